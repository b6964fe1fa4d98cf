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
      requester_port_(memory, *this, false),
      responder_port_(memory, *this, true),
      path_(AddressOfSide(side)) {}

void Qp::Wrong(const std::string& what) { host_.Fail(Name() + ": " + what); }

void Qp::Check(const std::string& wrong) {
  if (!wrong.empty()) Wrong(wrong);
}

void Qp::Note(const char* what) {
  if (host_.keeps_ladder()) host_.Note("      " + Name() + " " + what);
}

// --- Control

void Qp::Create(uint32_t qpn) {
  qpn_ = qpn;
  requester_port_.Clear();
  responder_port_.Clear();
  MakeMachines();
  state_ = QpState::kReset;
  connection_ = nullptr;
}

void Qp::Reset() {
  state_ = QpState::kReset;
  requester_port_.Clear();
  responder_port_.Clear();
  ResetMachines();
  connection_ = nullptr;
  wants_transmit_ = false;
}

void Qp::Connect(Connection* connection, uint32_t peer_qpn) {
  state_ = QpState::kInit;
  connection_ = connection;
  peer_qpn_ = peer_qpn;
  posted_ = next_wr_ = 0;
  send_failed_ = recv_failed_ = false;
  fault_ = nullptr;
  taken_.clear();
  queue_ = is_xrc() ? nullptr : in().srq != 0 ? host_.Srq(side_, in().srq) : &in().receives;
  if (host_.profile().receives_posted == 1) PostReceives();
}

void Qp::ToRtr() {
  state_ = QpState::kRtr;
  StartResponder();
}

void Qp::ToRts() {
  state_ = QpState::kRts;
  StartRequester();
}

void Qp::ToSqd() {
  state_ = QpState::kSqd;
  Drain();
}

void Qp::Resume() {
  state_ = QpState::kRts;
  send_failed_ = false;
  ResumeMachines();
}

void Qp::ToError() {
  state_ = QpState::kErr;
  connection_->ended = true;
  FlushMachines();
}

bool Qp::IsIdle() const {
  return state_ == QpState::kRts && posted_ == out().wrs.size() && outstanding() == 0 &&
         !HasPending(false) && !HasPending(true);
}

std::string Qp::Describe() const {
  std::string text = "qpn " + std::to_string(qpn_) + " state " + QpStateName(state_);
  if (connection_ == nullptr) return text;
  return text + " connection " + std::to_string(connection_->number) + " posted " +
         std::to_string(posted_) + "/" + std::to_string(out().wrs.size()) + " outstanding " +
         std::to_string(outstanding()) + " una " + std::to_string(una_psn().value()) + " next " +
         std::to_string(next_psn().value()) + " expected " +
         std::to_string(expected_psn().value()) + " receives without completion " +
         std::to_string(taken_.size());
}

// --- Posting

bool Qp::HasMoreToPost() const {
  if (connection_ == nullptr) return false;
  const ReceiveQueue& own = in().receives;
  return (sends() && posted_ < out().wrs.size()) || own.posted() < own.planned();
}

transport::SendRequest Qp::RequestOf(uint32_t index) const {
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
  if (wr.is_inline) {
    request.inline_data = Pattern(wr.sges[0].address - kPatternBase, wr.bytes);
  } else {
    request.sges = wr.sges;
  }
  return request;
}

void Qp::PostReceives() {
  ReceiveQueue& own = in().receives;
  while (own.posted() < own.planned() && host_.random().Chance(host_.profile().receives_posted)) {
    own.Post();
  }
}

void Qp::PostSome() {
  if (connection_ == nullptr) return;
  while (sends() && posted_ < out().wrs.size() && CanPost() && host_.random().Chance(0.8)) {
    Post(posted_++);
  }
  PostReceives();
}

bool Qp::Select(transport::SrqNumber number) {
  if (in_checked() && handling_ != kNoSequence && !handling_old_) {
    const Wr* wr = in().Find(handling_);
    if (wr == nullptr || wr->srq != number.value()) Wrong("selects an SRQ that is not named");
  }
  queue_ = host_.Srq(side_, number.value());
  return queue_ != nullptr;
}

bool Qp::Take(transport::RecvRequest* request) {
  // What is posted to an SRQ stays for others.
  if (queue_ == nullptr || (queue_->is_shared() && state_ == QpState::kErr)) return false;
  if (queue_->available() == 0) return false;
  Taken& taken = taken_.emplace_back();
  taken.receive = &queue_->Take(&taken.wr_id);
  taken.srq = queue_->srq();
  taken.wr = nullptr;
  if (in_checked() && state_ != QpState::kErr) CheckTake(taken);
  const PlannedReceive& receive = *taken.receive;
  if (is_xrc()) request->srq = transport::SrqNumber(taken.srq);
  request->wr_id = taken.wr_id;
  request->wqe_index = static_cast<uint32_t>(taken.wr_id);
  request->malformed = receive.malformed;
  request->sge_count = static_cast<uint32_t>(receive.sges.size());
  std::copy(receive.sges.begin(), receive.sges.end(), request->sges);
  return true;
}

