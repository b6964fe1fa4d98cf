// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/port/ip_host.h"

#include <algorithm>

#include "transport/base/byteorder.h"
#include "transport/wire/ip_udp.h"

namespace verbena::nic {

using namespace transport;  // NOLINT: the wire's names

namespace {

constexpr uint8_t kEchoRequest = 8;
constexpr uint8_t kEchoReply = 0;
constexpr uint8_t kEchoRequestV6 = 128;
constexpr uint8_t kEchoReplyV6 = 129;
constexpr size_t kIcmpHeaderBytes = 8;

constexpr MacAddress kNobody;
const Gid kAllNodes = [] {
  Gid::Bytes bytes{};
  bytes[0] = std::byte{0xff};
  bytes[1] = std::byte{0x02};
  bytes[15] = std::byte{0x01};
  return Gid(bytes);
}();

bool IsUsableSource(const Gid& source) {
  return !source.IsMulticast() && !source.IsZero() && source != Gid::FromIpv4(0) &&
         source != Gid::FromIpv4(0xffffffff) && !IsLoopback(source);
}

// The answer goes back to where the frame came from.
void ReturnToSender(std::byte* frame, const MacAddress& own) {
  MacAddress::Load(frame + MacAddress::kBytes).Store(frame);
  own.Store(frame + MacAddress::kBytes);
}

}  // namespace

IpHost::IpHost(const Config& config) : config_(config), answers_(kMaxAnswers) {}

const IpHost::Address* IpHost::Find(const Gid& gid) const {
  for (const Address& own : config_.addresses) {
    if (own.address.gid == gid) return &own;
  }
  return nullptr;
}

std::optional<Gid> IpHost::NextHop(const Gid& destination) const {
  if (destination.IsMulticast() || destination.IsZero() || IsLoopback(destination))
    return std::nullopt;
  for (const Address& own : config_.addresses) {
    if (IsOnLink(own.address, destination)) return destination;
  }
  if (destination.IsLinkLocal()) return std::nullopt;
  for (const Gid& gateway : config_.gateways) {
    if (gateway.IsV4Mapped() == destination.IsV4Mapped()) return gateway;
  }
  return std::nullopt;
}

// The address that a question about `target` comes from.
const Gid& IpHost::SourceFor(const Gid& target) const {
  const Gid* fallback = nullptr;
  for (const Address& own : config_.addresses) {
    if (IsOnLink(own.address, target)) return own.address.gid;
    if (fallback == nullptr && own.address.gid.IsV4Mapped() == target.IsV4Mapped()) {
      fallback = &own.address.gid;
    }
  }
  static const Gid kNone;
  return fallback != nullptr ? *fallback : kNone;
}

IpHost::Verdict IpHost::Malformed() {
  ++counters_.rcv_malformed;
  return Verdict::kDropped;
}

IpHost::Verdict IpHost::Other() {
  ++counters_.rcv_other;
  return Verdict::kDropped;
}

void IpHost::Answer(const ControlFrame& frame) {
  if (answer_count_ == kMaxAnswers) {
    ++counters_.xmit_failed;
    return;
  }
  answers_[(first_answer_ + answer_count_) % kMaxAnswers] = frame;
  ++answer_count_;
}

bool IpHost::PollTransmit(ControlFrame* frame) {
  if (answer_count_ != 0) {
    *frame = answers_[first_answer_];
    first_answer_ = (first_answer_ + 1) % kMaxAnswers;
    --answer_count_;
  } else {
    NeighbourTable::Question question;
    if (!neighbours_.PollQuestion(&question)) return false;
    *frame = QuestionFrame(question);
  }
  const uint16_t type = LoadBe16(&frame->bytes[12]);
  const bool group_report = type == kEtherTypeIpv4 || LoadBe8(&frame->bytes[20]) == kIpv6HopByHop;
  ++(type == kEtherTypeArp ? counters_.arp_xmit
     : group_report        ? counters_.group_reports
                           : counters_.nd_xmit);
  return true;
}

ControlFrame IpHost::QuestionFrame(const NeighbourTable::Question& question) {
  const Gid& source = SourceFor(question.address);
  if (question.address.IsV4Mapped()) {
    return WriteArp(question.mac != nullptr ? *question.mac : MacAddress::Broadcast(),
                    {.operation = ArpPacket::kRequest,
                     .sender_mac = config_.mac,
                     .sender_ip = source.Ipv4(),
                     .target_mac = kNobody,
                     .target_ip = question.address.Ipv4()});
  }
  const Gid group = SolicitedNodeGroup(question.address);
  return WriteNeighbourMessage(config_.mac,
                               question.mac != nullptr ? *question.mac : GroupMac(group),
                               {.source = source,
                                .destination = question.mac != nullptr ? question.address : group,
                                .target = question.address,
                                .link_layer = config_.mac});
}

void IpHost::Announce() {
  for (const Address& own : config_.addresses) {
    if (own.answered_by_kernel) continue;
    const Gid& gid = own.address.gid;
    if (gid.IsV4Mapped()) {
      Answer(WriteArp(MacAddress::Broadcast(), {.operation = ArpPacket::kRequest,
                                                .sender_mac = config_.mac,
                                                .sender_ip = gid.Ipv4(),
                                                .target_mac = kNobody,
                                                .target_ip = gid.Ipv4()}));
    } else {
      Answer(WriteNeighbourMessage(config_.mac, GroupMac(kAllNodes),
                                   {.advertisement = true,
                                    .source = gid,
                                    .destination = kAllNodes,
                                    .target = gid,
                                    .override_entry = true,
                                    .link_layer = config_.mac}));
    }
  }
}

IpHost::Verdict IpHost::Handle(std::byte* frame, size_t* size, Time now) {
  ++counters_.rcv_frames;
  if (*size < EthernetHeader::kBytes) return Malformed();
  const EthernetHeader ethernet = EthernetHeader::Load(frame);
  const bool to_group = ethernet.destination.IsGroup();
  if (!to_group && ethernet.destination != config_.mac) return Other();
  // Also what the kernel sends through a netdev that it shares with the NIC.
  if (ethernet.source.IsGroup()) return Malformed();
  switch (ethernet.ether_type) {
    case kEtherTypeArp:
      HandleArp({frame + EthernetHeader::kBytes, *size - EthernetHeader::kBytes}, now);
      return Verdict::kDone;
    case kEtherTypeIpv4:
      return HandleIpv4(frame, size, to_group, now);
    case kEtherTypeIpv6:
      return HandleIpv6(frame, size, to_group, now);
    default:
      return Other();
  }
}

void IpHost::AcceptGroup(const Gid& group, bool accept) {
  if (accept) {
    groups_.insert(group);
  } else {
    groups_.erase(group);
  }
}

void IpHost::JoinGroup(const Gid& group) {
  if (joined_[group]++ == 0) Report(group, GroupReport::kJoins);
}

void IpHost::LeaveGroup(const Gid& group) {
  const auto found = joined_.find(group);
  if (found == joined_.end() || --found->second != 0) return;
  joined_.erase(found);
  Report(group, GroupReport::kLeaves);
}

void IpHost::Report(const Gid& group, GroupReport report) {
  for (const Address& own : config_.addresses) {
    const Gid& gid = own.address.gid;
    // MLD has to come from a link-local address (RFC 3810, 5.2.13).
    if (gid.IsV4Mapped() != group.IsV4Mapped() || (!gid.IsV4Mapped() && !gid.IsLinkLocal())) {
      continue;
    }
    Answer(WriteGroupReport(config_.mac, gid, group, report));
    return;
  }
}

// At once: the delay of the RFCs is for many hosts that answer together.
IpHost::Verdict IpHost::HandleGroupQuery(const std::optional<Gid>& asked) {
  if (!asked) return Other();
  for (const auto& [group, times] : joined_) {
    const bool meant = asked->IsZero() || *asked == group;
    if (meant) Report(group, GroupReport::kIsMember);
  }
  return Verdict::kDone;
}

bool IpHost::IsInGroup(const Gid& group, const std::byte* frame) const {
  return groups_.contains(group) && MacAddress::Load(frame) == GroupMac(group);
}

void IpHost::HandleArp(std::span<const std::byte> payload, Time now) {
  const auto arp = ParseArp(payload);
  if (!arp) {
    ++counters_.rcv_malformed;
    return;
  }
  ++counters_.arp_rcv;
  if (arp->sender_mac == config_.mac) return;  // our own, from a hub or the kernel
  const Gid sender = Gid::FromIpv4(arp->sender_ip);
  if (Find(sender) != nullptr) {
    ++counters_.address_conflicts;
    return;
  }
  const Address* own = Find(Gid::FromIpv4(arp->target_ip));
  if (IsUsableSource(sender)) {
    const bool answer = arp->operation == ArpPacket::kReply && own != nullptr;
    neighbours_.Learn(sender, arp->sender_mac, answer, true, now);
  }
  if (arp->operation != ArpPacket::kRequest || own == nullptr || own->answered_by_kernel) return;
  Answer(WriteArp(arp->sender_mac, {.operation = ArpPacket::kReply,
                                    .sender_mac = config_.mac,
                                    .sender_ip = arp->target_ip,
                                    .target_mac = arp->sender_mac,
                                    .target_ip = arp->sender_ip}));
}

IpHost::Verdict IpHost::HandleIpv4(std::byte* frame, size_t* size, bool to_group, Time now) {
  std::byte* const packet = frame + EthernetHeader::kBytes;
  const size_t room = *size - EthernetHeader::kBytes;
  if (room < Ipv4Header::kBytes) return Malformed();
  const Ipv4Header ip = Ipv4Header::Load(packet);
  const size_t header_bytes = size_t{ip.header_words} * 4;
  if (ip.version != 4 || header_bytes < Ipv4Header::kBytes || ip.total_length < header_bytes ||
      ip.total_length > room) {
    return Malformed();
  }
  if (to_group && ip.protocol == kIpProtocolIgmp) {
    if (joined_.empty()) return Other();
    return HandleGroupQuery(
        ParseIgmpQuery({packet + header_bytes, ip.total_length - header_bytes}));
  }
  const Gid destination = Gid::FromIpv4(ip.destination);
  const Address* own = to_group ? nullptr : Find(destination);
  if (own == nullptr && !(to_group && IsInGroup(destination, frame))) return Other();
  // Options and fragments: neither RoCEv2 nor a ping that fits the link has them.
  constexpr uint16_t kFragmentBits = Ipv4Header::kMoreFragments | Ipv4Header::kFragmentOffsetMask;
  if (header_bytes != Ipv4Header::kBytes || (ip.flags_fragment & kFragmentBits) != 0) {
    return Other();
  }
  if (!Ipv4HeaderChecksumIsRight(packet)) return Malformed();
  if (!IsUsableSource(Gid::FromIpv4(ip.source))) {
    ++counters_.rcv_spoofed;
    return Verdict::kDropped;
  }
  *size = EthernetHeader::kBytes + ip.total_length;
  std::byte* const body = packet + Ipv4Header::kBytes;
  const size_t body_bytes = ip.total_length - Ipv4Header::kBytes;
  if (ip.protocol == kIpProtocolUdp && body_bytes >= UdpHeader::kBytes &&
      LoadBe16(body + 2) == kRoceUdpPort) {
    ++counters_.rcv_roce;
    neighbours_.Confirm(Gid::FromIpv4(ip.source), MacAddress::Load(frame + MacAddress::kBytes),
                        now);
    return Verdict::kRoce;
  }
  if (own == nullptr || ip.protocol != kIpProtocolIcmp || own->answered_by_kernel ||
      body_bytes < kIcmpHeaderBytes || LoadBe8(body) != kEchoRequest || LoadBe8(body + 1) != 0) {
    return Other();
  }
  if (IcmpChecksum({body, body_bytes}) != 0) return Malformed();

  ReturnToSender(frame, config_.mac);
  StoreBe32(packet + 12, ip.destination);
  StoreBe32(packet + 16, ip.source);
  StoreBe8(packet + 8, kDefaultHopLimit);
  StoreBe16(packet + 10, Ipv4HeaderChecksum(packet));
  StoreBe8(body, kEchoReply);
  StoreBe16(body + 2, 0);
  StoreBe16(body + 2, IcmpChecksum({body, body_bytes}));
  ++counters_.echo_replies;
  return Verdict::kReply;
}

IpHost::Verdict IpHost::HandleIpv6(std::byte* frame, size_t* size, bool to_group, Time now) {
  std::byte* const packet = frame + EthernetHeader::kBytes;
  const size_t room = *size - EthernetHeader::kBytes;
  if (room < Ipv6Header::kBytes) return Malformed();
  const Ipv6Header ip = Ipv6Header::Load(packet);
  if (ip.version != 6 || ip.payload_length > room - Ipv6Header::kBytes) return Malformed();
  const Address* own = Find(ip.destination);
  if (own == nullptr && !(to_group && ip.destination.IsMulticast())) return Other();
  *size = EthernetHeader::kBytes + Ipv6Header::kBytes + ip.payload_length;
  std::byte* const body = packet + Ipv6Header::kBytes;
  const std::span<const std::byte> whole{packet, Ipv6Header::kBytes + ip.payload_length};

  if (ip.next_header == kIpProtocolIcmpv6 && ip.payload_length >= kIcmpHeaderBytes) {
    const uint8_t type = LoadBe8(body);
    if (type == 135 || type == 136) {
      const auto message = ParseNeighbourMessage(whole);
      if (!message) return Malformed();
      ++counters_.nd_rcv;
      HandleNeighbour(*message, MacAddress::Load(frame + MacAddress::kBytes), now);
      return Verdict::kDone;
    }
  }
  if (to_group && ip.next_header == kIpv6HopByHop && !joined_.empty()) {
    return HandleGroupQuery(ParseMldQuery(whole));
  }
  if (to_group ? !IsInGroup(ip.destination, frame) : own == nullptr) return Other();
  if (!IsUsableSource(ip.source) || ip.source.IsV4Mapped()) {
    ++counters_.rcv_spoofed;
    return Verdict::kDropped;
  }
  if (ip.next_header == kIpProtocolUdp && ip.payload_length >= UdpHeader::kBytes &&
      LoadBe16(body + 2) == kRoceUdpPort) {
    ++counters_.rcv_roce;
    neighbours_.Confirm(ip.source, MacAddress::Load(frame + MacAddress::kBytes), now);
    return Verdict::kRoce;
  }
  if (to_group || ip.next_header != kIpProtocolIcmpv6 || own->answered_by_kernel ||
      ip.payload_length < kIcmpHeaderBytes || LoadBe8(body) != kEchoRequestV6 ||
      LoadBe8(body + 1) != 0) {
    return Other();
  }
  if (Icmpv6Checksum(whole) != 0) return Malformed();

  ReturnToSender(frame, config_.mac);
  ip.destination.Store(packet + 8);
  ip.source.Store(packet + 24);
  StoreBe8(packet + 7, kDefaultHopLimit);
  StoreBe8(body, kEchoReplyV6);
  StoreBe16(body + 2, 0);
  StoreBe16(body + 2, Icmpv6Checksum(whole));
  ++counters_.echo_replies;
  return Verdict::kReply;
}

void IpHost::HandleNeighbour(const NeighbourMessage& message, const MacAddress& sender, Time now) {
  if (sender == config_.mac) return;  // our own, from a hub or the kernel
  if (message.advertisement) {
    if (Find(message.target) != nullptr) {
      ++counters_.address_conflicts;
      return;
    }
    const MacAddress& mac = message.link_layer ? *message.link_layer : sender;
    neighbours_.Learn(message.target, mac, message.solicited, message.override_entry, now);
    return;
  }
  if (IsUsableSource(message.source) && message.link_layer && Find(message.source) == nullptr) {
    neighbours_.Learn(message.source, *message.link_layer, false, true, now);
  }
  const Address* own = Find(message.target);
  if (own == nullptr || own->answered_by_kernel) return;
  // To one who only tests whether the address is free: to all.
  const bool to_all = message.source.IsZero();
  const MacAddress& asker = message.link_layer ? *message.link_layer : sender;
  Answer(WriteNeighbourMessage(config_.mac, to_all ? GroupMac(kAllNodes) : asker,
                               {.advertisement = true,
                                .source = message.target,
                                .destination = to_all ? kAllNodes : message.source,
                                .target = message.target,
                                .solicited = !to_all,
                                .override_entry = true,
                                .link_layer = config_.mac}));
}

}  // namespace verbena::nic
