// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/flow_table.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <tuple>

#include "transport/base/byteorder.h"
#include "transport/wire/ip_udp.h"

namespace verbena::nic {

using transport::LoadBe16;

namespace {

// enum ibv_flow_spec_type.
constexpr uint32_t kEth = 0x20;
constexpr uint32_t kIpv4 = 0x30;
constexpr uint32_t kIpv6 = 0x31;
constexpr uint32_t kIpv4Ext = 0x32;
constexpr uint32_t kEsp = 0x34;
constexpr uint32_t kTcp = 0x40;
constexpr uint32_t kUdp = 0x41;
constexpr uint32_t kVxlan = 0x50;
constexpr uint32_t kGre = 0x51;
constexpr uint32_t kMpls = 0x60;
constexpr uint32_t kInner = 0x100;
constexpr uint32_t kActionHandle = 0x1002;

constexpr size_t kVlanTagAt = 14;    // in an ibv_flow_eth_filter
constexpr size_t kEtherTypeAt = 12;  // likewise
constexpr uint8_t kProtocolTcp = 6;
constexpr uint8_t kProtocolUdp = 17;

constexpr bool IsIpv4(uint32_t type) { return type == kIpv4 || type == kIpv4Ext; }
constexpr uint32_t LayerOf(uint32_t type) { return type & 0xf0; }

// A frame's fields, laid out like the filters.
struct Layers {
  std::array<std::byte, 40> eth{};
  std::array<std::byte, 40> ip{};
  std::array<std::byte, 40> ports{};
  bool has_vlan = false;
  bool is_ipv4 = false;
  bool is_ipv6 = false;
  uint8_t protocol = 0;  // of `ports`; 0: there are none
};

void ReadPorts(std::span<const std::byte> rest, uint8_t protocol, Layers* layers) {
  const size_t header = protocol == kProtocolTcp ? 20 : transport::UdpHeader::kBytes;
  if ((protocol != kProtocolTcp && protocol != kProtocolUdp) || rest.size() < header) return;
  layers->protocol = protocol;
  std::memcpy(&layers->ports[0], &rest[2], 2);
  std::memcpy(&layers->ports[2], &rest[0], 2);
}

void ReadIpv4(std::span<const std::byte> packet, Layers* layers) {
  constexpr size_t kLeast = transport::Ipv4Header::kBytes;
  if (packet.size() < kLeast || (packet[0] >> 4) != std::byte{4}) return;
  const size_t header = std::to_integer<size_t>(packet[0] & std::byte{15}) * 4;
  if (header < kLeast || packet.size() < header) return;
  layers->is_ipv4 = true;
  std::memcpy(&layers->ip[0], &packet[12], 8);
  layers->ip[8] = packet[9];
  layers->ip[9] = packet[1];
  layers->ip[10] = packet[8];
  layers->ip[11] = packet[6] >> 5;
  const bool is_later_fragment = (LoadBe16(&packet[6]) & 0x1fff) != 0;
  if (!is_later_fragment) {
    ReadPorts(packet.subspan(header), std::to_integer<uint8_t>(packet[9]), layers);
  }
}

void ReadIpv6(std::span<const std::byte> packet, Layers* layers) {
  constexpr size_t kHeader = transport::Ipv6Header::kBytes;
  if (packet.size() < kHeader || (packet[0] >> 4) != std::byte{6}) return;
  layers->is_ipv6 = true;
  std::memcpy(&layers->ip[0], &packet[8], 32);
  // The flow label's 20 bits, in network byte order.
  layers->ip[33] = packet[1] & std::byte{15};
  std::memcpy(&layers->ip[34], &packet[2], 2);
  layers->ip[36] = packet[6];
  layers->ip[37] = (packet[0] << 4) | (packet[1] >> 4);
  layers->ip[38] = packet[7];
  ReadPorts(packet.subspan(kHeader), std::to_integer<uint8_t>(packet[6]), layers);
}

Layers Read(std::span<const std::byte> frame) {
  Layers layers;
  if (frame.size() < transport::EthernetHeader::kBytes) return layers;
  std::memcpy(layers.eth.data(), frame.data(), 12);
  size_t l3 = transport::EthernetHeader::kBytes;
  if (LoadBe16(&frame[l3 - 2]) == transport::kEtherTypeVlan &&
      frame.size() >= l3 + transport::VlanTag::kBytes) {
    layers.has_vlan = true;
    std::memcpy(&layers.eth[kVlanTagAt], &frame[l3], 2);
    l3 += transport::VlanTag::kBytes;
  }
  std::memcpy(&layers.eth[kEtherTypeAt], &frame[l3 - 2], 2);
  const uint16_t ether_type = LoadBe16(&frame[l3 - 2]);
  if (ether_type == transport::kEtherTypeIpv4) ReadIpv4(frame.subspan(l3), &layers);
  if (ether_type == transport::kEtherTypeIpv6) ReadIpv6(frame.subspan(l3), &layers);
  return layers;
}

bool Agrees(const abi::FlowSpec& spec, const std::array<std::byte, 40>& fields, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    if ((std::to_integer<uint8_t>(fields[i]) & spec.mask[i]) != (spec.value[i] & spec.mask[i])) {
      return false;
    }
  }
  return true;
}

bool Agrees(const abi::FlowSpec& spec, const Layers& layers) {
  switch (spec.type) {
    case kEth:
      if ((spec.mask[kVlanTagAt] | spec.mask[kVlanTagAt + 1]) != 0 && !layers.has_vlan) {
        return false;
      }
      return Agrees(spec, layers.eth, 16);
    case kIpv4:
      return layers.is_ipv4 && Agrees(spec, layers.ip, 8);
    case kIpv4Ext:
      return layers.is_ipv4 && Agrees(spec, layers.ip, 12);
    case kIpv6:
      return layers.is_ipv6 && Agrees(spec, layers.ip, 39);
    case kTcp:
      return layers.protocol == kProtocolTcp && Agrees(spec, layers.ports, 4);
    case kUdp:
      return layers.protocol == kProtocolUdp && Agrees(spec, layers.ports, 4);
    default:
      return false;
  }
}

// enum ibv_rx_hash_fields.
constexpr uint32_t kHashSourceIpv4 = 1 << 0;
constexpr uint32_t kHashDestinationIpv4 = 1 << 1;
constexpr uint32_t kHashSourceIpv6 = 1 << 2;
constexpr uint32_t kHashDestinationIpv6 = 1 << 3;
constexpr uint32_t kHashSourceTcp = 1 << 4;
constexpr uint32_t kHashDestinationTcp = 1 << 5;
constexpr uint32_t kHashSourceUdp = 1 << 6;
constexpr uint32_t kHashDestinationUdp = 1 << 7;

// Source address, destination address, source port, destination port, as far as
// the frame has them and they are asked for.
uint32_t HashOf(const RssTable& rss, const Layers& layers) {
  std::array<std::byte, 36> input{};
  size_t bytes = 0;
  const auto add = [&](bool wanted, const std::byte* from, size_t count) {
    if (!wanted) return;
    std::memcpy(&input[bytes], from, count);
    bytes += count;
  };
  const auto asked = [&rss](uint32_t field) { return (rss.fields & field) != 0; };
  add(layers.is_ipv4 && asked(kHashSourceIpv4), &layers.ip[0], 4);
  add(layers.is_ipv4 && asked(kHashDestinationIpv4), &layers.ip[4], 4);
  add(layers.is_ipv6 && asked(kHashSourceIpv6), &layers.ip[0], 16);
  add(layers.is_ipv6 && asked(kHashDestinationIpv6), &layers.ip[16], 16);
  const bool is_tcp = layers.protocol == kProtocolTcp;
  const bool is_udp = layers.protocol == kProtocolUdp;
  add((is_tcp && asked(kHashSourceTcp)) || (is_udp && asked(kHashSourceUdp)), &layers.ports[2], 2);
  add((is_tcp && asked(kHashDestinationTcp)) || (is_udp && asked(kHashDestinationUdp)),
      &layers.ports[0], 2);
  return ToeplitzHash(rss.key, std::span(input).first(bytes));
}

bool IsSameSpec(const abi::FlowSpec& a, const abi::FlowSpec& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

bool AsksForTheSame(const FlowRule& a, const FlowRule& b) {
  return a.type == b.type && a.priority == b.priority &&
         std::equal(a.specs.begin(), a.specs.end(), b.specs.begin(), b.specs.end(), IsSameSpec);
}

// Normal rules, then the default of multicast, then that of all.
int Rank(FlowType type) {
  return type == FlowType::kMcDefault ? 1 : type == FlowType::kAllDefault ? 2 : 0;
}

// An ether type that is asked for whole must be that of the IP layer asked for.
bool IsEtherTypeOf(const abi::FlowSpec& eth, uint32_t ip_type) {
  uint16_t mask;
  std::memcpy(&mask, &eth.mask[kEtherTypeAt], sizeof mask);
  if (mask != 0xffff) return true;
  const uint16_t wanted = LoadBe16(reinterpret_cast<const std::byte*>(&eth.value[kEtherTypeAt]));
  return wanted == (IsIpv4(ip_type) ? transport::kEtherTypeIpv4 : transport::kEtherTypeIpv6);
}

}  // namespace

int CheckFlowSpecs(std::span<const abi::FlowSpec> specs) {
  const abi::FlowSpec* eth = nullptr;
  uint32_t ip = 0;
  uint32_t seen = 0;
  for (const abi::FlowSpec& spec : specs) {
    switch (spec.type) {
      case kEth:
        eth = &spec;
        break;
      case kIpv4:
      case kIpv4Ext:
      case kIpv6:
        ip = spec.type;
        break;
      case kTcp:
      case kUdp:
        break;
      case kEsp:
      case kVxlan:
      case kGre:
      case kMpls:
      case kActionHandle:
        return EOPNOTSUPP;
      default:
        return (spec.type & kInner) != 0 ? EOPNOTSUPP : EINVAL;
    }
    // One of each layer.
    const uint32_t layer = 1u << (LayerOf(spec.type) >> 4);
    if ((seen & layer) != 0) return EINVAL;
    seen |= layer;
  }
  return eth != nullptr && ip != 0 && !IsEtherTypeOf(*eth, ip) ? EINVAL : 0;
}

uint32_t ToeplitzHash(std::span<const uint8_t, 40> key, std::span<const std::byte> input) {
  uint32_t hash = 0;
  // The 32 bits of the key that begin at the input's bit at hand.
  uint32_t window =
      uint32_t{key[0]} << 24 | uint32_t{key[1]} << 16 | uint32_t{key[2]} << 8 | key[3];
  for (size_t i = 0; i < input.size() && i + 4 < key.size(); ++i) {
    for (int bit = 7; bit >= 0; --bit) {
      if ((std::to_integer<uint32_t>(input[i]) >> bit & 1) != 0) hash ^= window;
      window = window << 1 | (uint32_t{key[i + 4]} >> bit & 1);
    }
  }
  return hash;
}

void FlowTable::Add(uint32_t id, const FlowRule& rule) {
  const auto key = [](const FlowRule& r) { return std::tuple(Rank(r.type), r.priority); };
  const auto at =
      std::upper_bound(rules_.begin(), rules_.end(), rule,
                       [&](const FlowRule& r, const Entry& e) { return key(r) < key(e.rule); });
  rules_.insert(at, Entry{.id = id, .rule = rule});
  if (rule.type == FlowType::kSniffer) ++sniffers_;
}

bool FlowTable::Remove(uint32_t id) {
  const auto found =
      std::find_if(rules_.begin(), rules_.end(), [id](const Entry& e) { return e.id == id; });
  if (found == rules_.end()) return false;
  if (found->rule.type == FlowType::kSniffer) --sniffers_;
  rules_.erase(found);
  return true;
}

void FlowTable::Take(const FlowRule& rule, std::span<const std::byte> frame,
                     std::vector<Target>* targets) {
  if (rule.counters != nullptr) {
    ++rule.counters->packets;
    rule.counters->bytes += frame.size();
  }
  if (rule.drop) return;
  uint32_t qpn = rule.qpn;
  if (rule.rss != nullptr) {
    qpn = rule.rss->qpns[HashOf(*rule.rss, Read(frame)) & (rule.rss->qpns.size() - 1)];
  }
  for (const Target& target : *targets) {
    if (target.qpn == qpn) return;
  }
  targets->push_back({.shard = rule.shard, .qpn = qpn, .tag = rule.tag});
}

void FlowTable::Match(std::span<const std::byte> frame, std::vector<Target>* targets) {
  if (rules_.empty() || frame.size() < transport::EthernetHeader::kBytes) return;
  const Layers layers = Read(frame);
  const bool to_many = (frame[0] & std::byte{1}) != std::byte{0};
  const FlowRule* taker = nullptr;  // has taken it for good
  for (const Entry& entry : rules_) {
    const FlowRule& rule = entry.rule;
    if (rule.type == FlowType::kSniffer) continue;
    if (taker != nullptr) {
      if (AsksForTheSame(rule, *taker)) Take(rule, frame, targets);
      continue;
    }
    if (rule.type == FlowType::kMcDefault && !to_many) continue;
    const bool agrees =
        std::all_of(rule.specs.begin(), rule.specs.end(),
                    [&](const abi::FlowSpec& spec) { return Agrees(spec, layers); });
    if (!agrees) continue;
    Take(rule, frame, targets);
    if (!rule.dont_trap) taker = &rule;
  }
}

void FlowTable::MatchSniffers(std::span<const std::byte> frame, std::vector<Target>* targets) {
  if (sniffers_ == 0) return;
  for (const Entry& entry : rules_) {
    if (entry.rule.type == FlowType::kSniffer) Take(entry.rule, frame, targets);
  }
}

}  // namespace verbena::nic
