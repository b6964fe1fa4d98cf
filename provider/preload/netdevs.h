// SPDX-License-Identifier: Apache-2.0
//
// The simulated network interfaces of the NICs, from the file `netdevs` in the
// daemon's tree: one line per address, "NAME INDEX MAC MTU ADDRESS PREFIX".
// Not for signal handlers: allocates.
#pragma once

#include <netinet/in.h>

#include <cstdint>

namespace verbena::provider {

struct NetdevAddress {
  char name[16];  // "verbena0"
  uint32_t index;
  uint32_t mtu;
  uint8_t mac[6];
  sa_family_t family;  // AF_INET or AF_INET6
  uint8_t prefix;      // bits
  in6_addr address;    // AF_INET: the first 4 bytes
};

// All addresses; those of one interface follow each other. Freed by itself.
class Netdevs {
 public:
  Netdevs();
  ~Netdevs();
  Netdevs(const Netdevs&) = delete;
  Netdevs& operator=(const Netdevs&) = delete;

  const NetdevAddress* begin() const { return addresses_; }
  const NetdevAddress* end() const { return addresses_ + count_; }

 private:
  NetdevAddress* addresses_ = nullptr;
  int count_ = 0;
};

// What such an interface says of itself: IFF_*.
extern const unsigned kNetdevFlags;

// False for nearly all names.
bool MayBeNetdev(const char* name);

}  // namespace verbena::provider
