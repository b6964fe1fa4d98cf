// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/server_shared.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

namespace verbena::nic {

bool News::Tell(const LinkMessage& message, int fd) {
  const std::lock_guard guard(mutex_);
  notices_.Apply(message, UniqueFd(fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 3)));
  if (link_ == nullptr) return false;
  link_->Send(message, fd);
  return link_->has_pending();
}

bool News::TellSupervisor(const LinkMessage& message, int fd) {
  const std::lock_guard guard(mutex_);
  if (link_ == nullptr) return false;
  link_->Send(message, fd);
  return link_->has_pending();
}

void News::AnnounceRemoval(uint64_t context) {
  const std::lock_guard guard(mutex_);
  notices_.AnnounceRemoval(context);
}

void News::Announce() {
  const std::lock_guard guard(mutex_);
  notices_.Announce();
}

bool News::Flush() {
  const std::lock_guard guard(mutex_);
  if (link_ == nullptr) return false;
  link_->Flush();
  return link_->has_pending();
}

void News::Drain(int milliseconds) {
  const std::lock_guard guard(mutex_);
  if (link_ != nullptr) link_->Drain(milliseconds);
}

ServerShared::ServerShared(Hardware* device, EngineLink* link, ServerOptions server_options)
    : hardware(device),
      options(std::move(server_options)),
      news(link),
      rdma_cm(device),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void ServerShared::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t ignored = write(wake_.get(), &one, sizeof(one));
}

}  // namespace verbena::nic
