// SPDX-License-Identifier: Apache-2.0
//
// The device's side of an SRQ: a ring of receive WQEs that several QPs take
// from. A WQE is copied out whole, so messages may complete in any order.
//
// Thread: under the lock of the shard that its QPs are in.
#pragma once

#include <cstdint>

#include "nic_sim/abi/shared_memory.h"
#include "nic_sim/abi/work_queue.h"
#include "nic_sim/mem/region_table.h"
#include "nic_sim/queues/completion_queue.h"
#include "nic_sim/queues/shared_memory.h"
#include "transport/verbs_types.h"
#include "transport/work_request.h"

namespace verbena::nic {

class SharedReceiveQueue;

// The context of an SRQ: where its asynchronous events go.
class SrqEventSink {
 public:
  virtual ~SrqEventSink() = default;
  virtual void OnSrqEvent(SharedReceiveQueue& srq, transport::AsyncEventType type) = 0;
  // The CQ of an XRC SRQ is full.
  virtual void OnCqOverrun(CompletionQueue& cq) = 0;
};

class SharedReceiveQueue {
 public:
  struct Config {
    SrqEventSink* sink = nullptr;
    uint32_t slot = 0;
    uint32_t generation = 0;
    uint32_t number = 0;
    PdId pd = 0;  // of the buffers
    uint32_t max_wr = 0;
    uint32_t max_sge = 0;
    Ring ring;
    abi::SrqRecord* record = nullptr;
    uint64_t user_handle = 0;
    CompletionQueue* cq = nullptr;  // XRC: where its receives complete
    uint32_t xrcd = 0;              // XRC: handle of the domain in its context
  };
  explicit SharedReceiveQueue(const Config& config);
  SharedReceiveQueue(const SharedReceiveQueue&) = delete;
  SharedReceiveQueue& operator=(const SharedReceiveQueue&) = delete;

  const Config& config() const { return config_; }

  // Takes the oldest WQE; false if there is none, or after an error.
  bool Take(transport::RecvRequest* request);
  // Puts the one taken last back, before anything else happens here.
  void PutBack() { --taken_; }
  // What was taken is the application's again; the limit event, if it is due.
  // Called by QPs after the packets of a pass.
  void Publish();

  // Arms the limit event; 0 disarms.
  void SetLimit(uint32_t limit);
  uint32_t limit() const { return limit_; }

  // Resize in two steps, see abi::ModifySrqRequest. Begin: the second ring and
  // the value of SrqRecord::ring for it. Finish gives the ring that is to be
  // freed.
  bool resizing() const { return next_ring_.data != nullptr; }
  uint32_t BeginResize(const Ring& ring, uint32_t max_wr, uint32_t limit);
  Ring FinishResize(bool commit);

  // The application's index makes no sense: nothing can be taken any more.
  bool in_error() const { return in_error_; }

  uint32_t posted() const;
  uint32_t taken() const { return taken_; }
  uint32_t outstanding() const { return posted() - taken_; }
  const Ring& ring() const { return config_.ring; }
  const Ring& next_ring() const { return next_ring_; }

  uint32_t qp_references = 0;
  uint32_t async_events = 0;  // written to the context's event pipe

 private:
  const Ring& CurrentRing() const;
  // Looks at the application's index; false if it cannot be true.
  bool Look(uint32_t* posted) const;
  void Fail();

  Config config_;
  Ring next_ring_;
  uint32_t next_max_wr_ = 0;
  uint32_t next_limit_ = 0;
  uint32_t ring_number_ = 0;  // SrqRecord::ring of config_.ring
  uint32_t limit_ = 0;
  uint32_t taken_ = 0;
  uint32_t published_ = 0;
  bool in_error_ = false;
};

// What one QP sees of its SRQ. A QP in error takes nothing any more: what is
// posted stays for the others.
class SrqPort final : public transport::ReceiveQueuePort {
 public:
  explicit SrqPort(SharedReceiveQueue* srq) : srq_(srq) {}
  bool Take(transport::RecvRequest* request) override { return open_ && srq_->Take(request); }
  void PutBack() override { srq_->PutBack(); }
  void set_open(bool open) { open_ = open; }

 private:
  SharedReceiveQueue* srq_;
  bool open_ = true;
};

}  // namespace verbena::nic
