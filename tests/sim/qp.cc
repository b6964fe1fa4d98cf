// SPDX-License-Identifier: Apache-2.0
//
// Qp: states, posting, what comes in.
#include "tests/sim/qp.h"

#include <algorithm>

#include "transport/qp_state.h"

namespace verbena::sim {

using transport::Aeth;
using transport::AtomicKind;

namespace {

// Of the specification, in units of 10 µs.
constexpr uint32_t kRnrTable[32] = {65536, 1,    2,    3,     4,     6,     8,     12,
                                    16,    24,   32,   48,    64,    96,    128,   192,
                                    256,   384,  512,  768,   1024,  1536,  2048,  3072,
                                    4096,  6144, 8192, 12288, 16384, 24576, 32768, 49152};

transport::PacketAddress AddressOfSide(int side) {
  transport::PacketAddress address;
  const uint32_t from = static_cast<uint32_t>(1 + side);
  const uint32_t to = static_cast<uint32_t>(2 - side);
  address.source_mac = transport::MacAddress::FromUint64(0x020000000000u + from);
  address.destination_mac = transport::MacAddress::FromUint64(0x020000000000u + to);
  address.source_gid = transport::Gid::FromIpv4(0x0a000000 + from);
  address.destination_gid = transport::Gid::FromIpv4(0x0a000000 + to);
  return address;
}

}  // namespace

Qp::Qp(QpHost& host, HostMemory& memory, HostMemory& peer_memory, int side, uint32_t pair)
    : host_(host),
      memory_(memory),
      peer_memory_(peer_memory),
      side_(side),
      pair_(pair),
      path_(AddressOfSide(side)) {}

void Qp::Wrong(const std::string& what) { host_.Fail(Name() + ": " + what); }

void Qp::Check(const std::string& wrong) {
  if (!wrong.empty()) Wrong(wrong);
}

// --- Control

void Qp::Create(uint32_t qpn) {
  qpn_ = qpn;
  Random& random = host_.random();
  capacity_ = {
      .max_wr = static_cast<uint32_t>(random.Between(1, 40)), .max_sge = 8, .max_inline = 128};
  halves_ = std::make_unique<Halves>(capacity_, memory_, *this);
  state_ = QpState::kReset;
  connection_ = nullptr;
}

void Qp::Reset() {
  state_ = QpState::kReset;
  halves_->requester_port.Clear();
  halves_->responder_port.Clear();
  halves_->requester.Reset();
  halves_->responder.Reset();
  connection_ = nullptr;
  wants_transmit_ = false;
}

void Qp::Connect(Connection* connection, uint32_t peer_qpn) {
  state_ = QpState::kInit;
  connection_ = connection;
  peer_qpn_ = peer_qpn;
  posted_ = next_wr_ = receives_posted_ = receives_taken_ = next_receive_ = next_message_ = 0;
  send_failed_ = recv_failed_ = false;
  rnr_until_ = Time::Zero();
  rnr_una_ = kNoSequence;
}

transport::RcRequesterConfig Qp::RequesterConfig() const {
  const PathOptions& path = connection_->path;
  return {.pmtu = path.pmtu,
          .first_psn = out().first_psn(),
          .timeout = path.timeout,
          .retry_cnt = path.retry_cnt,
          .rnr_retry = path.rnr_retry,
          .max_rd_atomic = path.max_rd_atomic};
}

transport::RcResponderConfig Qp::ResponderConfig() const {
  const PathOptions& path = connection_->path;
  return {.pmtu = path.pmtu,
          .expected_psn = in().first_psn(),
          .max_dest_rd_atomic = path.max_rd_atomic,
          .min_rnr_timer = path.min_rnr_timer,
          .access_flags = path.access_flags,
          .service = path.xrc ? transport::Service::kXrc : transport::Service::kRc};
}

void Qp::ToRtr() {
  state_ = QpState::kRtr;
  halves_->responder.Start(ResponderConfig());
}

void Qp::ToRts() {
  state_ = QpState::kRts;
  halves_->requester.Start(RequesterConfig());
  halves_->responder.Reconfigure(ResponderConfig());
  retries_exceeded_ = false;
  const transport::TransportCounters& counters = halves_->requester.counters();
  progress_rounds_ = counters.completer_retry_err;
  progress_rnr_ = counters.rcvd_rnr_err;
}

void Qp::ToSqd() {
  state_ = QpState::kSqd;
  halves_->requester.Reconfigure(RequesterConfig());
  halves_->requester.Drain();
}

void Qp::Resume() {
  state_ = QpState::kRts;
  halves_->requester.Resume();
}

void Qp::ToError() {
  state_ = QpState::kErr;
  connection_->ended = true;
  halves_->requester.Flush();
  halves_->responder.Flush();
}

bool Qp::IsIdle() const {
  return state_ == QpState::kRts && posted_ == out().wrs.size() &&
         halves_->requester.outstanding() == 0 && !HasPending(false) && !HasPending(true);
}

std::string Qp::Describe() const {
  std::string text = "qpn " + std::to_string(qpn_) + " state " + QpStateName(state_);
  if (connection_ == nullptr) return text;
  return text + " connection " + std::to_string(connection_->number) + " posted " +
         std::to_string(posted_) + "/" + std::to_string(out().wrs.size()) + " outstanding " +
         std::to_string(halves_->requester.outstanding()) + " una " +
         std::to_string(una_psn().value()) + " next " + std::to_string(next_psn().value()) +
         " expected " + std::to_string(expected_psn().value()) + " receives " +
         std::to_string(receives_taken_) + "/" + std::to_string(receives_posted_) + "/" +
         std::to_string(in().receives.size());
}

// --- Posting

bool Qp::HasMoreToPost() const {
  if (connection_ == nullptr) return false;
  return (sends() && posted_ < out().wrs.size()) || receives_posted_ < in().receives.size();
}

void Qp::PostSend(uint32_t index) {
  const Wr& wr = out().wrs[index];
  transport::SendRequest request;
  request.wr_id = uint64_t{connection_->number} << 32 | index;
  request.wqe_index = index;
  request.opcode = wr.opcode;
  request.signaled = wr.signaled;
  request.fence = wr.fence;
  request.solicited = wr.solicited;
  request.imm_or_inv = wr.imm_or_inv;
  request.remote_address = wr.remote;
  request.rkey = wr.rkey;
  request.compare_add = wr.compare_add;
  request.swap = wr.swap;
  request.remote_srq = transport::SrqNumber(wr.srq);
  if (wr.malformed) request.malformed = WcStatus::kLocQpOpErr;
  std::vector<std::byte> inline_data;
  if (wr.is_inline) {
    const auto data = Pattern(wr.sges[0].address - kPatternBase, wr.bytes);
    inline_data.assign(data.begin(), data.end());
    request.inline_data = inline_data;
  } else {
    request.sges = wr.sges;
  }
  halves_->requester.Post(request, host_.now());
  // It was copied.
  std::fill(inline_data.begin(), inline_data.end(), std::byte{0xee});
}

void Qp::PostSome() {
  if (connection_ == nullptr) return;
  Random& random = host_.random();
  while (sends() && posted_ < out().wrs.size() && halves_->requester.CanPost() &&
         random.Chance(0.8)) {
    PostSend(posted_++);
  }
  while (receives_posted_ < in().receives.size() &&
         random.Chance(host_.profile().receives_posted)) {
    ++receives_posted_;
  }
}

bool Qp::Select(transport::SrqNumber number) {
  if (in_checked() && handling_ != kNoSequence && !handling_old_) {
    const Wr* wr = in().Find(handling_);
    if (wr == nullptr || wr->srq != number.value()) Wrong("selects an SRQ that is not named");
  }
  selected_srq_ = number.value();
  return IsSrq(selected_srq_);
}

bool Qp::Take(transport::RecvRequest* request) {
  // What is posted to an SRQ stays for others.
  if (is_xrc() && state_ == QpState::kErr) return false;
  if (receives_taken_ == receives_posted_) return false;
  if (in_checked() && state_ != QpState::kErr && (handling_old_ || handling_ != in().expected)) {
    Wrong("takes a receive for a packet that is not the next");
  }
  const uint32_t index = receives_taken_++;
  const PlannedReceive& receive = in().receives[index];
  if (is_xrc()) {
    if (in_checked() && receive.srq != selected_srq_) Wrong("takes a receive of another SRQ");
    request->srq = transport::SrqNumber(selected_srq_);
  }
  request->wr_id = uint64_t{connection_->number} << 32 | index;
  request->wqe_index = index;
  request->malformed = receive.malformed;
  request->sge_count = static_cast<uint32_t>(receive.sges.size());
  std::copy(receive.sges.begin(), receive.sges.end(), request->sges);
  return true;
}

// --- What comes in

void Qp::Receive(const PacketView& packet, const Frame& frame) {
  const auto service = is_xrc() ? transport::Service::kXrc : transport::Service::kRc;
  if (!receives() || packet.traits().service != service) return;
  const bool is_old = frame.connection != connection_->number;
  if (packet.traits().is_response()) {
    if (state_ != QpState::kRtr) ReceiveResponse(packet, is_old);
  } else {
    ReceiveRequest(packet, is_old);
  }
}

void Qp::ReceiveReserved(Psn psn) {
  if (receives()) halves_->responder.HandleReservedOpcode(psn, host_.now());
}

void Qp::ReceiveRequest(const PacketView& packet, bool is_old) {
  transport::RcResponder& responder = halves_->responder;
  const Psn before = responder.expected_psn();
  const uint64_t rnr_naks = responder.counters().send_rnr_err;
  const uint64_t sequence = in().ToSequence(packet.psn(), in().expected);
  handling_ = sequence;
  handling_old_ = is_old;
  responder.HandleRequest(packet, host_.now());
  handling_ = kNoSequence;
  handling_old_ = false;
  if (!in_checked()) return;
  if (responder.counters().send_rnr_err != rnr_naks && receives_taken_ != receives_posted_) {
    Wrong("RNR NAK though a receive is posted");
  }
  if (responder.expected_psn() == before) return;
  if (is_old) return Wrong("executed a packet of an earlier connection");
  Check(in().CheckExecuted(sequence, in().ToSequence(responder.expected_psn(), sequence)));
  const double vanishing = host_.profile().vanishing_key;
  if (vanishing > 0 && packet.traits().is_read_request() &&
      memory_.IsWindow(packet.reth().rkey.value()) && host_.random().Chance(vanishing)) {
    TakeAway(packet.reth().rkey.value());
  }
}

// The application deregisters memory that is in use.
void Qp::TakeAway(uint32_t key) {
  memory_.RemoveWindow(key);
  connection_->memory_failed = true;
  if (host_.keeps_ladder()) {
    host_.Note("      " + Name() + " takes key " + std::to_string(key) + " away");
  }
}

void Qp::ReceiveResponse(const PacketView& packet, bool is_old) {
  transport::RcRequester& requester = halves_->requester;
  const Psn before = requester.una_psn();
  const double vanishing = host_.profile().vanishing_key;
  if (vanishing > 0 && host_.random().Chance(vanishing)) {
    const Wr* wr = out().Find(una());
    if (wr != nullptr && wr->is_read_or_atomic() && memory_.IsWindow(wr->sges[0].key)) {
      TakeAway(wr->sges[0].key);
    }
  }
  const bool failed = requester.failed();
  const transport::TransportCounters counters = requester.counters();
  requester.HandleResponse(packet, host_.now());
  const bool moved = requester.una_psn() != before;
  if (moved) {
    progress_rounds_ = counters.completer_retry_err;
    progress_rnr_ = counters.rcvd_rnr_err;
  }
  NoteRnrNak(packet, counters.rcvd_rnr_err);
  CheckRetries(counters);
  if (!out_checked()) return;
  if (is_old && (moved || requester.failed() != failed)) {
    Wrong("a response of an earlier connection had an effect");
  }
  if (una() > out().expected) Wrong("takes as acknowledged what was not executed");
}

// A new wait begins?
void Qp::NoteRnrNak(const PacketView& packet, uint64_t rnr_naks_before) {
  if (halves_->requester.counters().rcvd_rnr_err == rnr_naks_before) return;
  rnr_una_ = una();
  rnr_until_ = host_.now() + Duration::Microseconds(10) * kRnrTable[packet.aeth().code()];
}

void Qp::HandleTimer() {
  if (halves_->requester.next_timeout() > host_.now()) return;
  if (host_.keeps_ladder()) {
    host_.Note("      " + Name() + " timer");
  }
  const transport::TransportCounters counters = halves_->requester.counters();
  halves_->requester.HandleTimeout(host_.now());
  CheckRetries(counters);
}

void Qp::CommitSome(bool responder) {
  Port& port = PortOf(responder);
  if (port.pending() == 0) return;
  Random& random = host_.random();
  const Time now = host_.now();
  const double failure = host_.profile().placement_failure;
  Ticket visible = 0;
  const auto report = [&] {
    if (visible == 0) return;
    if (responder) {
      halves_->responder.HandleCommitted(visible, now);
    } else {
      halves_->requester.HandleCommitted(visible, now);
    }
    visible = 0;
  };
  for (uint64_t count = random.Between(1, port.pending()); count > 0; --count) {
    if (failure > 0 && random.Chance(failure)) {
      report();
      const Ticket ticket = port.oldest();
      port.Clear();
      connection_->memory_failed = true;
      if (host_.keeps_ladder()) {
        host_.Note("      " + Name() + " placement fails");
      }
      const auto why = random.Chance(0.7) ? MemoryStatus::kFault : MemoryStatus::kBadKey;
      if (responder) {
        halves_->responder.HandlePlacementFailed(ticket, why, now);
      } else {
        halves_->requester.HandlePlacementFailed(ticket, why, now);
      }
      return;
    }
    const Port::Committed done = port.CommitOldest();
    if (done.is_atomic) {
      report();
      halves_->responder.HandleAtomicCommitted(done.ticket, done.original, now);
    } else {
      visible = done.ticket;
    }
  }
  report();
}

// --- What the halves do with memory

void Qp::OnPlace(bool responder, const MemorySegment& to, std::span<const std::byte> bytes,
                 MemoryAccess access) {
  if (!memory_.IsTarget(to.address, bytes.size())) return Wrong("places outside the targets");
  if (responder) {
    if (!in_checked()) return;
    if (handling_old_) return Wrong("places a packet of an earlier connection");
    Check(in().CheckRequestPlacement(handling_, to, bytes, access));
  } else if (out_checked()) {
    Check(out().CheckResponsePlacement(to, bytes));
  }
}

uint64_t Qp::OnAtomic(uint64_t address, const transport::AtomicOperation& operation) {
  if (!in_checked()) return 0;
  Wr* wr = in().Find(handling_);
  if (handling_old_ || handling_ != in().expected || wr == nullptr || !wr->is_atomic()) {
    Wrong("executes an atomic that is not the next");
    return 0;
  }
  const bool swap = wr->opcode == WrOpcode::kCompareSwap;
  if (address != wr->remote ||
      operation.kind != (swap ? AtomicKind::kCompareSwap : AtomicKind::kFetchAdd) ||
      operation.swap_or_add != (swap ? wr->swap : wr->compare_add) ||
      operation.compare != (swap ? wr->compare_add : 0)) {
    Wrong("executes another atomic than was posted");
  }
  return static_cast<uint64_t>(wr - in().wrs.data()) + 1;
}

void Qp::OnAtomicExecuted(uint64_t name, uint64_t original) {
  if (name == 0 || connection_ == nullptr) return;
  Wr& wr = in().wrs[name - 1];
  if (wr.executed) Wrong("an atomic runs twice");
  wr.executed = true;
  wr.original = original;
}

void Qp::OnInvalidate(bool responder, uint32_t key) {
  if (responder) {
    if (!in_checked()) return;
    const Wr* wr = in().Find(handling_);
    if (handling_old_ || handling_ != in().expected || wr == nullptr ||
        wr->opcode != WrOpcode::kSendInv || wr->imm_or_inv != key) {
      Wrong("invalidates a key that nobody asked for");
    }
    return;
  }
  if (!out_checked()) return;
  for (uint32_t i = 0; i < posted_; ++i) {
    const Wr& wr = out().wrs[i];
    if (wr.opcode == WrOpcode::kLocalInv && wr.imm_or_inv == key) return;
    if (wr.first != kNoSequence && wr.end() > una()) {
      return Wrong("invalidates a key before earlier WRs are done");
    }
  }
  Wrong("invalidates a key that nobody asked for");
}

}  // namespace verbena::sim
