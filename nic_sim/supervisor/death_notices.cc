// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/supervisor/death_notices.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "nic_sim/abi/commands.h"
#include "nic_sim/abi/shared_memory.h"

namespace verbena::nic {
namespace {

constexpr uint32_t kEventDeviceFatal = 8;  // IBV_EVENT_DEVICE_FATAL

void MarkDead(int status_page) {
  void* page =
      mmap(nullptr, sizeof(abi::StatusPage), PROT_READ | PROT_WRITE, MAP_SHARED, status_page, 0);
  if (page == MAP_FAILED) return;
  static_cast<abi::StatusPage*>(page)->device_dead.store(1, std::memory_order_release);
  munmap(page, sizeof(abi::StatusPage));
}

// The pipes do not block. A full channel is as good as a message: its reader is awake.
bool WriteWhole(int fd, const void* data, size_t bytes) {
  ssize_t written = 0;
  do {
    written = write(fd, data, bytes);
  } while (written < 0 && errno == EINTR);
  return written == static_cast<ssize_t>(bytes);
}

void WriteFatal(int fd) {
  const abi::AsyncEventRecord record = {0, kEventDeviceFatal, 0};
  if (WriteWhole(fd, &record, sizeof(record)) || errno != EAGAIN) return;
  // Full of events that nobody has read: this last one must still fit.
  const int size = fcntl(fd, F_GETPIPE_SZ);
  if (size > 0 && fcntl(fd, F_SETPIPE_SZ, 2 * size) > 0) WriteWhole(fd, &record, sizeof(record));
}

}  // namespace

void DeathNotices::Apply(const LinkMessage& message, UniqueFd fd) {
  switch (message.kind) {
    case LinkKind::kReady:
      status_page_ = std::move(fd);
      return;
    case LinkKind::kAddContext:
      contexts_[message.context].async = std::move(fd);
      return;
    case LinkKind::kAddChannel:
      AddChannel(message, std::move(fd));
      return;
    case LinkKind::kRemoveCq:
      if (const auto context = contexts_.find(message.context); context != contexts_.end()) {
        RemoveCq(&context->second, message.handle);
      }
      return;
    case LinkKind::kRemoveContext:
      contexts_.erase(message.context);
      return;
    default:
      return;
  }
}

void DeathNotices::AddChannel(const LinkMessage& message, UniqueFd fd) {
  const auto found = contexts_.find(message.context);
  struct stat info = {};
  if (found == contexts_.end() || fstat(fd.get(), &info) != 0) return;
  Context& context = found->second;
  RemoveCq(&context, message.handle);
  const PipeId id = {info.st_dev, info.st_ino};
  Channel& channel = context.channels[id];
  if (!channel.fd.valid()) channel.fd = std::move(fd);
  ++channel.cqs;
  context.cqs[message.handle] = {id, message.user_handle};
}

void DeathNotices::RemoveCq(Context* context, uint32_t handle) {
  const auto cq = context->cqs.find(handle);
  if (cq == context->cqs.end()) return;
  const auto channel = context->channels.find(cq->second.channel);
  if (--channel->second.cqs == 0) context->channels.erase(channel);
  context->cqs.erase(cq);
}

void DeathNotices::Announce() {
  if (std::exchange(announced_, true)) return;
  if (status_page_.valid()) MarkDead(status_page_.get());
  for (auto& [number, context] : contexts_) {
    for (const auto& [handle, cq] : context.cqs) {
      const int fd = context.channels.at(cq.channel).fd.get();
      WriteWhole(fd, &cq.user_handle, sizeof(cq.user_handle));
    }
    if (context.async.valid()) WriteFatal(context.async.get());
  }
}

void DeathNotices::AnnounceRemoval(uint64_t number) {
  const auto found = contexts_.find(number);
  if (found == contexts_.end()) return;
  Context& context = found->second;
  for (const auto& [handle, cq] : context.cqs) {
    const int fd = context.channels.at(cq.channel).fd.get();
    WriteWhole(fd, &cq.user_handle, sizeof(cq.user_handle));
  }
  if (context.async.valid()) WriteFatal(context.async.get());
}

size_t DeathNotices::descriptor_count() const {
  size_t count = status_page_.valid() ? 1 : 0;
  for (const auto& [number, context] : contexts_) {
    count += context.channels.size() + (context.async.valid() ? 1 : 0);
  }
  return count;
}

}  // namespace verbena::nic
