// SPDX-License-Identifier: Apache-2.0
//
// One end of a connection in the simulation: requester and responder (rc_qp.h,
// uc_qp.h), their memory ports, where its receives come from, and what its
// application does with it. Plays the part that nic_sim's Qp and Engine have in
// the device, and holds both halves against the flows of the connection.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/sim/flow.h"
#include "tests/sim/memory.h"
#include "tests/sim/network.h"
#include "tests/sim/profile.h"
#include "tests/sim/random.h"
#include "tests/sim/receive_queue.h"
#include "transport/wire/packet_builder.h"
#include "transport/wire/packet_view.h"
#include "transport/work_request.h"

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
  // nullptr: that side has no such SRQ.
  virtual ReceiveQueue* Srq(int side, uint32_t number) = 0;
  virtual void Fail(const std::string& what) = 0;
  virtual bool keeps_ladder() const = 0;
  virtual void Note(const std::string& line) = 0;
};

class Qp : public PortWatcher, public transport::ReceiveQueuePort {
 public:
  Qp(QpHost& host, HostMemory& memory, HostMemory& peer_memory, int side, uint32_t pair);

  // --- Control: what modify_qp and destroy_qp do.
  void Create(uint32_t qpn);  // in RESET; destroys what was
  void Reset();
  void Connect(Connection* connection, uint32_t peer_qpn);  // INIT
  void ToRtr();
  void ToRts();
  void ToSqd();
  void Resume();  // from SQD or SQE
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
  virtual Time next_timeout() const { return Time::Never(); }
  bool HasPending(bool responder) const { return PortOf(responder).pending() != 0; }
  bool HasMoreToPost() const;
  bool wants_transmit() const { return wants_transmit_; }

  QpState state() const { return state_; }
  uint32_t qpn() const { return qpn_; }
  uint32_t pair() const { return pair_; }
  int side() const { return side_; }
  Connection* connection() const { return connection_; }
  bool sends() const { return state_ >= QpState::kRts; }
  bool receives() const { return state_ >= QpState::kRtr && state_ <= QpState::kSqe; }
  // "A0": side and pair.
  std::string Name() const { return (side_ == 0 ? "A" : "B") + std::to_string(pair_); }
  // The engine did not run for `gap`.
  virtual void ShiftDeadlines(Duration) {}
  // All posted and completed.
  bool IsIdle() const;
  // All WRs of the connection are over: nothing may be left.
  void CheckAllDone();
  // Nothing is under way any more, in the network neither.
  virtual void CheckAtEnd() {}
  // For failures: how far it came.
  std::string Describe() const;
  virtual Psn una_psn() const = 0;
  virtual Psn next_psn() const = 0;
  virtual Psn expected_psn() const = 0;
  uint64_t packets() const { return packets_; }
  uint64_t errors() const { return errors_; }

  // PortWatcher.
  void OnPlace(bool responder, const MemorySegment& to, std::span<const std::byte> bytes,
               MemoryAccess access) override;
  uint64_t OnAtomic(uint64_t address, const transport::AtomicOperation& operation) override;
  void OnAtomicExecuted(uint64_t name, uint64_t original) override;
  void OnInvalidate(bool responder, uint32_t key, bool done) override;
  void OnBind(const transport::WindowBind& bind) override;
  uint64_t CurrentSequence() const override { return handling_; }
  // ReceiveQueuePort.
  bool Select(transport::SrqNumber number) override;
  bool Take(transport::RecvRequest* request) override;
  void PutBack() override;

 protected:
  // A receive that was taken and has not completed.
  struct Taken {
    const PlannedReceive* receive;
    uint64_t wr_id;
    uint32_t srq;
    Wr* wr;                    // the message that it is for; nullptr: flushed, or not known yet
    bool delivered = false;    // UC: the message is complete
    size_t writes_before = 0;  // UC: WRITEs that must be visible with it
  };

  // --- The two halves, with what is demanded of them.
  virtual void MakeMachines() = 0;
  virtual void ResetMachines() = 0;
  virtual void StartResponder() = 0;
  virtual void StartRequester() = 0;
  virtual void Drain() = 0;
  virtual void ResumeMachines() = 0;
  virtual void FlushMachines() = 0;

  // What was accepted by CanPost: `posted_` was moved over it.
  virtual bool CanPost() const = 0;
  virtual void Post(uint32_t index) = 0;
  // WRs posted and not over.
  virtual uint32_t outstanding() const = 0;
  virtual bool drained() const = 0;
  // Everything before this sequence number is over.
  virtual uint64_t una() const = 0;

