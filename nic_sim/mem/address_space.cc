// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/mem/address_space.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace verbena::nic {
namespace {

constexpr size_t kMaxIovecs = IOV_MAX;
// The kernel cuts a call at 2 GiB - 4 KiB.
constexpr size_t kMaxCallBytes = size_t{1} << 30;

iovec RemoteIovec(uint64_t address, size_t bytes) {
  return {reinterpret_cast<void*>(static_cast<uintptr_t>(address)), bytes};
}

iovec Slice(const iovec& whole, size_t offset, size_t bytes) {
  return {static_cast<char*>(whole.iov_base) + offset, bytes};
}

// A place in a list of iovecs.
struct Cursor {
  std::span<const iovec> list;
  size_t index = 0;
  size_t offset = 0;

  // Steps over used up and empty pieces; false at the end.
  bool Settle() {
    while (index < list.size() && offset == list[index].iov_len) {
      ++index;
      offset = 0;
    }
    return index < list.size();
  }
  size_t rest() const { return list[index].iov_len - offset; }
  void Advance(size_t bytes) {
    while (bytes > 0 && Settle()) {
      const size_t step = std::min(bytes, rest());
      offset += step;
      bytes -= step;
    }
    Settle();
  }
};

// The part of a list that goes into one system call.
struct CallList {
  iovec* pieces;
  size_t capacity;
  size_t count = 0;
  size_t current = SIZE_MAX;  // index in the cursor's list of the last piece

  bool CanTake(const Cursor& from) const { return current == from.index || count < capacity; }
  void Take(Cursor& from, size_t bytes) {
    if (current == from.index) {
      pieces[count - 1].iov_len += bytes;
    } else {
      pieces[count++] = Slice(from.list[from.index], from.offset, bytes);
      current = from.index;
    }
    from.offset += bytes;
  }
};

class ProcessVm final : public AddressSpace {
 public:
  explicit ProcessVm(const Identity& identity)
      : pid_(identity.pid),
        guard_address_(identity.guard_address),
        guard_magic_(identity.guard_magic) {}

  size_t Read(std::span<const iovec> local, std::span<const iovec> remote) override {
    return Transfer(process_vm_readv, local, remote);
  }
  size_t Write(std::span<const iovec> local, std::span<const iovec> remote) override {
    return Transfer(process_vm_writev, local, remote);
  }
  Backend backend() const override { return Backend::kProcessVm; }

  // 0, or the errno of a read of the guard; EFAULT also when it has a wrong
  // magic.
  int Probe() {
    local_[0] = {&seen_, sizeof(seen_)};
    remote_[0] = RemoteIovec(guard_address_, sizeof(seen_));
    const ssize_t got = process_vm_readv(pid_, local_, 1, remote_, 1, 0);
    if (got < 0) return errno;
    return got == sizeof(seen_) && seen_ == guard_magic_ ? 0 : EFAULT;
  }

 private:
  using Call = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long,
                           unsigned long);

  size_t Transfer(Call call, std::span<const iovec> local_list,
                  std::span<const iovec> remote_list) {
    Cursor local{local_list};
    Cursor remote{remote_list};
    while (remote.Settle()) {
      if (gone_) return remote.index;
      const Cursor start = remote;
      CallList local_part{local_ + 1, kMaxIovecs - 1};
      CallList remote_part{remote_ + 1, kMaxIovecs - 1};
      size_t bytes = 0;
      while (bytes < kMaxCallBytes && remote.Settle() && local.Settle() &&
             remote_part.CanTake(remote) && local_part.CanTake(local)) {
        const size_t step = std::min({remote.rest(), local.rest(), kMaxCallBytes - bytes});
        remote_part.Take(remote, step);
        local_part.Take(local, step);
        bytes += step;
      }
      if (bytes == 0) return start.index;  // `local` is too short: a bug of the caller
      const size_t copied = CallOnce(call, local_part.count + 1, remote_part.count + 1);
      if (copied != bytes) {
        // The kernel stops at the first bad piece and says only how much it did.
        remote = start;
        remote.Advance(copied);
        return remote.index;
      }
    }
    return remote_list.size();
  }

