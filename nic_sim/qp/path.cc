// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/qp/path.h"

#include <cerrno>

#include "nic_sim/port/control_frames.h"

namespace verbena::nic {

using transport::Gid;
using transport::MacAddress;

namespace {

// A multicast GID as rdma_cm makes it of an IPv4 group: ff0e::ffff:a.b.c.d.
bool IsIpv4Group(const Gid& gid) {
  const std::byte* p = gid.bytes().data();
  return transport::LoadBe64(p) == 0xff0e'0000'0000'0000u && transport::LoadBe32(p + 8) == 0xffff;
}

}  // namespace

Gid CanonicalGid(const Gid& gid) {
  return IsIpv4Group(gid) ? Gid::FromIpv4(transport::LoadBe32(gid.bytes().data() + 12)) : gid;
}

Gid DestinationOf(const abi::AhAttr& ah) {
  return CanonicalGid(Gid::Load(reinterpret_cast<const std::byte*>(ah.dgid)));
}

int CheckAddress(const Nic& nic, const abi::AhAttr& ah) {
  const auto& gids = nic.gids();
  if (ah.is_global == 0 || ah.port_num != 1) return EINVAL;  // RoCE needs a GRH
  if (ah.sgid_index >= gids.size() || gids[ah.sgid_index].IsZero()) return EINVAL;
  const Gid dgid = DestinationOf(ah);
  if (dgid.IsZero()) return EINVAL;
  return dgid.IsV4Mapped() == gids[ah.sgid_index].IsV4Mapped() ? 0 : EINVAL;
}

int CheckPath(const Nic& nic, Fabric& fabric, const abi::AhAttr& ah) {
  if (const int error = CheckAddress(nic, ah); error != 0) return error;
  const Gid dgid = DestinationOf(ah);
  if (dgid.IsMulticast()) return EINVAL;
  return fabric.CanReach(nic.port(), nic.gids()[ah.sgid_index], dgid) ? 0 : EHOSTUNREACH;
}

transport::PacketAddress AddressFor(const Nic& nic, Fabric& fabric, const abi::AhAttr& ah) {
  transport::PacketAddress address;
  address.source_mac = nic.config().mac;
  address.source_gid = nic.gids()[ah.sgid_index];
  address.destination_gid = DestinationOf(ah);
  address.is_ipv6 = !address.source_gid.IsV4Mapped();
  if (address.destination_gid.IsMulticast()) {
    address.destination_mac = GroupMac(address.destination_gid);
  } else if (const MacAddress* mac = fabric.Resolve(address.destination_gid)) {
    address.destination_mac = *mac;
  }
  address.traffic_class = ah.traffic_class;
  if (ah.hop_limit != 0) address.hop_limit = ah.hop_limit;
  address.flow_label = ah.flow_label & 0xfffff;
  return address;
}

}  // namespace verbena::nic