  virtual void ReceiveRequest(const PacketView& packet, uint64_t sequence) = 0;
  virtual void ReceiveResponse(const PacketView& packet, bool is_old) = 0;
  virtual void HandleReserved(Psn psn) = 0;
  virtual void HandleTimeout() {}
  virtual void HandleCommitted(bool responder, Ticket ticket) = 0;
  virtual void HandleAtomicCommitted(Ticket ticket, uint64_t original) = 0;
  virtual void HandlePlacementFailed(bool responder, Ticket ticket, MemoryStatus why) = 0;
  virtual bool PollPacket(transport::TxPacket* packet, bool* is_response) = 0;
  // The payload of the packet, and of those before it, was read.
  virtual void HandleFetched(Psn, bool) {}
  virtual void HandleFetchFailed(Psn psn, bool is_response, MemoryStatus why) = 0;
  virtual bool PollRecvCompletion(Completion* completion) = 0;
  virtual bool PollSendCompletion(Completion* completion) = 0;
  // Moves the QP to the state that a failure leads to; false: nothing has
  // failed.
  virtual bool TakeFailure() = 0;

  virtual void CheckPacket(bool is_response, const transport::TxPacket& packet,
                           const std::span<const std::byte>* payload) = 0;
  virtual void CheckPlacement(const MemorySegment& to, std::span<const std::byte> bytes,
                              MemoryAccess access) = 0;
  // The responder takes `taken` while it handles handling_.
  virtual void CheckTake(Taken& taken) = 0;
  virtual void CheckInvalidate(uint32_t key, bool done) = 0;
  // The WR is over, with success.
  virtual void CheckDone(const Wr& wr) = 0;
  // Is this an end that the WR may have without being wrong?
  virtual bool MayFail(const Wr& wr, WcStatus status) const = 0;
  // A receive with success or an error of its own.
  virtual void CheckReceived(const Completion& completion, const Taken& taken,
                             const std::string& who) = 0;
  // All of its message was executed.
  virtual bool IsWhole(const Taken& taken) const = 0;
  virtual void CheckAllReceived() = 0;

  Flow& out() const { return connection_->flows[side_]; }
  Flow& in() const { return connection_->flows[1 - side_]; }
  bool out_checked() const { return connection_ != nullptr && !out().tainted; }
  bool in_checked() const { return connection_ != nullptr && !in().tainted; }
  Port& PortOf(bool responder) { return responder ? responder_port_ : requester_port_; }
  const Port& PortOf(bool responder) const { return responder ? responder_port_ : requester_port_; }
  bool is_xrc() const { return connection_ != nullptr && connection_->path.is_xrc(); }
  void Check(const std::string& wrong);
  void Wrong(const std::string& what);
  void Note(const char* what);
  void TakeAway(uint32_t key);
  transport::SendRequest RequestOf(uint32_t index) const;
  void CheckMessageFields(const Completion& completion, const Wr& wr, const std::string& who);

  QpHost& host_;
  HostMemory& memory_;
  HostMemory& peer_memory_;
  const int side_;
  const uint32_t pair_;
  Port requester_port_;
  Port responder_port_;

  QpState state_ = QpState::kReset;
  Connection* connection_ = nullptr;

  // While a request is handled: its sequence number.
  uint64_t handling_ = kNoSequence;
  bool handling_old_ = false;  // it belongs to an earlier connection

  uint32_t posted_ = 0;            // of out().wrs
  uint32_t next_wr_ = 0;           // the next that may complete
  ReceiveQueue* queue_ = nullptr;  // where receives are taken from; XRC: once it is selected
  std::deque<Taken> taken_;
  bool wants_transmit_ = false;
  bool send_failed_ = false;
  bool recv_failed_ = false;
  const Wr* fault_ = nullptr;  // the request whose placement failed

 private:
  void PostReceives();
  void Transmit();
  void Build(const transport::TxPacket& packet, bool is_response);
  void FetchFailed(Psn psn, bool is_response, MemoryStatus why);
  void FlushBurst();
  void Poll();
  void OnSendCompletion(const Completion& completion);
  void OnRecvCompletion(const Completion& completion);
  void CheckFlushed();
  void CheckSqd();
  template <typename IsIt>
  Wr* FindLocal(IsIt is_it);

  transport::PacketTemplate path_;
  uint32_t qpn_ = 0;
  uint32_t peer_qpn_ = 0;

  // Packets built and not sent yet: their payload may turn out to be unreadable.
  struct Outgoing {
    uint32_t frame;
    Psn psn;
    bool is_response;
    bool failed;
  };
  std::vector<Outgoing> burst_;

  uint64_t packets_ = 0;
  uint64_t errors_ = 0;
};

}  // namespace verbena::sim