  // One call with the guard in front. Returns the bytes copied behind it. The
  // kernel resolves pid to an address space once per call, so a guard that is
  // there vouches for all pieces of the call.
  size_t CallOnce(Call call, size_t local_count, size_t remote_count) {
    seen_ = guard_magic_;
    local_[0] = {&seen_, sizeof(seen_)};
    remote_[0] = RemoteIovec(guard_address_, sizeof(seen_));
    ssize_t got;
    do {
      ++system_calls_;
      got = call(pid_, local_, local_count, remote_, remote_count, 0);
    } while (got < 0 && errno == EINTR);
    if (got < static_cast<ssize_t>(sizeof(seen_))) {
      // Out of memory (ours) and a process that stopped being dumpable may pass.
      gone_ = got >= 0 || (errno != ENOMEM && errno != EPERM);
      return 0;
    }
    if (seen_ != guard_magic_) {  // reads only: another program with a page there
      gone_ = true;
      return 0;
    }
    return static_cast<size_t>(got) - sizeof(seen_);
  }

  const pid_t pid_;
  const uint64_t guard_address_;
  const uint64_t guard_magic_;
  uint64_t seen_ = 0;
  iovec local_[kMaxIovecs];
  iovec remote_[kMaxIovecs];
};

// The descriptor stays with the address space of the process that opened it:
// after exec or exit nothing can be read or written through it. It ignores page
// protection (the kernel forces access as for a debugger), so a page that is
// read-only for the application is written all the same: permission is what was
// checked at registration. That is no gain for the application, which passed the
// descriptor of its own free will and could write its own pages through it.
class ProcMem final : public AddressSpace {
 public:
  explicit ProcMem(const Identity& identity)
      : fd_(identity.mem_fd),
        guard_address_(identity.guard_address),
        guard_magic_(identity.guard_magic) {}
  ~ProcMem() override { close(fd_); }

  size_t Read(std::span<const iovec> local, std::span<const iovec> remote) override {
    return Transfer(preadv, kReading, local, remote);
  }
  size_t Write(std::span<const iovec> local, std::span<const iovec> remote) override {
    return Transfer(pwritev, kWriting, local, remote);
  }
  Backend backend() const override { return Backend::kProcMem; }

  // 0 or an errno; EFAULT: wrong content, or the process is gone.
  int Probe() {
    uint64_t seen = 0;
    ssize_t got;
    do {
      ++system_calls_;
      got = pread(fd_, &seen, sizeof(seen), static_cast<off_t>(guard_address_));
    } while (got < 0 && errno == EINTR);
    if (got < 0) return errno;
    return got == sizeof(seen) && seen == guard_magic_ ? 0 : EFAULT;
  }

 private:
  using Call = ssize_t (*)(int, const iovec*, int, off_t);

  enum Direction { kReading, kWriting };

  // The kernel copies through a page of its own, each local piece anew from the
  // start of that page. A destination a few bytes behind the start of a page
  // makes that copy slow and lets it tear words (dma_queue.cc says why). So a
  // step that starts there ends where the distance is good: the words in the
  // first 64 bytes of the page stay exposed.
  static constexpr uint64_t kBadPageOffsets = 64;
  static bool IsBadStart(uint64_t address) {
    const uint64_t offset = address % 4096;
    return offset > 0 && offset < kBadPageOffsets;
  }
  static size_t LargestStep(uint64_t address, size_t rest) {
    const size_t limit = IsBadStart(address) ? kBadPageOffsets - address % 4096 : kMaxCallBytes;
    return std::min(rest, limit);
  }
  // Whether a piece behind the first would start at such a place.
  bool HasBadStart(uint64_t address, size_t count) const {
    for (size_t i = 0; i + 1 < count; ++i) {
      address += local_[i].iov_len;
      if (IsBadStart(address)) return true;
    }
    return false;
  }
  // Makes one piece of the first `count`, as far as it fits; the rest takes
  // another round.
  void Stage(size_t count) {
    size_t bytes = 0;
    for (size_t i = 0; i < count; ++i) {
      const size_t step = std::min(local_[i].iov_len, kStagingBytes - bytes);
      std::memcpy(staging_.get() + bytes, local_[i].iov_base, step);
      bytes += step;
    }
    local_[0] = {staging_.get(), bytes};
  }

