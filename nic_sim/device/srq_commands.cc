// SPDX-License-Identifier: Apache-2.0
//
// Shared receive queues of a context.
#include <algorithm>
#include <atomic>
#include <cerrno>

#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/device/device_context.h"
#include "nic_sim/device/slots.h"

namespace verbena::nic {

using transport::AsyncEventType;

namespace {

// enum ibv_srq_type and ibv_srq_attr_mask.
constexpr uint32_t kTypeBasic = 0;
constexpr uint32_t kTypeXrc = 1;
constexpr uint32_t kTypeTagMatching = 2;
constexpr uint32_t kMaskMaxWr = 1 << 0;
constexpr uint32_t kMaskLimit = 1 << 1;

// SRQ numbers have 24 bits; one that was used is not used again soon.
std::atomic<uint32_t> next_number{0};

}  // namespace

int DeviceContext::CreateSrq(const abi::CreateSrqRequest& request, abi::CreateSrqReply* reply,
                             SegmentFds* fds) {
  if (request.type == kTypeTagMatching) return EOPNOTSUPP;
  if (request.type > kTypeTagMatching) return EINVAL;
  const auto pd = pds_.find(request.pd);
  if (pd == pds_.end()) return EINVAL;
  const auto xrcd = xrcds_.find(request.xrcd);
  CompletionQueue* const cq = FindCq(request.cq);
  if (request.type == kTypeXrc ? xrcd == xrcds_.end() || cq == nullptr
                               : request.xrcd != abi::kNoHandle || request.cq != abi::kNoHandle) {
    return EINVAL;
  }
  const abi::DeviceAttributes& limits = nic_.attributes();
  if (request.max_wr > limits.max_srq_wr || request.max_sge > limits.max_srq_sge) return EINVAL;
  if (share_.srq_count >= limits_.srqs) return ENOMEM;
  const uint32_t slot = FreeSlot(srqs_, abi::kMaxSrqSlots);
  if (slot == abi::kMaxSrqSlots) return ENOMEM;
  const uint32_t max_wr = std::max(request.max_wr, 1u);
  const uint32_t max_sge = std::max(request.max_sge, 1u);
  Ring ring;
  if (const int error = rings_.Allocate(Slots(max_wr), abi::RecvStride(max_sge), &ring, fds);
      error != 0) {
    return error;
  }
  static std::atomic<uint32_t> generation{0};
  const SharedReceiveQueue::Config config{.sink = this,
                                          .slot = slot,
                                          .generation = ++generation,
                                          .number = ++next_number & 0xffffff,
                                          .pd = request.pd,
                                          .max_wr = max_wr,
                                          .max_sge = max_sge,
                                          .ring = ring,
                                          .record = &page_->srq[slot],
                                          .user_handle = request.user_handle,
                                          .cq = cq,
                                          .xrcd = request.xrcd};
  srqs_[slot] = std::make_unique<SharedReceiveQueue>(config);
  if (cq != nullptr) {
    ++cq->qp_references;
    ++xrcd->second.objects;
    xrcd->second.domain->Add(srqs_[slot].get());
  }
  ++share_.srq_count;
  ++pd->second;
  reply->handle = slot;
  reply->srqn = config.number;
  reply->generation = config.generation;
  reply->max_wr = max_wr;
  reply->max_sge = max_sge;
  reply->ring = ring.location;
  return 0;
}

int DeviceContext::ModifySrq(const abi::ModifySrqRequest& request, abi::ModifySrqReply* reply,
                             SegmentFds* fds) {
  SharedReceiveQueue* srq = FindSrq(request.handle);
  if (srq == nullptr || (request.mask & ~(kMaskMaxWr | kMaskLimit)) != 0) return EINVAL;
  if (srq->resizing()) return EBUSY;
  const bool resize = (request.mask & kMaskMaxWr) != 0;
  const uint32_t max_wr = resize ? request.max_wr : srq->config().max_wr;
  const uint32_t limit = (request.mask & kMaskLimit) != 0 ? request.srq_limit : srq->limit();
  if (resize && (max_wr == 0 || max_wr > nic_.attributes().max_srq_wr)) return EINVAL;
  if (limit > max_wr || srq->outstanding() > max_wr) return EINVAL;
  reply->max_wr = max_wr;
  if (!resize) {
    if ((request.mask & kMaskLimit) != 0) srq->SetLimit(limit);
    return 0;
  }
  Ring ring;
  if (const int error =
          rings_.Allocate(Slots(max_wr), abi::RecvStride(srq->config().max_sge), &ring, fds);
      error != 0) {
    return error;
  }
  reply->ring_number = srq->BeginResize(ring, max_wr, limit);
  reply->ring = ring.location;
  return 0;
}

int DeviceContext::FinishSrqResize(const abi::FinishSrqResizeRequest& request) {
  SharedReceiveQueue* srq = FindSrq(request.handle);
  if (srq == nullptr || !srq->resizing()) return EINVAL;
  rings_.Free(srq->FinishResize(request.commit != 0));
  return 0;
}

int DeviceContext::QuerySrq(uint32_t handle, abi::QuerySrqReply* reply) {
  const SharedReceiveQueue* srq = FindSrq(handle);
  if (srq == nullptr) return EINVAL;
  reply->max_wr = srq->config().max_wr;
  reply->max_sge = srq->config().max_sge;
  reply->srq_limit = srq->limit();
  return 0;
}

int DeviceContext::DestroySrq(uint32_t handle, abi::DestroyReply* reply) {
  SharedReceiveQueue* srq = FindSrq(handle);
  if (srq == nullptr) return EINVAL;
  if (srq->qp_references != 0) return EBUSY;
  reply->async_events = srq->async_events;
  rings_.Free(srq->ring());
  rings_.Free(srq->next_ring());
  --pds_[srq->config().pd];
  ForgetSrq(*srq);
  srqs_[handle].reset();
  return 0;
}

void DeviceContext::ForgetSrq(SharedReceiveQueue& srq) {
  --share_.srq_count;
  if (srq.config().cq == nullptr) return;
  --srq.config().cq->qp_references;
  XrcdHandle& xrcd = xrcds_.at(srq.config().xrcd);
  --xrcd.objects;
  xrcd.domain->Remove(&srq);
}

void DeviceContext::OnSrqEvent(SharedReceiveQueue& srq, AsyncEventType type) {
  if (WriteEvent(srq.config().user_handle, type)) ++srq.async_events;
  if (type != AsyncEventType::kSrqErr) return;
  // Nothing can be received any more; each QP finds it in its turn.
  for (Qp* qp : qps_) {
    if (qp != nullptr && qp->config().srq == &srq) shard_.MarkReady(*qp);
  }
}

}  // namespace verbena::nic
