// SPDX-License-Identifier: Apache-2.0
//
// Qp binds one pair of RC state machines to its queues, protection domain and
// path. It moves things between them; what the protocol says is in
// transport/rc, when it runs is in nic_sim/engine.
//
// Thread: under the shard's lock.
#pragma once

#include <cstdint>
#include <memory>

#include "nic_sim/abi/commands.h"
#include "nic_sim/mem/dma_queue.h"
#include "nic_sim/qp/nic.h"
#include "nic_sim/queues/completion_queue.h"
#include "nic_sim/queues/work_queue.h"
#include "transport/base/time.h"
#include "transport/qp_state.h"
#include "transport/rc/requester.h"
#include "transport/rc/responder.h"
#include "transport/wire/packet_builder.h"

namespace verbena::nic {

class Engine;

// Where a QP's asynchronous events and overrun reports go: its context.
class QpEventSink {
 public:
  virtual ~QpEventSink() = default;
  virtual void OnQpEvent(Qp& qp, transport::AsyncEventType type) = 0;
  virtual void OnCqOverrun(CompletionQueue& cq) = 0;
};

class Qp {
 public:
  struct Config {
    Nic* nic = nullptr;
    Engine* engine = nullptr;
    QpEventSink* sink = nullptr;
    uint32_t slot = 0;
    uint32_t generation = 0;
    PdId pd = 0;
    transport::QpType type = transport::QpType::kRc;
    abi::QpCaps caps{};
    bool signal_all = false;
    CompletionQueue* send_cq = nullptr;
    CompletionQueue* recv_cq = nullptr;
    Ring sq_ring;
    Ring rq_ring;
    abi::QpRecord* record = nullptr;
    uint64_t user_handle = 0;
  };
  explicit Qp(const Config& config);
  ~Qp();

  const Config& config() const { return config_; }
  Nic& nic() const { return *config_.nic; }
  transport::Qpn qpn() const { return qpn_; }
  void set_qpn(transport::Qpn qpn) { qpn_ = qpn; }
  transport::QpState state() const { return state_; }
  uint32_t generation() const { return config_.generation; }
  const abi::QpAttr& attr() const { return attr_; }

  // --- Control commands ---
  // 0 or an errno; nothing changes on error.
  int Modify(const abi::QpAttr& attr, uint32_t mask, uint32_t new_generation);
  abi::QpAttr Query() const;

  // --- Engine steps ---
  // A parsed packet for this QP whose ICRC is right. Gives why it was dropped,
  // or DropReason::count.
  DropReason HandlePacket(const transport::PacketView& packet, transport::Time now);
  void HandleTimeout(transport::Time now);
  // Moves completions and events out and, if the QP failed, to error. Fetches
  // up to `budget` WQEs; gives their number.
  uint32_t Service(transport::Time now, uint32_t budget);
  // Next packet to send. `response` tells whose it is.
  bool PollTransmit(transport::Time now, transport::TxPacket* packet, bool* response);
  void HandleFetchFailed(transport::Psn psn, bool response, transport::MemoryStatus why,
                         transport::Time now);
  // PSN relative to the first one of the stream that a packet belongs to.
  uint32_t PsnOffset(transport::Psn psn, bool response) const {
    return (psn.value() - (response ? attr_.rq_psn : attr_.sq_psn)) & transport::Psn::kMask;
  }
  const transport::PacketTemplate& path() const { return path_; }
  transport::Time next_timeout() const { return requester_.next_timeout(); }
  void ShiftDeadlines(transport::Duration gap) { requester_.ShiftDeadlines(gap); }
  bool wants_service() const { return sends() && !sq_.empty() && requester_.CanPost(); }
  // A state machine has ended the connection and Service has not seen it yet
  // (a responder fails when its NAK is on the way).
  bool wants_error() const {
    return state_ != transport::QpState::kErr && state_ != transport::QpState::kReset &&
           (requester_.failed() || responder_.failed());
  }
  // ERR by a CQ overrun or by an outside decision.
  void MoveToError();

  // --- Observers ---
  const transport::RcRequester& requester() const { return requester_; }
  const transport::RcResponder& responder() const { return responder_; }
  void AddCounters(transport::TransportCounters* sum) const {
    sum->Add(requester_.counters());
    sum->Add(responder_.counters());
  }
  const SendQueue& sq() const { return sq_; }
  const ReceiveQueue& rq() const { return rq_; }

  uint32_t async_events = 0;  // written for this QP

  // Bookkeeping of the engine's ready list and timer heap.
  bool in_ready_list = false;
  Qp* next_ready = nullptr;
  static constexpr uint32_t kNotInHeap = 0xffffffff;
  uint32_t heap_index = kNotInHeap;
  transport::Time heap_deadline;

 private:
  // Reports of placements to the two state machines.
  class RequesterSide final : public DmaOwner {
   public:
    explicit RequesterSide(Qp& qp) : qp_(qp) {}
    void OnPlaced(transport::Ticket ticket) override;
    void OnAtomic(transport::Ticket ticket, uint64_t original) override;
    void OnPlaceFailed(transport::Ticket ticket) override;

   private:
    Qp& qp_;
  };
  class ResponderSide final : public DmaOwner {
   public:
    explicit ResponderSide(Qp& qp) : qp_(qp) {}
    void OnPlaced(transport::Ticket ticket) override;
    void OnAtomic(transport::Ticket ticket, uint64_t original) override;
    void OnPlaceFailed(transport::Ticket ticket) override;

   private:
    Qp& qp_;
  };

  bool receives() const {
    return state_ == transport::QpState::kRtr || state_ == transport::QpState::kRts ||
           state_ == transport::QpState::kSqd;
  }
  bool sends() const {
    return state_ == transport::QpState::kRts || state_ == transport::QpState::kSqd ||
           state_ == transport::QpState::kErr;
  }
  void SetState(transport::QpState state);
  int CheckValues(const abi::QpAttr& attr, uint32_t mask) const;
  int CheckPath(const abi::AhAttr& ah) const;
  void CopyAttributes(const abi::QpAttr& attr, uint32_t mask);
  void BuildPath();
  transport::RcRequesterConfig RequesterConfig() const;
  transport::RcResponderConfig ResponderConfig() const;
  void ResetQueues();
  void DrainOutputs(transport::Time now);
  void Complete(CompletionQueue& cq, const transport::Completion& completion, transport::Time now);

  Config config_;
  transport::Qpn qpn_;
  transport::QpState state_ = transport::QpState::kReset;
  abi::QpAttr attr_{};
  bool drained_reported_ = false;
  transport::Gid peer_gid_;
  transport::PacketTemplate path_;

  SendQueue sq_;
  ReceiveQueue rq_;
  RequesterSide requester_side_;
  ResponderSide responder_side_;
  QpMemory requester_memory_;
  QpMemory responder_memory_;
  transport::RcRequester requester_;
  transport::RcResponder responder_;
};

}  // namespace verbena::nic
