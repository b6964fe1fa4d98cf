// SPDX-License-Identifier: Apache-2.0
//
// Qp binds the state machines of one QP to its queues, protection domain and
// path. It moves things between them; what the protocol says is in transport/,
// when it runs is in nic_sim/engine. Here is what QPs of all types share; the
// rest is in rc_qp.h, uc_qp.h and ud_qp.h.
//
// Thread: under the shard's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "nic_sim/faults/device_faults.h"
#include "nic_sim/mem/dma_queue.h"
#include "nic_sim/qp/nic.h"
#include "nic_sim/queues/completion_queue.h"
#include "nic_sim/queues/shared_receive_queue.h"
#include "nic_sim/queues/work_queue.h"
#include "nic_sim/trace/trace_ring.h"
#include "transport/base/time.h"
#include "transport/qp_state.h"
#include "transport/transport_event.h"
#include "transport/wire/packet_builder.h"
#include "transport/wire/packet_view.h"

namespace verbena::nic {

class Shard;

// An address handle.
struct AddressHandle {
  PdId pd = 0;
  uint32_t flow_label = 0;
  transport::PacketTemplate path;
};

// A QP's context: where its asynchronous events and overrun reports go, and
// whose address handles it uses.
class QpEventSink {
 public:
  virtual ~QpEventSink() = default;
  // nullptr: there is none. Valid until the next control call.
  virtual const AddressHandle* FindAh(uint32_t handle) const = 0;
  virtual void OnQpEvent(Qp& qp, transport::AsyncEventType type) = 0;
  virtual void OnCqOverrun(CompletionQueue& cq) = 0;
  // A rule wants an event of `type` (enum ibv_event_type); `cq` may be null.
  virtual void OnInjectedEvent(Qp& qp, CompletionQueue* cq, uint8_t type) = 0;
};

class Qp {
 public:
  struct Config {
    Nic* nic = nullptr;
    Shard* shard = nullptr;
    NicShare* share = nullptr;  // of the shard, on the NIC
    QpEventSink* sink = nullptr;
    uint32_t slot = 0;
    uint32_t generation = 0;
    PdId pd = 0;
    transport::QpType type = transport::QpType::kRc;
    abi::QpCaps caps{};
    bool signal_all = false;
    bool blocks_self_multicast = false;
    CompletionQueue* send_cq = nullptr;  // XRC_RECV: none
    CompletionQueue* recv_cq = nullptr;  // XRC: none
    SharedReceiveQueue* srq = nullptr;   // nullptr: its own queue
    XrcDomain* xrc_domain = nullptr;     // XRC_RECV: whose SRQs packets may name
    Ring sq_ring;
    Ring rq_ring;
    abi::QpRecord* record = nullptr;
    uint64_t user_handle = 0;
    const AddressSpace* space = nullptr;  // of its process; XRC_RECV: of none
    std::string app;                      // the process name of the context that made it
    uint32_t nth_qp = 0;                  // of the application, from 1
  };
  // config.type must be one that CheckQpRequest (device_context.cc) accepts.
  static std::unique_ptr<Qp> Create(const Config& config);
  virtual ~Qp();
  Qp(const Qp&) = delete;
  Qp& operator=(const Qp&) = delete;

  const Config& config() const { return config_; }
  Nic& nic() const { return *config_.nic; }
  transport::Qpn qpn() const { return qpn_; }
  void set_qpn(transport::Qpn qpn) { qpn_ = qpn; }
  transport::QpState state() const { return state_; }
  uint32_t generation() const { return config_.generation; }
  const abi::QpAttr& attr() const { return attr_; }

  // --- Control commands ---
  // 0 or an errno; nothing changes on error.
  int Modify(const abi::QpAttr& requested, uint32_t mask, uint32_t new_generation);
  abi::QpAttr Query() const;
  // 0 kbit/s: no limit. 0, EINVAL (not in RTS) or EOPNOTSUPP (not of this type).
  virtual int LimitRate(uint32_t /*kbps*/, uint32_t /*burst_bytes*/) { return EOPNOTSUPP; }

  // --- Engine steps ---
  // A parsed packet for this QP whose ICRC is right. Gives why it was dropped,
  // or DropReason::count.
  virtual DropReason HandlePacket(const transport::PacketView& packet, transport::Time now) = 0;
  // Raw packet QPs: a frame that a flow rule leads here.
  virtual DropReason HandleFrame(std::span<const std::byte>, uint32_t /*flow_tag*/) {
    return DropReason::wrong_transport;
  }
  // Its packets are whole frames, without headers of the device's.
  virtual bool is_raw() const { return false; }
  virtual void HandleTimeout(transport::Time) {}
  // Moves completions and events out and, if the QP failed, to error. Fetches
  // up to `budget` WQEs; gives their number.
  virtual uint32_t Service(transport::Time now, uint32_t budget) = 0;
  // Next packet to send, along path(). `response` tells whose it is.
  virtual bool PollTransmit(transport::Time now, transport::TxPacket* packet, bool* response) = 0;
  // The payload of this packet was read (only for those that HandleFetchFailed
  // could have named).
  virtual void HandleFetched(transport::Psn) {}
  virtual void HandleFetchFailed(transport::Psn psn, bool response, transport::MemoryStatus why,
                                 transport::Time now) = 0;
  // PSN relative to the first one of the stream that a packet belongs to.
  uint32_t PsnOffset(transport::Psn psn, bool response) const {
    return (psn.value() - (response ? attr_.rq_psn : attr_.sq_psn)) & transport::Psn::kMask;
  }
  // PD of the payload of a packet that PollTransmit gave.
  virtual PdId PayloadPd(const transport::TxPacket&) const { return config_.pd; }
  const transport::PacketTemplate& path() const { return path_; }
  virtual transport::Time next_timeout() const { return transport::Time::Never(); }
  virtual void ShiftDeadlines(transport::Duration) {}
  virtual bool wants_service() const = 0;
  // A state machine has failed and Service has not seen it yet (a responder
  // fails when its NAK is on the way).
  virtual bool wants_error() const = 0;
  // ERR by a CQ overrun or by an outside decision.
  void MoveToError();
  // ERR with QP_FATAL, as a rule wants it. Not from RESET.
  void FailByFault();
  FaultSubject fault_subject() const;

