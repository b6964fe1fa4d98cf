// SPDX-License-Identifier: Apache-2.0
//
// The device's side of a CQ and of a completion channel.
//
// Thread: under the shard's lock.
#pragma once

#include <cstdint>
#include <memory>

#include "nic_sim/abi/shared_memory.h"
#include "nic_sim/abi/work_queue.h"
#include "nic_sim/queues/shared_memory.h"
#include "transport/base/time.h"
#include "transport/transport_event.h"

namespace verbena::nic {

// The write end of a completion channel's pipe, shared by its CQs.
class EventChannel {
 public:
  EventChannel(int fd, uint64_t inode) : fd_(fd), inode_(inode) {}
  EventChannel(const EventChannel&) = delete;
  EventChannel& operator=(const EventChannel&) = delete;
  ~EventChannel();

  // False if the pipe is full; the event must be tried again.
  bool Write(uint64_t user_handle);
  uint64_t inode() const { return inode_; }

 private:
  int fd_;
  uint64_t inode_;
};

// Who a CQE belongs to.
struct CqeOrigin {
  uint32_t qpn = 0;
  uint16_t qp_slot = 0;
  uint32_t qp_generation = 0;
  uint32_t src_qpn = 0;
  bool of_xrc_srq = false;  // slot and generation are an SRQ's
};

class CompletionQueue {
 public:
  // Of IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN: `overwrites`.
  CompletionQueue(uint32_t slot, const Ring& ring, abi::CqRecord* record, uint64_t user_handle,
                  std::shared_ptr<EventChannel> channel, bool overwrites = false);

  // Writes one CQE. False: the CQ is full (overrun); from then on it is in
  // error and takes nothing.
  bool Write(const transport::Completion& completion, const CqeOrigin& origin,
             uint64_t timestamp_ns);

  // After a pass and a FullFence: sends the completion event if the CQ is armed
  // for what was written. When to call it again: the channel's pipe is full, or
  // moderation holds the event back; Never: nothing is left to do.
  transport::Time Notify(transport::Time now);
  // Events wait for `count` CQEs or `period` after the first; zeros: for neither.
  void SetModeration(uint32_t count, transport::Duration period);

  // Moves what is not consumed into `ring` and goes on there. EINVAL: it does not
  // fit; EBUSY: the ring before is not given back yet.
  int SwitchTo(const Ring& ring);
  // The ring before; false if there is none.
  bool TakeOldRing(Ring* ring);

  uint32_t slot() const { return slot_; }
  const Ring& ring() const { return ring_; }
  uint32_t slots() const { return ring_.location.slots; }
  uint32_t producer() const { return producer_; }
  uint64_t user_handle() const { return user_handle_; }
  bool in_error() const { return in_error_; }
  // As if it were full.
  void Fail() { in_error_ = true; }
  // As the application says; for people only.
  uint32_t consumer_hint() const { return record_->consumer.load(std::memory_order_relaxed); }
  uint32_t arm_hint() const { return record_->arm.load(std::memory_order_relaxed); }

  uint32_t qp_references = 0;
  uint32_t comp_events = 0;    // written to the channel
  uint32_t async_events = 0;   // written to the context's event pipe
  bool in_dirty_list = false;  // of the engine

 private:
  uint32_t slot_;
  Ring ring_;
  abi::CqRecord* record_;
  uint64_t user_handle_;
  std::shared_ptr<EventChannel> channel_;
  bool overwrites_;
  Ring old_ring_;  // during a resize; else without slots
  uint32_t producer_ = 0;
  // Consumer index when last looked at; a hint, only ever read when full.
  uint32_t consumer_ = 0;
  bool in_error_ = false;
  bool dirty_ = false;            // CQEs since the last Notify
  bool dirty_solicited_ = false;  // one of them was solicited or an error
  uint32_t moderation_count_ = 0;
  transport::Duration moderation_period_;
  uint32_t waiting_ = 0;  // CQEs since the last event, while it is held back
  uint32_t seen_producer_ = 0;
  transport::Time first_waiting_;
  transport::Time held_until_;

  bool HoldBack(transport::Time now);
};

}  // namespace verbena::nic
