// SPDX-License-Identifier: Apache-2.0
//
// Deadlines of QPs in a binary heap. Deadlines mostly move later (an ACK pushes
// the retransmission timer out), so an entry may be earlier than the QP's real
// deadline; whoever pops it looks again. Allocates only in Reserve.
//
// Thread: under the shard's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "nic_sim/qp/qp.h"
#include "transport/base/time.h"

namespace verbena::nic {

class TimerHeap {
 public:
  // Room for `qps` entries.
  void Reserve(size_t qps) { heap_.reserve(qps); }

  transport::Time next() const {
    return heap_.empty() ? transport::Time::Never() : heap_.front()->heap_deadline;
  }

  // Makes sure that the QP is popped at `deadline` or earlier.
  void Schedule(Qp& qp, transport::Time deadline) {
    if (deadline.IsNever()) return;
    if (qp.heap_index == Qp::kNotInHeap) {
      qp.heap_deadline = deadline;
      qp.heap_index = static_cast<uint32_t>(heap_.size());
      heap_.push_back(&qp);
      Up(qp.heap_index);
    } else if (deadline < qp.heap_deadline) {
      qp.heap_deadline = deadline;
      Up(qp.heap_index);
    }
  }

  // Takes the earliest entry out if it is due; nullptr otherwise.
  Qp* PopDue(transport::Time now) {
    if (heap_.empty() || heap_.front()->heap_deadline > now) return nullptr;
    Qp* qp = heap_.front();
    Remove(*qp);
    return qp;
  }

  void Remove(Qp& qp) {
    const uint32_t index = qp.heap_index;
    if (index == Qp::kNotInHeap) return;
    qp.heap_index = Qp::kNotInHeap;
    Qp* last = heap_.back();
    heap_.pop_back();
    if (last == &qp) return;
    heap_[index] = last;
    last->heap_index = index;
    Up(index);
    Down(last->heap_index);
  }

  template <typename Visitor>
  void ForEach(Visitor visit) const {
    for (Qp* qp : heap_) visit(*qp);
  }

 private:
  void Swap(uint32_t a, uint32_t b) {
    std::swap(heap_[a], heap_[b]);
    heap_[a]->heap_index = a;
    heap_[b]->heap_index = b;
  }
  void Up(uint32_t i) {
    while (i != 0) {
      const uint32_t parent = (i - 1) / 2;
      if (heap_[parent]->heap_deadline <= heap_[i]->heap_deadline) return;
      Swap(i, parent);
      i = parent;
    }
  }
  void Down(uint32_t i) {
    for (;;) {
      uint32_t least = i;
      for (uint32_t child = 2 * i + 1; child <= 2 * i + 2; ++child) {
        if (child < heap_.size() && heap_[child]->heap_deadline < heap_[least]->heap_deadline) {
          least = child;
        }
      }
      if (least == i) return;
      Swap(i, least);
      i = least;
    }
  }

  std::vector<Qp*> heap_;
};

}  // namespace verbena::nic
