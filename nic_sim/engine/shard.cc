// SPDX-License-Identifier: Apache-2.0
//
// The steps of one engine pass.
#include "nic_sim/engine/shard.h"

#include <rte_mbuf.h>
#include <rte_mempool.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "nic_sim/fabric/packet.h"
#include "nic_sim/mem/address_space.h"
#include "nic_sim/queues/doorbells.h"
#include "nic_sim/runtime/random.h"
#include "transport/wire/packet_view.h"

namespace verbena::nic {

using transport::Duration;
using transport::MemoryStatus;
using transport::PacketView;
using transport::Time;
using transport::TxPacket;

namespace {

// Longer than this without running, on a machine that has the links inside
// itself, is the engine's own fault and not a lost packet.
constexpr Duration kStarved = Duration::Milliseconds(10);

// A timer that an overloaded engine does not believe is looked at again after this.
constexpr Duration kLookAgain = Duration::Milliseconds(1);

uint32_t AethWord(uint8_t syndrome, transport::Msn msn) {
  return uint32_t{syndrome} << 24 | msn.value();
}

transport::TransportHeaders HeadersOf(const Qp& qp, const TxPacket& tx) {
  transport::TransportHeaders h;
  h.bth.opcode = tx.opcode;
  h.bth.solicited = tx.solicited;
  h.bth.ack_req = tx.ack_request;
  h.bth.psn = tx.psn;
  h.bth.mig_req = qp.attr().path_mig_state == kMigMigrated;
  const transport::OpcodeTraits& traits = transport::TraitsOf(tx.opcode);
  if (traits.has_deth()) {
    h.bth.dest_qpn = tx.dest_qpn;
    h.deth = {.qkey = tx.qkey, .source_qpn = qp.qpn()};
  } else {
    h.bth.dest_qpn = transport::Qpn(qp.attr().dest_qpn);
  }
  if (traits.has_xrceth()) h.xrceth = {.srq = tx.srq};
  if (traits.has_reth()) {
    h.reth = {
        .va = tx.remote_address, .rkey = transport::Rkey(tx.rkey), .dma_length = tx.dma_length};
  }
  if (traits.has_atomic_eth()) {
    h.atomic_eth = {.va = tx.remote_address,
                    .rkey = transport::Rkey(tx.rkey),
                    .swap_add = tx.swap_or_add,
                    .compare = tx.compare};
  }
  if (traits.has_aeth()) h.aeth = {.syndrome = tx.syndrome, .msn = tx.msn};
  if (traits.has_atomic_ack_eth()) h.atomic_ack_eth = {.original = tx.original};
  if (traits.has_imm()) {
    h.imm = {.value = transport::LoadBe32(reinterpret_cast<const std::byte*>(&tx.imm_or_inv))};
  }
  if (traits.has_feth()) h.feth = {.value = tx.imm_or_inv};
  if (traits.has_ieth()) h.ieth = {.rkey = transport::Rkey(tx.imm_or_inv)};
  return h;
}

}  // namespace

void Shard::UpdateNow() {
  if (config_.manual) return;  // RunPassAt sets it
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  now_ = Time::FromNanoseconds(int64_t{ts.tv_sec} * 1'000'000'000 + ts.tv_nsec);
}

bool Shard::RunPass() {
  UpdateNow();
  ++counters_.passes;
  wqes_this_pass_ = 0;
  CheckStarvation();
  if (resources_.fabric->next_deadline() <= now_) resources_.fabric->HandleTimeout(now_);
  CheckLinks();
  // The netdevs are served by one shard; steering gives each its packets.
  const bool from_outside = config_.id == 0 && resources_.fabric->PollWires(now_);
  if (!waiting_for_netdev_.empty()) ReleaseWaiting();
  bool worked = RunReceive() || from_outside;
  RunPlacements();
  worked |= RunDoorbells();
  worked |= RunQps();
  RunTimers();
  if (!delayed_.empty()) [[unlikely]]
    RunDelayed();
  RunNotifications();
  last_pass_ = now_;
  worked_this_pass_ = worked;
  if (wqes_this_pass_ != 0) progress_.store(true, std::memory_order_relaxed);
  return ready_head_ != nullptr || HasReceived() || from_outside;
}

bool Shard::RunPassAt(Time now) {
  const std::lock_guard guard(lock_);
  engine_holds_lock_.store(true, std::memory_order_seq_cst);
  now_ = last_pass_ = std::max(now_, now);  // time that is skipped is no starvation
  const bool more = RunPass();
  engine_holds_lock_.store(false, std::memory_order_seq_cst);
  return more;
}

// A starved engine must not look like a lossy network: deadlines move by the
// time that the engine did not get.
void Shard::CheckStarvation() {
  const Time reference = planned_wake_.IsNever() ? last_pass_ : std::max(planned_wake_, last_pass_);
  const bool asleep_without_deadline = planned_wake_.IsNever() && timers_.next().IsNever();
  if (!asleep_without_deadline && last_pass_ != Time() && now_ - reference > kStarved) {
    const Duration gap = now_ - reference;
    timers_.ForEach([gap](Qp& qp) { qp.ShiftDeadlines(gap); });
    ++counters_.deadline_shifts;
  }
  planned_wake_ = Time::Never();
}

void Shard::CheckLinks() {
  const uint32_t changes = resources_.fabric->link_changes();
  if (changes == seen_link_changes_) [[likely]]
    return;
  seen_link_changes_ = changes;
  for (DoorbellSource* source : sources_) source->watcher->OnLinkChange();
}

bool Shard::RunDoorbells() {
  bool rung = false;
  for (DoorbellSource* source : sources_) {
    TakeDoorbells(*source->page, source->qps->size(), [&](uint32_t slot) {
      if (slot >= source->qps->size() || (*source->qps)[slot] == nullptr) return;
      Qp& qp = *(*source->qps)[slot];
      MarkReady(qp);
      trace_.Record({.time_ns = now_.ns(),
                     .qpn = qp.qpn().value(),
                     .port = qp.nic().port(),
                     .kind = TraceKind::kDoorbell});
      ++counters_.doorbells;
      rung = true;
    });
  }
  return rung;
}

bool Shard::RunReceive() {
  bool worked = false;
  queue_wait_ = Duration::Zero();
  rte_mbuf* burst[kBurst];
  for (Nic* nic : config_.nics) {
    if (!resources_.fabric->has_received(nic->port(), config_.id)) continue;
    const size_t count = resources_.fabric->Receive(nic->port(), burst, config_.id);
    // The first has waited longest.
    if (count != 0) {
      const Time queued = Time::FromNanoseconds(MetaOf(burst[0]).queued_ns);
      queue_wait_ = std::max(queue_wait_, now_ - queued);
    }
    for (size_t i = 0; i < count; ++i) {
      // A full queue would call back into a QP that is handling a packet.
      if (dma_->room() < transport::kMaxSge + 1) dma_->FlushPlacements();
      Receive(*nic, burst[i]);
    }
    worked |= count != 0;
  }
  if (worked) progress_.store(true, std::memory_order_relaxed);
  return worked;
}

void Shard::Receive(Nic& nic, rte_mbuf* packet) {
  received_.push_back(packet);  // capacity: burst times ports, reserved
  const auto drop = [&](DropReason reason) {
    resources_.fabric->CountReceiveDrop(nic.port(), reason);
  };
  if (MetaOf(packet).raw) [[unlikely]]
    return ReceiveFrame(nic, packet);
  auto parsed = PacketView::Parse(FrameSpan(packet));
  // A responder answers these.
  if (!parsed.ok() && parsed.error() == transport::ParseError::kReservedOpcode) {
    parsed = PacketView::ParseReserved(FrameSpan(packet));
  }
  if (!parsed.ok()) return drop(DropReason::malformed);
  const PacketView& view = parsed.value();
  if (!MetaOf(packet).trusted && !view.VerifyIcrc()) {
    TraceReceived(nic, view, view.dest_qpn(), DropReason::bad_icrc);
    return drop(DropReason::bad_icrc);
  }
  const bool to_group = IsToGroup(packet);
  if (to_group != (view.dest_qpn() == transport::kMulticastQpn)) {
    return drop(DropReason::unknown_qp);
  }
  if (to_group) return ReceiveFromGroup(nic, view);
  Qp* qp = nic.qps().Find(view.dest_qpn(), config_.id);
  const DropReason reason = qp != nullptr ? qp->HandlePacket(view, now_) : DropReason::unknown_qp;
  TraceReceived(nic, view, view.dest_qpn(), reason);
  if (reason != DropReason::count) return drop(reason);
  MarkReady(*qp);
}

// A frame that a flow rule leads to a raw packet QP.
void Shard::ReceiveFrame(Nic& nic, rte_mbuf* packet) {
  const PacketMeta& meta = MetaOf(packet);
  Qp* qp = nic.qps().Find(transport::Qpn(meta.to_qpn), config_.id);
  const DropReason reason =
      qp != nullptr ? qp->HandleFrame(FrameSpan(packet), meta.flow_tag) : DropReason::unknown_qp;
  if (reason != DropReason::count) {
    resources_.fabric->CountReceiveDrop(nic.port(), reason);
    return;
  }
  MarkReady(*qp);
}

// Each QP of the group takes it, or not, for itself.
void Shard::ReceiveFromGroup(Nic& nic, const PacketView& packet) {
  const auto& groups = shares_[nic.config().index]->groups;
  const auto group = groups.find(packet.destination_gid());
  if (group == groups.end()) {
    resources_.fabric->CountReceiveDrop(nic.port(), DropReason::unknown_qp);
    return;
  }
  const bool from_here = packet.traits().has_deth() && nic.HasAddress(packet.source_gid());
  for (Qp* qp : group->second) {
    if (from_here && qp->config().blocks_self_multicast && packet.deth().source_qpn == qp->qpn()) {
      continue;
    }
    if (dma_->room() < transport::kMaxSge + 1) dma_->FlushPlacements();
    const DropReason reason = qp->HandlePacket(packet, now_);
    TraceReceived(nic, packet, qp->qpn(), reason);
    if (reason == DropReason::count) {
      MarkReady(*qp);
    } else {
      resources_.fabric->CountReceiveDrop(nic.port(), reason);
    }
  }
}

// `qpn`: the packet's QP, or one of the group's. DropReason::count: the QP took it.
void Shard::TraceReceived(const Nic& nic, const PacketView& packet, transport::Qpn qpn,
                          DropReason reason) {
  const transport::OpcodeTraits& traits = packet.traits();
  const transport::Aeth aeth = traits.has_aeth() ? packet.aeth() : transport::Aeth();
  // The fields of a RETH or AtomicETH take the room of wr_id and AETH, which such packets lack.
  uint64_t address = 0;
  uint32_t detail = AethWord(aeth.syndrome, aeth.msn);
  if (traits.has_reth()) {
    const transport::Reth reth = packet.reth();
    address = reth.va;
    detail = reth.rkey.value();
  } else if (traits.has_atomic_eth()) {
    const transport::AtomicEth atomic = packet.atomic_eth();
    address = atomic.va;
    detail = atomic.rkey.value();
  }
  trace_.Record(
      {.time_ns = now_.ns(),
       .wr_id = address,
       .qpn = qpn.value(),
       .peer_qpn = traits.has_deth() ? packet.deth().source_qpn.value() : 0,
       .psn = packet.psn().value(),
       .bytes = static_cast<uint32_t>(packet.payload_bytes()),
       .detail = detail,
       .port = nic.port(),
       .kind = reason == DropReason::count ? TraceKind::kReceived : TraceKind::kRefused,
       .opcode = static_cast<uint8_t>(packet.opcode()),
       .code = static_cast<uint8_t>(reason),
       .flags = static_cast<uint8_t>(packet.bth().ack_req ? TraceEvent::kAckRequest : 0)});
}

void Shard::RunPlacements() {
  if (dma_->has_placements()) dma_->FlushPlacements();
  TraceDma(dma_->counters().bytes_placed, /*placed=*/true);
  if (!received_.empty()) {
    rte_pktmbuf_free_bulk(received_.data(), static_cast<unsigned>(received_.size()));
    received_.clear();
  }
}

bool Shard::RunQps() {
  // Only what is ready now; what becomes ready meanwhile is for the next pass.
  Qp* const last = ready_tail_;
  bool worked = false;
  while (ready_head_ != nullptr) {
    Qp& qp = *ready_head_;
    ready_head_ = qp.next_ready;
    if (ready_head_ == nullptr) ready_tail_ = nullptr;
    qp.in_ready_list = false;
    worked = true;
    wqes_this_pass_ += qp.Service(now_, kFetchBudget);
    Transmit(qp);
    if (qp.wants_error()) MarkReady(qp);
    timers_.Schedule(qp, qp.next_timeout());
    if (&qp == last) break;
  }
  FlushOutgoing();
  return worked;
}

// QPs whose netdev has room again.
void Shard::ReleaseWaiting() {
  std::erase_if(waiting_for_netdev_, [this](Qp* qp) {
    if (resources_.fabric->congested(qp->nic().port())) return false;
    qp->waits_for_netdev = false;
    MarkReady(*qp);
    return true;
  });
}

void Shard::Transmit(Qp& qp) {
  // The memory of a dying process goes before its connection ends. Until then
  // accesses fail; but its peers are to see what a vanished host gives, not NAKs.
  if (qp.config().space != nullptr && qp.config().space->gone()) [[unlikely]]
    return;
  if (resources_.fabric->congested(qp.nic().port())) [[unlikely]] {
    if (!qp.waits_for_netdev) waiting_for_netdev_.push_back(&qp);
    qp.waits_for_netdev = true;
    return;
  }
  TxPacket tx;
  bool response = false;
  for (uint32_t sent = 0; sent < kBurst; ++sent) {
    if (outgoing_count_ == kTxBurst) FlushOutgoing();
    // The buffer comes first: what PollTransmit has given must be sent.
    if (spare_ == nullptr) spare_ = rte_pktmbuf_alloc(resources_.pool);
    if (spare_ == nullptr) {
      ++counters_.no_packet;
      MarkReady(qp);
      return;
    }
    if (!qp.PollTransmit(now_, &tx, &response)) {
      if (qp.wants_service()) MarkReady(qp);
      return;
    }
    if (BuildPacket(qp, tx, response, spare_)) {
      outgoing_[outgoing_count_++] = {
          .packet = spare_, .qp = &qp, .psn = tx.psn, .response = response};
      spare_ = nullptr;
    }
  }
  MarkReady(qp);  // its turn is over
}

// Writes headers and pad, queues the fetch of the payload. False if the payload
// may not be read: the state machine knows then, nothing is sent.
bool Shard::BuildPacket(Qp& qp, const TxPacket& tx, bool response, rte_mbuf* packet) {
  rte_pktmbuf_reset_headroom(packet);
  std::byte* const frame = rte_pktmbuf_mtod(packet, std::byte*);
  const size_t headers =
      qp.is_raw() ? 0 : qp.path().WriteHeaders(HeadersOf(qp, tx), tx.payload_bytes, frame);
  std::byte* to = frame + headers;
  if (tx.inline_payload != nullptr) {
    std::memcpy(to, tx.inline_payload, tx.payload_bytes);
    to += tx.payload_bytes;
  } else {
    for (uint32_t i = 0; i < tx.segment_count; ++i) {
      const transport::MemorySegment& segment = tx.segments[i];
      if (segment.length == 0) continue;
      Extent extent;
      const MemoryStatus status = qp.config().share->regions.Translate(
          segment.key, qp.PayloadPd(tx), segment.address, segment.length, tx.payload_access,
          &extent, qp.qpn().value());
      if (status != MemoryStatus::kOk) {
        // Pieces already queued go into a buffer that nobody sends; they must
        // not outlive it.
        FlushOutgoing();
        qp.HandleFetchFailed(tx.psn, response, status, now_);
        return false;
      }
      if (extent.null) {
        std::memset(to, 0, segment.length);
      } else {
        dma_->Fetch(extent, to, segment.length, outgoing_count_);
      }
      to += segment.length;
    }
  }
  size_t bytes = tx.payload_bytes;
  if (!qp.is_raw()) [[likely]] {
    std::memset(to, 0, 3 + 4);  // pad and ICRC
    bytes = qp.path().FrameBytes(tx.opcode, tx.payload_bytes);
  }
  packet->data_len = static_cast<uint16_t>(bytes);
  packet->pkt_len = static_cast<uint32_t>(bytes);
  MetaOf(packet) = {.source_qpn = qp.qpn().value(),
                    .psn_offset = qp.PsnOffset(tx.psn, response),
                    .retransmission = tx.retransmission,
                    .icrc_present = qp.is_raw(),
                    .trusted = !qp.is_raw(),
                    .wr_id = tx.wr_id,
                    .has_wr_id = !response,
                    .raw = qp.is_raw()};
  if (qp.is_raw()) return true;
  const transport::OpcodeTraits& traits = transport::TraitsOf(tx.opcode);
  const bool is_datagram = traits.has_deth();
  const bool names_memory = traits.has_reth() || traits.has_atomic_eth();
  trace_.Record(
      {.time_ns = now_.ns(),
       .wr_id = names_memory ? tx.remote_address : 0,
       .qpn = qp.qpn().value(),
       .peer_qpn = is_datagram ? tx.dest_qpn.value() : qp.attr().dest_qpn,
       .psn = tx.psn.value(),
       .bytes = tx.payload_bytes,
       .detail = names_memory ? tx.rkey : AethWord(tx.syndrome, tx.msn),
       .port = qp.nic().port(),
       .kind = TraceKind::kSent,
       .opcode = static_cast<uint8_t>(tx.opcode),
       .flags = static_cast<uint8_t>((tx.retransmission ? TraceEvent::kRetransmission : 0) |
                                     (response ? TraceEvent::kResponse : 0) |
                                     (tx.ack_request ? TraceEvent::kAckRequest : 0))});
  return true;
}

// The copies since the last time, all together.
void Shard::TraceDma(uint64_t bytes, bool placed) {
  uint64_t& traced = placed ? traced_placed_ : traced_fetched_;
  if (bytes == traced) return;
  trace_.Record({.time_ns = now_.ns(),
                 .bytes = static_cast<uint32_t>(bytes - traced),
                 .kind = TraceKind::kDma,
                 .flags = placed ? TraceEvent::kReceivingSide : uint8_t{0}});
  traced = bytes;
}

void Shard::FlushOutgoing() {
  dma_->FlushFetches([this](uint32_t tag) {
    // The tag after the last packet is of one that BuildPacket gave up.
    if (tag < outgoing_count_) outgoing_[tag].failed = true;
  });
  TraceDma(dma_->counters().bytes_fetched, /*placed=*/false);
  if (outgoing_count_ == 0) return;
  progress_.store(true, std::memory_order_relaxed);
  for (uint32_t i = 0; i < outgoing_count_; ++i) {
    if (outgoing_[i].packet == nullptr) continue;
    if (!outgoing_[i].failed) {
      outgoing_[i].qp->HandleFetched(outgoing_[i].psn);
      continue;
    }
    outgoing_[i].qp->HandleFetchFailed(outgoing_[i].psn, outgoing_[i].response,
                                       MemoryStatus::kFault, now_);
    // What follows on the same stream was built on the failed packet.
    for (uint32_t j = i + 1; j < outgoing_count_; ++j) {
      if (outgoing_[j].qp == outgoing_[i].qp && outgoing_[j].response == outgoing_[i].response &&
          outgoing_[j].packet != nullptr) {
        rte_pktmbuf_free(outgoing_[j].packet);
        outgoing_[j] = {};
      }
    }
    rte_pktmbuf_free(outgoing_[i].packet);
    outgoing_[i] = {};
  }
  // Runs of packets of one port go out together.
  rte_mbuf* run[kTxBurst];
  uint32_t length = 0;
  PortId port = 0;
  for (uint32_t i = 0; i < outgoing_count_; ++i) {
    if (outgoing_[i].packet == nullptr) continue;
    const PortId its_port = outgoing_[i].qp->nic().port();
    if (length != 0 && its_port != port) {
      resources_.fabric->Transmit(port, {run, length}, now_);
      length = 0;
    }
    port = its_port;
    run[length++] = outgoing_[i].packet;
  }
  if (length != 0) resources_.fabric->Transmit(port, {run, length}, now_);
  outgoing_count_ = 0;
}

void Shard::RunTimers() {
  // Bounded: a QP whose timer fires again at once waits for the next pass.
  for (uint32_t i = 0; i < kBurst; ++i) {
    Qp* qp = timers_.PopDue(now_);
    if (qp == nullptr) return;
    if (resources_.fabric->stalled(qp->nic().port())) [[unlikely]]
      qp->ShiftDeadlines(Duration::Microseconds(200));
    // What an overloaded engine has not looked at yet is not lost: a request and its answer wait in
    // its own queues. Sending again would make them longer still.
    const Time due = qp->next_timeout();
    if (due <= now_ && due + queue_wait_ + queue_wait_ > now_) {
      timers_.Schedule(*qp, now_ + kLookAgain);
      continue;
    }
    if (due <= now_) {
      trace_.Record({.time_ns = now_.ns(),
                     .qpn = qp->qpn().value(),
                     .port = qp->nic().port(),
                     .kind = TraceKind::kTimer});
      qp->HandleTimeout(now_);
      MarkReady(*qp);
    }
    timers_.Schedule(*qp, qp->next_timeout());
  }
}

void Shard::RunNotifications() {
  if (dirty_cqs_.empty()) return;
  abi::FullFence();  // pairs with the one after CqRecord::arm is raised
  size_t kept = 0;
  next_notification_ = Time::Never();
  for (CompletionQueue* cq : dirty_cqs_) {
    const Time again = cq->Notify(now_);
    cq->in_dirty_list = !again.IsNever();
    if (cq->in_dirty_list) dirty_cqs_[kept++] = cq;
    next_notification_ = std::min(next_notification_, again);
  }
  dirty_cqs_.resize(kept);
}

Time Shard::NextDeadline() const {
  Time next = std::min(timers_.next(), resources_.fabric->next_deadline());
  next = std::min(next, next_notification_);
  for (const DelayedCompletion& one : delayed_) next = std::min(next, one.release);
  // Another shard may have made room in the netdev.
  if (!waiting_for_netdev_.empty()) next = std::min(next, now_ + Duration::Microseconds(200));
  return next;
}

bool Shard::HasReceived() const {
  for (const Nic* nic : config_.nics) {
    if (resources_.fabric->has_received(nic->port(), config_.id)) return true;
  }
  return false;
}

bool Shard::HasWork() {
  if (ready_head_ != nullptr || HasReceived()) return true;
  for (DoorbellSource* source : sources_) {
    if (HasDoorbell(*source->page)) return true;
  }
  return NextDeadline() <= now_;
}

void Shard::MarkReady(Qp& qp) {
  if (qp.in_ready_list) return;
  qp.in_ready_list = true;
  qp.next_ready = nullptr;
  if (ready_tail_ != nullptr) {
    ready_tail_->next_ready = &qp;
  } else {
    ready_head_ = &qp;
  }
  ready_tail_ = &qp;
  // From a control call: all threads may be asleep.
  if (!engine_holds_lock_.load(std::memory_order_relaxed)) Kick();
}

void Shard::SendPosted(Qp& qp) {
  constexpr int kMostPasses = 16;  // of kBurst packets each
  for (int i = 0; i < kMostPasses && qp.sq().posted() != qp.sq().fetched(); ++i) {
    MarkReady(qp);
    RunPass();
  }
}

void Shard::MarkDirty(CompletionQueue& cq) {
  if (cq.in_dirty_list) return;
  cq.in_dirty_list = true;
  dirty_cqs_.push_back(&cq);  // room was made by Reserve
}

void Shard::AddSource(DoorbellSource* source) { sources_.push_back(source); }

void Shard::RemoveSource(DoorbellSource* source) { std::erase(sources_, source); }

void Shard::AddNic(Nic* nic) {
  config_.nics.push_back(nic);
  const uint64_t seed = config_.seed != 0 ? config_.seed + config_.nics.size() : RandomNumber();
  shares_.push_back(std::make_unique<NicShare>(config_.max_regions, seed));
  received_.reserve(config_.nics.size() * kBurst);
}

void Shard::Reserve() {
  size_t qps = 0;
  size_t cqs = 0;
  for (const auto& share : shares_) {
    qps += share->qp_count;
    cqs += share->cq_count;
  }
  timers_.Reserve(qps);
  waiting_for_netdev_.reserve(qps);
  dirty_cqs_.reserve(cqs);
}

void Shard::ForgetQp(Qp& qp) {
  std::erase_if(delayed_, [&qp](const auto& one) { return one.qp == &qp; });
  timers_.Remove(qp);
  if (qp.waits_for_netdev) std::erase(waiting_for_netdev_, &qp);
  if (!qp.in_ready_list) return;
  qp.in_ready_list = false;
  Qp* before = nullptr;
  for (Qp* it = ready_head_; it != nullptr; before = it, it = it->next_ready) {
    if (it != &qp) continue;
    (before != nullptr ? before->next_ready : ready_head_) = qp.next_ready;
    if (ready_tail_ == &qp) ready_tail_ = before;
    return;
  }
}

void Shard::ForgetCq(CompletionQueue& cq) {
  std::erase_if(delayed_, [&cq](const auto& one) { return one.cq == &cq; });
  std::erase(dirty_cqs_, &cq);
  if (dirty_cqs_.empty()) next_notification_ = Time::Never();
}

uint32_t Shard::free_packets() const { return rte_mempool_avail_count(resources_.pool); }

}  // namespace verbena::nic
