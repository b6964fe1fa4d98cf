// SPDX-License-Identifier: Apache-2.0
//
// UdReceiver: the receiving half of a UD QP. A datagram takes one receive WQE:
// its network header goes into the first 40 bytes (an IPv4 header into bytes
// 20-39, zeros before), its payload behind (IBTA Annex A17, 17.9.2). What does not
// fit is dropped without a trace for sender and receiver. Sans-I/O.
//
// Owner: one QP. Thread: whoever runs the QP's shard.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/base/ring.h"
#include "transport/memory_port.h"
#include "transport/transport_event.h"
#include "transport/types.h"
#include "transport/wire/packet_view.h"
#include "transport/work_request.h"

namespace verbena::transport {

class UdReceiver {
 public:
  static constexpr uint32_t kGrhBytes = 40;

  enum class Verdict {
    kAccepted,
    kNotUd,
    kWrongQkey,
    kNoReceive,  // none is posted, or too many are still being placed
    kTooLong,    // for the oldest receive, which stays
  };

  UdReceiver(MemoryPort& memory, ReceiveQueuePort& receive_queue)
      : memory_(memory), receive_queue_(receive_queue) {}

  // INIT→RTR. Forgets everything earlier.
  void Start(Qkey qkey);
  void set_qkey(Qkey qkey) { qkey_ = qkey; }
  void Reset();

  // A packet for this QP, ICRC and P_Key already checked. Its bytes must stay
  // until the placements are committed.
  Verdict HandlePacket(const PacketView& packet);
  // Raw packet QPs: a whole frame into the receive, without a network header.
  Verdict HandleFrame(std::span<const std::byte> frame, uint32_t flow_tag);
  void HandleCommitted(Ticket ticket);
  // Placement `ticket` failed, later ones of this port are void.
  void HandlePlacementFailed(Ticket ticket);
  // QP to error: all posted receives complete as flushed.
  void Flush() { flushing_ = true; }

  bool PollCompletion(Completion* completion);

  // After Flush: no receive that was taken waits for its completion.
  bool flushed() const { return flushing_ && received_.empty(); }
  // A receive failed: the QP goes to ERR.
  bool failed() const { return failed_; }
  const TransportCounters& counters() const { return counters_; }

 private:
  struct Received {
    uint64_t wr_id;
    Ticket ticket;  // waits for this
    uint32_t wqe_index;
    uint32_t imm;
    uint32_t byte_len;
    uint32_t flow_tag;
    Qpn src_qpn;
    WcStatus status;
    NetworkHeader network_header;
    bool has_imm;
    bool solicited;
  };

  // Takes a receive that has room for so many bytes.
  Verdict Take(uint32_t bytes);
  void Finish(Received* received, MemoryStatus status);
  MemoryStatus Scatter(std::span<const std::byte> bytes, Ticket* ticket);

  MemoryPort& memory_;
  ReceiveQueuePort& receive_queue_;
  Qkey qkey_;
  bool failed_ = false;
  bool flushing_ = false;
  Ticket committed_ = 0;
  // The receive that is being filled.
  uint32_t sge_ = 0;
  uint32_t sge_used_ = 0;
  RecvRequest receive_;
  Ring<Received, 512> received_;
  TransportCounters counters_;
};

}  // namespace verbena::transport
