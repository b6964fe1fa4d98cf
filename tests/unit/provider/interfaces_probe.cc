// SPDX-License-Identifier: Apache-2.0
//
// A program that knows nothing of Verbena, run with LD_PRELOAD by
// interfaces_test: looks for network interfaces and at counters in every usual
// way. The NICs are verbena0 and verbena1, both with 127.88.0.1.
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/netlink.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <netinet/in.h>
#include <netpacket/packet.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

void Say(const char* what, bool good) { printf("%s %s\n", good ? "good" : "BAD", what); }

constexpr unsigned kFlags = IFF_UP | IFF_RUNNING;

void Addresses() {
  for (int round = 0; round < 3; ++round) {
    ifaddrs* list = nullptr;
    Say("getifaddrs", getifaddrs(&list) == 0);
    int links = 0;
    int addresses = 0;
    int others = 0;
    for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
      if (strncmp(each->ifa_name, "verbena", 7) != 0) {
        ++others;
        continue;
      }
      const bool up = (each->ifa_flags & kFlags) == kFlags && (each->ifa_flags & IFF_LOOPBACK) == 0;
      if (!up) Say("up, running, not loopback", false);
      if (each->ifa_addr->sa_family == AF_PACKET) {
        const auto* link = reinterpret_cast<const sockaddr_ll*>(each->ifa_addr);
        links += link->sll_halen == 6 && link->sll_addr[0] == 2 && link->sll_addr[5] == 1 &&
                 static_cast<unsigned>(link->sll_ifindex) == if_nametoindex(each->ifa_name);
      }
      if (each->ifa_addr->sa_family == AF_INET) {
        const auto* address = reinterpret_cast<const sockaddr_in*>(each->ifa_addr);
        const auto* mask = reinterpret_cast<const sockaddr_in*>(each->ifa_netmask);
        const auto* broadcast = reinterpret_cast<const sockaddr_in*>(each->ifa_broadaddr);
        addresses += ntohl(address->sin_addr.s_addr) == 0x7f580001 &&
                     ntohl(mask->sin_addr.s_addr) == 0xffff0000 &&
                     ntohl(broadcast->sin_addr.s_addr) == 0x7f58ffff;
      }
    }
    Say("links", links == 2);
    Say("addresses", addresses == 2);
    Say("the kernel's are there too", others > 0);
    freeifaddrs(list);
  }
}

void Names() {
  const unsigned first = if_nametoindex("verbena0");
  const unsigned second = if_nametoindex("verbena1");
  Say("indices", first > 0 && second > 0 && first != second);
  char name[IFNAMSIZ];
  Say("name", if_indextoname(second, name) == name && strcmp(name, "verbena1") == 0);
  Say("unknown name", if_nametoindex("verbena2") == 0 && errno == ENODEV);
  Say("unknown index", if_indextoname(second + 1, name) == nullptr && errno == ENXIO);
  Say("the kernel's", if_nametoindex("lo") > 0 && if_indextoname(if_nametoindex("lo"), name) &&
                          strcmp(name, "lo") == 0);
  struct if_nameindex* list = if_nameindex();
  int found = 0;
  bool loopback = false;
  for (const struct if_nameindex* each = list; each != nullptr && each->if_index != 0; ++each) {
    found += (each->if_index == first && strcmp(each->if_name, "verbena0") == 0) ||
             (each->if_index == second && strcmp(each->if_name, "verbena1") == 0);
    loopback |= strcmp(each->if_name, "lo") == 0;
  }
  Say("if_nameindex", found == 2 && loopback);
  if_freenameindex(list);
}

void Ioctls() {
  const int fd = socket(AF_INET, SOCK_DGRAM, 0);
  ifreq request = {};
  const auto ask = [&](unsigned long code, const char* name) {
    memset(&request, 0, sizeof(request));
    strcpy(request.ifr_name, name);
    return ioctl(fd, code, &request) == 0;
  };
  Say("index", ask(SIOCGIFINDEX, "verbena1") &&
                   static_cast<unsigned>(request.ifr_ifindex) == if_nametoindex("verbena1"));
  const int index = request.ifr_ifindex;
  request = {};
  request.ifr_ifindex = index;
  Say("name", ioctl(fd, SIOCGIFNAME, &request) == 0 && strcmp(request.ifr_name, "verbena1") == 0);
  Say("flags", ask(SIOCGIFFLAGS, "verbena0") &&
                   (static_cast<unsigned>(request.ifr_flags) & kFlags) == kFlags &&
                   (request.ifr_flags & IFF_LOOPBACK) == 0);
  Say("mtu", ask(SIOCGIFMTU, "verbena0") && request.ifr_mtu == 9000);
  Say("hardware address", ask(SIOCGIFHWADDR, "verbena0") &&
                              request.ifr_hwaddr.sa_family == ARPHRD_ETHER &&
                              request.ifr_hwaddr.sa_data[0] == 2);
  const auto address = [&] {
    sockaddr_in value;
    memcpy(&value, &request.ifr_addr, sizeof(value));
    return value.sin_family == AF_INET ? ntohl(value.sin_addr.s_addr) : 0u;
  };
  Say("address", ask(SIOCGIFADDR, "verbena0") && address() == 0x7f580001);
  Say("netmask", ask(SIOCGIFNETMASK, "verbena0") && address() == 0xffff0000);
  Say("broadcast", ask(SIOCGIFBRDADDR, "verbena0") && address() == 0x7f58ffff);
  Say("no change", !ask(SIOCSIFMTU, "verbena0") && errno == EOPNOTSUPP);
  Say("unknown", !ask(SIOCGIFFLAGS, "verbena7") && errno == ENODEV);
  Say("the kernel's", ask(SIOCGIFADDR, "lo") && address() == 0x7f000001);
  ifreq items[64];
  ifconf list = {};
  list.ifc_len = sizeof(items);
  list.ifc_req = items;
  int found = 0;
  bool loopback = false;
  Say("SIOCGIFCONF", ioctl(fd, SIOCGIFCONF, &list) == 0);
  for (int i = 0; i < list.ifc_len / static_cast<int>(sizeof(ifreq)); ++i) {
    request = items[i];
    found += strncmp(items[i].ifr_name, "verbena", 7) == 0 && address() == 0x7f580001;
    loopback |= strcmp(items[i].ifr_name, "lo") == 0;
  }
  Say("both and lo", found == 2 && loopback);
  const int needed = list.ifc_len;
  list.ifc_len = 0;
  list.ifc_req = nullptr;
  Say("its length", ioctl(fd, SIOCGIFCONF, &list) == 0 && list.ifc_len == needed);
  list.ifc_len = needed - 1;
  list.ifc_req = items;
  Say("cut", ioctl(fd, SIOCGIFCONF, &list) == 0 &&
                 list.ifc_len == needed - static_cast<int>(sizeof(ifreq)));
}

