// SPDX-License-Identifier: Apache-2.0
//
// XRC domains of a context, and receiving XRC QPs, which contexts share.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <cerrno>

#include "nic_sim/device/device_context.h"
#include "nic_sim/qp/xrc_domain.h"

namespace verbena::nic {

using transport::AsyncEventType;
using transport::QpType;

namespace {

// Which file a descriptor refers to. Does not wait for a file system that does
// not answer.
bool KeyOf(int fd, FileKey* key) {
  struct statx status {};
  if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_INO, &status) != 0) return false;
  *key = {makedev(status.stx_dev_major, status.stx_dev_minor), status.stx_ino};
  return true;
}

}  // namespace

// As the kernel's uverbs: EAGAIN where a file has no domain and none is to be
// made, EINVAL where there must not be one.
int DeviceContext::OpenXrcd(const abi::OpenXrcdRequest& request, int fd, uint32_t* handle) {
  if (xrcds_.size() >= abi::kMaxSrqSlots) return ENOMEM;
  std::optional<FileKey> file;
  if (fd >= 0 && !KeyOf(fd, &file.emplace())) return EBADF;
  XrcDomain* domain = nullptr;
  for (XrcDomain& one : share_.xrc_domains) {
    if (file.has_value() && one.file() == file) domain = &one;
  }
  if (file.has_value()) {
    if (domain == nullptr && (request.flags & O_CREAT) == 0) return EAGAIN;
    if (domain != nullptr && (request.flags & O_EXCL) != 0) return EINVAL;
  }
  if (domain == nullptr) domain = &share_.xrc_domains.emplace_back(file);
  ++domain->handles;
  while (xrcds_.contains(next_xrcd_) || next_xrcd_ == abi::kNoHandle) ++next_xrcd_;
  *handle = next_xrcd_++;
  xrcds_.emplace(*handle, XrcdHandle{.domain = domain, .objects = 0});
  return 0;
}

int DeviceContext::CloseXrcd(uint32_t handle) {
  const auto found = xrcds_.find(handle);
  if (found == xrcds_.end()) return EINVAL;
  if (found->second.objects != 0) return EBUSY;
  ReleaseDomain(found->second.domain);
  xrcds_.erase(found);
  return 0;
}

void DeviceContext::ReleaseDomain(XrcDomain* domain) {
  if (--domain->handles != 0) return;
  share_.xrc_domains.remove_if([domain](const XrcDomain& one) { return &one == domain; });
}

uint32_t DeviceContext::AddOpener(XrcTarget* target, uint32_t xrcd, uint64_t user_handle) {
  while (xrc_qps_.contains(next_xrc_qp_) || next_xrc_qp_ < abi::kMaxQpSlots) {
    next_xrc_qp_ = std::max(next_xrc_qp_ + 1, abi::kMaxQpSlots);
  }
  const uint32_t handle = next_xrc_qp_++;
  XrcQpHandle& entry = xrc_qps_[handle];
  entry.target = target;
  entry.opener = std::make_unique<XrcOpener>();
  entry.opener->sink = this;
  entry.opener->user_handle = user_handle;
  entry.opener->xrcd = xrcd;
  target->openers.push_back(entry.opener.get());
  ++xrcds_.at(xrcd).objects;
  return handle;
}

int DeviceContext::CreateXrcTarget(const abi::CreateQpRequest& request, abi::CreateQpReply* reply) {
  const auto xrcd = xrcds_.find(request.xrcd);
  if (xrcd == xrcds_.end() || request.srq != abi::kNoHandle) return EINVAL;
  if (share_.qp_count >= limits_.qps) return ENOMEM;
  XrcDomain& domain = *xrcd->second.domain;
  XrcTarget& target = domain.targets.emplace_back();
  const Qp::Config config{.nic = &nic_,
                          .shard = &shard_,
                          .share = &share_,
                          .sink = &target,
                          .slot = 0,
                          .generation = 0,
                          .pd = 0,
                          .type = QpType::kXrcRecv,
                          .caps = {},
                          .signal_all = false,
                          .send_cq = nullptr,
                          .recv_cq = nullptr,
                          .srq = nullptr,
                          .xrc_domain = &domain,
                          .sq_ring = {},
                          .rq_ring = {},
                          .record = &target.record,
                          .user_handle = 0,
                          .space = nullptr,
                          .app = client_.comm,
                          .nth_qp = *qp_count_ + 1};
  target.qp = Qp::Create(config);
  transport::Qpn qpn;
  if (!nic_.qps().Insert(target.qp.get(), shard_.id(), &qpn)) {
    domain.targets.pop_back();
    return ENOMEM;
  }
  target.qp->set_qpn(qpn);
  shard_.fabric().NameQp(nic_.port(), qpn.value(), client_.comm, ++*qp_count_);
  ++share_.qp_count;
  shard_.Reserve();
  reply->handle = AddOpener(&target, request.xrcd, request.user_handle);
  reply->qpn = qpn.value();
  return 0;
}

int DeviceContext::OpenQp(const abi::OpenQpRequest& request, abi::OpenQpReply* reply) {
  const auto xrcd = xrcds_.find(request.xrcd);
  if (xrcd == xrcds_.end()) return EINVAL;
  XrcTarget* target = xrcd->second.domain->FindTarget(request.qpn);
  if (target == nullptr) return EINVAL;
  reply->handle = AddOpener(target, request.xrcd, request.user_handle);
  reply->state = static_cast<uint32_t>(target->qp->state());
  return 0;
}

// The last one takes the QP with it.
uint32_t DeviceContext::CloseXrcQp(uint32_t handle) {
  const auto found = xrc_qps_.find(handle);
  XrcTarget* target = found->second.target;
  const uint32_t events = found->second.opener->async_events;
  XrcdHandle& xrcd = xrcds_.at(found->second.opener->xrcd);
  --xrcd.objects;
  std::erase(target->openers, found->second.opener.get());
  xrc_qps_.erase(found);
  if (!target->openers.empty()) return events;
  shard_.ForgetQp(*target->qp);
  nic_.qps().Remove(target->qp->qpn());
  shard_.fabric().ForgetQp(nic_.port(), target->qp->qpn().value());
  --share_.qp_count;
  target->qp->AddCounters(&share_.retired_counters);
  xrcd.domain->targets.remove_if([target](const XrcTarget& one) { return &one == target; });
  return events;
}

void DeviceContext::OnXrcQpEvent(Qp& target, XrcOpener& opener, AsyncEventType type) {
  if (WriteEvent(opener.user_handle, type, target.qpn().value())) ++opener.async_events;
}

void DeviceContext::ReleaseXrc() {
  while (!xrc_qps_.empty()) CloseXrcQp(xrc_qps_.begin()->first);
  for (const auto& [handle, xrcd] : xrcds_) ReleaseDomain(xrcd.domain);
  xrcds_.clear();
}

}  // namespace verbena::nic
