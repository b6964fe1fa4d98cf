// SPDX-License-Identifier: Apache-2.0
//
// Flow steering: which raw packet QPs get the frames of a port (ibv_create_flow(3)).
// Packets that the NIC's own transport takes are shown to sniffers only.
//
// Thread: the owner's (the fabric's lock).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "nic_sim/fabric/packet.h"

namespace verbena::nic {

struct FlowCounters {
  uint64_t packets = 0;
  uint64_t bytes = 0;
};

// Numbers of enum ibv_flow_attr_type.
enum class FlowType : uint8_t { kNormal = 0, kAllDefault = 1, kMcDefault = 2, kSniffer = 3 };

// Receive side scaling.
struct RssTable {
  uint32_t fields = 0;  // enum ibv_rx_hash_fields
  std::array<uint8_t, 40> key{};
  std::vector<uint32_t> qpns;  // a power of two of them
};

// The Toeplitz hash of RSS.
uint32_t ToeplitzHash(std::span<const uint8_t, 40> key, std::span<const std::byte> input);

struct FlowRule {
  FlowType type = FlowType::kNormal;
  uint16_t priority = 0;   // 0 goes first
  bool dont_trap = false;  // the frame looks for further rules
  bool drop = false;
  uint32_t tag = 0;
  ShardId shard = 0;
  uint32_t qpn = 0;  // or
  std::shared_ptr<const RssTable> rss;
  std::vector<abi::FlowSpec> specs;
  std::shared_ptr<FlowCounters> counters;  // or null
};

// 0, EINVAL (a type that does not exist, one twice, layers that exclude each
// other), EOPNOTSUPP (a type that is not looked at).
int CheckFlowSpecs(std::span<const abi::FlowSpec> specs);

// The rules of one port.
class FlowTable {
 public:
  struct Target {
    ShardId shard = 0;
    uint32_t qpn = 0;
    uint32_t tag = 0;
  };

  void Add(uint32_t id, const FlowRule& rule);
  bool Remove(uint32_t id);
  size_t size() const { return rules_.size(); }
  bool has_sniffers() const { return sniffers_ != 0; }

  // Who gets a frame, each QP once. The first normal rule of the lowest priority
  // number that matches takes it, and with it those that ask for the same; then
  // the rule for all multicast, then that for all. Counts.
  void Match(std::span<const std::byte> frame, std::vector<Target>* targets);
  // Those that see everything.
  void MatchSniffers(std::span<const std::byte> frame, std::vector<Target>* targets);

 private:
  struct Entry {
    uint32_t id = 0;
    FlowRule rule;
  };
  static void Take(const FlowRule& rule, std::span<const std::byte> frame,
                   std::vector<Target>* targets);

  std::vector<Entry> rules_;  // by type and priority, then age
  uint32_t sniffers_ = 0;
};

}  // namespace verbena::nic