  size_t Transfer(Call call, Direction direction, std::span<const iovec> local_list,
                  std::span<const iovec> remote_list) {
    Cursor local{local_list};
    Cursor remote{remote_list};
    if (!remote.Settle()) return remote_list.size();
    if (gone_ || Probe() != 0) {
      gone_ = true;
      return remote.index;
    }
    while (remote.Settle()) {
      // One call per remote piece: the file has one position.
      const size_t piece = remote.index;
      Cursor ahead = local;
      CallList part{local_, kMaxIovecs};
      size_t bytes = 0;
      const auto address = reinterpret_cast<uintptr_t>(remote.list[piece].iov_base) + remote.offset;
      const size_t wanted = LargestStep(address, remote.rest());
      while (bytes < wanted && ahead.Settle() && part.CanTake(ahead)) {
        const size_t step = std::min(wanted - bytes, ahead.rest());
        part.Take(ahead, step);
        bytes += step;
      }
      if (bytes == 0) return piece;
      if (direction == kWriting && HasBadStart(address, part.count)) {
        Stage(part.count);
        part.count = 1;
      }
      ++system_calls_;
      const ssize_t got =
          call(fd_, local_, static_cast<int>(part.count), static_cast<off_t>(address));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return piece;  // 0: the address space is gone
      // Short: the next round either goes on or gets the error.
      local.Advance(static_cast<size_t>(got));
      remote.Advance(static_cast<size_t>(got));
    }
    return remote_list.size();
  }

  static constexpr size_t kStagingBytes = 64 * 1024;

  const int fd_;
  const uint64_t guard_address_;
  const uint64_t guard_magic_;
  iovec local_[kMaxIovecs];
  std::unique_ptr<std::byte[]> staging_ = std::make_unique<std::byte[]>(kStagingBytes);
};

int YamaScope() {
  int scope = 0;
  if (FILE* file = fopen("/proc/sys/kernel/yama/ptrace_scope", "re")) {
    if (fscanf(file, "%d", &scope) != 1) scope = 0;
    fclose(file);
  }
  return scope;
}

// Effective uid of the process by its status file, or -1.
long EffectiveUid(pid_t pid) {
  char path[64];
  snprintf(path, sizeof(path), "/proc/%d/status", pid);
  FILE* file = fopen(path, "re");
  if (file == nullptr) return -1;
  char line[256];
  unsigned real = 0;
  unsigned effective = 0;
  bool found = false;
  while (!found && fgets(line, sizeof(line), file) != nullptr) {
    found = sscanf(line, "Uid: %u %u", &real, &effective) == 2;
  }
  fclose(file);
  return found ? static_cast<long>(effective) : -1;
}

// A non-dumpable process has its /proc files owned by root.
bool LooksNonDumpable(pid_t pid, long uid) {
  char path[64];
  snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  struct stat status;
  return uid > 0 && stat(path, &status) == 0 && static_cast<long>(status.st_uid) != uid;
}

