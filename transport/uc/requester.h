// SPDX-License-Identifier: Apache-2.0
//
// UcRequester: the sending half of a UC QP. A message is sent once, packet by
// packet; its WR completes when the payload has been read. Nobody answers
// (IBTA Vol 1 §9.8.2). BIND_MW and LOCAL_INV send nothing and take effect when
// everything before them is over. Sans-I/O, no heap after construction.
//
// Owner: one QP. Thread: whoever runs the QP's shard.
#pragma once

#include <cstdint>
#include <span>

#include "transport/base/ring.h"
#include "transport/memory_port.h"
#include "transport/psn.h"
#include "transport/transport_event.h"
#include "transport/types.h"
#include "transport/work_request.h"

namespace verbena::transport {

struct UcRequesterConfig {
  Pmtu pmtu = Pmtu::k1024;
  Psn first_psn;
};

class UcRequester {
 public:
  // WRs whose payload may still have to be read, and completions that nobody
  // polled yet.
  static constexpr uint32_t kWindow = 64;

  // `memory` must live longer.
  explicit UcRequester(MemoryPort& memory) : memory_(memory) {}

  // RTR→RTS. Forgets everything earlier.
  void Start(const UcRequesterConfig& config);
  void Reset();

  // Is the message before out, and is there room for one more?
  bool CanPost() const { return !in_message_ && !sent_.full(); }
  // What `request` refers to must stay until CanPost(). A WR that cannot be
  // sent completes with an error, and everything behind it is flushed.
  void Post(const SendRequest& request);
  // The next packet of the message, or false.
  bool PollTransmit(TxPacket* packet);
  // The payloads of the packet with `psn` and of all before it were read.
  void HandleFetched(Psn psn);
  // This one's could not be; it and what was sent behind it did not go out.
  void HandleFetchFailed(Psn psn);
  // QP to error: all WRs from now on complete as flushed.
  void Flush();
  // After SQE→RTS: takes WRs again.
  void Resume() { failed_ = false; }

  // In order. Only signalled or failed WRs give one.
  bool PollCompletion(Completion* completion);

  // A WR failed: the QP goes to SQE (IBTA Vol 1 §10.3.1).
  bool failed() const { return failed_; }
  // Nothing has begun that is not over.
  bool drained() const { return sent_.empty(); }
  // PollCompletion has something to look at.
  bool has_completion() { return !sent_.empty() && sent_[0].done; }
  Psn next_psn() const { return next_psn_; }
  // WRs posted whose completion nobody polled.
  uint32_t outstanding() const { return sent_.size(); }
  const TransportCounters& counters() const { return counters_; }

 private:
  struct Sent {
    uint64_t wr_id;
    uint32_t wqe_index;
    uint32_t byte_len;
    Psn last_psn;  // of the message; not before all of it is out
    WcStatus status;
    WcOpcode opcode;
    bool signaled;
    bool out;   // all packets were given away
    bool done;  // and their payload was read
  };
  void Fail(Sent& sent, WcStatus status);
  void FillSegments(uint32_t bytes, TxPacket* packet);
  // The local operation that waits, if nothing is before it any more.
  void ExecuteLocal();

  MemoryPort& memory_;
  uint32_t mtu_ = 1024;
  Psn next_psn_;
  bool failed_ = false;
  // The message that is being sent, or a local operation that waits; it is the
  // last of sent_.
  bool in_message_ = false;
  SendRequest message_;
  uint32_t length_ = 0;
  uint32_t offset_ = 0;
  uint32_t sge_ = 0;
  uint32_t sge_used_ = 0;
  Ring<Sent, kWindow> sent_;
  TransportCounters counters_;
};

}  // namespace verbena::transport
