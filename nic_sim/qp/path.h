// SPDX-License-Identifier: Apache-2.0
//
// From the address attributes of verbs to what stands in front of each packet.
//
// Thread: under the shard's lock.
#pragma once

#include "nic_sim/abi/commands.h"
#include "nic_sim/fabric/fabric.h"
#include "nic_sim/qp/nic.h"
#include "transport/types.h"
#include "transport/wire/packet_builder.h"

namespace verbena::nic {

// One form of GIDs that mean the same IPv4 group.
transport::Gid CanonicalGid(const transport::Gid& gid);
transport::Gid DestinationOf(const abi::AhAttr& ah);

// 0; EINVAL: an address that makes no sense. Says nothing of whether there is
// a way.
int CheckAddress(const Nic& nic, const abi::AhAttr& ah);
// The same for a connection: one peer, and there is a way to it, else
// EHOSTUNREACH.
int CheckPath(const Nic& nic, Fabric& fabric, const abi::AhAttr& ah);

// The UDP source port is left to whoever knows the QPs. `ah` was checked.
transport::PacketAddress AddressFor(const Nic& nic, Fabric& fabric, const abi::AhAttr& ah);

}  // namespace verbena::nic
