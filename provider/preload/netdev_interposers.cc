// SPDX-License-Identifier: Apache-2.0
//
// Interposed functions that tell of network interfaces: those of the NICs are
// shown beside the kernel's. Packets of ordinary sockets do not pass them; that
// their addresses can be reached is the loopback interface's doing.
#include <ifaddrs.h>
#include <linux/if_packet.h>
#include <linux/sockios.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "provider/preload/interpose.h"
#include "provider/preload/netdev_ioctl.h"
#include "provider/preload/netdevs.h"

namespace {

using verbena::provider::kNetdevFlags;
using verbena::provider::MayBeNetdev;
using verbena::provider::NetdevAddress;
using verbena::provider::Netdevs;

// One entry of getifaddrs with all that it points to.
struct Entry {
  ifaddrs head;
  char name[IFNAMSIZ];
  union {
    sockaddr any;
    sockaddr_in v4;
    sockaddr_in6 v6;
    sockaddr_ll link;
  } address, mask, broadcast;
  uint32_t statistics[24];  // struct rtnl_link_stats, of AF_PACKET entries
};

// Entries that were appended to a list of libc's, until it is freed.
struct Appendix {
  Appendix* next;
  ifaddrs* list;
  Entry entries[];
};
Appendix* g_appendices;
std::atomic_flag g_appendices_busy = ATOMIC_FLAG_INIT;

class AppendicesLock {
 public:
  AppendicesLock() {
    while (g_appendices_busy.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~AppendicesLock() { g_appendices_busy.clear(std::memory_order_release); }
  AppendicesLock(const AppendicesLock&) = delete;
  AppendicesLock& operator=(const AppendicesLock&) = delete;
};

// Takes the appendix of `list` out; nullptr: it has none.
Appendix* TakeAppendix(const ifaddrs* list) {
  const AppendicesLock lock;
  for (Appendix** next = &g_appendices; *next != nullptr; next = &(*next)->next) {
    Appendix* const found = *next;
    if (found->list != list) continue;
    *next = found->next;
    return found;
  }
  return nullptr;
}

void FillMask(uint8_t* mask, size_t bytes, unsigned prefix) {
  for (size_t i = 0; i < bytes; ++i, prefix -= prefix < 8 ? prefix : 8) {
    mask[i] = static_cast<uint8_t>(prefix >= 8 ? 0xff : 0xff00 >> prefix);
  }
}

void Begin(const NetdevAddress& from, Entry* entry) {
  memcpy(entry->name, from.name, sizeof(entry->name));
  entry->head.ifa_name = entry->name;
  entry->head.ifa_flags = kNetdevFlags | 0x10000;  // IFF_LOWER_UP
  entry->head.ifa_addr = &entry->address.any;
}

void FillLink(const NetdevAddress& from, Entry* entry) {
  Begin(from, entry);
  sockaddr_ll& link = entry->address.link;
  link.sll_family = AF_PACKET;
  link.sll_ifindex = static_cast<int>(from.index);
  link.sll_hatype = ARPHRD_ETHER;
  link.sll_halen = sizeof(from.mac);
  memcpy(link.sll_addr, from.mac, sizeof(from.mac));
  entry->broadcast.link = link;
  memset(entry->broadcast.link.sll_addr, 0xff, sizeof(from.mac));
  entry->head.ifa_broadaddr = &entry->broadcast.any;
  entry->head.ifa_data = entry->statistics;
}

void FillAddress(const NetdevAddress& from, Entry* entry) {
  Begin(from, entry);
  entry->head.ifa_netmask = &entry->mask.any;
  if (from.family == AF_INET) {
    entry->address.v4.sin_family = AF_INET;
    memcpy(&entry->address.v4.sin_addr, &from.address, sizeof(in_addr));
    entry->mask.v4.sin_family = AF_INET;
    FillMask(reinterpret_cast<uint8_t*>(&entry->mask.v4.sin_addr), sizeof(in_addr), from.prefix);
    entry->broadcast.v4.sin_family = AF_INET;
    entry->broadcast.v4.sin_addr.s_addr =
        entry->address.v4.sin_addr.s_addr | ~entry->mask.v4.sin_addr.s_addr;
    entry->head.ifa_broadaddr = &entry->broadcast.any;
  } else {
    entry->address.v6.sin6_family = AF_INET6;
    entry->address.v6.sin6_addr = from.address;
    if (IN6_IS_ADDR_LINKLOCAL(&from.address)) entry->address.v6.sin6_scope_id = from.index;
    entry->mask.v6.sin6_family = AF_INET6;
    FillMask(entry->mask.v6.sin6_addr.s6_addr, sizeof(in6_addr), from.prefix);
  }
}

// The next address of another interface.
const NetdevAddress* NextNetdev(const Netdevs& netdevs, const NetdevAddress* address) {
  const uint32_t index = address->index;
  while (address != netdevs.end() && address->index == index) ++address;
  return address;
}

// Whether a NIC has an address of that family; AF_UNSPEC: of any.
bool HasFamily(int family) {
  for (const NetdevAddress& each : Netdevs()) {
    if (family == AF_UNSPEC || each.family == family) return true;
  }
  return false;
}

const NetdevAddress* FindByName(const Netdevs& netdevs, const char* name) {
  for (const NetdevAddress& each : netdevs) {
    if (strncmp(each.name, name, sizeof(each.name)) == 0) return &each;
  }
  return nullptr;
}

}  // namespace

VERBENA_INTERPOSE int getifaddrs(ifaddrs** list) noexcept {
  const int result = VERBENA_NEXT(getifaddrs)(list);
  if (result != 0) return result;
  const Netdevs netdevs;
  size_t count = static_cast<size_t>(netdevs.end() - netdevs.begin());
  if (count == 0) return 0;
  for (auto each = netdevs.begin(); each != netdevs.end(); each = NextNetdev(netdevs, each))
    ++count;
  auto* const appendix =
      static_cast<Appendix*>(calloc(1, sizeof(Appendix) + count * sizeof(Entry)));
  if (appendix == nullptr) return 0;
  Entry* entry = appendix->entries;
  for (auto each = netdevs.begin(); each != netdevs.end(); each = NextNetdev(netdevs, each)) {
    FillLink(*each, entry++);
  }
  for (const NetdevAddress& each : netdevs) FillAddress(each, entry++);
  for (size_t i = 0; i + 1 < count; ++i) {
    appendix->entries[i].head.ifa_next = &appendix->entries[i + 1].head;
  }
  ifaddrs** last = list;
  while (*last != nullptr) last = &(*last)->ifa_next;
  *last = &appendix->entries[0].head;
  appendix->list = *list;
  // Of a list at the same place that was freed otherwise.
  free(TakeAppendix(*list));
  const AppendicesLock lock;
  appendix->next = g_appendices;
  g_appendices = appendix;
  return 0;
}

VERBENA_INTERPOSE void freeifaddrs(ifaddrs* list) noexcept {
  Appendix* const appendix = list == nullptr ? nullptr : TakeAppendix(list);
  // Without interfaces of the kernel's the list is all ours.
  const bool all_ours = appendix != nullptr && list == &appendix->entries[0].head;
  if (!all_ours) VERBENA_NEXT(freeifaddrs)(list);
  free(appendix);
}

VERBENA_INTERPOSE unsigned if_nametoindex(const char* name) noexcept {
  if (MayBeNetdev(name)) {
    const Netdevs netdevs;
    if (const NetdevAddress* found = FindByName(netdevs, name)) return found->index;
  }
  return VERBENA_NEXT(if_nametoindex)(name);
}

VERBENA_INTERPOSE char* if_indextoname(unsigned index, char* name) noexcept {
  if (index >= verbena::abi::NetdevIndex(0)) {
    const Netdevs netdevs;
    for (const NetdevAddress& each : netdevs) {
      if (each.index == index) return static_cast<char*>(memcpy(name, each.name, IFNAMSIZ));
    }
  }
  return VERBENA_NEXT(if_indextoname)(index, name);
}

// Freed by libc's if_freenameindex(): names one by one, then the array.
VERBENA_INTERPOSE struct if_nameindex* if_nameindex() noexcept {
  struct if_nameindex* list = VERBENA_NEXT(if_nameindex)();
  if (list == nullptr) return nullptr;
  size_t count = 0;
  while (list[count].if_index != 0 || list[count].if_name != nullptr) ++count;
  const Netdevs netdevs;
  for (auto each = netdevs.begin(); each != netdevs.end(); each = NextNetdev(netdevs, each)) {
    auto* const longer =
        static_cast<struct if_nameindex*>(realloc(list, (count + 2) * sizeof(struct if_nameindex)));
    char* const name = longer == nullptr ? nullptr : strdup(each->name);
    if (longer != nullptr) list = longer;
    if (name == nullptr) return list;
    list[count++] = {each->index, name};
    list[count] = {0, nullptr};
  }
  return list;
}

// AI_ADDRCONFIG: libc asks the kernel which families have an address, and has no answer of the
// other family, not even for a number. A host without IPv6 of its own has that of its NICs.
VERBENA_INTERPOSE int getaddrinfo(const char* node, const char* service, const addrinfo* hints,
                                  addrinfo** result) {
  const auto next = VERBENA_NEXT(getaddrinfo);
  const int error = next(node, service, hints, result);
  if (error != EAI_ADDRFAMILY && error != EAI_NONAME && error != EAI_NODATA) return error;
  addrinfo wanted = {};
  wanted.ai_flags = AI_V4MAPPED | AI_ADDRCONFIG;  // what no hints stand for
  if (hints != nullptr) wanted = *hints;
  if (node == nullptr || (wanted.ai_flags & AI_ADDRCONFIG) == 0) return error;
  if (!HasFamily(wanted.ai_family)) return error;
  wanted.ai_flags &= ~AI_ADDRCONFIG;
  return next(node, service, &wanted, result);
}

namespace verbena::provider {

bool IsNetdevIoctl(unsigned long request) {
  switch (request) {
    case SIOCGIFNAME:
    case SIOCGIFINDEX:
    case SIOCGIFFLAGS:
    case SIOCGIFMTU:
    case SIOCGIFMETRIC:
    case SIOCGIFTXQLEN:
    case SIOCGIFHWADDR:
    case SIOCGIFADDR:
    case SIOCGIFNETMASK:
    case SIOCGIFBRDADDR:
    case SIOCSIFFLAGS:
    case SIOCSIFMTU:
    case SIOCSIFADDR:
    case SIOCSIFNETMASK:
    case SIOCSIFHWADDR:
    case SIOCETHTOOL:
      return true;
    default:
      return false;
  }
}

bool NetdevIoctl(unsigned long request, void* argument, int* error) {
  if (argument == nullptr) return false;
  auto* const data = static_cast<ifreq*>(argument);
  *error = 0;
  const Netdevs netdevs;
  if (request == SIOCGIFNAME) {
    for (const NetdevAddress& each : netdevs) {
      if (each.index != static_cast<unsigned>(data->ifr_ifindex)) continue;
      memcpy(data->ifr_name, each.name, IFNAMSIZ);
      return true;
    }
    return false;
  }
  if (!MayBeNetdev(data->ifr_name)) return false;
  const NetdevAddress* found = FindByName(netdevs, data->ifr_name);
  if (found == nullptr) return false;
  Entry entry = {};
  // The IPv4 address, if it has one.
  for (const NetdevAddress* each = found; each != netdevs.end(); ++each) {
    if (each->index != found->index || each->family != AF_INET) continue;
    FillAddress(*each, &entry);
    break;
  }
  const auto give = [&](const sockaddr_in& address) {
    if (entry.head.ifa_addr == nullptr) *error = EADDRNOTAVAIL;
    memcpy(&data->ifr_addr, &address, sizeof(data->ifr_addr));
  };
  switch (request) {
    case SIOCGIFINDEX:
      data->ifr_ifindex = static_cast<int>(found->index);
      return true;
    case SIOCGIFFLAGS:
      data->ifr_flags = static_cast<short>(kNetdevFlags);
      return true;
    case SIOCGIFMTU:
      data->ifr_mtu = static_cast<int>(found->mtu);
      return true;
    case SIOCGIFMETRIC:
      data->ifr_metric = 0;
      return true;
    case SIOCGIFTXQLEN:
      data->ifr_qlen = 1000;
      return true;
    case SIOCGIFHWADDR:
      memset(&data->ifr_hwaddr, 0, sizeof(data->ifr_hwaddr));
      data->ifr_hwaddr.sa_family = ARPHRD_ETHER;
      memcpy(data->ifr_hwaddr.sa_data, found->mac, sizeof(found->mac));
      return true;
    case SIOCGIFADDR:
      give(entry.address.v4);
      return true;
    case SIOCGIFNETMASK:
      give(entry.mask.v4);
      return true;
    case SIOCGIFBRDADDR:
      give(entry.broadcast.v4);
      return true;
    default:
      *error = EOPNOTSUPP;  // nothing of it can be changed
      return true;
  }
}

void AppendNetdevs(ifconf* list, int room) {
  const Netdevs netdevs;
  for (const NetdevAddress& each : netdevs) {
    if (each.family != AF_INET) continue;
    if (list->ifc_buf != nullptr) {
      if (list->ifc_len + static_cast<int>(sizeof(ifreq)) > room) return;
      ifreq item = {};
      memcpy(item.ifr_name, each.name, IFNAMSIZ);
      Entry entry = {};
      FillAddress(each, &entry);
      memcpy(&item.ifr_addr, &entry.address.v4, sizeof(item.ifr_addr));
      memcpy(list->ifc_buf + list->ifc_len, &item, sizeof(item));
    }
    list->ifc_len += static_cast<int>(sizeof(ifreq));
  }
}

}  // namespace verbena::provider
