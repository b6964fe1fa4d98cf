// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/device/device_context.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <new>

#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/device/slots.h"
#include "nic_sim/qp/lid.h"
#include "nic_sim/qp/path.h"
#include "nic_sim/trace/failure_signal.h"

namespace verbena::nic {

using transport::AsyncEventType;
using transport::QpType;

DeviceContext::DeviceContext(Shard& shard, Nic& nic, const UserLimits& limits, uint64_t cookie,
                             ClientIdentity client, std::unique_ptr<AddressSpace> space,
                             SharedMemory page)
    : shard_(shard),
      nic_(nic),
      share_(shard.share(nic)),
      limits_(limits),
      cookie_(cookie),
      client_(std::move(client)),
      space_(std::move(space)),
      memory_(std::move(page)),
      page_(reinterpret_cast<abi::ContextPage*>(memory_.data())),
      rings_("verbena-" + std::to_string(cookie), &shard.ring_budget()),
      source_{.page = page_, .qps = &qps_, .watcher = this},
      link_up_(shard.fabric().link_up(nic.port())),
      qp_count_(shard.QpCountOf(client_.pid)) {
  SetCheckedVerbs(shard.faults().checked_verbs());
  shard_.AddSource(&source_);
  share_.contexts.emplace(cookie_, this);
}

DeviceContext::~DeviceContext() {
  share_.contexts.erase(cookie_);
  shard_.RemoveSource(&source_);
  while (!flows_.empty()) DestroyFlow(flows_.begin()->first);
  for (Qp* qp : qps_) {
    if (qp != nullptr) DeleteQp(qp);
  }
  for (auto& cq : cqs_) {
    if (cq == nullptr) continue;
    shard_.ForgetCq(*cq);
    --share_.cq_count;
  }
  FreeMemoryObjects();
  for (const auto& srq : srqs_) {
    if (srq != nullptr) ForgetSrq(*srq);
  }
  ReleaseXrc();
  share_.ah_count -= static_cast<uint32_t>(ahs_.size());
  share_.pd_count -= static_cast<uint32_t>(pds_.size() - imported_pds_.size());
  close(client_.async_write_fd);
  // Nothing of it is written any more.
  if (removed_) page_->removed.store(1, std::memory_order_release);
}

// --- Protection domains and memory regions ---

int DeviceContext::AllocPd(uint32_t* handle) {
  if (share_.pd_count >= limits_.pds) return ENOMEM;
  ++share_.pd_count;
  *handle = share_.next_pd++;
  pds_.emplace(*handle, 0);
  return 0;
}

int DeviceContext::DeallocPd(uint32_t handle) {
  const auto found = pds_.find(handle);
  if (found == pds_.end()) return EINVAL;
  if (found->second != 0) return EBUSY;
  pds_.erase(found);
  if (imported_pds_.erase(handle) == 0) --share_.pd_count;
  return 0;
}

int DeviceContext::RegMr(const abi::RegMrRequest& request, abi::RegMrReply* reply) {
  const auto pd = pds_.find(request.pd);
  if (pd == pds_.end()) return EINVAL;
  const Region region{.space = space_.get(),
                      .pd = request.pd,
                      .access = request.access,
                      .iova = request.iova,
                      .length = request.length,
                      .address = request.address,
                      .key = 0,
                      .owner = cookie_};
  uint32_t key = 0;
  if (share_.regions.size() - share_.regions.window_count() >= limits_.mrs) return ENOMEM;
  if (const int error = share_.regions.Register(region, &key); error != 0) return error;
  mrs_.insert(key);
  ++pd->second;
  reply->handle = reply->lkey = reply->rkey = key;
  return 0;
}

int DeviceContext::DeregMr(uint32_t handle) {
  const auto found = mrs_.find(handle);
  if (found == mrs_.end()) return EINVAL;
  const Region* region = share_.regions.Find(handle);
  if (region != nullptr && region->windows != 0) return EBUSY;
  if (region != nullptr) --pds_[region->pd];
  share_.regions.Deregister(handle);
  mrs_.erase(found);
  return 0;
}

// --- Completion queues ---

int DeviceContext::ChannelOf(int fd, std::shared_ptr<EventChannel>* result) {
  struct stat st {};
  if (fstat(fd, &st) != 0 || !S_ISFIFO(st.st_mode)) return EINVAL;
  std::erase_if(channels_, [](const auto& channel) { return channel.expired(); });
  for (const auto& weak : channels_) {
    auto channel = weak.lock();
    if (channel != nullptr && channel->inode() == st.st_ino) {
      close(fd);
      *result = std::move(channel);
      return 0;
    }
  }
  if (shard_.channel_count >= limits_.channels) return ENOMEM;
  // The engine must never block on a pipe that the application does not read.
  if (fcntl(fd, F_SETFL, O_WRONLY | O_NONBLOCK) != 0) return EINVAL;
  ++shard_.channel_count;
  result->reset(new EventChannel(fd, st.st_ino), [count = &shard_.channel_count](auto* channel) {
    --*count;
    delete channel;
  });
  channels_.push_back(*result);
  return 0;
}

int DeviceContext::CreateCq(const abi::CreateCqRequest& request, int channel_fd,
                            abi::CreateCqReply* reply, SegmentFds* fds) {
  std::shared_ptr<EventChannel> channel;
  if (channel_fd >= 0) {
    if (const int error = ChannelOf(channel_fd, &channel); error != 0) {
      close(channel_fd);
      return error;
    }
  }
  const abi::DeviceAttributes& limits = nic_.attributes();
  if (request.cqe == 0 || request.cqe > limits.max_cqe) return EINVAL;
  if (request.comp_vector >= limits.num_comp_vectors) return EINVAL;
  if ((request.has_channel != 0) != (channel != nullptr)) return EINVAL;
  if ((request.flags & ~uint32_t{abi::kCqIgnoreOverrun}) != 0) return EINVAL;
  if (share_.cq_count >= limits_.cqs) return ENOMEM;
  const uint32_t slot = FreeSlot(cqs_, abi::kMaxCqSlots);
  if (slot == abi::kMaxCqSlots) return ENOMEM;
  Ring ring;
  if (const int error = rings_.Allocate(Slots(request.cqe), sizeof(abi::Cqe), &ring, fds);
      error != 0) {
    return error;
  }
  ++share_.cq_count;
  shard_.Reserve();
  cqs_[slot] = std::make_unique<CompletionQueue>(slot, ring, &page_->cq[slot], request.user_handle,
                                                 std::move(channel),
                                                 (request.flags & abi::kCqIgnoreOverrun) != 0);
  reply->handle = slot;
  reply->cqe = ring.location.slots;
  reply->ring = ring.location;
  return 0;
}

int DeviceContext::DestroyCq(uint32_t handle, abi::DestroyReply* reply) {
  CompletionQueue* cq = FindCq(handle);
  if (cq == nullptr) return EINVAL;
  if (cq->qp_references != 0) return EBUSY;
  reply->comp_events = cq->comp_events;
  reply->async_events = cq->async_events;
  shard_.ForgetCq(*cq);
  FinishCqResize(handle);
  rings_.Free(cq->ring());
  cqs_[handle].reset();
  --share_.cq_count;
  return 0;
}

int DeviceContext::ResizeCq(const abi::ResizeCqRequest& request, abi::CreateCqReply* reply,
                            SegmentFds* fds) {
  CompletionQueue* cq = FindCq(request.handle);
  if (cq == nullptr || request.cqe == 0 || request.cqe > nic_.attributes().max_cqe) return EINVAL;
  if (cq->in_error()) return EINVAL;
  Ring ring;
  if (const int error = rings_.Allocate(Slots(request.cqe), sizeof(abi::Cqe), &ring, fds);
      error != 0) {
    return error;
  }
  if (const int error = cq->SwitchTo(ring); error != 0) {
    rings_.Free(ring);
    return error;
  }
  reply->handle = request.handle;
  reply->cqe = ring.location.slots;
  reply->ring = ring.location;
  return 0;
}

int DeviceContext::FinishCqResize(uint32_t handle) {
  CompletionQueue* cq = FindCq(handle);
  Ring old;
  if (cq == nullptr || !cq->TakeOldRing(&old)) return EINVAL;
  rings_.Free(old);
  return 0;
}

int DeviceContext::ModifyCq(const abi::ModifyCqRequest& request) {
  CompletionQueue* cq = FindCq(request.handle);
  if (cq == nullptr || request.count > kMaxCqModeration || request.period_us > kMaxCqModeration) {
    return EINVAL;
  }
  cq->SetModeration(request.count, transport::Duration::Microseconds(request.period_us));
  shard_.Kick();  // an event may be held back by what was there before
  return 0;
}

// --- Queue pairs ---

int DeviceContext::CheckQpRequest(const abi::CreateQpRequest& request) const {
  switch (static_cast<QpType>(request.type)) {
    case QpType::kRc:
    case QpType::kUc:
    case QpType::kUd:
      break;
    case QpType::kXrcSend:
    case QpType::kXrcRecv:
      break;
    case QpType::kRawPacket:
      // Whole frames of the sender's making need CAP_NET_RAW on Linux. Here they stay
      // among the ports of who owns the daemon.
      if (client_.uid != 0 && client_.uid != geteuid()) return EPERM;
      break;
    default:
      return EINVAL;
  }
  if (static_cast<QpType>(request.type) == QpType::kXrcRecv) return 0;  // CreateXrcTarget
  const bool receives = static_cast<QpType>(request.type) != QpType::kXrcSend;
  if (!pds_.contains(request.pd) || FindCq(request.send_cq) == nullptr ||
      (FindCq(request.recv_cq) == nullptr) == receives) {
    return EINVAL;
  }
  if (request.xrcd != abi::kNoHandle || (!receives && request.srq != abi::kNoHandle)) return EINVAL;
  if (request.srq != abi::kNoHandle && FindSrq(request.srq) == nullptr) return EINVAL;
  if ((request.create_flags & ~abi::kQpBlockSelfMulticast) != 0) return EOPNOTSUPP;
  const abi::DeviceAttributes& limits = nic_.attributes();
  const abi::QpCaps& caps = request.caps;
  if (caps.max_send_wr > limits.max_qp_wr || caps.max_recv_wr > limits.max_qp_wr ||
      caps.max_send_sge > limits.max_sge || caps.max_recv_sge > limits.max_sge ||
      caps.max_inline > limits.max_inline) {
    return EINVAL;
  }
  return 0;
}

int DeviceContext::CreateQp(const abi::CreateQpRequest& request, abi::CreateQpReply* reply,
                            SegmentFds* fds) {
  if (const int error = CheckQpRequest(request); error != 0) return error;
  if (static_cast<QpType>(request.type) == QpType::kXrcRecv) {
    return CreateXrcTarget(request, reply);
  }
  if (share_.qp_count >= limits_.qps) return ENOMEM;
  const uint32_t slot = FreeSlot(qps_, abi::kMaxQpSlots);
  if (slot == abi::kMaxQpSlots) return ENOMEM;
  abi::QpCaps caps = request.caps;
  caps.max_send_wr = std::max(caps.max_send_wr, 1u);
  SharedReceiveQueue* const srq = FindSrq(request.srq);
  // With an SRQ there is no queue of its own, whatever is asked for, and an
  // XRC_SEND QP receives nothing.
  const bool own_rq = srq == nullptr && static_cast<QpType>(request.type) != QpType::kXrcSend;
  caps.max_recv_wr = own_rq ? std::max(caps.max_recv_wr, 1u) : 0;
  caps.max_send_sge = std::max(caps.max_send_sge, 1u);
  caps.max_recv_sge = own_rq ? std::max(caps.max_recv_sge, 1u) : 0;
  const uint32_t sq_stride = abi::SendStride(caps.max_send_sge, caps.max_inline);
  // What the WQE has room for anyway is given.
  caps.max_inline = std::min(kMaxInline, sq_stride - static_cast<uint32_t>(sizeof(abi::SendWqe)));
  Ring sq;
  Ring rq;
  if (const int error = rings_.Allocate(Slots(caps.max_send_wr), sq_stride, &sq, fds); error != 0) {
    return error;
  }
  if (own_rq) {
    const uint32_t rq_stride = abi::RecvStride(caps.max_recv_sge);
    if (const int error = rings_.Allocate(Slots(caps.max_recv_wr), rq_stride, &rq, fds);
        error != 0) {
      rings_.Free(sq);
      return error;
    }
  }
  static std::atomic<uint32_t> generation{0};  // of all QPs: a slot never repeats one soon
  const Qp::Config config{
      .nic = &nic_,
      .shard = &shard_,
      .share = &share_,
      .sink = this,
      .slot = slot,
      .generation = ++generation,
      .pd = request.pd,
      .type = static_cast<QpType>(request.type),
      .caps = caps,
      .signal_all = request.sq_sig_all != 0,
      .blocks_self_multicast = (request.create_flags & abi::kQpBlockSelfMulticast) != 0,
      .send_cq = FindCq(request.send_cq),
      .recv_cq = FindCq(request.recv_cq),
      .srq = srq,
      .sq_ring = sq,
      .rq_ring = rq,
      .record = &page_->qp[slot],
      .user_handle = request.user_handle,
      .space = space_.get(),
      .app = client_.comm,
      .nth_qp = *qp_count_ + 1};
  std::unique_ptr<Qp> qp = Qp::Create(config);
  transport::Qpn qpn;
  if (!nic_.qps().Insert(qp.get(), shard_.id(), &qpn)) {
    qp.reset();
    rings_.Free(sq);
    rings_.Free(rq);
    return ENOMEM;
  }
  qp->set_qpn(qpn);
  shard_.fabric().NameQp(nic_.port(), qpn.value(), client_.comm, ++*qp_count_);
  ++share_.qp_count;
  shard_.Reserve();
  ++pds_[request.pd];
  qps_[slot] = qp.release();
  reply->handle = slot;
  reply->qpn = qpn.value();
  reply->generation = config.generation;
  reply->caps = caps;
  reply->sq = sq.location;
  reply->rq = rq.location;
  return 0;
}

int DeviceContext::ModifyQp(const abi::ModifyQpRequest& request, abi::ModifyQpReply* reply) {
  shard_.fabric().RefreshLinks();
  Qp* qp = FindQp(request.handle);
  if (qp == nullptr) return EINVAL;
  // Controlled Q_Keys (IBTA Vol 1, 10.2.5), QP1's is one, need CAP_NET_RAW on Linux: whoever sends
  // with it could speak for every user's connections.
  const bool controlled =
      (request.mask & transport::kQpAttrQkey) != 0 && (request.attr.qkey & 0x80000000) != 0;
  if (controlled && client_.uid != 0 && client_.uid != geteuid()) return EPERM;
  static std::atomic<uint32_t> reset_generation{0x80000000};  // apart from those of CreateQp
  shard_.UpdateNow();
  if (const int error = qp->Modify(request.attr, request.mask, ++reset_generation); error != 0) {
    return error;
  }
  reply->state = static_cast<uint32_t>(qp->state());
  reply->generation = qp->generation();
  return 0;
}

int DeviceContext::QueryQp(uint32_t handle, abi::QueryQpReply* reply) {
  const Qp* qp = FindQp(handle);
  if (qp == nullptr) return EINVAL;
  reply->attr = qp->Query();
  reply->caps = qp->config().caps;
  return 0;
}

void DeviceContext::DeleteQp(Qp* qp) {
  const Ring sq = qp->config().sq_ring;
  const Ring rq = qp->config().rq_ring;
  while (!qp->groups.empty()) Detach(*qp, qp->groups.back());
  DestroyFlowsOf(*qp);
  --pds_[qp->config().pd];
  shard_.ForgetQp(*qp);
  nic_.qps().Remove(qp->qpn());
  shard_.fabric().ForgetQp(nic_.port(), qp->qpn().value());
  share_.regions.UnbindWindowsOf(qp->qpn().value());
  --share_.qp_count;
  qp->AddCounters(&share_.retired_counters);
  qps_[qp->config().slot] = nullptr;
  delete qp;
  rings_.Free(sq);
  rings_.Free(rq);
}

// Programs (mckey) post datagrams and destroy address handle and QP without waiting for
// completions: a NIC has sent them by then.
void DeviceContext::SendPosted(Qp& qp) {
  const bool is_acknowledged =
      qp.config().type == QpType::kRc || qp.config().type == QpType::kXrcSend;
  if (qp.state() == transport::QpState::kRts && !is_acknowledged) shard_.SendPosted(qp);
}

int DeviceContext::DestroyQp(uint32_t handle, abi::DestroyReply* reply) {
  Qp* qp = FindQp(handle);
  if (qp == nullptr) return EINVAL;
  if (handle >= abi::kMaxQpSlots) {
    reply->async_events = CloseXrcQp(handle);
    return 0;
  }
  if (!qp->groups.empty() || qp->flows != 0) return EBUSY;
  SendPosted(*qp);
  reply->async_events = qp->async_events;
  DeleteQp(qp);
  return 0;
}

// --- Multicast ---

int DeviceContext::AttachMcast(const abi::McastRequest& request) {
  Qp* qp = FindQp(request.handle);
  if (qp == nullptr || qp->config().type != QpType::kUd) return EINVAL;
  const transport::Gid group =
      CanonicalGid(transport::Gid::Load(reinterpret_cast<const std::byte*>(request.gid)));
  if (!group.IsMulticast()) return EINVAL;
  if (std::find(qp->groups.begin(), qp->groups.end(), group) != qp->groups.end()) return 0;
  if (share_.mcast_count >= limits_.mcast_attachments) return ENOMEM;
  if (const int error = shard_.fabric().AttachGroup(nic_.port(), shard_.id(), group); error != 0) {
    return error;
  }
  ++share_.mcast_count;
  share_.groups[group].push_back(qp);
  qp->groups.push_back(group);
  return 0;
}

int DeviceContext::DetachMcast(const abi::McastRequest& request) {
  Qp* qp = FindQp(request.handle);
  if (qp == nullptr) return EINVAL;
  const transport::Gid group =
      CanonicalGid(transport::Gid::Load(reinterpret_cast<const std::byte*>(request.gid)));
  if (std::find(qp->groups.begin(), qp->groups.end(), group) == qp->groups.end()) return EINVAL;
  Detach(*qp, group);
  return 0;
}

void DeviceContext::Detach(Qp& qp, const transport::Gid& named) {
  const transport::Gid group = named;  // it may lie in what is changed here
  std::erase(qp.groups, group);
  const auto found = share_.groups.find(group);
  std::erase(found->second, &qp);
  if (found->second.empty()) share_.groups.erase(found);
  --share_.mcast_count;
  shard_.fabric().DetachGroup(nic_.port(), shard_.id(), group);
}

// --- Address handles and ports ---

int DeviceContext::CreateAh(const abi::CreateAhRequest& request, uint32_t* handle) {
  const auto pd = pds_.find(request.pd);
  if (pd == pds_.end()) return EINVAL;
  const abi::AhAttr attr = WithGids(nic_, shard_.fabric(), request.attr);
  if (const int error = CheckAddress(nic_, attr); error != 0) return error;
  if (share_.ah_count >= limits_.ahs) return ENOMEM;
  while (ahs_.contains(next_ah_)) ++next_ah_;
  *handle = next_ah_++;
  const transport::PacketAddress address = AddressFor(nic_, shard_.fabric(), attr);
  ahs_.emplace(*handle, AddressHandle{.pd = request.pd,
                                      .flow_label = address.flow_label,
                                      .path = transport::PacketTemplate(address)});
  ++share_.ah_count;
  ++pd->second;
  return 0;
}

int DeviceContext::DestroyAh(uint32_t handle) {
  const auto found = ahs_.find(handle);
  if (found == ahs_.end()) return EINVAL;
  for (Qp* qp : qps_) {
    if (qp != nullptr && qp->config().type == QpType::kUd) SendPosted(*qp);
  }
  --pds_[found->second.pd];
  ahs_.erase(found);
  --share_.ah_count;
  return 0;
}

const AddressHandle* DeviceContext::FindAh(uint32_t handle) const {
  const auto found = ahs_.find(handle);
  return found == ahs_.end() ? nullptr : &found->second;
}

int DeviceContext::QueryPort(uint32_t port, abi::QueryPortReply* reply) {
  if (port != 1) return EINVAL;
  const abi::ReplyHeader header = reply->header;
  *reply = MakePortAttributes();
  reply->header = header;
  reply->lid = LidOf(nic_);
  Fabric& fabric = shard_.fabric();
  fabric.RefreshLinks();
  reply->active_mtu = static_cast<uint8_t>(fabric.active_mtu(nic_.port()));
  if (!fabric.link_up(nic_.port())) {
    reply->state = 1;       // DOWN
    reply->phys_state = 3;  // Disabled
  }
  return 0;
}

int DeviceContext::GetSegment(uint32_t segment, SegmentFds* fds) {
  const int fd = rings_.OpenSegment(segment);
  if (fd < 0) return EINVAL;
  fds->push_back(fd);
  return 0;
}

// --- Events ---

bool DeviceContext::WriteEvent(uint64_t element, AsyncEventType type, uint32_t qpn) {
  shard_.trace().Record({.time_ns = shard_.now().ns(),
                         .qpn = qpn,
                         .port = nic_.port(),
                         .kind = TraceKind::kEvent,
                         .code = static_cast<uint8_t>(type)});
  if (type == AsyncEventType::kQpFatal || type == AsyncEventType::kQpReqErr ||
      type == AsyncEventType::kQpAccessErr) {
    FailureSignal::Raise();
  }
  const abi::AsyncEventRecord record{
      .element = element, .event_type = static_cast<uint32_t>(type), .reserved = 0};
  ssize_t written;
  do {
    written = write(client_.async_write_fd, &record, sizeof record);
  } while (written < 0 && errno == EINTR);
  return written == sizeof record;
}

void DeviceContext::OnQpEvent(Qp& qp, AsyncEventType type) {
  if (WriteEvent(qp.config().user_handle, type, qp.qpn().value())) ++qp.async_events;
}

void DeviceContext::TraceCommand(uint32_t op, int error) {
  shard_.UpdateNow();
  shard_.trace().Record({.time_ns = shard_.now().ns(),
                         .bytes = op,
                         .detail = static_cast<uint32_t>(error),
                         .port = nic_.port(),
                         .kind = TraceKind::kCommand});
}

void DeviceContext::OnLinkChange() {
  const bool up = shard_.fabric().link_up(nic_.port());
  if (up == link_up_) return;
  link_up_ = up;
  WriteEvent(1, up ? AsyncEventType::kPortActive : AsyncEventType::kPortErr);
}

void DeviceContext::OnCqOverrun(CompletionQueue& cq) {
  if (WriteEvent(cq.user_handle(), AsyncEventType::kCqErr)) ++cq.async_events;
  for (Qp* qp : qps_) {
    if (qp == nullptr || (qp->config().send_cq != &cq && qp->config().recv_cq != &cq)) continue;
    if (qp->state() == transport::QpState::kErr) continue;
    qp->MoveToError();
    OnQpEvent(*qp, AsyncEventType::kQpFatal);
  }
}

}  // namespace verbena::nic
