// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/qp1_port.h"

#include <rte_mbuf.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "nic_sim/fabric/packet.h"
#include "transport/wire/packet_builder.h"
#include "transport/wire/packet_view.h"

namespace verbena::nic {

using namespace transport;  // NOLINT: the wire's names

namespace {

Time Now() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return Time::FromNanoseconds(now.tv_sec * 1'000'000'000 + now.tv_nsec);
}

bool MatchesDefault(Pkey pkey) {
  return (pkey.value() & 0x7fff) == (kDefaultPkey.value() & 0x7fff);
}

}  // namespace

Qp1Port::Qp1Port(Device& device)
    : device_(device),
      fabric_(device.fabric()),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      next_psn_(device.nic_count()) {
  fabric_.OpenManagementInbox(this);
}

Qp1Port::~Qp1Port() { fabric_.CloseInbox(kManagementInbox); }

void Qp1Port::SendMad(const MadPacket& mad) {
  const auto port = static_cast<PortId>(mad.nic);
  rte_mbuf* packet = device_.NewPacket();
  if (packet == nullptr) return;  // as lost: it is sent again
  PacketAddress address;
  address.source_mac = fabric_.config(port).mac;
  address.is_ipv6 = !mad.source.IsV4Mapped();
  address.source_gid = mad.source;
  address.destination_gid = mad.destination;
  if (const MacAddress* mac = fabric_.Resolve(mad.destination)) address.destination_mac = *mac;
  address.traffic_class = mad.traffic_class;
  address.hop_limit = mad.hop_limit;
  // Linux takes QP1's port from its number alone, whatever the path's flow label is.
  address.udp_source_port = UdUdpSourcePort(kManagementQpn);
  TransportHeaders headers;
  headers.bth.opcode = Opcode::kUdSendOnly;
  headers.bth.pkey = mad.pkey;
  headers.bth.dest_qpn = kManagementQpn;
  headers.bth.ack_req = true;
  headers.bth.psn = next_psn_[port];
  headers.deth = {.qkey = kManagementQkey, .source_qpn = kManagementQpn};
  std::byte* const frame = FrameOf(packet);
  const size_t head = WriteHeaders(address, headers, kMadBytes, frame);
  std::memcpy(frame + head, mad.bytes.data(), kMadBytes);
  std::memset(frame + head + kMadBytes, 0, kIcrcBytes);
  packet->data_len = static_cast<uint16_t>(head + kMadBytes + kIcrcBytes);
  packet->pkt_len = packet->data_len;
  MetaOf(packet) = {.source_qpn = kManagementQpn.value(),
                    .psn_offset = next_psn_[port].value(),
                    .retransmission = false,
                    .icrc_present = false,
                    .trusted = true};
  next_psn_[port] = next_psn_[port].Next();
  polled_.store(true);
  fabric_.Transmit(port, {&packet, 1}, Now());
  KickEngine();
}

// What a rule holds, and questions for MAC addresses, go on by the engine.
void Qp1Port::KickEngine() {
  if (!fabric_.next_deadline().IsNever()) device_.Kick();
}

bool Qp1Port::HasReceived() const {
  for (PortId port = 0; port < fabric_.port_count(); ++port) {
    if (fabric_.has_received(port, kManagementInbox)) return true;
  }
  return false;
}

bool Qp1Port::PollMad(MadPacket* mad) {
  do {
    for (PortId port = 0; port < fabric_.port_count(); ++port) {
      rte_mbuf* packet = nullptr;
      while (fabric_.has_received(port, kManagementInbox) &&
             fabric_.Receive(port, {&packet, 1}, kManagementInbox) == 1) {
        const DropReason reason = Read(port, packet, mad);
        rte_pktmbuf_free(packet);
        if (reason == DropReason::count) return true;
        fabric_.CountReceiveDrop(port, reason);
      }
    }
    polled_.store(false);
  } while (HasReceived());
  return false;
}

DropReason Qp1Port::Read(PortId port, rte_mbuf* packet, MadPacket* mad) const {
  const auto parsed = PacketView::Parse(FrameSpan(packet));
  if (!parsed.ok()) return DropReason::malformed;
  const PacketView& view = parsed.value();
  if (!MetaOf(packet).trusted && !view.VerifyIcrc()) return DropReason::bad_icrc;
  if (view.bth().opcode != Opcode::kUdSendOnly) return DropReason::wrong_transport;
  if (!MatchesDefault(view.bth().pkey)) return DropReason::pkey_mismatch;
  if (view.deth().qkey != kManagementQkey) return DropReason::qkey_mismatch;
  if (view.payload_bytes() != kMadBytes) return DropReason::malformed;
  *mad = MadPacket{};
  mad->nic = port;
  mad->source = view.source_gid();
  mad->destination = view.destination_gid();
  mad->traffic_class = view.traffic_class();
  mad->hop_limit = view.hop_limit();
  mad->pkey = view.bth().pkey;
  std::memcpy(mad->bytes.data(), view.payload().data(), kMadBytes);
  return DropReason::count;
}

void Qp1Port::OnForeignPackets() {
  if (polled_.load()) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t ignored = write(wake_.get(), &one, sizeof one);
}

CmPlatform::Reach Qp1Port::Resolve(uint32_t nic, const Gid& destination) {
  const auto port = static_cast<PortId>(nic);
  const std::vector<Gid> gids = fabric_.gids(port);
  const bool reachable = std::any_of(gids.begin(), gids.end(), [&](const Gid& own) {
    return !own.IsZero() && own.IsV4Mapped() == destination.IsV4Mapped() &&
           fabric_.CanReach(port, own, destination);
  });
  if (!reachable) return CmPlatform::Reach::kUnreachable;
  const bool known = fabric_.Prepare(port, destination, Now());
  KickEngine();
  return known ? CmPlatform::Reach::kReachable : CmPlatform::Reach::kPending;
}

void Qp1Port::JoinGroup(uint32_t nic, const Gid& group) {
  fabric_.ReportGroup(static_cast<PortId>(nic), group, true, Now());
}

void Qp1Port::LeaveGroup(uint32_t nic, const Gid& group) {
  fabric_.ReportGroup(static_cast<PortId>(nic), group, false, Now());
}

}  // namespace verbena::nic