void Qp::PutBack() {
  queue_->PutBack();
  taken_.pop_back();
}

// --- What comes in

void Qp::Receive(const PacketView& packet, const Frame& frame) {
  const PathOptions* path = connection_ != nullptr ? &connection_->path : nullptr;
  if (!receives() || packet.traits().service != path->service) return;
  const bool is_old = frame.connection != connection_->number;
  // Nothing tells a packet of an earlier UC connection: whoever uses a QP number
  // again has to wait until there are none.
  if (path->is_uc() && is_old) return;
  if (packet.traits().is_response()) {
    ReceiveResponse(packet, is_old);
    return;
  }
  handling_ = in().ToSequence(packet.psn(), path->is_uc() ? in().next : in().expected);
  handling_old_ = is_old;
  ReceiveRequest(packet, handling_);
  handling_ = kNoSequence;
  handling_old_ = false;
}

void Qp::ReceiveReserved(Psn psn) {
  if (receives()) HandleReserved(psn);
}

// The application deregisters memory that is in use.
void Qp::TakeAway(uint32_t key) {
  memory_.RemoveWindow(key);
  connection_->memory_failed = true;
  if (host_.keeps_ladder()) {
    host_.Note("      " + Name() + " takes key " + std::to_string(key) + " away");
  }
}

void Qp::HandleTimer() {
  if (next_timeout() > host_.now()) return;
  Note("timer");
  HandleTimeout();
}

void Qp::CommitSome(bool responder) {
  Port& port = PortOf(responder);
  if (port.pending() == 0) return;
  Random& random = host_.random();
  const double failure = host_.profile().placement_failure;
  Ticket visible = 0;
  const auto report = [&] {
    if (visible != 0) HandleCommitted(responder, visible);
    visible = 0;
  };
  for (uint64_t count = random.Between(1, port.pending()); count > 0; --count) {
    if (failure > 0 && random.Chance(failure)) {
      report();
      const Ticket ticket = port.oldest();
      if (responder && in_checked()) fault_ = in().Find(port.oldest_sequence());
      port.Clear();
      connection_->memory_failed = true;
      Note("placement fails");
      const auto why = random.Chance(0.7) ? MemoryStatus::kFault : MemoryStatus::kBadKey;
      HandlePlacementFailed(responder, ticket, why);
      return;
    }
    const Port::Committed done = port.CommitOldest();
    if (done.is_atomic) {
      report();
      HandleAtomicCommitted(done.ticket, done.original);
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
    if (in_checked()) CheckPlacement(to, bytes, access);
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

void Qp::OnInvalidate(bool responder, uint32_t key, bool done) {
  if (responder) {
    if (in_checked()) CheckInvalidate(key, done);
    return;
  }
  if (!done) return;
  if (Wr* wr = FindLocal([key](const Wr& local) {
        return local.opcode == WrOpcode::kLocalInv && local.imm_or_inv == key;
      })) {
    wr->executed = true;
  }
}

void Qp::OnBind(const transport::WindowBind& bind) {
  Wr* wr = FindLocal([&bind](const Wr& local) {
    return local.opcode == WrOpcode::kBindMw && local.rkey == bind.new_key;
  });
  if (wr == nullptr) return;
  wr->executed = true;
  if (bind.address != wr->remote || bind.length != wr->compare_add ||
      bind.region_key != static_cast<uint32_t>(wr->swap) || bind.access != wr->swap >> 32) {
    Wrong("binds a window to something else than was posted");
  }
}

// The local WR that takes effect: it is posted, and everything before it is
// over.
template <typename IsIt>
Wr* Qp::FindLocal(IsIt is_it) {
  if (!out_checked()) return nullptr;
  for (uint32_t i = next_wr_; i < posted_; ++i) {
    Wr& wr = out().wrs[i];
    if (is_it(wr)) {
      if (wr.executed) Wrong("a local WR takes effect twice");
      if (state_ == QpState::kSqd) Wrong("a local WR takes effect in SQD");
      return &wr;
    }
    const bool is_over = wr.is_local() ? wr.executed : wr.first != kNoSequence && wr.end() <= una();
    if (!is_over) break;
  }
  Wrong("a local WR takes effect that is not the next");
  return nullptr;
}

}  // namespace verbena::sim
