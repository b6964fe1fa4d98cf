// SPDX-License-Identifier: Apache-2.0
//
// Port spaces: who has bound which port. One table per host, as one network
// namespace has on Linux.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "nic_sim/cm/socket_address.h"

namespace verbena::nic {

// What binds a port; its address and options may change while it is bound.
struct PortOwner {
  SocketAddress source;
  bool reuse_address = false;
  bool family_only = false;  // an IPv6 wildcard does not stand for IPv4
};

class PortTable {
 public:
  static constexpr uint16_t kFirstEphemeral = 32768;
  static constexpr uint16_t kLastEphemeral = 60999;

  // Binds owner.source.port in `space`. 0, EADDRINUSE, or EADDRNOTAVAIL (one of
  // the two is a wildcard), as Linux.
  int Bind(uint16_t space, PortOwner& owner);
  // Binds a free port and writes it to owner.source. EADDRNOTAVAIL: none left.
  int BindEphemeral(uint16_t space, PortOwner& owner, uint32_t random);
  void Release(uint16_t space, PortOwner& owner);
  // Who has bound a port; nullptr: nobody.
  const std::set<PortOwner*>* OwnersOf(uint16_t space, uint16_t port) const {
    const auto it = ports_.find({space, port});
    return it == ports_.end() ? nullptr : &it->second;
  }
  // Whether `owner`, which is bound, may be the one that listens.
  int CheckListen(uint16_t space, const PortOwner& owner) const;

 private:
  using Key = std::pair<uint16_t, uint16_t>;
  int Check(const Key& key, const PortOwner& owner, bool reuse_address) const;

  std::map<Key, std::set<PortOwner*>> ports_;
};

}  // namespace verbena::nic
