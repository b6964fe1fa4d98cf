// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/capture.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>

namespace verbena::nic {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kLongestStall{1000};    // of the engine
constexpr milliseconds kWriterPeriod{10};      // packets reach the file within
constexpr milliseconds kFinishPatience{2000};  // for a reader that does not read

// pcapng; all fields in this machine's byte order, blocks in units of 4 bytes.
constexpr uint32_t kSectionHeaderBlock = 0x0a0d0d0a;
constexpr uint32_t kInterfaceBlock = 1;
constexpr uint32_t kEnhancedPacketBlock = 6;
constexpr uint16_t kLinkTypeEthernet = 1;
constexpr uint16_t kOptionEnd = 0;
constexpr uint16_t kOptionComment = 1;
constexpr uint16_t kOptionUserApplication = 4;  // of a section
constexpr uint16_t kOptionInterfaceName = 2;    // of an interface
constexpr uint16_t kOptionTimeResolution = 9;   // of an interface
constexpr uint16_t kOptionPacketFlags = 2;      // of a packet
constexpr uint32_t kFlagInbound = 1;
constexpr uint32_t kFlagOutbound = 2;
constexpr uint32_t kFlagUnicast = 1 << 2;
// Block type, length, interface, time (2), lengths (2); flags, end of options;
// length again.
constexpr size_t kPacketBlockFixedBytes = 28 + 8 + 4 + 4;

constexpr size_t Padded(size_t bytes) { return (bytes + 3) & ~size_t{3}; }

std::byte* Put(std::byte* at, const void* bytes, size_t size) {
  std::memcpy(at, bytes, size);
  return at + size;
}
template <typename T>
std::byte* Put(std::byte* at, T value) {
  return Put(at, &value, sizeof value);
}

// Builds a block of the file's header.
class Block {
 public:
  explicit Block(uint32_t type) { Add(type).Add(uint32_t{0}); }
  template <typename T>
  Block& Add(T value) {
    return AddBytes(&value, sizeof value);
  }
  Block& AddOption(uint16_t code, const void* value, size_t size) {
    Add(code).Add(static_cast<uint16_t>(size)).AddBytes(value, size);
    bytes_.resize(Padded(bytes_.size()));
    return *this;
  }
  void AppendTo(std::vector<std::byte>* out) {
    Add(kOptionEnd).Add(uint16_t{0});
    const auto length = static_cast<uint32_t>(bytes_.size() + sizeof(uint32_t));
    Add(length);
    Put(&bytes_[4], length);
    out->insert(out->end(), bytes_.begin(), bytes_.end());
  }

