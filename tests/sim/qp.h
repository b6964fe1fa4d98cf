// SPDX-License-Identifier: Apache-2.0
//
// One end of a connection in the simulation: requester and responder, their
// memory ports, its receive queue, and what its application does with it. Plays
// the part that nic_sim's Qp and Engine have in the device, and holds both
// halves against the flows of the connection.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/sim/flow.h"
#include "tests/sim/memory.h"
#include "tests/sim/network.h"
#include "tests/sim/profile.h"
#include "tests/sim/random.h"
#include "transport/rc/requester.h"
#include "transport/rc/responder.h"
#include "transport/wire/packet_builder.h"

namespace verbena::sim {

using transport::Completion;
using transport::PacketView;
using transport::QpState;
using transport::Time;

// Two ends from RTR on until one of them is reset.
struct Connection {
  uint32_t number = 0;  // unique in a world, from 1
  PathOptions path;
  Flow flows[2];  // flows[s]: requests of side s
  // The application breaks it, placements failed or packets were forged: WRs
  // may fail without being wrong.
  bool interfered = false;
  bool memory_failed = false;
  bool ended = false;
};

// What a QP needs of its world.
class QpHost {
 public:
  virtual ~QpHost() = default;
  virtual Time now() const = 0;
  virtual Random& random() = 0;
  virtual const Profile& profile() const = 0;
  virtual FramePool& frames() = 0;
  virtual void Send(int side, uint32_t frame) = 0;
  virtual void Fail(const std::string& what) = 0;
  virtual bool keeps_ladder() const = 0;
  virtual void Note(const std::string& line) = 0;
};

class Qp final : public PortWatcher, public transport::ReceiveQueuePort {
 public:
  Qp(QpHost& host, HostMemory& memory, HostMemory& peer_memory, int side, uint32_t pair);

  // --- Control: what modify_qp and destroy_qp do.
  void Create(uint32_t qpn);  // in RESET; destroys what was
  void Reset();
  void Connect(Connection* connection, uint32_t peer_qpn);  // INIT
  void ToRtr();
  void ToRts();
  void ToSqd();
  void Resume();
  void ToError();

  // --- Events.
  void Receive(const PacketView& packet, const Frame& frame);
  void ReceiveReserved(Psn psn);
  void HandleTimer();
  // Makes some placements visible, or one of them fail.
  void CommitSome(bool responder);
  void PostSome();
  // Drains completions and packets; to be called after every event.
  void Service();

  // When each has to be called; Time::Never() if not at all.
  Time next_timeout() const { return halves_->requester.next_timeout(); }
  bool HasPending(bool responder) const { return PortOf(responder).pending() != 0; }
  bool HasMoreToPost() const;
  bool wants_transmit() const { return wants_transmit_; }

  QpState state() const { return state_; }
  uint32_t qpn() const { return qpn_; }
  uint32_t pair() const { return pair_; }
  int side() const { return side_; }
  Connection* connection() const { return connection_; }
  bool sends() const { return state_ >= QpState::kRts; }
  bool receives() const { return state_ >= QpState::kRtr && state_ <= QpState::kSqd; }
  // "A0": side and pair.
  std::string Name() const { return (side_ == 0 ? "A" : "B") + std::to_string(pair_); }
  // The engine did not run for `gap`.
  void ShiftDeadlines(Duration gap) {
    if (state_ >= QpState::kRts) halves_->requester.ShiftDeadlines(gap);
  }
  // All posted and completed.
  bool IsIdle() const;
  // All WRs of the connection have succeeded: nothing may be left.
  void CheckAllDone();
  // For failures: how far it came.
  std::string Describe() const;
  Psn una_psn() const { return halves_->requester.una_psn(); }
  Psn next_psn() const { return halves_->requester.next_psn(); }
  Psn expected_psn() const { return halves_->responder.expected_psn(); }
  uint64_t packets() const { return packets_; }
  uint64_t errors() const { return errors_; }

