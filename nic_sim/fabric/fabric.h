// SPDX-License-Identifier: Apache-2.0
//
// Fabric: joins the ports of the simulated NICs through a switch. The way of a
// packet, also on loopback to its own port:
//   address look-up (no owner: no_route, an xmit_discard; nothing else sees it)
//   sending side:    capture "before", rules, capture "after", xmit counters
//   receiving side:  capture "before", rules, capture "after", rcv counters
//   receive queue of the port
// So port_xmit_packets and port_rcv_packets count what a rule let pass, copies
// included, and equal the outbound and inbound packets of a capture "after".
// What rules take away is in no packet counter but in drops (fault, port_down)
// and in port_xmit_discards (sending side) or port_rcv_errors (receiving side);
// a capture "before" has it, and has no copies made on its side.
//
// Receive queues are linked through the packets: they cannot overflow. Rules are
// described in fault_rule.h.
//
// Thread: under the shard's lock. Nothing allocates after AddPort but control
// calls (rules, capture).
#pragma once

#include <rte_mbuf.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nic_sim/fabric/packet.h"
#include "nic_sim/stats/counters.h"
#include "transport/base/time.h"
#include "transport/types.h"

namespace verbena::nic {

class CaptureFile;  // capture.h

struct PortConfig {
  std::string device;  // "verbena0"
  transport::MacAddress mac;
  std::vector<transport::Gid> gids;  // index = GID index; zero GIDs are free
};

enum class CaptureStage { kBefore, kAfter };

class Fabric {
 public:
  // strict: ICRCs are always computed and checked, also inside the daemon.
  explicit Fabric(bool strict);
  ~Fabric();

  PortId AddPort(const PortConfig& config);
  size_t port_count() const;
  const PortConfig& config(PortId port) const;
  PortCounters& counters(PortId port);
  bool link_up(PortId port) const;  // false while a `down` rule holds

  // MAC of the port that owns `gid`, for the headers; nullptr: no route.
  const transport::MacAddress* Resolve(const transport::Gid& gid) const;

  // Takes the packets over. Each has Ethernet to pad, plus 4 bytes of room for
  // the ICRC (PacketMeta::icrc_present says if they are filled). A packet
  // without one that is not `strict` becomes trusted.
  void Transmit(PortId port, std::span<rte_mbuf* const> packets, transport::Time now);
  // Takes up to out.size() received packets; the caller frees them. ICRC: must
  // be checked by the caller unless PacketMeta::trusted.
  size_t Receive(PortId port, std::span<rte_mbuf*> out);
  bool has_received(PortId port) const;

  // Packets that rules hold or that a removed rule held, ends of `down` rules.
  transport::Time next_deadline() const;
  void HandleTimeout(transport::Time now);

  // Fault rules: 'ACTION [key=value ...]'. Add gives the id (> 0), or 0 with a
  // sentence in *error that names the bad word.
  uint32_t AddRule(std::string_view text, std::string* error);
  nlohmann::json ListRules() const;
  // Removes rule `id`, or all with 0; gives the number removed.
  uint32_t ClearRules(uint32_t id);

  // Starts writing packets of `port` (or all: kAllPorts) to `fd`, which the
  // capture owns. Gives an id; 0: 16 captures run already, no such port, or no
  // thread (`fd` is closed). `count` 0: no limit.
  static constexpr PortId kAllPorts = 0xffff;
  uint32_t StartCapture(int fd, PortId port, CaptureStage stage, uint64_t count);
  // It has ended by itself: its count is reached or a write failed.
  bool CaptureDone(uint32_t id) const;
  // Ends it. CaptureFile::Finish() then waits until all is written and gives
  // the counts; call it without the shard's lock.
  std::unique_ptr<CaptureFile> DetachCapture(uint32_t id);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace verbena::nic
