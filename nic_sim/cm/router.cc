// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/cm/router.h"

#include <cerrno>

#include "transport/base/byteorder.h"

namespace verbena::nic {
namespace {

using transport::Gid;

// 127.88.0.0/16 is the network of simulated NICs.
bool IsSimulatedNetwork(const Gid& gid) { return gid.IsV4Mapped() && gid.Ipv4() >> 16 == 0x7f58; }

bool SharesPrefix(const Gid& a, const Gid& b, uint8_t bits) {
  for (size_t i = 0; i < Gid::kBytes && bits > 0; ++i) {
    const unsigned shift = bits >= 8 ? 0 : 8 - bits;
    const unsigned difference =
        std::to_integer<unsigned>(a.bytes()[i]) ^ std::to_integer<unsigned>(b.bytes()[i]);
    if (difference >> shift != 0) return false;
    bits = static_cast<uint8_t>(bits >= 8 ? bits - 8 : 0);
  }
  return true;
}

}  // namespace

const Gid& Router::GidOf(const LocalEnd& end) const {
  return nics_[end.nic].gids[end.sgid_index].gid;
}

std::optional<uint8_t> Router::GidIndexOfFamily(uint32_t nic, bool ipv4) const {
  const auto& gids = nics_[nic].gids;
  for (size_t i = 0; i < gids.size(); ++i) {
    if (!gids[i].gid.IsZero() && gids[i].gid.IsV4Mapped() == ipv4) return static_cast<uint8_t>(i);
  }
  return std::nullopt;
}

// The address that stands for the NIC: its first IPv4 one.
uint8_t Router::PrimaryGidIndex(uint32_t nic) const {
  const auto ipv4 = GidIndexOfFamily(nic, true);
  return ipv4 ? *ipv4 : GidIndexOfFamily(nic, false).value_or(0);
}

std::optional<LocalEnd> Router::FindLocal(const SocketAddress& address) const {
  for (uint32_t nic = 0; nic < nics_.size(); ++nic) {
    const auto& gids = nics_[nic].gids;
    for (size_t i = 0; i < gids.size(); ++i) {
      if (gids[i].gid == address.ip && !gids[i].gid.IsZero()) {
        return LocalEnd{.nic = nic, .sgid_index = static_cast<uint8_t>(i)};
      }
    }
  }
  if (nics_.empty() || nics_[0].gids.empty()) return std::nullopt;
  const bool own =
      address.IsLoopback() ? !IsSimulatedNetwork(address.ip) : platform_.IsHostAddress(address.ip);
  if (!own) return std::nullopt;
  return LocalEnd{.nic = 0, .sgid_index = PrimaryGidIndex(0), .stands_in = true};
}

std::optional<LocalEnd> Router::FindBySubnet(const Gid& destination) const {
  std::optional<LocalEnd> best;
  int best_prefix = -1;
  for (uint32_t nic = 0; nic < nics_.size(); ++nic) {
    const auto& gids = nics_[nic].gids;
    for (size_t i = 0; i < gids.size(); ++i) {
      const auto& entry = gids[i];
      if (entry.gid.IsZero() || entry.prefix <= best_prefix ||
          entry.gid.IsV4Mapped() != destination.IsV4Mapped() ||
          !SharesPrefix(entry.gid, destination, entry.prefix)) {
        continue;
      }
      best = LocalEnd{.nic = nic, .sgid_index = static_cast<uint8_t>(i)};
      best_prefix = entry.prefix;
    }
  }
  if (best) return best;
  // Behind a gateway, if the surroundings know one.
  for (uint32_t nic = 0; nic < nics_.size(); ++nic) {
    const auto index = GidIndexOfFamily(nic, destination.IsV4Mapped());
    if (!index) continue;
    if (destination.IsMulticast() ||
        platform_.Resolve(nic, destination) != CmPlatform::Reach::kUnreachable) {
      return LocalEnd{.nic = nic, .sgid_index = *index};
    }
  }
  return std::nullopt;
}

int Router::Find(const SocketAddress& destination, const std::optional<LocalEnd>& bound,
                 const SocketAddress& source, Route* route) const {
  if (nics_.empty()) return ENODEV;
  *route = Route{};
  const std::optional<LocalEnd> peer =
      destination.IsMulticast() ? std::nullopt : FindLocal(destination);
  if (peer) {
    // As for TCP: without a source of its own a connection to a local address
    // comes from that same address.
    route->local = bound ? *bound : *peer;
    route->source = bound ? source : destination;
    LocalEnd remote = *peer;
    // One of the two ends may have to speak the other's IP version.
    if (GidOf(route->local).IsV4Mapped() != GidOf(remote).IsV4Mapped()) {
      LocalEnd& adapts = remote.stands_in ? remote : route->local;
      const auto index = GidIndexOfFamily(adapts.nic, !GidOf(adapts).IsV4Mapped());
      if (!adapts.stands_in || !index) return ENETUNREACH;
      adapts.sgid_index = *index;
    }
    route->local_gid = GidOf(route->local);
    route->remote_gid = GidOf(remote);
    return 0;
  }
  const std::optional<LocalEnd> local = bound ? bound : FindBySubnet(destination.ip);
  if (!local) return ENETUNREACH;
  route->local = *local;
  if (GidOf(route->local).IsV4Mapped() != destination.ip.IsV4Mapped()) {
    const auto index = GidIndexOfFamily(local->nic, destination.ip.IsV4Mapped());
    if (!local->stands_in || !index) return ENETUNREACH;
    route->local.sgid_index = *index;
  }
  route->local_gid = GidOf(route->local);
  route->remote_gid = destination.ip;
  // A stand-in cannot be reached from other hosts: they see the NIC's address.
  route->source = bound && !bound->stands_in ? source : SocketAddress::Inet(route->local_gid, 0);
  route->source.family = destination.family;
  route->needs_reach = !destination.IsMulticast();
  return 0;
}

}  // namespace verbena::nic
