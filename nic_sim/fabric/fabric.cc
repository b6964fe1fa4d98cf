// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/fabric.h"

#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <mutex>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "nic_sim/fabric/fabric_state.h"
#include "nic_sim/fabric/fault_rule.h"

namespace verbena::nic {

using namespace transport;  // NOLINT: the wire's names

namespace {

// No vector of ports moves: threads already look at the first when the next is added.
constexpr size_t kMaxPorts = 64;
constexpr size_t kMaxCaptures = 16;

}  // namespace

Fabric::Fabric(bool strict) : state_(std::make_unique<State>(strict)) {
  state_->ports.reserve(kMaxPorts);
}
Fabric::~Fabric() = default;

PortId Fabric::AddPort(const PortConfig& config) {
  const std::lock_guard guard(state_->mutex);
  State& state = *state_;
  const auto port = static_cast<PortId>(state.ports.size());
  assert(port < kMaxPorts);
  auto added = std::make_unique<State::Port>();
  added->config = config;
  added->gids = config.gids;
  state.ports.push_back(std::move(added));
  for (const Gid& gid : config.gids) {
    // The first owner of an address keeps it.
    if (!gid.IsZero()) state.ports_by_gid.emplace(gid, port);
  }
  state.ForgetAnswers();
  return port;
}

void Fabric::State::ForgetAnswers() {
  last_ipv4 = 0;
  last_ipv4_port = kNoPort;
  last_ipv6 = Gid();
  last_ipv6_port = kNoPort;
}

void Fabric::SetGids(PortId port, const std::vector<Gid>& gids) {
  const std::lock_guard guard(state_->mutex);
  State& state = *state_;
  const std::vector<Gid> before = std::exchange(state.ports[port]->gids, gids);
  for (const Gid& gid : gids) {
    const bool is_new = std::find(before.begin(), before.end(), gid) == before.end();
    if (!gid.IsZero() && is_new) state.ports_by_gid[gid] = port;
  }
  // What it has given up may be another's.
  for (const Gid& gid : before) {
    if (gid.IsZero() || state.FindOwner(gid) != State::kNoPort) continue;
    for (PortId other = 0; other < state.ports.size(); ++other) {
      const auto& all = state.ports[other]->gids;
      if (std::find(all.begin(), all.end(), gid) == all.end()) continue;
      state.ports_by_gid[gid] = other;
      break;
    }
  }
  state.ForgetAnswers();
}

std::vector<Gid> Fabric::gids(PortId port) const {
  const std::lock_guard guard(state_->mutex);
  return state_->ports[port]->gids;
}

size_t Fabric::port_count() const { return state_->ports.size(); }
const PortConfig& Fabric::config(PortId port) const { return state_->ports[port]->config; }

PortCounters Fabric::counters(PortId port) const {
  const std::lock_guard guard(state_->mutex);
  return state_->ports[port]->counters;
}

void Fabric::CountReceiveDrop(PortId port, DropReason reason) {
  const std::lock_guard guard(state_->mutex);
  state_->Discard(port, Direction::kRx, reason);
}

bool Fabric::link_up(PortId port) const {
  const std::lock_guard guard(state_->mutex);
  const Wire* wire = state_->ports[port]->wire.get();
  return state_->faults.link_up(port) && (wire == nullptr || wire->port().up());
}

uint32_t Fabric::link_changes() const {
  return state_->link_changes.load(std::memory_order_acquire);
}

void Fabric::State::NoteLinks() {
  bool changed = false;
  for (PortId id = 0; id < ports.size(); ++id) {
    Port& port = *ports[id];
    const bool up = faults.link_up(id) && (port.wire == nullptr || port.wire->port().up());
    changed |= up != port.was_up;
    port.was_up = up;
  }
  if (!changed) return;
  link_changes.fetch_add(1, std::memory_order_release);
  for (const Inbox& inbox : inboxes) {
    if (inbox.owner != nullptr) inbox.owner->OnForeignPackets();
  }
}

// NICs that rules hold up, and those that go on.
void Fabric::State::NoteStalls(Time now) {
  bool any = has_wires;
  bool released = false;
  for (PortId id = 0; id < ports.size(); ++id) {
    const bool stalls = faults.has_stalls() && faults.stalled(id, now);
    any |= stalls;
    released |= ports[id]->stalled.exchange(stalls) && !stalls;
  }
  may_wait = any;
  if (!released) return;
  for (const Inbox& inbox : inboxes) {
    if (inbox.owner != nullptr) inbox.owner->OnForeignPackets();
  }
}

void Fabric::AttachWire(PortId port, std::unique_ptr<Wire> wire) {
  const std::lock_guard guard(state_->mutex);
  state_->ports[port]->wire = std::move(wire);
  state_->wired.push_back(port);
  state_->has_wires = state_->may_wait = true;
}

std::optional<WireStatus> Fabric::wire_status(PortId port) const {
  const std::lock_guard guard(state_->mutex);
  const Wire* wire = state_->ports[port]->wire.get();
  if (wire == nullptr) return std::nullopt;
  return wire->status();
}

std::vector<int> Fabric::wake_fds() const {
  const std::lock_guard guard(state_->mutex);
  std::vector<int> fds;
  for (const PortId port : state_->wired)
    fds.push_back(state_->ports[port]->wire->port().wake_fd());
  return fds;
}

bool Fabric::congested(PortId port) const {
  if (!state_->may_wait) [[likely]]
    return false;
  if (state_->ports[port]->stalled) return true;
  if (!state_->has_wires) return false;
  const std::lock_guard guard(state_->mutex);
  const Wire* wire = state_->ports[port]->wire.get();
  return wire != nullptr && wire->congested();
}

Pmtu Fabric::active_mtu(PortId port) const {
  const std::lock_guard guard(state_->mutex);
  const Wire* wire = state_->ports[port]->wire.get();
  if (wire == nullptr) return Pmtu::k4096;
  // As Linux computes it: IPv6, UDP, BTH, XRCETH and AtomicETH, ICRC.
  constexpr uint32_t kHeaders = 40 + 8 + 12 + 4 + 28 + 4;
  Pmtu mtu = Pmtu::k4096;
  while (mtu != Pmtu::k256 && PmtuBytes(mtu) + kHeaders > wire->port().mtu()) {
    mtu = Pmtu{static_cast<uint8_t>(static_cast<uint8_t>(mtu) - 1)};
  }
  return mtu;
}

void Fabric::RefreshLinks() {
  if (!state_->has_wires) return;
  const std::lock_guard guard(state_->mutex);
  for (const PortId port : state_->wired) state_->ports[port]->wire->port().Refresh();
  state_->NoteLinks();
}

bool Fabric::CanReach(PortId port, const Gid& source, const Gid& destination) const {
  const std::lock_guard guard(state_->mutex);
  if (state_->FindOwner(destination) != State::kNoPort) return true;
  const Wire* wire = state_->ports[port]->wire.get();
  return wire != nullptr && wire->CanReach(source, destination);
}

bool Fabric::Prepare(PortId port, const Gid& destination, Time now) {
  if (!state_->has_wires) return true;
  const std::lock_guard guard(state_->mutex);
  Wire* wire = state_->ports[port]->wire.get();
  if (wire == nullptr || state_->FindPort(destination) != State::kNoPort) return true;
  const bool known = wire->Prepare(destination, now);
  state_->FlushWires(now);
  return known;
}

void Fabric::SetSteering(const PacketSteering* steering) {
  const std::lock_guard guard(state_->mutex);
  state_->steering = steering;
}

void Fabric::OpenInbox(ShardId shard, const rte_mempool* pool, InboxOwner* owner) {
  const std::lock_guard guard(state_->mutex);
  state_->inboxes[shard] = {.open = true, .pool = pool, .owner = owner};
}

void Fabric::OpenManagementInbox(InboxOwner* owner) {
  const std::lock_guard guard(state_->mutex);
  state_->inboxes[kManagementInbox] = {.open = true, .all_foreign = true, .owner = owner};
}

void Fabric::CloseInbox(ShardId shard) {
  const std::lock_guard guard(state_->mutex);
  state_->inboxes[shard] = {};
  for (const auto& port : state_->ports) {
    port->received[shard].packets.Clear();
    port->received[shard].has_some = false;
  }
}

int Fabric::AttachGroup(PortId port, ShardId shard, const Gid& group) {
  const std::lock_guard guard(state_->mutex);
  const bool first = state_->groups.Find(group, port) == nullptr;
  const int error =
      state_->groups.Attach(group, port, shard, state_->ports[port]->config.group_limits);
  Wire* wire = state_->ports[port]->wire.get();
  if (error == 0 && first && wire != nullptr) wire->AcceptGroup(group, true);
  return error;
}

void Fabric::DetachGroup(PortId port, ShardId shard, const Gid& group) {
  const std::lock_guard guard(state_->mutex);
  state_->groups.Detach(group, port, shard);
  Wire* wire = state_->ports[port]->wire.get();
  if (wire != nullptr && state_->groups.Find(group, port) == nullptr) {
    wire->AcceptGroup(group, false);
  }
}

void Fabric::ReportGroup(PortId port, const Gid& group, bool join, Time now) {
  const std::lock_guard guard(state_->mutex);
  Wire* wire = state_->ports[port]->wire.get();
  if (wire == nullptr) return;
  wire->ReportGroup(group, join);
  state_->FlushWires(now);
}

const MacAddress* Fabric::Resolve(const Gid& gid) const {
  const std::lock_guard guard(state_->mutex);
  const PortId port = state_->FindPort(gid);
  return port == State::kNoPort ? nullptr : &state_->ports[port]->config.mac;
}

uint32_t Fabric::AddRule(std::string_view text, std::string* error, std::string* field) {
  const std::lock_guard guard(state_->mutex);
  State& state = *state_;
  FaultRule rule;
  if (!ParseFaultRule(text, &rule, error, field)) return 0;
  PortId port = FaultStage::kAnyPort;
  if (rule.device) {
    const auto found = std::find_if(
        state.ports.begin(), state.ports.end(),
        [&](const std::unique_ptr<State::Port>& p) { return p->config.device == *rule.device; });
    if (found == state.ports.end()) {
      *error = "bad value in 'dev=" + *rule.device + "': there is no such device";
      if (field != nullptr) *field = "dev";
      return 0;
    }
    port = static_cast<PortId>(found - state.ports.begin());
  }
  const uint32_t id = state.faults.Add(rule, port);
  if (id == 0) *error = "there are " + std::to_string(kMaxFaultRules) + " rules already";
  state.UpdatePlain();
  state.NoteLinks();
  state.NoteStalls(state.latest);
  return id;
}

uint32_t Fabric::TakeRuleId() {
  const std::lock_guard guard(state_->mutex);
  return state_->faults.TakeId();
}

void Fabric::NameQp(PortId port, uint32_t qpn, std::string_view app, uint32_t nth) {
  const std::lock_guard guard(state_->mutex);
  state_->faults.qps().Name(port, qpn, app, nth);
}

void Fabric::ForgetQp(PortId port, uint32_t qpn) {
  const std::lock_guard guard(state_->mutex);
  state_->faults.qps().Forget(port, qpn);
}

nlohmann::json Fabric::ListRules() const {
  const std::lock_guard guard(state_->mutex);
  return state_->faults.List();
}

void Fabric::ForEachHit(const std::function<void(const TraceEvent&)>& visit) const {
  const std::lock_guard guard(state_->mutex);
  state_->faults.trace().ForEach(visit);
}

uint32_t Fabric::ClearRules(uint32_t id) {
  const std::lock_guard guard(state_->mutex);
  const uint32_t removed = state_->faults.Clear(id);
  state_->UpdatePlain();
  state_->NoteLinks();
  state_->NoteStalls(state_->latest);
  return removed;
}

size_t Fabric::ReleaseHeld(uint32_t rule, size_t count) {
  const std::lock_guard guard(state_->mutex);
  return state_->faults.Release(rule, count);
}

nlohmann::json Fabric::ListHeld() const {
  const std::lock_guard guard(state_->mutex);
  nlohmann::json list = state_->faults.Held();
  for (nlohmann::json& packet : list) {
    const auto port = packet["port"].get<PortId>();
    packet.erase("port");
    packet["device"] = state_->ports[port]->config.device;
  }
  return list;
}

uint32_t Fabric::StartCapture(int fd, PortId port, CaptureStage stage, uint64_t count,
                              uint32_t qpn) {
  const std::lock_guard guard(state_->mutex);
  State& state = *state_;
  if (state.captures.size() >= kMaxCaptures || (port != kAllPorts && port >= state.ports.size())) {
    close(fd);
    return 0;
  }
  std::vector<std::string> interfaces;
  for (size_t i = 0; i < state.ports.size(); ++i) {
    if (port == kAllPorts || port == i) interfaces.push_back(state.ports[i]->config.device);
  }
  State::Capture capture{
      .id = state.next_capture_id, .port = port, .stage = stage, .qpn = qpn, .file = nullptr};
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
  const std::lock_guard guard(state_->mutex);
  for (const State::Capture& capture : state_->captures) {
    if (capture.id == id) return capture.file->done();
  }
  return true;
}

std::unique_ptr<CaptureFile> Fabric::DetachCapture(uint32_t id) {
  const std::lock_guard guard(state_->mutex);
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
