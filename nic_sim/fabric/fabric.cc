// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/fabric.h"

#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <nlohmann/json.hpp>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "nic_sim/fabric/capture.h"
#include "nic_sim/fabric/fault_rule.h"
#include "nic_sim/fabric/fault_stage.h"
#include "nic_sim/fabric/packet_queue.h"
#include "transport/base/byteorder.h"
#include "transport/wire/ip_udp.h"

namespace verbena::nic {

using namespace transport;  // NOLINT: the wire's names

namespace {

constexpr PortId kNoPort = 0xffff;
constexpr size_t kMaxCaptures = 16;

struct Port {
  PortConfig config;
  PortCounters counters;
  PacketQueue received;
};

struct Capture {
  uint32_t id = 0;
  PortId port = Fabric::kAllPorts;
  CaptureStage stage = CaptureStage::kAfter;
  std::unique_ptr<CaptureFile> file;
};

// Where the switch sends a packet.
struct Destination {
  PortId port = kNoPort;
  uint32_t l3 = 0;  // 0: no IP packet
};

}  // namespace

struct Fabric::State {
  explicit State(bool strict_icrc) : strict(strict_icrc) {}

  Destination FindDestination(rte_mbuf* packet);
  PortId FindPort(const Gid& gid) const {
    const auto found = ports_by_gid.find(gid);
    return found == ports_by_gid.end() ? kNoPort : found->second;
  }

  // The stations of a packet on its way, in this order.
  void Send(PortId port, rte_mbuf* packet, Time now);
  void RunFaults(rte_mbuf* packet, Time now);
  void Continue(rte_mbuf* packet, Time now);
  void CountSent(PortId port, rte_mbuf* packet, uint32_t l3);
  void Deliver(PortId port, rte_mbuf* packet, uint32_t l3);

  void ReleaseHeld(Time now);
  void Discard(PortId port, Direction direction, DropReason reason);
  void Record(CaptureStage stage, rte_mbuf* packet, Time now);
  // Nothing but the switch is between the ports.
  void UpdatePlain() { plain = faults.idle() && captures.empty(); }

  const bool strict;
  bool plain = true;
  std::vector<std::unique_ptr<Port>> ports;
  std::unordered_map<Gid, PortId> ports_by_gid;
  // Last answers, since neighbours in a burst mostly have one destination.
  // As on the wire; 0 never is a destination.
  uint32_t last_ipv4 = 0;
  PortId last_ipv4_port = kNoPort;
  Gid last_ipv6;
  PortId last_ipv6_port = kNoPort;

