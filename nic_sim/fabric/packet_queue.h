// SPDX-License-Identifier: Apache-2.0
//
// What the fabric knows of a packet on its way, and a FIFO of packets linked
// through it: a queue needs no memory of its own, so it never overflows (its
// bound is the packet pool) and never allocates. A packet is in at most one
// queue. Thread: under the shard's lock.
#pragma once

#include <rte_mbuf.h>

#include <cstddef>
#include <cstdint>

#include "nic_sim/fabric/packet.h"
#include "transport/base/time.h"

namespace verbena::nic {

// The side of a port, or of the switch.
enum class Direction : uint8_t { kTx, kRx };

// In the mbuf's private area behind PacketMeta.
struct PacketTransit {
  rte_mbuf* next = nullptr;  // of PacketQueue
  transport::Time release;   // while the fault stage holds it
  uint32_t flow_qpn = 0;     // destination QPN
  uint32_t passes_left = 0;  // reorder: later packets that go first
  uint32_t hold_order = 0;   // hold: counts up
  PortId source = 0;
  PortId destination = 0;
  Direction direction = Direction::kTx;
};
inline constexpr size_t kTransitOffset = 48;
static_assert(sizeof(PacketMeta) <= kTransitOffset);
static_assert(kTransitOffset + sizeof(PacketTransit) <= kPacketPrivateBytes);

inline PacketTransit& TransitOf(rte_mbuf* packet) {
  return *reinterpret_cast<PacketTransit*>(static_cast<std::byte*>(rte_mbuf_to_priv(packet)) +
                                           kTransitOffset);
}

class PacketQueue {
 public:
  PacketQueue() = default;
  // Owns its packets.
  ~PacketQueue() { Clear(); }
  PacketQueue(const PacketQueue&) = delete;
  PacketQueue& operator=(const PacketQueue&) = delete;

  bool empty() const { return head_ == nullptr; }
  size_t size() const { return size_; }
  rte_mbuf* front() const { return head_; }

  void Push(rte_mbuf* packet) {
    TransitOf(packet).next = nullptr;
    if (tail_ == nullptr) {
      head_ = packet;
    } else {
      TransitOf(tail_).next = packet;
    }
    tail_ = packet;
    ++size_;
  }

  // nullptr when empty.
  rte_mbuf* Pop() {
    rte_mbuf* packet = head_;
    if (packet == nullptr) return nullptr;
    head_ = TransitOf(packet).next;
    if (head_ == nullptr) tail_ = nullptr;
    --size_;
    return packet;
  }

  // Moves all of `other` behind its own.
  void Append(PacketQueue* other) {
    while (rte_mbuf* packet = other->Pop()) Push(packet);
  }

  // Moves the packets for which take(packet) is true to `out`, in order.
  template <typename Predicate>
  void Extract(Predicate take, PacketQueue* out) {
    PacketQueue rest;
    while (rte_mbuf* packet = Pop()) {
      if (take(packet)) {
        out->Push(packet);
      } else {
        rest.Push(packet);
      }
    }
    Append(&rest);
  }

  void Clear() {
    while (rte_mbuf* packet = Pop()) rte_pktmbuf_free(packet);
  }

 private:
  rte_mbuf* head_ = nullptr;
  rte_mbuf* tail_ = nullptr;
  size_t size_ = 0;
};

}  // namespace verbena::nic
