// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/port/netdev.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ifaddrs.h>
#include <linux/filter.h>
#include <linux/if_packet.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "transport/wire/ip_udp.h"

namespace verbena::nic {

using transport::Gid;
using transport::MacAddress;

namespace {

class Socket {
 public:
  Socket() : fd_(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  bool Ask(unsigned long request, const std::string& interface, ifreq* answer) const {
    *answer = {};
    interface.copy(answer->ifr_name, IFNAMSIZ - 1);
    return fd_ >= 0 && ioctl(fd_, request, answer) == 0;
  }

 private:
  int fd_;
};

uint8_t PrefixBits(const unsigned char* mask, size_t bytes) {
  unsigned bits = 0;
  for (size_t i = 0; i < bytes; ++i) bits += static_cast<unsigned>(std::popcount(mask[i]));
  return static_cast<uint8_t>(bits);
}

std::optional<InterfaceAddress> AddressOf(const ifaddrs& entry) {
  if (entry.ifa_addr == nullptr || entry.ifa_netmask == nullptr) return std::nullopt;
  if (entry.ifa_addr->sa_family == AF_INET) {
    const auto* address = reinterpret_cast<const sockaddr_in*>(entry.ifa_addr);
    const auto* mask = reinterpret_cast<const sockaddr_in*>(entry.ifa_netmask);
    return InterfaceAddress{
        Gid::FromIpv4(ntohl(address->sin_addr.s_addr)),
        static_cast<uint8_t>(
            96 + PrefixBits(reinterpret_cast<const unsigned char*>(&mask->sin_addr), 4))};
  }
  if (entry.ifa_addr->sa_family == AF_INET6) {
    const auto* address = reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr);
    const auto* mask = reinterpret_cast<const sockaddr_in6*>(entry.ifa_netmask);
    return InterfaceAddress{
        Gid::Load(reinterpret_cast<const std::byte*>(&address->sin6_addr)),
        PrefixBits(reinterpret_cast<const unsigned char*>(&mask->sin6_addr), 16)};
  }
  return std::nullopt;
}

// Calls `wanted` for each open descriptor until it is true.
template <typename Wanted>
int FindDescriptor(Wanted wanted) {
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return -1;
  int found = -1;
  while (const dirent* entry = readdir(folder)) {
    char* end = nullptr;
    const long fd = std::strtol(entry->d_name, &end, 10);
    if (end == entry->d_name || fd == dirfd(folder)) continue;
    if (wanted(static_cast<int>(fd))) {
      found = static_cast<int>(fd);
      break;
    }
  }
  closedir(folder);
  return found;
}

}  // namespace

std::optional<NetdevInfo> ReadNetdev(const std::string& interface, std::string* error) {
  const Socket socket;
  ifreq request;
  NetdevInfo info;
  if (!socket.Ask(SIOCGIFINDEX, interface, &request)) {
    *error =
        "there is no netdev '" + interface + "' in this network namespace: " + std::strerror(errno);
    return std::nullopt;
  }
  info.index = request.ifr_ifindex;
  if (!socket.Ask(SIOCGIFHWADDR, interface, &request) ||
      request.ifr_hwaddr.sa_family != ARPHRD_ETHER) {
    *error = "netdev '" + interface + "' is no Ethernet device";
    return std::nullopt;
  }
  info.mac = MacAddress::Load(reinterpret_cast<const std::byte*>(request.ifr_hwaddr.sa_data));
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    *error = std::string("the kernel does not tell its addresses: ") + std::strerror(errno);
    return std::nullopt;
  }
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (interface != entry->ifa_name) continue;
    if (const auto address = AddressOf(*entry)) info.addresses.push_back(*address);
  }
  freeifaddrs(list);
  return info;
}

LinkInfo ReadLink(const std::string& interface) {
  const Socket socket;
  ifreq request;
  LinkInfo link;
  if (socket.Ask(SIOCGIFMTU, interface, &request))
    link.mtu = static_cast<uint32_t>(request.ifr_mtu);
  constexpr int kUp = IFF_UP | IFF_RUNNING;
  if (socket.Ask(SIOCGIFFLAGS, interface, &request)) link.up = (request.ifr_flags & kUp) == kUp;
  return link;
}

std::vector<int> SilenceRoceUdpPort(const std::string& interface) {
  std::vector<int> sockets;
  for (const int family : {AF_INET, AF_INET6}) {
    const int fd = socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    const int on = 1;
    // Keeps nothing of what comes.
    sock_filter nothing[] = {BPF_STMT(BPF_RET | BPF_K, 0)};
    const sock_fprog filter{.len = 1, .filter = nothing};
    setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter);
    // For this netdev only, and beside another daemon's.
    setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, interface.c_str(),
               static_cast<socklen_t>(interface.size()));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = htons(transport::kRoceUdpPort);
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(transport::kRoceUdpPort);
    const bool bound = family == AF_INET
                           ? bind(fd, reinterpret_cast<const sockaddr*>(&v4), sizeof v4) == 0
                           : bind(fd, reinterpret_cast<const sockaddr*>(&v6), sizeof v6) == 0;
    if (bound) {
      sockets.push_back(fd);
    } else {
      close(fd);
    }
  }
  return sockets;
}

int FindPacketSocket(int interface_index) {
  return FindDescriptor([interface_index](int fd) {
    sockaddr_ll address{};
    socklen_t length = sizeof address;
    return getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
           address.sll_family == AF_PACKET && address.sll_ifindex == interface_index;
  });
}

int FindTapQueue(const std::string& interface) {
  return FindDescriptor([&interface](int fd) {
    ifreq request{};
    return ioctl(fd, TUNGETIFF, &request) == 0 && interface == request.ifr_name;
  });
}

}  // namespace verbena::nic
