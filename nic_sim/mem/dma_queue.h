// SPDX-License-Identifier: Apache-2.0
//
// DmaQueue: collects the copies of one engine pass and does them with few
// system calls; merges neighbours; keeps the order promised to applications:
// packets of a QP in order, the last 8 bytes of a message last, an aligned
// 8-byte word never torn, everything placed before its commit is reported.
//
// Two phases per pass: placements (received payload, atomics) and fetches
// (payload of packets to send). Placements are flushed before fetches, so that
// a READ sees the WRITEs before it. Nothing here allocates after construction;
// a full queue is flushed by the call that finds it full.
//
// What "order" means (docs/ARCHITECTURE.md, "Memory"):
// - A placement with `last` is the end of a message that somebody may watch in
//   memory: its last 8 bytes become visible after all that was placed before,
//   and before all that is placed later for the same owner.
// - Placements without `last` may become visible in any order among each other,
//   but none before an earlier `last`.
// - An aligned 8-byte word that lies wholly in one watched placement is never
//   torn. One that two packets share (a message at an unaligned address) can be,
//   and with /proc/PID/mem one at 8 to 63 of a page in which a message or its
//   end starts (address_space.cc says why).
// - Different owners have no order among each other.
//
// Thread: the engine, under the shard's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "nic_sim/mem/address_space.h"
#include "nic_sim/mem/region_table.h"
#include "transport/memory_port.h"
#include "transport/types.h"

namespace verbena::nic {

// Gets the results of placements of one QP, in ticket order, after all copies of
// the flush. A callback may call Place, Atomic, Fetch and Forget (of any owner);
// what it queues belongs to the next flush, up to the capacity of the queue.
class DmaOwner {
 public:
  virtual ~DmaOwner() = default;
  // All placements of this owner up to `ticket` are visible.
  virtual void OnPlaced(transport::Ticket ticket) = 0;
  virtual void OnAtomic(transport::Ticket ticket, uint64_t original) = 0;
  // This one failed and may be visible in part; the owner's later ones of this
  // flush are void: not placed and not reported.
  virtual void OnPlaceFailed(transport::Ticket ticket) = 0;
};

class DmaQueue {
 public:
  explicit DmaQueue(uint32_t capacity = 1024);
  ~DmaQueue();

  // `from` stays valid until FlushPlacements (or the flush by a full queue:
  // then owner callbacks come from inside this call; who cannot have that asks
  // room() first). An empty `from` is reported in its turn.
  // `watched` false: nobody looks at the memory before a completion tells (SEND,
  // READ response); then `last` means nothing and words may be torn meanwhile.
  void Place(const Extent& to, std::span<const std::byte> from, bool last, DmaOwner* owner,
             transport::Ticket ticket, bool watched = true);
  void Atomic(const Extent& at, const transport::AtomicOperation& operation, DmaOwner* owner,
              transport::Ticket ticket);
  bool has_placements() const;
  // Placements and atomics that can be added before a flush.
  uint32_t room() const;
  // From inside a callback it does nothing.
  void FlushPlacements();

  // `to` is written by FlushFetches. `tag` names the packet; all pieces of a
  // packet have the same tag and are added one after the other. Bytes beside a
  // small piece, in the same page, may be read too, and are dropped.
  void Fetch(const Extent& from, std::byte* to, uint32_t length, uint32_t tag);
  // Calls failed(tag) once for each tag with a piece that could not be read,
  // in ascending order of addition.
  template <typename Failed>
  void FlushFetches(Failed failed) {
    for (uint32_t tag : RunFetches()) failed(tag);
  }

  // From now on the checking builds (dma_claim.h) end the process also at an
  // extent that comes without a claim.
  void RequireClaims();

  // The owner is going away (QP destroyed): its entries are dropped.
  void Forget(DmaOwner* owner);

  struct Counters {
    // As queued.
    uint64_t placements = 0, fetches = 0, atomics = 0;
    uint64_t bytes_placed = 0, bytes_fetched = 0;
    uint64_t system_calls = 0;
    uint64_t failures = 0;     // placements, atomics and fetches; void ones not
    uint64_t slow_copies = 0;  // took > 5 ms: the memory's owner holds us up

    void Add(const Counters& other) {
      placements += other.placements;
      fetches += other.fetches;
      atomics += other.atomics;
      bytes_placed += other.bytes_placed;
      bytes_fetched += other.bytes_fetched;
      system_calls += other.system_calls;
      failures += other.failures;
      slow_copies += other.slow_copies;
    }
  };
  const Counters& counters() const;

 private:
  std::span<const uint32_t> RunFetches();
  struct State;
  std::unique_ptr<State> state_;
};

// The MemoryPort of one QP.
class QpMemory final : public transport::MemoryPort {
 public:
  // `qpn` outlives it; nullptr: of no QP that could bind windows.
  QpMemory(RegionTable& table, DmaQueue& dma, PdId pd, DmaOwner* owner,
           const transport::Qpn* qpn = nullptr)
      : table_(table), dma_(dma), pd_(pd), receive_pd_(pd), owner_(owner), qpn_(qpn) {}
  // XRC: of the SRQ that a request names.
  void set_pd(PdId pd) { pd_ = receive_pd_ = pd; }
  // PD of buffers of receives, where it is another (SRQ).
  void set_receive_pd(PdId pd) { receive_pd_ = pd; }

  transport::MemoryStatus CheckKey(uint32_t key, transport::MemoryAccess access) override;
  transport::MemoryStatus Check(uint32_t key, uint64_t address, uint64_t length,
                                transport::MemoryAccess access) override;
  transport::MemoryStatus Place(const transport::MemorySegment& to,
                                std::span<const std::byte> bytes, transport::MemoryAccess access,
                                bool last, transport::Ticket* ticket) override;
  transport::MemoryStatus Atomic(uint32_t rkey, uint64_t address,
                                 const transport::AtomicOperation& operation,
                                 transport::Ticket* ticket) override;
  transport::MemoryStatus Invalidate(uint32_t rkey) override;
  transport::MemoryStatus Bind(const transport::WindowBind& bind) override;

 private:
  uint32_t qpn() const { return qpn_ != nullptr ? qpn_->value() : 0; }

  RegionTable& table_;
  DmaQueue& dma_;
  PdId PdOf(transport::MemoryAccess access) const {
    return access == transport::MemoryAccess::kLocalWrite ? receive_pd_ : pd_;
  }

  PdId pd_;
  PdId receive_pd_;
  DmaOwner* owner_;
  const transport::Qpn* qpn_;
  transport::Ticket next_ticket_ = 1;
};

}  // namespace verbena::nic
