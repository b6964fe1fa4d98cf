// SPDX-License-Identifier: Apache-2.0
//
// Runs a fuzz target without libFuzzer: replays its corpus, then mutations of
// it from a seed. Blind, where libFuzzer follows the coverage; in return it is
// the same on every machine and lasts a second.
//
//   VERBENA_FUZZ_RUNS   mutations, instead of the number that the target has
//   VERBENA_FUZZ_SEED   start of the random numbers, default 1
// The input that is being run is kept in fuzz-input in TEST_TMPDIR (or the
// working folder); when the target ends the process it is named on stderr.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz_target.h"

#ifndef FUZZ_TARGET_NAME
#error "the build rule names the target"
#endif
#ifndef FUZZ_TARGET_RUNS
#error "the build rule gives the number of runs"
#endif

namespace verbena::fuzz {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kMaxInputBytes = 4096;

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 0);
}

std::vector<Bytes> ReadCorpus() {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry :
       std::filesystem::directory_iterator("tests/fuzz/corpus/" FUZZ_TARGET_NAME)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

// The input being run, in memory that outlives the process: a file.
class Witness {
 public:
  Witness() {
    const char* folder = std::getenv("TEST_TMPDIR");
    path_ = std::string(folder == nullptr ? "." : folder) + "/fuzz-input";
    fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd_ >= 0 && ftruncate(fd_, sizeof(Page)) == 0) {
      void* map = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
      if (map != MAP_FAILED) page_ = static_cast<Page*>(map);
    }
    text_ = "\nthe input that ended the target is at the start of " + path_ +
            " (its length: the last 8 bytes)\n";
    the_witness = this;
    for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
      struct sigaction old = {};
      sigaction(signal, nullptr, &old);
      if (old.sa_handler != SIG_DFL) continue;  // a sanitizer's own
      struct sigaction action = {};
      action.sa_handler = &Say;
      action.sa_flags = static_cast<int>(SA_RESETHAND);
      sigaction(signal, &action, nullptr);
    }
  }

  void Run(const Bytes& input) {
    if (page_ != nullptr) {
      std::copy_n(input.begin(), std::min(input.size(), sizeof(page_->bytes)), page_->bytes);
      page_->length = input.size();
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }

 private:
  struct Page {
    uint8_t bytes[1 << 20];
    uint64_t length;
  };
  static void Say(int signal) {
    [[maybe_unused]] const ssize_t ignored =
        write(STDERR_FILENO, the_witness->text_.data(), the_witness->text_.size());
    raise(signal);
  }
  static Witness* the_witness;

  std::string path_;
  std::string text_;
  int fd_ = -1;
  Page* page_ = nullptr;
};
Witness* Witness::the_witness = nullptr;

Witness& TheWitness() {
  static Witness witness;
  return witness;
}

// What real inputs differ in: bits, numbers at the ends of their ranges, pieces
// that are missing, doubled, or come from another input.
class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  Bytes Mutate(const std::vector<Bytes>& corpus) {
    Bytes bytes = corpus.empty() ? Bytes() : corpus[Below(corpus.size())];
    for (uint64_t i = 0, rounds = 1 + Below(6); i < rounds; ++i) Once(corpus, &bytes);
    if (bytes.size() > kMaxInputBytes) bytes.resize(kMaxInputBytes);
    return bytes;
  }

 private:
  uint64_t Below(uint64_t limit) { return limit == 0 ? 0 : random_() % limit; }

  void Once(const std::vector<Bytes>& corpus, Bytes* bytes) {
    static constexpr uint64_t kEdges[] = {0,      1,           0x7f,       0x80,       0xff,
                                          0x7fff, 0x8000,      0xffff,     0x7fffffff, 0x80000000,
                                          ~0u,    ~uint64_t{}, 1ull << 63, 0x1000,     0xffffff};
    const size_t size = bytes->size();
    const auto at = bytes->begin() + static_cast<ptrdiff_t>(Below(size));
    switch (size == 0 ? 5 : Below(8)) {
      case 0:
        *at = static_cast<uint8_t>(*at ^ (1u << Below(8)));
        return;
      case 1:
        *at = static_cast<uint8_t>(random_());
        return;
      case 2: {
        const uint64_t edge = kEdges[Below(std::size(kEdges))] + Below(3) - 1;
        const size_t width =
            std::min<size_t>(size_t{1} << Below(4), static_cast<size_t>(bytes->end() - at));
        std::memcpy(&*at, &edge, width);
        return;
      }
      case 3:
        bytes->resize(Below(size + 1));
        return;
      case 4:
        bytes->erase(
            at,
            at + static_cast<ptrdiff_t>(
                     1 + Below(std::min<uint64_t>(16, static_cast<uint64_t>(bytes->end() - at)))));
        return;
      case 5:
        for (uint64_t i = 0, n = 1 + Below(16); i < n; ++i) {
          bytes->insert(bytes->begin() + static_cast<ptrdiff_t>(Below(bytes->size() + 1)),
                        static_cast<uint8_t>(random_()));
        }
        return;
      case 6: {  // a piece of it once more
        const Bytes piece(
            at, at + static_cast<ptrdiff_t>(Below(static_cast<uint64_t>(bytes->end() - at) + 1)));
        bytes->insert(bytes->begin() + static_cast<ptrdiff_t>(Below(size + 1)), piece.begin(),
                      piece.end());
        return;
      }
      default: {  // the end of another one
        if (corpus.empty()) return;
        const Bytes& other = corpus[Below(corpus.size())];
        bytes->resize(Below(size + 1));
        bytes->insert(bytes->end(), other.begin() + static_cast<ptrdiff_t>(Below(other.size() + 1)),
                      other.end());
        return;
      }
    }
  }

  std::mt19937_64 random_;
};

TEST(FuzzTarget, HandlesItsCorpus) {
  const std::vector<Bytes> corpus = ReadCorpus();
  ASSERT_FALSE(corpus.empty());
  for (const Bytes& input : corpus) TheWitness().Run(input);
}

TEST(FuzzTarget, HandlesSeededMutations) {
  const std::vector<Bytes> corpus = ReadCorpus();
  const uint64_t runs = FromEnvironment("VERBENA_FUZZ_RUNS", FUZZ_TARGET_RUNS);
  Mutator mutator(FromEnvironment("VERBENA_FUZZ_SEED", 1));
  for (uint64_t i = 0; i < runs; ++i) TheWitness().Run(mutator.Mutate(corpus));
}

}  // namespace
}  // namespace verbena::fuzz