  // --- Observers ---
  struct Progress {
    transport::Psn sq_psn;   // next to send
    transport::Psn rq_psn;   // expected; what a type does not have stays 0
    transport::Psn una_psn;  // oldest not acknowledged
    uint32_t outstanding = 0;
    transport::Msn msn;
  };
  virtual Progress progress() const = 0;
  virtual void AddCounters(transport::TransportCounters* sum) const = 0;
  const SendQueue& sq() const { return sq_; }
  const ReceiveQueue& rq() const { return rq_; }

  uint32_t async_events = 0;           // written for this QP
  uint32_t flows = 0;                  // rules that lead here
  std::vector<transport::Gid> groups;  // that it is attached to

  // Bookkeeping of the engine's ready list and timer heap.
  bool in_ready_list = false;
  bool waits_for_netdev = false;
  Qp* next_ready = nullptr;
  static constexpr uint32_t kNotInHeap = 0xffffffff;
  uint32_t heap_index = kNotInHeap;
  transport::Time heap_deadline;

 protected:
  explicit Qp(const Config& config);

  bool receives() const {
    return state_ == transport::QpState::kRtr || state_ == transport::QpState::kRts ||
           state_ == transport::QpState::kSqd || state_ == transport::QpState::kSqe;
  }
  void SetState(transport::QpState state);
  // Into the shard's ring; time, QPN and port are filled in here.
  inline void Trace(const TraceEvent& event);  // qp.cc alone has use for it
  // The oldest send WQE; false if none is posted.
  bool FetchSend(FetchedSend* send);
  void TraceCompletion(const transport::Completion& completion, uint32_t peer_qpn);
  void Complete(CompletionQueue& cq, const transport::Completion& completion, transport::Time now);
  // Writes the CQE, or what rules make of it (completion_faults.cc). False: the CQ is
  // full.
  bool WriteCqe(CompletionQueue& cq, const transport::Completion& completion,
                const CqeOrigin& origin, transport::Time now);
  // Of a connected QP: does the packet come from the peer? What it says of path
  // migration is heeded (IBTA Vol 1 §17.2.8): both ends ask for it, REARM, and
  // are then ARMED; the first packet of a peer that has migrated takes this end
  // along.
  bool IsFromPeer(const transport::PacketView& packet);
  // To the alternate path, which becomes the primary one.
  void Migrate();
  // SQD and nothing outstanding any more: tells once.
  void ReportDrained();
  transport::ReceiveQueuePort& receive_queue() {
    if (config_.srq != nullptr) return srq_port_;
    return rq_;
  }
  // PD of the buffers that receives name.
  PdId receive_pd() const { return config_.srq != nullptr ? config_.srq->config().pd : config_.pd; }
  // Of a QP on an SRQ: when packets and failures have been dealt with, and when
  // all completions have been written.
  void CheckSrq();
  void ReportLastWqe();

  // What the state machines do with an accepted change that is neither to RESET
  // nor to ERR; attr() is the new one, state() still the old.
  virtual void OnTransition(transport::QpState from, transport::QpState to) = 0;
  virtual void ResetMachines() = 0;
  // Path, timeout or migration state have changed.
  virtual void OnMigration() {}
  virtual void FlushMachines() = 0;
  virtual bool drained() const = 0;
  // In error, no receive is in progress any more.
  virtual bool receives_flushed() const = 0;

  Config config_;
  transport::Qpn qpn_;
  transport::QpState state_ = transport::QpState::kReset;
  abi::QpAttr attr_{};
  transport::Gid peer_gid_;
  transport::PacketTemplate path_;
  SendQueue sq_;
  ReceiveQueue rq_;
  SrqPort srq_port_;

 private:
  int CheckValues(const abi::QpAttr& attr, uint32_t mask) const;
  void CopyAttributes(const abi::QpAttr& attr, uint32_t mask);
  int CheckAlternatePath(const abi::QpAttr& attr, uint32_t mask) const;
  void SetMigration(uint32_t state);
  void BuildPath();
  void ResetQueues();
  bool WriteWithFaults(CompletionQueue& cq, transport::Completion completion,
                       const CqeOrigin& origin, transport::Time now);

  bool has_alternate_ = false;
  bool migration_error_reported_ = false;
  bool drained_reported_ = false;
  bool last_wqe_reported_ = false;
  bool flushes_all_ = false;  // a rule failed a WR: those after it cannot succeed
};

// Values of enum ibv_mig_state.
inline constexpr uint32_t kMigMigrated = 0;
inline constexpr uint32_t kMigRearm = 1;
inline constexpr uint32_t kMigArmed = 2;

// Two P_Keys match when their low 15 bits do and one is a full member.
bool PkeyMatches(transport::Pkey a, transport::Pkey b);

}  // namespace verbena::nic
