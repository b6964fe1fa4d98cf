// SPDX-License-Identifier: Apache-2.0
#include "transport/ud/receiver.h"

#include <algorithm>
#include <array>

namespace verbena::transport {
namespace {

constexpr std::array<std::byte, UdReceiver::kGrhBytes - Ipv4Header::kBytes> kZeros{};

uint64_t Capacity(const RecvRequest& receive) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < receive.sge_count; ++i) bytes += receive.sges[i].length;
  return bytes;
}

}  // namespace

void UdReceiver::Start(Qkey qkey) {
  Reset();
  qkey_ = qkey;
}

void UdReceiver::Reset() {
  received_.clear();
  failed_ = flushing_ = false;
}

// The next bytes of the message into the receive's SGEs.
MemoryStatus UdReceiver::Scatter(std::span<const std::byte> bytes, Ticket* ticket) {
  while (!bytes.empty()) {
    MemorySegment to = receive_.sges[sge_];
    const uint32_t room = to.length - sge_used_;
    if (room == 0) {
      ++sge_;
      sge_used_ = 0;
      continue;
    }
    to.address += sge_used_;
    to.length = std::min(room, static_cast<uint32_t>(bytes.size()));
    const MemoryStatus status = memory_.Place(to, bytes.first(to.length), MemoryAccess::kLocalWrite,
                                              /*last=*/false, ticket);
    if (status != MemoryStatus::kOk) return status;
    bytes = bytes.subspan(to.length);
    sge_used_ += to.length;
  }
  return MemoryStatus::kOk;
}

UdReceiver::Verdict UdReceiver::Take(uint32_t bytes) {
  if (failed_ || flushing_ || received_.full() || !receive_queue_.Take(&receive_)) {
    return Verdict::kNoReceive;
  }
  if (!receive_.malformed && Capacity(receive_) < bytes) {
    receive_queue_.PutBack();
    return Verdict::kTooLong;
  }
  sge_ = sge_used_ = 0;
  return Verdict::kAccepted;
}

void UdReceiver::Finish(Received* received, MemoryStatus status) {
  if (status == MemoryStatus::kOk) return;
  received->status = WcStatus::kLocProtErr;
  failed_ = true;
}

UdReceiver::Verdict UdReceiver::HandleFrame(std::span<const std::byte> frame, uint32_t flow_tag) {
  const auto bytes = static_cast<uint32_t>(frame.size());
  if (const Verdict verdict = Take(bytes); verdict != Verdict::kAccepted) return verdict;
  Received& received = received_.push_back();
  received = {.wr_id = receive_.wr_id,
              .ticket = committed_,
              .wqe_index = receive_.wqe_index,
              .imm = 0,
              .byte_len = bytes,
              .flow_tag = flow_tag,
              .src_qpn = Qpn(),
              .status = WcStatus::kSuccess,
              .network_header = NetworkHeader::kNone,
              .has_imm = false,
              .solicited = true};
  Finish(&received, receive_.malformed ? MemoryStatus::kBadKey : Scatter(frame, &received.ticket));
  return Verdict::kAccepted;
}

UdReceiver::Verdict UdReceiver::HandlePacket(const PacketView& packet) {
  if (packet.traits().service != Service::kUd) return Verdict::kNotUd;
  const Deth deth = packet.deth();
  if (deth.qkey != qkey_) return Verdict::kWrongQkey;
  const auto bytes = static_cast<uint32_t>(kGrhBytes + packet.payload_bytes());
  if (const Verdict verdict = Take(bytes); verdict != Verdict::kAccepted) return verdict;

  Received& received = received_.push_back();
  received = {.wr_id = receive_.wr_id,
              .ticket = committed_,
              .wqe_index = receive_.wqe_index,
              .imm = 0,
              .byte_len = bytes,
              .flow_tag = 0,
              .src_qpn = deth.source_qpn,
              .status = WcStatus::kSuccess,
              .network_header = packet.is_ipv6() ? NetworkHeader::kIpv6 : NetworkHeader::kIpv4,
              .has_imm = packet.traits().has_imm(),
              .solicited = packet.bth().solicited};
  if (received.has_imm) StoreBe32(reinterpret_cast<std::byte*>(&received.imm), packet.imm().value);

  MemoryStatus status = MemoryStatus::kBadKey;
  if (!receive_.malformed) {
    status = MemoryStatus::kOk;
    if (!packet.is_ipv6()) status = Scatter(kZeros, &received.ticket);
    if (status == MemoryStatus::kOk) status = Scatter(packet.ip_header(), &received.ticket);
    if (status == MemoryStatus::kOk) status = Scatter(packet.payload(), &received.ticket);
  }
  Finish(&received, status);
  return Verdict::kAccepted;
}

void UdReceiver::HandleCommitted(Ticket ticket) { committed_ = std::max(committed_, ticket); }

void UdReceiver::HandlePlacementFailed(Ticket ticket) {
  bool first = true;
  for (uint32_t i = 0; i < received_.size(); ++i) {
    Received& received = received_[i];
    if (received.ticket < ticket || received.status != WcStatus::kSuccess) continue;
    received.status = first ? WcStatus::kLocProtErr : WcStatus::kWrFlushErr;
    first = false;
  }
  // Nothing will be heard of the later ones.
  for (uint32_t i = 0; i < received_.size(); ++i) {
    committed_ = std::max(committed_, received_[i].ticket);
  }
  failed_ = true;
}

bool UdReceiver::PollCompletion(Completion* completion) {
  if (!received_.empty()) {
    const Received received = received_.front();
    if (received.ticket > committed_) return false;
    received_.pop_front();
    const bool ok = received.status == WcStatus::kSuccess;
    *completion = {};
    completion->wr_id = received.wr_id;
    completion->wqe_index = received.wqe_index;
    completion->status = received.status;
    completion->opcode = WcOpcode::kRecv;
    completion->has_imm = ok && received.has_imm;
    completion->solicited = received.solicited;
    completion->imm_or_inv = received.imm;
    completion->byte_len = received.byte_len;
    completion->network_header = received.network_header;
    completion->src_qpn = received.src_qpn;
    completion->flow_tag = received.flow_tag;
    if (ok) ++counters_.rdma_recvs;
    return true;
  }
  if (!flushing_ || !receive_queue_.Take(&receive_)) return false;
  *completion = {};
  completion->wr_id = receive_.wr_id;
  completion->wqe_index = receive_.wqe_index;
  completion->status = WcStatus::kWrFlushErr;
  completion->opcode = WcOpcode::kRecv;
  return true;
}

}  // namespace verbena::transport
