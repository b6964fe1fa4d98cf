// SPDX-License-Identifier: Apache-2.0
//
// Which NIC and which of its addresses a rdma_cm address means.
//
// An address that a NIC has leads to that NIC. The machine's own addresses,
// 127.0.0.0/8 (but for what NICs have in it: 127.88.0.0/16) and ::1 lead to the
// first NIC: the application keeps the address that it named, packets carry the
// NIC's own. Everything else leaves by the NIC whose subnet it lies in.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "nic_sim/cm/cm_agent.h"
#include "nic_sim/cm/socket_address.h"
#include "transport/types.h"

namespace verbena::nic {

// A local address.
struct LocalEnd {
  uint32_t nic = 0;
  uint8_t sgid_index = 0;
  bool stands_in = false;  // the NIC stands for an address that it does not have
};

struct Route {
  LocalEnd local;
  transport::Gid local_gid;
  transport::Gid remote_gid;
  SocketAddress source;      // as the application sees it; without a port
  bool needs_reach = false;  // not of this host: CmPlatform::Resolve decides
};

class Router {
 public:
  Router(const std::vector<CmNic>& nics, CmPlatform& platform) : nics_(nics), platform_(platform) {}

  // The NIC that has or stands for `address`; empty: not local.
  std::optional<LocalEnd> FindLocal(const SocketAddress& address) const;

  // `bound`: where the caller's source address is, if it is specific, with that
  // address in `source`. 0 or ENETUNREACH, ENODEV.
  int Find(const SocketAddress& destination, const std::optional<LocalEnd>& bound,
           const SocketAddress& source, Route* route) const;

 private:
  std::optional<uint8_t> GidIndexOfFamily(uint32_t nic, bool ipv4) const;
  uint8_t PrimaryGidIndex(uint32_t nic) const;
  const transport::Gid& GidOf(const LocalEnd& end) const;
  std::optional<LocalEnd> FindBySubnet(const transport::Gid& destination) const;

  const std::vector<CmNic>& nics_;
  CmPlatform& platform_;
};

}  // namespace verbena::nic
