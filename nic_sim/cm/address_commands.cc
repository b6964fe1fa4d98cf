// SPDX-License-Identifier: Apache-2.0
//
// CmAgent: commands about ids, addresses, routes and options.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "nic_sim/cm/agent_state.h"
#include "transport/base/byteorder.h"

namespace verbena::nic {
namespace {

using transport::Gid;
using transport::StoreBe16;
using transport::StoreBe32;

// Selector "exactly" of an IB path record.
constexpr uint8_t kSelectorExactly = 2;
// Flags of a struct ib_path_rec_data: GMP, primary, both directions.
constexpr uint32_t kPathFlags = 0x0b;

uint16_t ToBe16(uint16_t v) {
  uint16_t result;
  StoreBe16(reinterpret_cast<std::byte*>(&result), v);
  return result;
}
uint32_t ToBe32(uint32_t v) {
  uint32_t result;
  StoreBe32(reinterpret_cast<std::byte*>(&result), v);
  return result;
}
uint64_t ToBe64(uint64_t v) {
  return (uint64_t{ToBe32(static_cast<uint32_t>(v))} << 32) |
         ToBe32(static_cast<uint32_t>(v >> 32));
}

void StoreGid(const Gid& gid, void* to) { std::memcpy(to, gid.bytes().data(), Gid::kBytes); }

// An address of the commands that name its size, which must be right.
std::optional<SocketAddress> LoadSized(const __kernel_sockaddr_storage& storage, uint16_t size) {
  const auto address = SocketAddress::Load(ObjectBytes(storage));
  return address && address->size() == size ? address : std::nullopt;
}

// Port spaces that an AF_IB service id may stand for.
constexpr uint64_t kIbServiceMask = ~uint64_t{0xffff};

}  // namespace

int CmAgent::State::CreateId(const Request& request) {
  const auto command = Load<rdma_ucm_create_id>(request);
  CmIdQpType type;
  switch (command.ps) {
    case RDMA_PS_TCP:
      type = CmIdQpType::kRc;
      break;
    case RDMA_PS_UDP:
    case RDMA_PS_IPOIB:
      type = CmIdQpType::kUd;
      break;
    case RDMA_PS_IB:
      type = CmIdQpType{command.qp_type};
      switch (type) {
        case CmIdQpType::kRc:
        case CmIdQpType::kUc:
        case CmIdQpType::kUd:
        case CmIdQpType::kXrcSend:
        case CmIdQpType::kXrcRecv:
          break;
        default:
          return EINVAL;
      }
      break;
    default:
      return EINVAL;
  }
  CmIdRecord* record = NewId(request.file_id);
  if (record == nullptr) return ENOMEM;
  record->uid = command.uid;
  record->port_space = command.ps;
  record->qp_type = type;
  Answer(request, rdma_ucm_create_id_resp{.id = record->id});
  return 0;
}

// --- Bind

int CmAgent::State::BindPort(CmIdRecord& record) {
  uint16_t space = record.port_space;
  if (record.source.family == kFamilyIb) {
    // The service id says which port space is meant.
    SocketAddress& source = record.source;
    const uint64_t id = source.service_id & source.service_mask & kIbServiceMask;
    const uint64_t mask = source.service_mask & kIbServiceMask;
    const auto means = [&](uint16_t candidate) {
      const bool allowed = record.port_space == RDMA_PS_IB || record.port_space == candidate;
      return allowed && id == ((uint64_t{candidate} << 16) & mask);
    };
    space = 0;
    for (const uint16_t candidate : {RDMA_PS_IB, RDMA_PS_TCP, RDMA_PS_UDP}) {
      if (space == 0 && means(candidate)) space = candidate;
    }
    if (space == 0) return EPROTONOSUPPORT;
    source.service_id = (uint64_t{space} << 16) | source.port;
    source.service_mask = ~uint64_t{0};
    record.port_space = space;
  }
  const uint16_t port = record.source.port;
  int error;
  if (port == 0) {
    error = ports_.BindEphemeral(space, record, platform_.Random());
  } else if (port < 1024 && !files_.at(record.file).client.may_bind_low_ports) {
    error = EACCES;
  } else {
    error = ports_.Bind(space, record);
  }
  record.has_port = error == 0;
  return error;
}

int CmAgent::State::BindRecord(CmIdRecord& record, const SocketAddress& address) {
  if (record.state != CmIdState::kIdle) return EINVAL;
  std::optional<LocalEnd> local;
  if (!address.IsAny()) {
    // Service ids of InfiniBand fabrics lead to no RoCE port.
    if (address.family == kFamilyIb) return ENODEV;
    local = router_.FindLocal(address);
    if (!local) return EADDRNOTAVAIL;
    if (IsRemoved(local->nic)) return ENODEV;
  }
  const SocketAddress old_source = record.source;
  const bool old_family_only = record.family_only;
  record.source = address;
  if (!record.family_only_set) record.family_only = address.family == kFamilyInet;
  if (const int error = BindPort(record)) {
    record.source = old_source;
    record.family_only = old_family_only;
    return error;
  }
  record.local = local;
  if (local) record.local_gid = nics_[local->nic].gids[local->sgid_index].gid;
  record.state = CmIdState::kAddrBound;
  return 0;
}

int CmAgent::State::BindIp(const Request& request) {
  const auto command = Load<rdma_ucm_bind_ip>(request);
  const auto address = SocketAddress::Load(ObjectBytes(command.addr));
  if (!address) return EINVAL;
  CmIdRecord* record = FindId(request, command.id);
  return record == nullptr ? ENOENT : BindRecord(*record, *address);
}

int CmAgent::State::Bind(const Request& request) {
  const auto command = Load<rdma_ucm_bind>(request);
  const auto address = LoadSized(command.addr, command.addr_size);
  if (command.reserved != 0 || !address) return EINVAL;
  CmIdRecord* record = FindId(request, command.id);
  return record == nullptr ? ENOENT : BindRecord(*record, *address);
}

// --- Resolve

int CmAgent::State::ResolveRecord(CmIdRecord& record, const SocketAddress* source,
                                  const SocketAddress& destination, uint32_t timeout_ms) {
  if (record.state == CmIdState::kIdle) {
    SocketAddress from;
    from.family = destination.family;
    if (source != nullptr) from = *source;
    if (const int error = BindRecord(record, from)) return error;
  }
  if (record.state != CmIdState::kAddrBound) return EINVAL;
  if (record.source.family != destination.family) return EINVAL;
  if (destination.family == kFamilyIb) return ENODEV;
  SocketAddress to = destination;
  if (to.IsAny()) {
    Gid::Bytes one{};
    one[15] = std::byte{1};
    to.ip = to.family == kFamilyInet ? Gid::FromIpv4(0x7f000001) : Gid(one);
  }
  constexpr uint8_t kAddrError = 1;
  Route route;
  const int no_route = router_.Find(to, record.local, record.source, &route);
  const auto nic = no_route == 0 ? std::optional<uint32_t>(route.local.nic) : std::nullopt;
  if (const auto status = platform_.InjectedStatus(record.file, kAddrError, nic)) {
    record.destination = to;
    record.state = CmIdState::kAddrQuery;
    FinishResolve(record, -*status);
    return 0;
  }
  if (no_route != 0) return no_route;
  const bool removed = IsRemoved(route.local.nic);
  bool pending = false;
  if (route.needs_reach && !removed) {
    const auto reach = platform_.Resolve(route.local.nic, route.remote_gid);
    if (reach == CmPlatform::Reach::kUnreachable) return ENETUNREACH;
    pending = reach == CmPlatform::Reach::kPending;
  }
  record.destination = to;
  if (removed) {  // The netdev is there, found by the route; its RDMA device is not.
    record.state = CmIdState::kAddrQuery;
    FinishResolve(record, ENODEV);
    return 0;
  }
  record.local = route.local;
  record.local_gid = route.local_gid;
  record.remote_gid = route.remote_gid;
  route.source.port = record.source.port;
  route.source.scope_id = record.source.scope_id;
  route.source.flow_info = record.source.flow_info;
  record.source = route.source;
  record.state = CmIdState::kAddrQuery;
  if (!pending) {
    FinishResolve(record, 0);
    return 0;
  }
  record.resolve_until = now_ + transport::Duration::Milliseconds(timeout_ms);
  resolving_.insert(record.id);
  next_resolve_ = std::min(next_resolve_, now_ + transport::Duration::Milliseconds(1));
  return 0;
}

void CmAgent::State::FinishResolve(CmIdRecord& record, int error) {
  resolving_.erase(record.id);
  record.resolve_until = transport::Time::Never();
  record.state = error == 0 ? CmIdState::kAddrResolved : CmIdState::kAddrBound;
  constexpr uint32_t kAddrResolved = 0;
  constexpr uint32_t kAddrError = 1;
  QueuePlain(record, error == 0 ? kAddrResolved : kAddrError, -error);
}

int CmAgent::State::ResolveIp(const Request& request) {
  const auto command = Load<rdma_ucm_resolve_ip>(request);
  const auto destination = SocketAddress::Load(ObjectBytes(command.dst_addr));
  const auto source = SocketAddress::Load(ObjectBytes(command.src_addr));
  if (!destination || (command.src_addr.sin6_family != 0 && !source)) return EINVAL;
  CmIdRecord* record = FindId(request, command.id);
  if (record == nullptr) return ENOENT;
  return ResolveRecord(*record, source ? &*source : nullptr, *destination, command.timeout_ms);
}

int CmAgent::State::ResolveAddr(const Request& request) {
  const auto command = Load<rdma_ucm_resolve_addr>(request);
  const auto destination = LoadSized(command.dst_addr, command.dst_size);
  const auto source = LoadSized(command.src_addr, command.src_size);
  if (command.reserved != 0 || !destination || (command.src_size != 0 && !source)) return EINVAL;
  CmIdRecord* record = FindId(request, command.id);
  if (record == nullptr) return ENOENT;
  return ResolveRecord(*record, source ? &*source : nullptr, *destination, command.timeout_ms);
}

void CmAgent::State::MakePath(CmIdRecord& record) {
  const CmNic& nic = nics_[record.local->nic];
  transport::CmPath& path = record.path;
  path = {};
  path.nic = record.local->nic;
  path.sgid_index = record.local->sgid_index;
  path.local_gid = record.local_gid;
  path.remote_gid = record.remote_gid;
  // Both directions of the connection use it, hence one UDP source port.
  path.flow_label =
      record.source.family == kFamilyInet6 ? record.destination.flow_info & 0xfffff : 0;
  if (path.flow_label == 0) path.flow_label = (platform_.Random() & 0xfffff) | 1;
  path.traffic_class = record.tos.value_or(0);
  path.mtu = nic.mtu;
  if (record.ack_timeout.value_or(0) != 0) {
    path.packet_life_time = static_cast<uint8_t>(*record.ack_timeout - 1);
  }
  record.has_path = true;
}

int CmAgent::State::ResolveRoute(const Request& request) {
  const auto command = Load<rdma_ucm_resolve_route>(request);
  CmIdRecord* record = FindId(request, command.id);
  if (record == nullptr) return ENOENT;
  if (record->state != CmIdState::kAddrResolved) return EINVAL;
  constexpr uint8_t kRouteError = 3;
  if (const auto status = platform_.InjectedStatus(record->file, kRouteError, record->local->nic)) {
    QueuePlain(*record, kRouteError, *status);
    return 0;
  }
  MakePath(*record);
  record->state = CmIdState::kRouteResolved;
  constexpr uint32_t kRouteResolved = 2;
  QueuePlain(*record, kRouteResolved, 0);
  return 0;
}

// --- Query

template <typename Response>
void CmAgent::State::FillDevice(const CmIdRecord& record, Response* response) const {
  response->ibdev_index = 0xffffffff;
  if (!record.local) return;
  const CmNic& nic = nics_[record.local->nic];
  response->node_guid = ToBe64(nic.node_guid);
  response->ibdev_index = nic.ibdev_index;
  response->port_num = 1;
}

int CmAgent::State::QueryAddress(const Request& request, const CmIdRecord& record) {
  if (request.out < offsetof(rdma_ucm_query_addr_resp, ibdev_index)) return ENOSPC;
  rdma_ucm_query_addr_resp response{};
  FillDevice(record, &response);
  if (record.local) response.pkey = 0xffff;
  response.src_size = record.source.size();
  response.dst_size = record.destination.size();
  record.source.Store(reinterpret_cast<std::byte*>(&response.src_addr));
  record.destination.Store(reinterpret_cast<std::byte*>(&response.dst_addr));
  Answer(request, response);
  return 0;
}

int CmAgent::State::QueryGid(const Request& request, const CmIdRecord& record) {
  if (request.out < offsetof(rdma_ucm_query_addr_resp, ibdev_index)) return ENOSPC;
  rdma_ucm_query_addr_resp response{};
  FillDevice(record, &response);
  const auto as_ib = [&](const SocketAddress& address, const Gid& gid) {
    if (address.family == kFamilyIb) return address;
    SocketAddress ib;
    ib.family = kFamilyIb;
    ib.pkey = record.local ? 0xffff : 0;
    ib.ip = gid;
    ib.service_id = transport::CmServiceId(record.port_space, address.port);
    return ib;
  };
  if (record.local) response.pkey = 0xffff;
  const SocketAddress source = as_ib(record.source, record.local_gid);
  const SocketAddress destination = as_ib(record.destination, record.remote_gid);
  response.src_size = source.size();
  response.dst_size = destination.size();
  source.Store(reinterpret_cast<std::byte*>(&response.src_addr));
  destination.Store(reinterpret_cast<std::byte*>(&response.dst_addr));
  Answer(request, response);
  return 0;
}

int CmAgent::State::QueryPath(const Request& request, const CmIdRecord& record) {
  struct Response {
    uint32_t num_paths;
    uint32_t reserved;
    ib_path_rec_data path;
  } response{};
  static_assert(sizeof(Response) == 80);
  if (!record.has_path || request.out < sizeof(response)) {
    const uint64_t counts = record.has_path ? 1 : 0;  // num_paths and the reserved word
    static_assert(sizeof(counts) == sizeof(rdma_ucm_query_path_resp));
    Answer(request, counts);
    return 0;
  }
  const transport::CmPath& path = record.path;
  response.num_paths = 1;
  response.path.flags = kPathFlags;
  // A PathRecord as SA messages have it.
  auto* p = reinterpret_cast<std::byte*>(response.path.path_rec);
  path.remote_gid.Store(p + 8);
  path.local_gid.Store(p + 24);
  StoreBe32(p + 44, (path.flow_label << 8) | path.hop_limit);
  p[48] = std::byte{path.traffic_class};
  p[49] = std::byte{0x80};  // reversible
  StoreBe16(p + 50, path.pkey.value());
  StoreBe16(p + 52, path.sl);
  p[54] = std::byte(kSelectorExactly << 6 | static_cast<uint8_t>(path.mtu));
  p[55] = std::byte(kSelectorExactly << 6 | path.rate);
  p[56] = std::byte(kSelectorExactly << 6 | path.packet_life_time);
  Answer(request, response);
  return 0;
}

int CmAgent::State::Query(const Request& request) {
  const auto command = Load<rdma_ucm_query>(request);
  const CmIdRecord* record = FindId(request, command.id);
  if (record == nullptr) return ENOENT;
  switch (command.option) {
    case RDMA_USER_CM_QUERY_ADDR:
      return QueryAddress(request, *record);
    case RDMA_USER_CM_QUERY_PATH:
      return QueryPath(request, *record);
    case RDMA_USER_CM_QUERY_GID:
      return QueryGid(request, *record);
    default:
      return ENOSYS;
  }
}

int CmAgent::State::QueryRoute(const Request& request) {
  const auto command = Load<rdma_ucm_query>(request);
  const CmIdRecord* record = FindId(request, command.id);
  if (record == nullptr) return ENOENT;
  rdma_ucm_query_route_resp response{};
  FillDevice(*record, &response);
  // This command knows no AF_IB; its addresses have room for IPv6.
  std::byte storage[128];
  const auto store = [&storage](const SocketAddress& address, sockaddr_in6* to) {
    if (address.family == kFamilyIb) return;
    address.Store(storage);
    std::memcpy(to, storage, address.size());
  };
  store(record->source, &response.src_addr);
  store(record->destination, &response.dst_addr);
  if (record->local) {
    ib_user_path_rec& route = response.ib_route[0];
    StoreGid(record->remote_gid, route.dgid);
    StoreGid(record->local_gid, route.sgid);
    route.pkey = 0xffff;
    if (record->has_path) {
      response.num_paths = 1;
      route.flow_label = ToBe32(record->path.flow_label);
      route.reversible = 1;
      route.mtu = static_cast<uint32_t>(record->path.mtu);
      route.pkey = ToBe16(record->path.pkey.value());
      route.hop_limit = record->path.hop_limit;
      route.traffic_class = record->path.traffic_class;
      route.sl = record->path.sl;
      route.mtu_selector = kSelectorExactly;
      route.rate_selector = kSelectorExactly;
      route.rate = record->path.rate;
      route.packet_life_time_selector = kSelectorExactly;
      route.packet_life_time = record->path.packet_life_time;
    }
  }
  Answer(request, response);
  return 0;
}

// --- Options

int CmAgent::State::SetIdOption(CmIdRecord& record, uint32_t name,
                                std::span<const std::byte> value) {
  const bool is_byte = name == RDMA_OPTION_ID_TOS || name == RDMA_OPTION_ID_ACK_TIMEOUT;
  const bool is_int = name == RDMA_OPTION_ID_REUSEADDR || name == RDMA_OPTION_ID_AFONLY;
  if (!is_byte && !is_int) return ENOSYS;
  if (value.size() != (is_byte ? sizeof(uint8_t) : sizeof(int32_t))) return EINVAL;
  const bool on = is_int && LoadStruct<int32_t>(value) != 0;
  const auto byte = std::to_integer<uint8_t>(value[0]);
  switch (name) {
    case RDMA_OPTION_ID_TOS:
      record.tos = byte;
      return 0;
    case RDMA_OPTION_ID_REUSEADDR:
      if (record.state != CmIdState::kIdle && (!on || record.state == CmIdState::kListen)) {
        return EINVAL;
      }
      record.reuse_address = on;
      return 0;
    case RDMA_OPTION_ID_AFONLY:
      if (record.state != CmIdState::kIdle && record.state != CmIdState::kAddrBound) return EINVAL;
      record.family_only = on;
      record.family_only_set = true;
      return 0;
    default:
      if (record.qp_type != CmIdQpType::kRc && record.qp_type != CmIdQpType::kXrcSend) {
        return EINVAL;
      }
      record.ack_timeout = byte & 31;
      return 0;
  }
}

int CmAgent::State::SetPath(CmIdRecord& record, std::span<const std::byte> value) {
  if (value.empty() || value.size() % sizeof(ib_path_rec_data) != 0) return EINVAL;
  const std::byte* found = nullptr;
  for (size_t at = 0; at < value.size() && found == nullptr; at += sizeof(ib_path_rec_data)) {
    if (LoadStruct<uint32_t>(value.subspan(at)) == kPathFlags) found = &value[at + 8];
  }
  if (found == nullptr || !record.local) return EINVAL;
  if (record.state != CmIdState::kAddrResolved) return EINVAL;
  MakePath(record);
  // Where the packets go is what the address resolution found; how they go may
  // be set.
  record.path.flow_label = transport::LoadBe32(found + 44) >> 8 & 0xfffff;
  record.path.traffic_class = transport::LoadBe8(found + 48);
  record.path.sl = transport::LoadBe8(found + 53) & 15;
  const auto mtu = transport::Pmtu{static_cast<uint8_t>(transport::LoadBe8(found + 54) & 63)};
  if (IsValid(mtu) && mtu < record.path.mtu) record.path.mtu = mtu;
  record.path.rate = transport::LoadBe8(found + 55) & 63;
  record.path.packet_life_time = transport::LoadBe8(found + 56) & 31;
  record.state = CmIdState::kRouteResolved;
  constexpr uint32_t kRouteResolved = 2;
  QueuePlain(record, kRouteResolved, 0);
  return 0;
}

int CmAgent::State::SetOption(const Request& request) {
  const auto command = Load<rdma_ucm_set_option>(request);
  CmIdRecord* record = FindId(request, command.id);
  if (record == nullptr) return ENOENT;
  if (command.optlen > request.extra.size()) return EINVAL;
  const auto value = request.extra.first(command.optlen);
  switch (command.level) {
    case RDMA_OPTION_ID:
      return SetIdOption(*record, command.optname, value);
    case RDMA_OPTION_IB:
      return command.optname == RDMA_OPTION_IB_PATH ? SetPath(*record, value) : ENOSYS;
    default:
      return ENOSYS;
  }
}

}  // namespace verbena::nic