 private:
  Block& AddBytes(const void* value, size_t size) {
    const auto* bytes = static_cast<const std::byte*>(value);
    bytes_.insert(bytes_.end(), bytes, bytes + size);
    return *this;
  }
  std::vector<std::byte> bytes_;
};

// What the packet itself does not say: whose it is, and what was done to it.
// Empty for what came from outside untouched.
size_t WriteComment(const PacketMeta& meta, char* out, size_t size) {
  size_t used = 0;
  const auto add = [&](const char* format, auto... values) {
    const int length = std::snprintf(out + used, size - used, format, values...);
    if (length > 0) used = std::min(used + static_cast<size_t>(length), size - 1);
  };
  if (meta.source_qpn != 0) add("QP 0x%06x", meta.source_qpn);
  if (meta.source_qpn > 1 && meta.has_wr_id) {
    add(", wr_id %llu", static_cast<unsigned long long>(meta.wr_id));
  }
  if (meta.retransmission) add("%s", ", sent again");
  if (meta.hit_by != 0) add("%sfault rule %u", used == 0 ? "" : ", ", meta.hit_by);
  return used;
}

int64_t WallClockNs() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

CaptureFile::CaptureFile(int fd, std::vector<std::string> interfaces, uint64_t count,
                         size_t buffer_bytes)
    : capacity_(std::max(buffer_bytes, kPacketBlockFixedBytes + 100 + Padded(UINT16_MAX))),
      count_(count),
      fd_(fd) {
  struct stat info;
  is_file_ = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  WriteHeader(interfaces);
  // Not initialised: pages are used only as packets come.
  filling_.bytes = std::make_unique_for_overwrite<std::byte[]>(capacity_);
  writing_.bytes = std::make_unique_for_overwrite<std::byte[]>(capacity_);
  try {
    writer_ = std::thread([this] { Run(); });
  } catch (...) {
    close(fd_);
    throw;
  }
}

CaptureFile::~CaptureFile() { Finish(); }

void CaptureFile::WriteHeader(const std::vector<std::string>& interfaces) {
  constexpr char kApplication[] = "Verbena";
  Block section(kSectionHeaderBlock);
  section.Add(uint32_t{0x1a2b3c4d}).Add(uint16_t{1}).Add(uint16_t{0}).Add(int64_t{-1});
  section.AddOption(kOptionUserApplication, kApplication, sizeof kApplication - 1);
  section.AppendTo(&header_);
  for (const std::string& name : interfaces) {
    constexpr uint8_t kNanoseconds = 9;
    constexpr uint32_t kNoSnapLength = 0;
    Block block(kInterfaceBlock);
    block.Add(kLinkTypeEthernet).Add(uint16_t{0}).Add(kNoSnapLength);
    block.AddOption(kOptionInterfaceName, name.data(), name.size());
    block.AddOption(kOptionTimeResolution, &kNanoseconds, 1);
    block.AppendTo(&header_);
  }
}

void CaptureFile::Add(uint32_t interface, Direction direction, rte_mbuf* packet,
                      transport::Time now) {
  if (done()) return;
  EnsureIcrc(packet);
  const uint32_t size = packet->data_len;
  char comment[96];
  const size_t comment_bytes = WriteComment(MetaOf(packet), comment, sizeof comment);
  const size_t block_bytes =
      kPacketBlockFixedBytes + Padded(size) + (comment_bytes != 0 ? 4 + Padded(comment_bytes) : 0);

  std::unique_lock<std::mutex> lock(mutex_);
  if (filling_.size + block_bytes > capacity_ && !MakeRoom(&lock, block_bytes)) {
    ++missed_;
    return;
  }
  if (!has_clock_offset_) {
    clock_offset_ns_ = WallClockNs() - now.ns();
    has_clock_offset_ = true;
  }
  const auto time = static_cast<uint64_t>(now.ns() + clock_offset_ns_);
  const uint32_t flags =
      kFlagUnicast | (direction == Direction::kTx ? kFlagOutbound : kFlagInbound);
  const auto length = static_cast<uint32_t>(block_bytes);

  std::byte* at = filling_.bytes.get() + filling_.size;
  at = Put(at, kEnhancedPacketBlock);
  at = Put(at, length);
  at = Put(at, interface);
  at = Put(at, static_cast<uint32_t>(time >> 32));
  at = Put(at, static_cast<uint32_t>(time));
  at = Put(at, size);
  at = Put(at, size);
  at = Put(at, FrameOf(packet), size);
  std::memset(at, 0, Padded(size) - size);
  at += Padded(size) - size;
  at = Put(at, kOptionPacketFlags);
  at = Put(at, static_cast<uint16_t>(sizeof flags));
  at = Put(at, flags);
  if (comment_bytes != 0) {
    at = Put(at, kOptionComment);
    at = Put(at, static_cast<uint16_t>(comment_bytes));
    at = Put(at, comment, comment_bytes);
    std::memset(at, 0, Padded(comment_bytes) - comment_bytes);
    at += Padded(comment_bytes) - comment_bytes;
  }
  at = Put(at, uint32_t{kOptionEnd});
  Put(at, length);
  filling_.size += block_bytes;

  ++accepted_;
  if (accepted_ == count_) {
    done_ = true;
    wake_.notify_one();
  } else if (filling_.size > capacity_ / 2 && filling_.size - block_bytes <= capacity_ / 2) {
    wake_.notify_one();
  }
}

// False: the writer does not move.
bool CaptureFile::MakeRoom(std::unique_lock<std::mutex>* lock, size_t bytes) {
  if (stalled_) return false;
  full_ = true;
  wake_.notify_one();
  const bool room = space_.wait_for(*lock, kLongestStall,
                                    [&] { return done_ || filling_.size + bytes <= capacity_; });
  full_ = false;
  stalled_ = !room;
  return room && !done_;
}

void CaptureFile::Run() {
  // No handler of the daemon runs here, and a closed pipe gives EPIPE.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  pthread_setname_np(pthread_self(), "capture");

  size_t written = 0;
  bool good = WriteAll(header_, &written);
  std::unique_lock<std::mutex> lock(mutex_);
  while (good) {
    wake_.wait_for(lock, kWriterPeriod, [this] {
      return finishing_ || full_ || done_ || filling_.size > capacity_ / 2;
    });
    if (filling_.size == 0) {
      if (finishing_) break;
      // Its count is reached and all is written: wait for Finish.
      if (done_) wake_.wait(lock, [this] { return finishing_.load(); });
      continue;
    }
    std::swap(filling_, writing_);
    filling_.size = 0;
    stalled_ = false;
    // Cleared here, too: as long as it is set, the wait above does not release the mutex, and the
    // producer could never take it to see the room.
    full_ = false;
    space_.notify_all();
    lock.unlock();
    const std::span<const std::byte> blocks(writing_.bytes.get(), writing_.size);
    good = WriteAll(blocks, &written);
    written_ += WholePackets(blocks.first(written));
    lock.lock();
  }
  done_ = true;
  space_.notify_all();
}

// Number of packet blocks that are complete in a beginning of a buffer.
uint64_t CaptureFile::WholePackets(std::span<const std::byte> blocks) {
  uint64_t packets = 0;
  while (blocks.size() >= kPacketBlockFixedBytes) {
    uint32_t length;
    std::memcpy(&length, &blocks[4], sizeof length);
    if (length > blocks.size()) break;
    blocks = blocks.subspan(length);
    ++packets;
  }
  return packets;
}

bool CaptureFile::WriteAll(std::span<const std::byte> bytes, size_t* written) {
  *written = 0;
  while (*written < bytes.size()) {
    size_t size = bytes.size() - *written;
    if (!is_file_) {
      // A pipe that is writable takes PIPE_BUF bytes without blocking. Its
      // O_NONBLOCK is not ours to set: the client shares it.
      if (!WaitWritable()) return false;
      size = std::min<size_t>(size, 4096);
    }
    const ssize_t result = write(fd_, bytes.data() + *written, size);
    if (result > 0) {
      *written += static_cast<size_t>(result);
    } else if (result < 0 && errno != EINTR && errno != EAGAIN) {
      error_ = errno;
      return false;
    } else if (result == 0) {
      error_ = EIO;
      return false;
    }
  }
  return true;
}

bool CaptureFile::WaitWritable() {
  steady_clock::time_point give_up{};
  for (;;) {
    pollfd descriptor{.fd = fd_, .events = POLLOUT, .revents = 0};
    const int ready = poll(&descriptor, 1, 100);
    // An error condition shows in the write.
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) {
      error_ = errno;
      return false;
    }
    if (!finishing_) continue;
    const steady_clock::time_point now = steady_clock::now();
    if (give_up == steady_clock::time_point{}) give_up = now + kFinishPatience;
    if (now >= give_up) {
      error_ = ETIMEDOUT;
      return false;
    }
  }
}

CaptureResult CaptureFile::Finish() {
  if (!finished_) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      finishing_ = true;
      done_ = true;
    }
    wake_.notify_one();
    writer_.join();
    // Some file systems report a full disk only now.
    if (close(fd_) != 0 && error_ == 0 && errno != EINTR) error_ = errno;
    finished_ = true;
  }
  return {.packets = written_, .missed = missed_ + accepted_ - written_, .error = error_};
}

}  // namespace verbena::nic