std::string WhyProcessVmFailed(pid_t pid, int error) {
  const std::string process = "process " + std::to_string(pid);
  switch (error) {
    case ESRCH:
      return process + " does not exist (any more)";
    case EFAULT:
      return process + " does not have the guard page that the application announced";
    case ENOSYS:
      return "this kernel has no process_vm_readv";
    case EPERM:
      break;
    default:
      return "process_vm_readv of " + process + ": " + strerror(error);
  }
  const long uid = EffectiveUid(pid);
  if (uid >= 0 && geteuid() != 0 && static_cast<long>(geteuid()) != uid) {
    return process + " belongs to uid " + std::to_string(uid) + ", the daemon runs as uid " +
           std::to_string(geteuid());
  }
  if (LooksNonDumpable(pid, uid)) {
    return process + " is not dumpable (file capabilities, set-uid or prctl PR_SET_DUMPABLE)";
  }
  if (const int scope = YamaScope(); scope > 0) {
    return "Yama forbids access to " + process + " (kernel.yama.ptrace_scope is " +
           std::to_string(scope) + ")";
  }
  return "access to " + process + " is not permitted (not dumpable, seccomp or a security module)";
}

// "" if `fd` can be the memory of a process. Only to refuse what could block or
// surprise; that it is the right memory is what the guard says.
std::string WhyNotMemFile(int fd) {
  struct statfs file_system;
  char path[64];
  char target[PATH_MAX];
  snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(path, target, sizeof(target));
  const std::string_view name(target, length > 0 ? static_cast<size_t>(length) : 0);
  if (fstatfs(fd, &file_system) != 0 || file_system.f_type != PROC_SUPER_MAGIC ||
      !name.ends_with("/mem")) {
    return "the descriptor that the application passed is not /proc/self/mem";
  }
  if ((fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR) {
    return "the application passed /proc/self/mem without write access";
  }
  return "";
}

std::unique_ptr<AddressSpace> OpenProcessVm(const AddressSpace::Identity& identity,
                                            std::string* why) {
  if (identity.pid <= 0) {
    *why = "the application's process is not visible from the daemon (another pid namespace)";
    return nullptr;
  }
  auto space = std::make_unique<ProcessVm>(identity);
  const int error = space->Probe();
  if (error == 0) return space;
  *why = WhyProcessVmFailed(identity.pid, error);
  return nullptr;
}

// Takes identity.mem_fd in any case.
std::unique_ptr<AddressSpace> OpenProcMem(const AddressSpace::Identity& identity,
                                          std::string* why) {
  if (identity.mem_fd < 0) {
    *why =
        "the application did not pass /proc/self/mem (it may be not dumpable: file capabilities, "
        "set-uid or prctl PR_SET_DUMPABLE)";
    return nullptr;
  }
  *why = WhyNotMemFile(identity.mem_fd);
  if (!why->empty()) {
    close(identity.mem_fd);
    return nullptr;
  }
  auto space = std::make_unique<ProcMem>(identity);
  const int error = space->Probe();
  if (error == 0) return space;
  *why = error == EFAULT || error == EIO
             ? "the memory behind the passed /proc/self/mem does not have the guard page that the "
               "application announced"
             : std::string("reading the passed /proc/self/mem: ") + strerror(error);
  return nullptr;
}

}  // namespace

std::unique_ptr<AddressSpace> AddressSpace::Open(const Identity& identity, std::string* why,
                                                 const Backend* force) {
  std::string process_vm;
  std::string proc_mem;
  if (force == nullptr || *force == Backend::kProcessVm) {
    if (auto space = OpenProcessVm(identity, &process_vm)) {
      if (identity.mem_fd >= 0) close(identity.mem_fd);
      return space;
    }
  }
  if (force == nullptr || *force == Backend::kProcMem) {
    if (auto space = OpenProcMem(identity, &proc_mem)) return space;
  } else if (identity.mem_fd >= 0) {
    close(identity.mem_fd);
  }
  if (why != nullptr) {
    *why = "cannot reach the application's memory: " + process_vm +
           (process_vm.empty() || proc_mem.empty() ? "" : "; ") + proc_mem;
  }
  return nullptr;
}

}  // namespace verbena::nic
