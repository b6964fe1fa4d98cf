// SPDX-License-Identifier: Apache-2.0
//
// The device's side of send and receive queues: WQEs are copied out of shared
// memory once and the copy is validated.
//
// Thread: under the shard's lock.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nic_sim/abi/shared_memory.h"
#include "nic_sim/abi/work_queue.h"
#include "nic_sim/queues/shared_memory.h"
#include "transport/work_request.h"

namespace verbena::nic {

// One fetched send WQE; `request` points into this object.
struct FetchedSend {
  transport::SendRequest request;
  transport::MemorySegment sges[transport::kMaxSge];
  alignas(16) std::byte inline_data[512];
};

class SendQueue {
 public:
  struct Limits {
    uint32_t max_sge = 0;
    uint32_t max_inline = 0;
    bool signal_all = false;
    bool datagrams = false;  // WQEs name an address handle
    bool xrc = false;        // or an SRQ
  };

  SendQueue(const Ring& ring, abi::QpRecord* record, const Limits& limits)
      : ring_(ring), record_(record), limits_(limits) {}

  bool empty() const { return Posted() == fetched_; }
  // Fetches the oldest WQE; false if none is posted. A WQE that makes no sense
  // comes with request.malformed set.
  bool Fetch(FetchedSend* fetched);
  // Makes the number of fetched WQEs known to the application.
  void Publish() { record_->sq_fetched.store(fetched_, std::memory_order_release); }
  void Reset();

  uint32_t fetched() const { return fetched_; }
  uint32_t posted() const { return Posted(); }
  const Ring& ring() const { return ring_; }

 private:
  // The application's index, as far as it can be true.
  uint32_t Posted() const;

  Ring ring_;
  abi::QpRecord* record_;
  Limits limits_;
  uint32_t fetched_ = 0;
};

// Copies the receive WQE in `slot`, but for its index.
void CopyRecvWqe(const std::byte* slot, uint32_t max_sge, transport::RecvRequest* request);

class ReceiveQueue final : public transport::ReceiveQueuePort {
 public:
  ReceiveQueue(const Ring& ring, abi::QpRecord* record, uint32_t max_sge)
      : ring_(ring), record_(record), max_sge_(max_sge) {}

  bool Take(transport::RecvRequest* request) override;
  void PutBack() override { --taken_; }
  bool empty() const { return Posted() == taken_; }
  void Reset();

  uint32_t taken() const { return taken_; }
  uint32_t posted() const { return Posted(); }
  const Ring& ring() const { return ring_; }

 private:
  uint32_t Posted() const;

  Ring ring_;
  abi::QpRecord* record_;
  uint32_t max_sge_;
  uint32_t taken_ = 0;
};

}  // namespace verbena::nic
