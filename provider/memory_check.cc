// SPDX-License-Identifier: Apache-2.0
#include "provider/memory_check.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace verbena::provider {
namespace {

// struct procmap_query of <linux/fs.h> since Linux 6.11.
struct ProcmapQuery {
  uint64_t size;
  uint64_t query_flags;
  uint64_t query_addr;
  uint64_t vma_start;
  uint64_t vma_end;
  uint64_t vma_flags;
  uint64_t vma_page_size;
  uint64_t vma_offset;
  uint64_t inode;
  uint32_t dev_major;
  uint32_t dev_minor;
  uint32_t vma_name_size;
  uint32_t build_id_size;
  uint64_t vma_name_addr;
  uint64_t build_id_addr;
};
static_assert(sizeof(ProcmapQuery) == 104);
constexpr unsigned long kProcmapQuery = 0xc0686611;
constexpr uint64_t kVmaReadable = 1;
constexpr uint64_t kVmaWritable = 2;

enum Answer { kGood, kBad, kUnknown };

struct Wanted {
  uint64_t next;  // first address not known to be good
  uint64_t end;
  bool write;
};

// Advances `wanted` over one mapping that contains wanted->next.
bool Accept(Wanted* wanted, uint64_t end, bool readable, bool writable) {
  if (!readable || (wanted->write && !writable)) return false;
  wanted->next = end;
  return true;
}

Answer AskKernel(int fd, Wanted wanted) {
  while (wanted.next < wanted.end) {
    ProcmapQuery query = {};
    query.size = sizeof(query);
    query.query_addr = wanted.next;
    // Directly: ioctl() is interposed by our preload.
    if (syscall(SYS_ioctl, fd, kProcmapQuery, &query) != 0) {
      return errno == ENOENT ? kBad : kUnknown;
    }
    if (query.vma_end <= wanted.next) return kUnknown;
    if (!Accept(&wanted, query.vma_end, (query.vma_flags & kVmaReadable) != 0,
                (query.vma_flags & kVmaWritable) != 0)) {
      return kBad;
    }
  }
  return kGood;
}

// Reads lines "START-END rwxp …", in ascending order, of any length.
class MapsReader {
 public:
  explicit MapsReader(int fd) : fd_(fd) {}

  // False at the end.
  bool Next(uint64_t* start, uint64_t* end, bool* readable, bool* writable) {
    if (!ReadHex('-', start) || !ReadHex(' ', end)) return false;
    *readable = Get() == 'r';
    *writable = Get() == 'w';
    int c;
    do {
      c = Get();
    } while (c != '\n' && c != kEnd);
    return true;
  }

 private:
  static constexpr int kEnd = -1;

  int Get() {
    if (position_ == filled_) {
      ssize_t got;
      do {
        got = read(fd_, buffer_, sizeof(buffer_));
      } while (got < 0 && errno == EINTR);
      if (got <= 0) return kEnd;
      position_ = 0;
      filled_ = static_cast<size_t>(got);
    }
    return static_cast<unsigned char>(buffer_[position_++]);
  }

  bool ReadHex(int stop, uint64_t* value) {
    *value = 0;
    for (int c = Get(); c != stop; c = Get()) {
      if (c >= '0' && c <= '9') {
        *value = *value * 16 + static_cast<uint64_t>(c - '0');
      } else if (c >= 'a' && c <= 'f') {
        *value = *value * 16 + static_cast<uint64_t>(c - 'a' + 10);
      } else {
        return false;
      }
    }
    return true;
  }

  int fd_;
  size_t position_ = 0;
  size_t filled_ = 0;
  char buffer_[4096];
};

Answer ReadMaps(int fd, Wanted wanted) {
  MapsReader maps(fd);
  uint64_t start;
  uint64_t end;
  bool readable;
  bool writable;
  while (wanted.next < wanted.end) {
    if (!maps.Next(&start, &end, &readable, &writable) || start > wanted.next) return kBad;
    if (end > wanted.next && !Accept(&wanted, end, readable, writable)) return kBad;
  }
  return kGood;
}

}  // namespace

int CheckRange(uint64_t address, uint64_t length, bool write, bool ask_kernel) {
  const int fd =
      static_cast<int>(syscall(SYS_openat, AT_FDCWD, "/proc/self/maps", O_RDONLY | O_CLOEXEC));
  if (fd < 0) return 0;
  const Wanted wanted = {address, address + length, write};
  Answer answer = ask_kernel ? AskKernel(fd, wanted) : kUnknown;
  if (answer == kUnknown) answer = ReadMaps(fd, wanted);
  close(fd);
  return answer == kBad ? EFAULT : 0;
}

}  // namespace verbena::provider
