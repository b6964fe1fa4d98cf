// SPDX-License-Identifier: Apache-2.0
//
// EAL starts once per process, so each test runs in a child of its own. What
// the child reports comes as one line on a pipe: "" is good.
#include "nic_sim/env/dpdk_env.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>
#include <rte_lcore.h>
#include <rte_mbuf.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "nic_sim/fabric/packet.h"

namespace verbena::nic {
namespace {

class DpdkEnv : public ::testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/verbena-env-XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    folder_ = folder;
    chmod(folder, 0777);  // for the child that is another user
  }
  void TearDown() override {
    // EAL's files are gone as well: the folder is empty.
    EXPECT_EQ(rmdir(folder_.c_str()), 0) << strerror(errno);
  }

  DpdkOptions Options(const std::string& instance) const {
    DpdkOptions options;
    options.instance = instance;
    options.run_folder = folder_;
    options.memory_mib = 64;
    return options;
  }

  // Runs `body` in a child. Its text, or what became of it.
  static std::string InChild(const std::function<std::string()>& body) {
    int fds[2];
    if (pipe(fds) != 0) return "no pipe";
    const pid_t pid = fork();
    if (pid == 0) {
      const std::string text = body();
      const ssize_t written = write(fds[1], text.data(), text.size());
      _exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
    }
    close(fds[1]);
    std::string text;
    char buffer[512];
    pollfd readable{.fd = fds[0], .events = POLLIN, .revents = 0};
    for (;;) {
      if (poll(&readable, 1, 30'000) <= 0) {
        text += " (no end after 30 s)";
        kill(pid, SIGKILL);
        break;
      }
      const ssize_t size = read(fds[0], buffer, sizeof buffer);
      if (size <= 0) break;
      text.append(buffer, static_cast<size_t>(size));
    }
    close(fds[0]);
    int status = 0;
    waitpid(pid, &status, 0);
    if (status != 0) text += " (status " + std::to_string(status) + ")";
    return text;
  }

  // Starts, uses a pool, ends.
  static std::string UseOnce(const DpdkOptions& options) {
    std::string error;
    if (!InitDpdk(options, &error)) return error;
    rte_mempool* pool = CreatePacketPool("packets", 8192, &error);
    if (pool == nullptr) return error;
    rte_mbuf* packet = rte_pktmbuf_alloc(pool);
    if (packet == nullptr) return "no packet";
    rte_pktmbuf_free(packet);
    rte_mempool_free(pool);
    CleanUpDpdk();
    return "";
  }

  std::string folder_;
};

TEST_F(DpdkEnv, PacketsHaveRoomForMetadataAndTheLargestFrame) {
  EXPECT_EQ(InChild([&]() -> std::string {
              std::string error;
              if (!InitDpdk(Options("a"), &error)) return error;
              rte_mempool* pool = CreatePacketPool("packets", 8192, &error);
              if (pool == nullptr) return error;
              if (rte_mempool_avail_count(pool) != 8192) return "not 8192 packets";
              if (rte_pktmbuf_priv_size(pool) != kPacketPrivateBytes) return "private area";
              rte_mbuf* packet = rte_pktmbuf_alloc(pool);
              MetaOf(packet) = PacketMeta{};
              if (rte_pktmbuf_append(packet, kMaxFrameBytes) == nullptr) return "no room";
              std::memset(FrameOf(packet), 0xee, kMaxFrameBytes);
              rte_pktmbuf_free(packet);
              return "";
            }),
            "");
}

TEST_F(DpdkEnv, CallingThreadKeepsItsAffinityNameSignalsAndEnvironment) {
  EXPECT_EQ(InChild([&]() -> std::string {
              pthread_setname_np(pthread_self(), "my-name");
              setenv("XDG_RUNTIME_DIR", "/somewhere", 1);
              unsetenv("RUNTIME_DIRECTORY");
              cpu_set_t before;
              cpu_set_t after;
              pthread_getaffinity_np(pthread_self(), sizeof before, &before);
              std::string error;
              if (!InitDpdk(Options("a"), &error)) return error;
              pthread_getaffinity_np(pthread_self(), sizeof after, &after);
              if (!CPU_EQUAL(&before, &after)) return "affinity";
              char name[16];
              pthread_getname_np(pthread_self(), name, sizeof name);
              if (std::string(name) != "my-name") return name;
              if (std::string(getenv("XDG_RUNTIME_DIR")) != "/somewhere") return "XDG_RUNTIME_DIR";
              if (getenv("RUNTIME_DIRECTORY") != nullptr) return "RUNTIME_DIRECTORY";
              sigset_t blocked;
              pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
              return sigismember(&blocked, SIGTERM) ? "SIGTERM is blocked" : "";
            }),
            "");
}

TEST_F(DpdkEnv, SecondStartIsRefusedWithASentence) {
  EXPECT_EQ(InChild([&]() -> std::string {
              std::string error;
              if (!InitDpdk(Options("a"), &error)) return error;
              return InitDpdk(Options("b"), &error) ? "started twice" : error;
            }),
            "DPDK is already initialised in this process");
}

TEST_F(DpdkEnv, TooLittleMemoryForThePoolIsASentence) {
  const std::string text = InChild([&]() -> std::string {
    std::string error;
    if (!InitDpdk(Options("a"), &error)) return "init: " + error;
    return CreatePacketPool("packets", 100'000, &error) == nullptr ? error : "made";
  });
  EXPECT_NE(text.find("no packet pool of 100000 packets"), std::string::npos) << text;
}

TEST_F(DpdkEnv, FurtherThreadsRegisterAndMayUsePackets) {
  EXPECT_EQ(InChild([&]() -> std::string {
              std::string error;
              if (!InitDpdk(Options("a"), &error)) return error;
              rte_mempool* pool = CreatePacketPool("packets", 8192, &error);
              if (pool == nullptr) return error;
              std::string bad;
              for (int i = 0; i < 300; ++i) {  // numbers are given back
                std::thread([&] {
                  cpu_set_t before;
                  cpu_set_t after;
                  pthread_getaffinity_np(pthread_self(), sizeof before, &before);
                  if (!RegisterDpdkThread()) bad = "not registered";
                  pthread_getaffinity_np(pthread_self(), sizeof after, &after);
                  if (!CPU_EQUAL(&before, &after)) bad = "affinity";
                  if (rte_lcore_id() == LCORE_ID_ANY) bad = "no number";
                  rte_mbuf* packet = rte_pktmbuf_alloc(pool);
                  if (packet == nullptr) bad = "no packet";
                  rte_pktmbuf_free(packet);
                  UnregisterDpdkThread();
                }).join();
              }
              if (!RegisterDpdkThread()) bad = "first thread";
              if (rte_mempool_avail_count(pool) != 8192) bad = "lost packets";
              return bad;
            }),
            "");
}

TEST_F(DpdkEnv, DoesNotTouchMemoryBeforeItIsUsed) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer's shadow memory counts, too";
#endif
  const auto rss_kib = [] {
    std::ifstream status("/proc/self/status");
    std::string word;
    while (status >> word) {
      if (word == "VmRSS:") {
        long kib = 0;
        status >> kib;
        return kib;
      }
    }
    return -1L;
  };
  EXPECT_EQ(InChild([&]() -> std::string {
              DpdkOptions options = Options("a");
              options.memory_mib = 256;
              std::string error;
              const long before = rss_kib();
              if (!InitDpdk(options, &error)) return error;
              if (CreatePacketPool("packets", 8192, &error) == nullptr) return error;
              const long grown = rss_kib() - before;
              return grown < 100 * 1024 ? "" : std::to_string(grown) + " KiB";
            }),
            "");
}

TEST_F(DpdkEnv, TwoInstancesRunSideBySide) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer forbids threads after a fork of a process with threads";
#endif
  std::string first;
  std::thread other([&] { first = InChild([&] { return UseOnce(Options("one")); }); });
  EXPECT_EQ(InChild([&] { return UseOnce(Options("two")); }), "");
  other.join();
  EXPECT_EQ(first, "");
}

TEST_F(DpdkEnv, RunsAsPlainUser) {
  constexpr uid_t kNobody = 65534;
  const std::string text = InChild([&]() -> std::string {
    if (geteuid() == 0 && (setgid(kNobody) != 0 || setuid(kNobody) != 0)) return "cannot";
    return UseOnce(Options("a"));
  });
  if (text == "cannot") GTEST_SKIP() << "a sandbox in which root cannot become another user";
  EXPECT_EQ(text, "");
}

}  // namespace
}  // namespace verbena::nic
