// SPDX-License-Identifier: Apache-2.0
//
// Wire: a NIC's way to the outside. Between the fabric and a FramePort: writes
// destination MAC addresses, lets packets wait for them, answers what a host on
// the link has to answer, hands RoCEv2 packets for the NIC to the fabric.
//
// Packets that wait are bounded: per next hop and in all.
//
// Thread: under the fabric's lock. Nothing allocates after construction.
#pragma once

#include <rte_mbuf.h>
#include <rte_mempool.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "nic_sim/fabric/packet_queue.h"
#include "nic_sim/port/frame_port.h"
#include "nic_sim/port/ip_host.h"
#include "transport/base/time.h"
#include "transport/types.h"
#include "transport/wire/ip_udp.h"

namespace verbena::nic {

struct WireStatus {
  WireCounters counters;
  size_t neighbours = 0;
};

class Wire {
 public:
  static constexpr size_t kBurst = 32;
  static constexpr size_t kMaxWaitingPerHop = 64;
  static constexpr size_t kMaxWaiting = 1024;
  // A full netdev is tried again after this. One that takes nothing for so long
  // is down: what is to go there is lost, as on a cable that is cut.
  static constexpr transport::Duration kRetry = transport::Duration::Microseconds(100);
  static constexpr transport::Duration kStuck = transport::Duration::Milliseconds(200);

  // `pool`: for ARP and the like. Announces the NIC's addresses.
  Wire(const IpHost::Config& config, std::unique_ptr<FramePort> port, rte_mempool* pool);
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  // Is there a way from one of the NIC's addresses to another?
  bool CanReach(const transport::Gid& source, const transport::Gid& destination) const;
  bool HasAddress(const transport::Gid& gid) const { return host_.HasAddress(gid); }
  // Frames to the group's MAC address are for the NIC, or no longer.
  void AcceptGroup(const transport::Gid& group, bool accept) { host_.AcceptGroup(group, accept); }
  // Starts to find the next hop, so that the first packet need not wait.
  // True: it is known. The question goes out with Flush.
  bool Prepare(const transport::Gid& destination, transport::Time now);
  // See IpHost.
  void ReportGroup(const transport::Gid& group, bool join);

  enum class Way {
    kReady,    // the destination MAC is written
    kWaits,    // taken over; PopResolved or PopLost gives it back
    kFull,     // too many wait
    kNoRoute,  // no address of the NIC is on that link, and there is no gateway
  };
  Way FindWay(rte_mbuf* packet, const transport::Gid& source, const transport::Gid& destination,
              transport::Time now);
  // Packets whose way was found (ask FindWay again), in order; nullptr: none.
  rte_mbuf* PopResolved() { return resolved_.Pop(); }
  // Packets whose next hop did not answer.
  rte_mbuf* PopLost() { return lost_.Pop(); }

  // The netdev has no room: send nothing more, it is tried again by HandleTimeout.
  bool congested() const { return queued_ != 0; }
  bool FitsMtu(const rte_mbuf* packet) const {
    return packet->data_len <= port_->mtu() + transport::EthernetHeader::kBytes;
  }
  // Takes over a packet with destination MAC and ICRC; it goes out with Flush.
  void Send(rte_mbuf* packet) { Enqueue(packet, true); }
  // Sends what Send took and what the host has to say. Gives the number of the
  // former that are lost: the queue is full, or the netdev takes nothing at all.
  size_t Flush(transport::Time now);

  // What is neither for the NIC nor answered goes to `out` too, PacketMeta::raw.
  void set_takes_all(bool all) { takes_all_ = all; }

  // One burst of frames. RoCEv2 packets for the NIC go to `out` (room for
  // kBurst), cut to their length; not yet parsed. True: there may be more.
  bool Receive(std::span<rte_mbuf*> out, size_t* count, transport::Time now);

  transport::Time next_deadline() const { return std::min(host_.next_deadline(), retry_at_); }
  void HandleTimeout(transport::Time now);

  FramePort& port() { return *port_; }
  const FramePort& port() const { return *port_; }
  WireStatus status() const {
    return {.counters = host_.counters(), .neighbours = host_.neighbours().size()};
  }

 private:
  void TakeOutcomes();
  void SendControlFrames();
  void Enqueue(rte_mbuf* packet, bool is_roce);
  void Lose(rte_mbuf* packet, bool is_roce);

  IpHost host_;
  std::unique_ptr<FramePort> port_;
  rte_mempool* pool_;
  std::vector<PacketQueue> waiting_;  // by the neighbour's slot
  size_t waiting_count_ = 0;
  PacketQueue resolved_;
  PacketQueue lost_;
  // Ring of what goes out next.
  static constexpr size_t kMaxQueued = 512;
  std::array<rte_mbuf*, kMaxQueued> queue_{};
  std::array<bool, kMaxQueued> is_roce_{};
  size_t first_ = 0;
  size_t queued_ = 0;
  size_t roce_lost_ = 0;
  bool takes_all_ = false;
  transport::Time retry_at_ = transport::Time::Never();
  transport::Time last_progress_;
};

}  // namespace verbena::nic