  FaultStage faults;
  std::vector<Capture> captures;
  uint32_t next_capture_id = 1;
};

Destination Fabric::State::FindDestination(rte_mbuf* packet) {
  const std::span<const std::byte> frame = FrameSpan(packet);
  const uint32_t l3 = L3OffsetOf(frame);
  if (l3 == 0) return {};
  if (LoadBe16(&frame[l3 - 2]) == kEtherTypeIpv4) {
    uint32_t address;
    std::memcpy(&address, &frame[l3 + 16], sizeof address);
    if (address != last_ipv4) {
      last_ipv4_port = FindPort(Gid::FromIpv4(LoadBe32(&frame[l3 + 16])));
      last_ipv4 = address;
    }
    return {last_ipv4_port, l3};
  }
  const Gid gid = Gid::Load(&frame[l3 + 24]);
  if (gid != last_ipv6) {
    last_ipv6_port = FindPort(gid);
    last_ipv6 = gid;
  }
  return {last_ipv6_port, l3};
}

void Fabric::State::Discard(PortId port, Direction direction, DropReason reason) {
  PortCounters& counters = ports[port]->counters;
  counters.Drop(reason);
  ++(direction == Direction::kTx ? counters.port_xmit_discards : counters.port_rcv_errors);
}

void Fabric::State::CountSent(PortId port, rte_mbuf* packet, uint32_t l3) {
  PortCounters& counters = ports[port]->counters;
  ++counters.port_xmit_packets;
  ++counters.unicast_xmit_packets;
  counters.port_xmit_data += (packet->data_len - l3) / 4;
}

void Fabric::State::Deliver(PortId port, rte_mbuf* packet, uint32_t l3) {
  Port& receiver = *ports[port];
  ++receiver.counters.port_rcv_packets;
  ++receiver.counters.unicast_rcv_packets;
  receiver.counters.port_rcv_data += (packet->data_len - l3) / 4;
  receiver.received.Push(packet);
}

void Fabric::State::Record(CaptureStage stage, rte_mbuf* packet, Time now) {
  if (captures.empty()) return;
  const PacketTransit& transit = TransitOf(packet);
  const PortId port = transit.direction == Direction::kTx ? transit.source : transit.destination;
  for (Capture& capture : captures) {
    if (capture.stage != stage) continue;
    if (capture.port == kAllPorts) {
      capture.file->Add(port, transit.direction, packet, now);
    } else if (capture.port == port) {
      capture.file->Add(0, transit.direction, packet, now);
    }
  }
}

void Fabric::State::Send(PortId port, rte_mbuf* packet, Time now) {
  PacketMeta& meta = MetaOf(packet);
  if (strict) [[unlikely]] {
    EnsureIcrc(packet);
    meta.trusted = false;
  } else if (!meta.icrc_present) {
    meta.trusted = true;
  }
  const Destination destination = FindDestination(packet);
  if (destination.port == kNoPort) [[unlikely]] {
    Discard(port, Direction::kTx,
            destination.l3 == 0 ? DropReason::malformed : DropReason::no_route);
    rte_pktmbuf_free(packet);
    return;
  }
  if (plain) [[likely]] {
    CountSent(port, packet, destination.l3);
    Deliver(destination.port, packet, destination.l3);
    return;
  }
  PacketTransit& transit = TransitOf(packet);
  transit = PacketTransit();
  transit.source = port;
  transit.destination = destination.port;
  RunFaults(packet, now);
}

void Fabric::State::RunFaults(rte_mbuf* packet, Time now) {
  Record(CaptureStage::kBefore, packet, now);
  if (faults.idle()) {
    Continue(packet, now);
    return;
  }
  const PacketTransit transit = TransitOf(packet);
  PacketQueue out;
  const FaultStage::Verdict verdict = faults.Apply(packet, now, &out);
  if (verdict != FaultStage::Verdict::kGoesOn) {
    Discard(transit.direction == Direction::kTx ? transit.source : transit.destination,
            transit.direction,
            verdict == FaultStage::Verdict::kDropped ? DropReason::fault : DropReason::port_down);
  }
  while (rte_mbuf* next = out.Pop()) Continue(next, now);
}

// Behind the fault stage of one side.
void Fabric::State::Continue(rte_mbuf* packet, Time now) {
  PacketTransit& transit = TransitOf(packet);
  const uint32_t l3 = L3OffsetOf(FrameSpan(packet));
  Record(CaptureStage::kAfter, packet, now);
  if (transit.direction == Direction::kRx) {
    Deliver(transit.destination, packet, l3);
    return;
  }
  CountSent(transit.source, packet, l3);
  transit.direction = Direction::kRx;
  RunFaults(packet, now);
}

void Fabric::State::ReleaseHeld(Time now) {
  PacketQueue out;
  faults.Expire(now, &out);
  UpdatePlain();
  while (rte_mbuf* packet = out.Pop()) Continue(packet, now);
}

Fabric::Fabric(bool strict) : state_(std::make_unique<State>(strict)) {}
Fabric::~Fabric() = default;

PortId Fabric::AddPort(const PortConfig& config) {
  State& state = *state_;
  const auto port = static_cast<PortId>(state.ports.size());
  assert(port != kNoPort);
  auto added = std::make_unique<Port>();
  added->config = config;
  state.ports.push_back(std::move(added));
  for (const Gid& gid : config.gids) {
    // The first owner of an address keeps it.
    if (!gid.IsZero()) state.ports_by_gid.emplace(gid, port);
  }
  // Answers of the switch may have changed.
  state.last_ipv4 = 0;
  state.last_ipv4_port = kNoPort;
  state.last_ipv6 = Gid();
  state.last_ipv6_port = kNoPort;
  return port;
}

size_t Fabric::port_count() const { return state_->ports.size(); }
const PortConfig& Fabric::config(PortId port) const { return state_->ports[port]->config; }
PortCounters& Fabric::counters(PortId port) { return state_->ports[port]->counters; }
bool Fabric::link_up(PortId port) const { return state_->faults.link_up(port); }

const MacAddress* Fabric::Resolve(const Gid& gid) const {
  const PortId port = state_->FindPort(gid);
  return port == kNoPort ? nullptr : &state_->ports[port]->config.mac;
}

void Fabric::Transmit(PortId port, std::span<rte_mbuf* const> packets, Time now) {
  State& state = *state_;
  if (!state.plain) [[unlikely]] {
    state.ReleaseHeld(now);  // they were first
  }
  for (rte_mbuf* packet : packets) state.Send(port, packet, now);
}

size_t Fabric::Receive(PortId port, std::span<rte_mbuf*> out) {
  PacketQueue& received = state_->ports[port]->received;
  size_t count = 0;
  while (count < out.size()) {
    rte_mbuf* packet = received.Pop();
    if (packet == nullptr) break;
    out[count++] = packet;
  }
  return count;
}

bool Fabric::has_received(PortId port) const { return !state_->ports[port]->received.empty(); }

Time Fabric::next_deadline() const { return state_->faults.next_deadline(); }

void Fabric::HandleTimeout(Time now) {
  if (!state_->plain) state_->ReleaseHeld(now);
}

uint32_t Fabric::AddRule(std::string_view text, std::string* error) {
  State& state = *state_;
  FaultRule rule;
  if (!ParseFaultRule(text, &rule, error)) return 0;
  PortId port = FaultStage::kAnyPort;
  if (rule.device) {
    const auto found = std::find_if(
        state.ports.begin(), state.ports.end(),
        [&](const std::unique_ptr<Port>& p) { return p->config.device == *rule.device; });
    if (found == state.ports.end()) {
      *error = "bad value in 'dev=" + *rule.device + "': there is no such device";
      return 0;
    }
    port = static_cast<PortId>(found - state.ports.begin());
  }
  const uint32_t id = state.faults.Add(rule, port);
  if (id == 0) *error = "there are " + std::to_string(kMaxFaultRules) + " rules already";
  state.UpdatePlain();
  return id;
}

nlohmann::json Fabric::ListRules() const { return state_->faults.List(); }

uint32_t Fabric::ClearRules(uint32_t id) {
  const uint32_t removed = state_->faults.Clear(id);
  state_->UpdatePlain();
  return removed;
}

uint32_t Fabric::StartCapture(int fd, PortId port, CaptureStage stage, uint64_t count) {
  State& state = *state_;
  if (state.captures.size() >= kMaxCaptures || (port != kAllPorts && port >= state.ports.size())) {
    close(fd);
    return 0;
  }
  std::vector<std::string> interfaces;
  for (size_t i = 0; i < state.ports.size(); ++i) {
    if (port == kAllPorts || port == i) interfaces.push_back(state.ports[i]->config.device);
  }
  Capture capture{.id = state.next_capture_id, .port = port, .stage = stage, .file = nullptr};
  try {
    capture.file = std::make_unique<CaptureFile>(fd, std::move(interfaces), count);
  } catch (const std::system_error&) {
    return 0;
  }
  ++state.next_capture_id;
  state.captures.push_back(std::move(capture));
  state.UpdatePlain();
  return state.captures.back().id;
}

bool Fabric::CaptureDone(uint32_t id) const {
  for (const Capture& capture : state_->captures) {
    if (capture.id == id) return capture.file->done();
  }
  return true;
}

std::unique_ptr<CaptureFile> Fabric::DetachCapture(uint32_t id) {
  State& state = *state_;
  std::unique_ptr<CaptureFile> file;
  for (auto capture = state.captures.begin(); capture != state.captures.end(); ++capture) {
    if (capture->id != id) continue;
    file = std::move(capture->file);
    state.captures.erase(capture);
    break;
  }
  state.UpdatePlain();
  return file;
}

}  // namespace verbena::nic
