// SPDX-License-Identifier: Apache-2.0
//
// The little of an IP host that a NIC on a real link needs besides RoCEv2: it
// answers ARP, neighbour solicitations and pings for the NIC's addresses, finds
// the MAC addresses of next hops, and tells frames for the NIC from all others.
// Frames come from anyone: each is checked, counted and, if wrong, left.
//
// Addresses that the host's kernel has as well (`answered_by_kernel`) are not
// answered for: it does that itself.
//
// Sans-I/O: time is a parameter, frames go in by Handle and out by
// PollTransmit. Nothing allocates after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "nic_sim/port/control_frames.h"
#include "nic_sim/port/neighbour_table.h"
#include "nic_sim/port/port_options.h"
#include "transport/base/time.h"
#include "transport/types.h"

namespace verbena::nic {

// X(name, meaning); group "wire" of `verbena counters`.
#define VERBENA_WIRE_COUNTERS(X)                                                   \
  X(rcv_frames, "frames received, of any kind and for anyone")                     \
  X(xmit_frames, "frames sent, RoCEv2 and others")                                 \
  X(rcv_roce, "of rcv_frames, RoCEv2 packets for this NIC")                        \
  X(rcv_other, "of rcv_frames, for others or of no use here: left")                \
  X(rcv_malformed, "of rcv_frames, damaged or forged: left")                       \
  X(rcv_spoofed, "of rcv_frames, from an address that cannot be outside: left")    \
  X(arp_rcv, "ARP requests and replies received")                                  \
  X(arp_xmit, "ARP requests and replies sent")                                     \
  X(nd_rcv, "neighbour solicitations and advertisements received")                 \
  X(nd_xmit, "neighbour solicitations and advertisements sent")                    \
  X(group_reports, "memberships in multicast groups told")                         \
  X(echo_replies, "pings answered")                                                \
  X(address_conflicts, "another host says that it has one of the NIC's addresses") \
  X(xmit_failed, "frames that the netdev did not take")

struct WireCounters {
#define X(name, meaning) uint64_t name = 0;
  VERBENA_WIRE_COUNTERS(X)
#undef X
};

class IpHost {
 public:
  struct Address {
    InterfaceAddress address;
    bool answered_by_kernel = false;
  };
  struct Config {
    transport::MacAddress mac;
    std::vector<Address> addresses;  // none of them loopback
    std::vector<transport::Gid> gateways;
  };
  explicit IpHost(const Config& config);

  enum class Verdict {
    kRoce,     // a UDP datagram to port 4791 of the NIC, cut to the length of its IP packet
    kReply,    // the frame was turned into an answer: send it
    kDone,     // taken note of
    kDropped,  // not for this host, or wrong; counted
  };
  // `*size`: of the frame, in and out.
  Verdict Handle(std::byte* frame, size_t* size, transport::Time now);

  // Announces the addresses, so that others forget who had them before.
  void Announce();
  bool PollTransmit(ControlFrame* frame);

  // Whom a packet to `destination` has to be sent to: itself, or a gateway.
  // Nothing: there is no way.
  std::optional<transport::Gid> NextHop(const transport::Gid& destination) const;
  bool HasAddress(const transport::Gid& gid) const { return Find(gid) != nullptr; }

  // Multicast groups whose RoCEv2 packets are let in.
  void AcceptGroup(const transport::Gid& group, bool accept);
  // Memberships that are told to routers and switches, counted; queries about them
  // are answered.
  void JoinGroup(const transport::Gid& group);
  void LeaveGroup(const transport::Gid& group);

  NeighbourTable& neighbours() { return neighbours_; }
  const NeighbourTable& neighbours() const { return neighbours_; }
  transport::Time next_deadline() const { return neighbours_.next_deadline(); }
  void HandleTimeout(transport::Time now) { neighbours_.HandleTimeout(now); }

  WireCounters& counters() { return counters_; }
  const WireCounters& counters() const { return counters_; }

 private:
  static constexpr size_t kMaxAnswers = 64;

  const Address* Find(const transport::Gid& gid) const;
  const transport::Gid& SourceFor(const transport::Gid& target) const;
  void Report(const transport::Gid& group, GroupReport report);
  Verdict HandleGroupQuery(const std::optional<transport::Gid>& asked);
  bool IsInGroup(const transport::Gid& group, const std::byte* frame) const;
  void HandleArp(std::span<const std::byte> payload, transport::Time now);
  Verdict HandleIpv4(std::byte* frame, size_t* size, bool to_group, transport::Time now);
  Verdict HandleIpv6(std::byte* frame, size_t* size, bool to_group, transport::Time now);
  void HandleNeighbour(const NeighbourMessage& message, const transport::MacAddress& sender,
                       transport::Time now);
  void Answer(const ControlFrame& frame);
  ControlFrame QuestionFrame(const NeighbourTable::Question& question);
  Verdict Malformed();
  Verdict Other();

  Config config_;
  std::unordered_set<transport::Gid> groups_;
  std::unordered_map<transport::Gid, uint32_t> joined_;  // times
  NeighbourTable neighbours_;
  // Ring of answers that wait for PollTransmit; more are dropped, as on a busy
  // host.
  std::vector<ControlFrame> answers_;
  size_t first_answer_ = 0;
  size_t answer_count_ = 0;
  WireCounters counters_;
};

}  // namespace verbena::nic
