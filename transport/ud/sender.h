// SPDX-License-Identifier: Apache-2.0
//
// UdSender: the sending half of a UD QP. Each WR is one packet, sent once; it
// completes when its payload has been read. Sans-I/O, no heap after
// construction.
//
// Owner: one QP. Thread: whoever runs the QP's shard.
#pragma once

#include <cstdint>

#include "transport/base/ring.h"
#include "transport/memory_port.h"
#include "transport/psn.h"
#include "transport/transport_event.h"
#include "transport/types.h"
#include "transport/work_request.h"

namespace verbena::transport {

struct UdSenderConfig {
  Psn first_psn;
  Qkey qkey;                          // the QP's own, for WRs whose Q_Key has the top bit set
  uint32_t max_payload_bytes = 4096;  // MTU of the port
};

class UdSender {
 public:
  // Packets whose payload may still have to be read, and completions that
  // nobody polled yet.
  static constexpr uint32_t kWindow = 64;

  // RTR→RTS. Forgets everything earlier.
  void Start(const UdSenderConfig& config);
  void set_qkey(Qkey qkey) { config_.qkey = qkey; }
  void Reset();

  bool CanSend() const { return !sent_.full(); }
  // The packet of a WR; false if it has none: it completes with an error, and
  // everything behind it is flushed. `has_path`: its address handle is good.
  // May be called when CanSend().
  bool Send(const SendRequest& request, bool has_path, TxPacket* packet);
  // The payloads of the packet with `psn` and of all before it were read.
  void HandleFetched(Psn psn);
  // This one's could not be; it and what was sent behind it did not go out.
  void HandleFetchFailed(Psn psn);
  // QP to error: all WRs from now on complete as flushed.
  void Flush();
  // After SQE→RTS: takes WRs again.
  void Resume() { failed_ = false; }

  bool PollCompletion(Completion* completion);

  // A WR failed: the QP goes to SQE (IBTA Vol 1, 10.3.1).
  bool failed() const { return failed_; }
  bool drained() const { return sent_.empty(); }
  Psn next_psn() const { return next_psn_; }
  const TransportCounters& counters() const { return counters_; }

 private:
  struct Sent {
    uint64_t wr_id;
    uint32_t wqe_index;
    Psn psn;
    WcStatus status;
    bool signaled;
    bool done;
  };
  bool Fail(Sent& sent, WcStatus status);

  UdSenderConfig config_;
  Psn next_psn_;
  bool failed_ = false;
  Ring<Sent, kWindow> sent_;
  TransportCounters counters_;
};

}  // namespace verbena::transport
