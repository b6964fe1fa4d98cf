// SPDX-License-Identifier: Apache-2.0
//
// LIDs. RoCE has none, and a path without a GRH is refused by its NICs. Programs
// that know nothing else (qperf without rdma_cm) can run over the fabric of one
// daemon all the same: port n of it has the LID n + 1, and a path that names one
// of those is the path between the GIDs of both ports. dlid 0, what a RoCE port
// shows as its LID, leads nowhere.
//
// Thread: any.
#pragma once

#include "nic_sim/abi/commands.h"
#include "nic_sim/fabric/fabric.h"
#include "nic_sim/qp/nic.h"

namespace verbena::nic {

uint16_t LidOf(const Nic& nic);

// `ah` itself if it has a GRH or its LID is nobody's.
abi::AhAttr WithGids(const Nic& nic, const Fabric& fabric, const abi::AhAttr& ah);

}  // namespace verbena::nic
