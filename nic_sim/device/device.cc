// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/device/device.h"

#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <optional>

#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/device/device_context.h"
#include "nic_sim/device/device_state.h"
#include "nic_sim/env/dpdk_env.h"
#include "nic_sim/port/netdev.h"
#include "nic_sim/port/port_options.h"
#include "nic_sim/runtime/random.h"

namespace verbena::nic {

namespace {

// How NIC `n` looks on its link.
struct NicIdentity {
  transport::MacAddress mac;
  std::vector<InterfaceAddress> addresses;  // GIDs from index 1 on
  std::optional<NetdevInfo> netdev;         // that it shares with the kernel
  bool HasKernelAddress(const transport::Gid& gid) const {
    return netdev && std::any_of(netdev->addresses.begin(), netdev->addresses.end(),
                                 [&gid](const InterfaceAddress& a) { return a.gid == gid; });
  }
};

// Empty with a sentence.
std::optional<NicIdentity> MakeIdentity(const NicOptions& options, uint32_t host, uint32_t n,
                                        std::string* error) {
  NicIdentity identity{.mac = {}, .addresses = options.addresses, .netdev = {}};
  const bool shares = options.port && options.port->driver == PortDriver::kAfPacket;
  if (shares && !(identity.netdev = ReadNetdev(options.port->interface, error))) {
    return std::nullopt;
  }
  if (options.addresses.empty() && shares) {
    for (const InterfaceAddress& address : identity.netdev->addresses) {
      if (!address.gid.IsLinkLocal() && !IsLoopback(address.gid)) {
        identity.addresses.push_back(address);
      }
    }
  }
  // Locally administered; its last bytes come from the address, so that NICs
  // of several daemons on one wire differ when their addresses do.
  uint64_t tail = static_cast<uint32_t>(RandomNumber());
  if (!identity.addresses.empty() || !options.port) {
    if (identity.addresses.empty()) {
      const uint32_t ordinal = ((host & 0xff) << 8) | (n + 1);
      identity.addresses.push_back(
          {transport::Gid::FromIpv4((127u << 24) | (88u << 16) | ordinal), 112});
    }
    tail = transport::LoadBe32(&identity.addresses[0].gid.bytes()[12]);
  }
  identity.mac = transport::MacAddress::FromUint64((uint64_t{0x0256} << 32) | tail);
  // An address that the kernel has as well goes with its MAC.
  const auto shared = std::find_if(
      identity.addresses.begin(), identity.addresses.end(),
      [&identity](const InterfaceAddress& a) { return identity.HasKernelAddress(a.gid); });
  if (shared != identity.addresses.end()) identity.mac = identity.netdev->mac;
  if (options.mac) identity.mac = *options.mac;
  if (shared != identity.addresses.end() && identity.mac != identity.netdev->mac) {
    *error = "the kernel has " + shared->gid.ToString() + " on " + options.port->interface +
             " too: the NIC must have its MAC address " + identity.netdev->mac.ToString() +
             " or another address";
    return std::nullopt;
  }
  return identity;
}

IpHost::Config MakeHost(const Nic& nic, const NicIdentity& identity, const NicOptions& options) {
  IpHost::Config host{.mac = nic.config().mac, .addresses = {}, .gateways = options.gateways};
  const auto add = [&](const InterfaceAddress& address) {
    host.addresses.push_back({address, identity.HasKernelAddress(address.gid)});
  };
  add({nic.gids()[0], 64});
  for (const InterfaceAddress& address : identity.addresses) {
    if (!IsLoopback(address.gid)) add(address);
  }
  return host;
}

// Of the GIDs as they are now: of one that came with a fault rule the usual length.
std::vector<uint8_t> Prefixes(const Nic& nic, const std::vector<uint8_t>& configured) {
  std::vector<uint8_t> prefixes = configured;
  const std::vector<transport::Gid>& gids = nic.gids();
  for (size_t i = 1; i < gids.size(); ++i) {
    const bool same =
        i <= nic.config().addresses.size() && gids[i] == nic.config().addresses[i - 1];
    if (!same) prefixes[i] = !gids[i].IsV4Mapped() ? 64 : gids[i].Ipv4() >> 24 == 127 ? 112 : 120;
  }
  return prefixes;
}

// Dotted; empty if the NIC has only IPv6 addresses.
std::string FirstIpv4(const std::vector<transport::Gid>& gids) {
  for (const transport::Gid& gid : gids) {
    if (!gid.IsV4Mapped()) continue;
    in_addr address{.s_addr = htonl(gid.Ipv4())};
    char text[INET_ADDRSTRLEN];
    return inet_ntop(AF_INET, &address, text, sizeof text);
  }
  return {};
}

}  // namespace

Device::Device() : state_(std::make_unique<State>()) {}

Device::~Device() {
  WatchNics({});
  for (const auto& tenant : state_->tenants) {
    const std::lock_guard guard(tenant->shard->lock());
    tenant->contexts.clear();
  }
  state_->tenants.clear();
  const bool started = state_->engine != nullptr;
  state_->engine.reset();
  state_->nics.clear();
  if (started) CleanUpDpdk();
}

std::unique_ptr<Device> Device::Start(const DeviceOptions& options, std::string* error) {
  if (options.nics == 0 || options.nics > kMaxNics) {
    *error = "the number of NICs must be 1 to " + std::to_string(kMaxNics);
    return nullptr;
  }
  std::unique_ptr<Device> device(new Device());
  State& state = *device->state_;
  state.status = SharedMemory::Create("verbena-status", sizeof(abi::StatusPage));
  if (state.status.data() == nullptr || (state.status_readonly = state.status.OpenReadOnly()) < 0) {
    *error = "no memory for the status page";
    return nullptr;
  }
  state.engine = Engine::Start(options, error);
  if (state.engine == nullptr) return nullptr;
  state.engine->Describe(new (state.status.data()) abi::StatusPage{});
  for (uint32_t n = 0; n < options.nics; ++n) {
    const NicOptions nic_options =
        n < options.nic_options.size() ? options.nic_options[n] : NicOptions();
    const auto identity = MakeIdentity(nic_options, options.host, n, error);
    if (!identity) return nullptr;
    std::vector<transport::Gid> addresses;
    for (const InterfaceAddress& address : identity->addresses) addresses.push_back(address.gid);
    const Nic::Config config{.index = n,
                             .device = "verbena" + std::to_string(n),
                             .host = options.host,
                             .mac = identity->mac,
                             .addresses = std::move(addresses),
                             .seed = options.seed != 0 ? options.seed + n : RandomNumber()};
    state.nics.push_back(std::make_unique<Nic>(config, state.engine->fabric()));
    Nic& nic = *state.nics.back();
    state.engine->AddNic(&nic);
    if (nic_options.port &&
        !state.engine->AttachPort(nic, *nic_options.port, MakeHost(nic, *identity, nic_options),
                                  error)) {
      return nullptr;
    }
    std::vector<uint8_t> prefixes(nic.gids().size(), 64);
    for (size_t i = 0; i < identity->addresses.size() && i + 1 < prefixes.size(); ++i) {
      prefixes[i + 1] = identity->addresses[i].prefix_bits;
    }
    state.prefixes.push_back(std::move(prefixes));
    state.ports.push_back(nic_options.port ? ToString(*nic_options.port) : "");
  }
  state.tenants.push_back(std::make_shared<Tenant>(UserOf(geteuid()), kOwnerLimits, *state.engine,
                                                   &state.engine->main_shard()));
  state.engine->main_shard().WatchWires();
  return device;
}

Tenant::~Tenant() {
  if (shard->id() != 0) engine.RemoveShard(shard);
}

Device::State::~State() {
  if (status_readonly >= 0) close(status_readonly);
}

size_t Device::nic_count() const { return state_->nics.size(); }
abi::EngineMode Device::mode() const { return state_->engine->mode(); }
uint32_t Device::thread_count() const { return state_->engine->thread_count(); }
int Device::status_page_fd() const { return state_->status.fd(); }
int Device::status_page_readonly_fd() const { return state_->status_readonly; }
rte_mbuf* Device::NewPacket() { return state_->engine->NewPacket(); }
Fabric& Device::fabric() { return state_->engine->fabric(); }
size_t Device::context_count() const { return state_->context_count; }
void Device::Kick() { state_->engine->Kick(); }
bool Device::RunPass(transport::Time now) {
  RunTimedFaults(now);
  return state_->engine->RunPassAt(now);
}
DeviceFaults& Device::faults() { return state_->engine->faults(); }

const abi::DeviceAttributes& Device::attributes(size_t nic) const {
  return state_->nics[nic]->attributes();
}

NicInfo Device::nic_info(size_t index) const {
  const Nic& nic = *state_->nics[index];
  state_->engine->fabric().RefreshLinks();
  return {.device = nic.config().device,
          .host = nic.config().host,
          .mac = nic.config().mac.ToString(),
          .ipv4 = FirstIpv4(nic.gids()),
          .gids = nic.gids(),
          .prefixes = Prefixes(nic, state_->prefixes[index]),
          .active = state_->engine->fabric().link_up(nic.port()),
          .port = state_->ports[index],
          .active_mtu = PmtuBytes(state_->engine->fabric().active_mtu(nic.port())),
          .node_guid = nic.node_guid(),
          .present = state_->present(index)};
}

int Device::OpenContext(const abi::Hello& hello, ClientIdentity client, abi::HelloReply* reply,
                        int* context_fd, Context** context, std::string* why) {
  const int mem_fd = std::exchange(client.mem_fd, -1);
  // The address space owns mem_fd from here on, also when it cannot be opened.
  const auto give_up = [&](int error, std::string sentence) {
    *why = std::move(sentence);
    if (client.async_write_fd >= 0) close(client.async_write_fd);
    return error;
  };
  // A daemon of root reaches more than another user's client may: a set-uid program that the client
  // executes keeps its pid, and only a guess protects the guard page of that. What the client
  // opened itself stays with the program that it was then.
  const AddressSpace::Backend passed = AddressSpace::Backend::kProcMem;
  auto space = AddressSpace::Open({.pid = client.pid,
                                   .mem_fd = mem_fd,
                                   .guard_address = hello.guard_address,
                                   .guard_magic = hello.guard_magic},
                                  why, client.uid == geteuid() ? nullptr : &passed);
  if (space == nullptr) return give_up(EPERM, *why);
  if (hello.device_index >= state_->nics.size()) {
    return give_up(ENODEV, "no device verbena" + std::to_string(hello.device_index));
  }
  if (!state_->present(hello.device_index)) return give_up(ENODEV, "the device is taken out");
  DeviceFaults& faults = state_->engine->faults();
  if (faults.wants(DeviceFaults::kAtVerb)) {
    const FaultSubject subject{
        .nic = hello.device_index, .app = client.comm, .qpn = 0, .nth_qp = 0};
    const int error = faults.OnVerb(kVerbOpenDevice, subject, state_->Now());
    if (error != 0) return give_up(error, "a fault rule wants it");
  }
  SharedMemory page = SharedMemory::Create("verbena-context", sizeof(abi::ContextPage));
  if (page.data() == nullptr) return give_up(ENOMEM, "no memory for a context");
  const std::shared_ptr<Tenant> tenant = state_->TenantOf(UserOf(client.uid), why);
  if (tenant == nullptr) return give_up(ENOMEM, *why);
  // Counted before it is there, so that several users together stay below the limit.
  if (state_->context_count.fetch_add(1) >= kMaxContexts) {
    --state_->context_count;
    state_->DropIfUnused(tenant);
    return give_up(EBUSY, "too many open devices");
  }
  Nic& nic = *state_->nics[hello.device_index];
  *context_fd = page.ReleaseFd();
  const uint64_t cookie = RandomNumber();
  const std::lock_guard guard(tenant->shard->lock());
  auto opened =
      std::make_unique<DeviceContext>(*tenant->shard, nic, tenant->limits, cookie,
                                      std::move(client), std::move(space), std::move(page));
  reply->cookie = cookie;
  reply->attributes = nic.attributes();
  // Taken out since we looked: whoever did it may not have seen this one.
  if (!state_->present(hello.device_index)) opened->Remove();
  *context = opened.get();
  tenant->contexts.push_back(std::move(opened));
  return 0;
}

void Device::CloseContext(Context* context) {
  for (const std::shared_ptr<Tenant>& tenant : state_->Tenants()) {
    // Those of other users are closed by other threads, which may have to wait.
    if (&tenant->shard->lock() != &context->lock()) continue;
    {
      const std::lock_guard guard(tenant->shard->lock());
      std::erase_if(tenant->contexts, [context](const auto& one) { return one.get() == context; });
    }
    --state_->context_count;
    state_->DropIfUnused(tenant);
    return;
  }
}

uid_t Device::UserOf(uid_t uid) { return uid == 0 ? geteuid() : uid; }

std::shared_ptr<Tenant> Device::State::TenantOf(uid_t uid, std::string* why) {
  const std::lock_guard guard(mutex);
  for (const auto& tenant : tenants) {
    if (tenant->uid == uid) return tenant;
  }
  Shard* shard = engine->AddShard(why);
  if (shard == nullptr) return nullptr;
  tenants.push_back(std::make_shared<Tenant>(uid, kOtherUserLimits, *engine, shard));
  shard->ring_budget().limit = kOtherUserLimits.ring_bytes;
  return tenants.back();
}

// A user's contexts are opened and closed one after the other, so none comes meanwhile.
void Device::State::DropIfUnused(const std::shared_ptr<Tenant>& tenant) {
  if (tenant->shard->id() == 0) return;
  {
    const std::lock_guard guard(tenant->shard->lock());
    if (!tenant->contexts.empty()) return;
  }
  const std::lock_guard guard(mutex);
  std::erase(tenants, tenant);
}

}  // namespace verbena::nic
