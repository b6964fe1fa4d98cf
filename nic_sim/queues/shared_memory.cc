// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/queues/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

namespace verbena::nic {

SharedMemory SharedMemory::Create(const std::string& name, size_t bytes) {
  SharedMemory memory;
  const int fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return memory;
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int saved = errno;
    close(fd);
    errno = saved;
    return memory;
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    const int saved = errno;
    close(fd);
    errno = saved;
    return memory;
  }
  memory.data_ = static_cast<std::byte*>(data);
  memory.bytes_ = bytes;
  memory.fd_ = fd;
  return memory;
}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
  if (fd_ >= 0) close(fd_);
}

int SharedMemory::ReleaseFd() { return std::exchange(fd_, -1); }

int SharedMemory::OpenReadOnly() const {
  // Whoever has the new descriptor could open it again for writing, through /proc. Processes of
  // this user, which could end us as well, still can.
  if (fchmod(fd_, S_IRUSR) != 0) return -1;
  const std::string path = "/proc/self/fd/" + std::to_string(fd_);
  return open(path.c_str(), O_RDONLY | O_CLOEXEC);
}

bool RingAllocator::TakeFrom(Segment& segment, uint64_t block, uint64_t* offset) {
  const auto order = static_cast<size_t>(std::countr_zero(block / kMinBlock));
  size_t from = order;
  while (from < segment.free.size() && segment.free[from].empty()) ++from;
  if (from >= segment.free.size()) return false;
  uint64_t found = segment.free[from].back();
  segment.free[from].pop_back();
  while (from > order) {  // split, keep the lower half
    --from;
    segment.free[from].push_back(found + (kMinBlock << from));
  }
  *offset = found;
  return true;
}

int RingAllocator::Allocate(uint32_t slots, uint32_t stride, Ring* ring,
                            std::vector<int>* new_fds) {
  const uint64_t wanted = uint64_t{slots} * stride;
  const uint64_t block = std::bit_ceil(std::max(wanted, kMinBlock));
  uint64_t offset = 0;
  size_t index = 0;
  while (index < segments_.size() && !TakeFrom(segments_[index], block, &offset)) {
    ++index;
  }
  bool is_new = false;
  if (index == segments_.size()) {
    const uint64_t size =
        std::max(block, std::clamp(std::bit_ceil(total_), kMinSegment, kMaxSegment));
    if (total_ + size > kMaxTotal) return ENOMEM;
    if (budget_ != nullptr && size > budget_->limit - std::min(budget_->limit, budget_->used)) {
      return ENOMEM;
    }
    Segment segment;
    segment.memory =
        SharedMemory::Create(name_ + "-rings-" + std::to_string(index), static_cast<size_t>(size));
    if (segment.memory.data() == nullptr) return ENOMEM;
    const int fd = fcntl(segment.memory.fd(), F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return ENOMEM;
    segment.free.resize(static_cast<size_t>(std::countr_zero(size / kMinBlock)) + 1);
    segment.free.back().push_back(0);
    new_fds->push_back(fd);
    segments_.push_back(std::move(segment));
    total_ += size;
    if (budget_ != nullptr) budget_->used += size;
    TakeFrom(segments_.back(), block, &offset);
    is_new = true;
  }
  const Segment& segment = segments_[index];
  allocated_ += block;
  ring->data = segment.memory.data() + offset;
  ring->bytes = block;
  ring->location = {.segment = static_cast<uint32_t>(index),
                    .new_segment = is_new ? 1u : 0u,
                    .segment_bytes = segment.memory.bytes(),
                    .offset = offset,
                    .slots = slots,
                    .stride = stride};
  return 0;
}

int RingAllocator::OpenSegment(uint32_t index) const {
  return index < segments_.size() ? fcntl(segments_[index].memory.fd(), F_DUPFD_CLOEXEC, 3) : -1;
}

void RingAllocator::Free(const Ring& ring) {
  if (ring.data == nullptr) return;
  // The next user needs zeros; large rings give their pages back.
  constexpr uint64_t kRemoveFrom = 65536;
  if (ring.bytes < kRemoveFrom || madvise(ring.data, ring.bytes, MADV_REMOVE) != 0) {
    std::memset(ring.data, 0, ring.bytes);
  }
  Segment& segment = segments_[ring.location.segment];
  uint64_t offset = ring.location.offset;
  auto order = static_cast<size_t>(std::countr_zero(ring.bytes / kMinBlock));
  for (; order + 1 < segment.free.size(); ++order) {  // join with the buddy
    auto& list = segment.free[order];
    const uint64_t buddy = offset ^ (kMinBlock << order);
    const auto found = std::find(list.begin(), list.end(), buddy);
    if (found == list.end()) break;
    *found = list.back();
    list.pop_back();
    offset = std::min(offset, buddy);
  }
  segment.free[order].push_back(offset);
  allocated_ -= ring.bytes;
}

}  // namespace verbena::nic