bool ReadsAs(const char* path, const char* expected) {
  char text[64] = {};
  const int fd = open(path, O_RDONLY);
  const ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
  close(fd);
  return length > 0 && strcmp(text, expected) == 0;
}

void Files() {
  Say("mtu", ReadsAs("/sys/class/net/verbena0/mtu", "9000\n"));
  Say("address", ReadsAs("/sys/class/net/verbena1/address", "02:00:00:00:00:01\n"));
  Say("the kernel's", access("/sys/class/net/lo/mtu", R_OK) == 0);
  Say("unknown", access("/sys/class/net/verbena5", F_OK) == -1 && errno == ENOENT);
}

// The fake device's counters grow when the test reads a line.
void Counters() {
  constexpr char kCounter[] = "/sys/class/infiniband/verbena0/ports/1/counters/port_xmit_packets";
  Say("before", ReadsAs(kCounter, "5\n"));
  puts("counted");
  fflush(stdout);
  getchar();
  Say("after", ReadsAs(kCounter, "1234567890123\n"));
  FILE* stream = fopen(kCounter, "r");
  unsigned long long value = 0;
  Say("by stdio",
      stream != nullptr && fscanf(stream, "%llu", &value) == 1 && value == 1234567890123);
  if (stream != nullptr) fclose(stream);
  Say("hw_counters",
      ReadsAs("/sys/class/infiniband/verbena0/device/infiniband/verbena0/ports/1/hw_counters/"
              "duplicate_request",
              "6\n"));
}

void Netlink() {
  const int fd = socket(AF_NETLINK, SOCK_RAW, 20);
  Say("socket", fd >= 0);
  int one = 1;
  sockaddr_nl address = {};
  address.nl_family = AF_NETLINK;
  Say("setsockopt", setsockopt(fd, 270, 10, &one, sizeof(one)) == 0);
  Say("bind", bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  socklen_t size = sizeof(address);
  Say("getsockname", getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
                         size == sizeof(address) && address.nl_family == AF_NETLINK &&
                         address.nl_pid != 0);
  struct {
    nlmsghdr header;
  } request = {{sizeof(nlmsghdr), 5 << 10 | 1, NLM_F_REQUEST | NLM_F_DUMP, 9, 0}};
  sockaddr_nl kernel = {};
  kernel.nl_family = AF_NETLINK;
  Say("sendto", sendto(fd, &request, sizeof(request), 0, reinterpret_cast<sockaddr*>(&kernel),
                       sizeof(kernel)) == sizeof(request));
  int devices = 0;
  while (true) {
    alignas(nlmsghdr) char answer[8192];
    sockaddr_nl from = {};
    iovec part = {answer, sizeof(answer)};
    msghdr message = {};
    message.msg_name = &from;
    message.msg_namelen = sizeof(from);
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    const ssize_t got = recvmsg(fd, &message, 0);
    const auto* header = reinterpret_cast<const nlmsghdr*>(answer);
    if (got < static_cast<ssize_t>(sizeof(*header))) break;
    if (message.msg_namelen != sizeof(from) || from.nl_family != AF_NETLINK || from.nl_pid != 0 ||
        header->nlmsg_seq != 9) {
      Say("from the kernel", false);
    }
    if (header->nlmsg_type == NLMSG_DONE) {
      Say("two devices", devices == 2);
      break;
    }
    ++devices;
  }
  close(fd);
  const int other = socket(AF_INET, SOCK_DGRAM, 0);
  sockaddr_in any = {};
  any.sin_family = AF_INET;
  Say("the number is another socket's now",
      other == fd && bind(other, reinterpret_cast<sockaddr*>(&any), sizeof(any)) == 0 &&
          getsockname(other, reinterpret_cast<sockaddr*>(&any), &(size = sizeof(any))) == 0 &&
          any.sin_family == AF_INET && any.sin_port != 0);
}

}  // namespace

int main(int argc, char** argv) {
  alarm(60);
  const char* scenario = argc > 1 ? argv[1] : "";
  struct {
    const char* name;
    void (*run)();
  } const scenarios[] = {
      {"addresses", Addresses}, {"names", Names},       {"ioctls", Ioctls},
      {"files", Files},         {"counters", Counters}, {"netlink", Netlink},
  };
  for (const auto& each : scenarios) {
    if (strcmp(each.name, scenario) == 0) {
      each.run();
      puts("end");
      return 0;
    }
  }
  return 2;
}