  // PortWatcher.
  void OnPlace(bool responder, const MemorySegment& to, std::span<const std::byte> bytes,
               MemoryAccess access) override;
  uint64_t OnAtomic(uint64_t address, const transport::AtomicOperation& operation) override;
  void OnAtomicExecuted(uint64_t name, uint64_t original) override;
  void OnInvalidate(bool responder, uint32_t key) override;
  uint64_t CurrentSequence() const override { return handling_; }
  // ReceiveQueuePort.
  bool Select(transport::SrqNumber number) override;
  bool Take(transport::RecvRequest* request) override;
  void PutBack() override { --receives_taken_; }

 private:
  struct Halves {
    Halves(const transport::RcRequester::Capacity& capacity, HostMemory& memory, Qp& qp)
        : requester_port(memory, qp, false),
          responder_port(memory, qp, true),
          requester(capacity, requester_port),
          responder(responder_port, qp) {}
    Port requester_port;
    Port responder_port;
    transport::RcRequester requester;
    transport::RcResponder responder;
  };

  Flow& out() const { return connection_->flows[side_]; }
  Flow& in() const { return connection_->flows[1 - side_]; }
  bool out_checked() const { return connection_ != nullptr && !out().tainted; }
  bool in_checked() const { return connection_ != nullptr && !in().tainted; }
  Port& PortOf(bool responder) const {
    return responder ? halves_->responder_port : halves_->requester_port;
  }
  bool is_xrc() const { return connection_ != nullptr && connection_->path.xrc; }
  uint64_t una() const { return out().ToSequence(una_psn(), out().next); }
  void Check(const std::string& wrong);
  void Wrong(const std::string& what);
  void TakeAway(uint32_t key);
  transport::RcRequesterConfig RequesterConfig() const;
  transport::RcResponderConfig ResponderConfig() const;

  void ReceiveRequest(const PacketView& packet, bool is_old);
  void ReceiveResponse(const PacketView& packet, bool is_old);
  void NoteRnrNak(const PacketView& packet, uint64_t rnr_naks_before);
  void PostSend(uint32_t index);
  void Transmit();
  void Build(const transport::TxPacket& packet, bool is_response);
  void FetchFailed(Psn psn, bool is_response, MemoryStatus why);
  void FlushBurst();
  void CheckTransmit(bool is_response, const transport::TxPacket& packet,
                     const std::span<const std::byte>* payload);
  void Poll();
  void OnSendCompletion(const Completion& completion);
  void OnRecvCompletion(const Completion& completion);
  bool MayFail(const Wr& wr, WcStatus status) const;
  void CheckRetries(const transport::TransportCounters& before);
  void CheckFlushed();
  void CheckSqd();

  QpHost& host_;
  HostMemory& memory_;
  HostMemory& peer_memory_;
  const int side_;
  const uint32_t pair_;
  std::unique_ptr<Halves> halves_;
  transport::PacketTemplate path_;
  transport::RcRequester::Capacity capacity_;

  QpState state_ = QpState::kReset;
  uint32_t qpn_ = 0;
  uint32_t peer_qpn_ = 0;
  Connection* connection_ = nullptr;
  bool wants_transmit_ = false;

  // Packets built and not sent yet: their payload may turn out to be unreadable.
  struct Outgoing {
    uint32_t frame;
    Psn psn;
    bool is_response;
    bool failed;
  };
  std::vector<Outgoing> burst_;

  // While a request is handled: its sequence number.
  uint64_t handling_ = kNoSequence;
  bool handling_old_ = false;  // it belongs to an earlier connection

  uint32_t posted_ = 0;           // of out().wrs
  uint32_t next_wr_ = 0;          // the next that may complete
  uint32_t receives_posted_ = 0;  // of in().receives
  uint32_t receives_taken_ = 0;
  uint32_t selected_srq_ = 0;  // XRC
  uint32_t next_receive_ = 0;  // the next that may complete
  uint32_t next_message_ = 0;  // of in().wrs: the next that completes a receive
  bool send_failed_ = false;
  bool recv_failed_ = false;

  // The requester's counters at the last progress.
  uint64_t progress_rounds_ = 0;
  uint64_t progress_rnr_ = 0;
  bool retries_exceeded_ = false;
  Time rnr_until_ = Time::Zero();  // nothing is sent before, unless una moves
  uint64_t rnr_una_ = kNoSequence;

  uint64_t packets_ = 0;
  uint64_t errors_ = 0;
};

}  // namespace verbena::sim
