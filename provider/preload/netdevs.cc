// SPDX-License-Identifier: Apache-2.0
#include "provider/preload/netdevs.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <net/if.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "provider/preload/daemon_tree.h"

namespace verbena::provider {
namespace {

constexpr int kMaxAddresses = 1024;  // 64 NICs with 16 GIDs
constexpr size_t kMaxLine = 128;

bool Parse(const char* line, NetdevAddress* out) {
  char mac[18];
  char address[INET6_ADDRSTRLEN];
  unsigned prefix;
  unsigned octets[6];
  if (sscanf(line, "%15s %u %17s %u %45s %u", out->name, &out->index, mac, &out->mtu, address,
             &prefix) != 6 ||
      sscanf(mac, "%x:%x:%x:%x:%x:%x", &octets[0], &octets[1], &octets[2], &octets[3], &octets[4],
             &octets[5]) != 6) {
    return false;
  }
  for (int i = 0; i < 6; ++i) out->mac[i] = static_cast<uint8_t>(octets[i]);
  out->prefix = static_cast<uint8_t>(prefix);
  out->family = strchr(address, ':') == nullptr ? AF_INET : AF_INET6;
  return prefix <= (out->family == AF_INET ? 32u : 128u) &&
         inet_pton(out->family, address, &out->address) == 1;
}

}  // namespace

const unsigned kNetdevFlags = IFF_UP | IFF_BROADCAST | IFF_RUNNING | IFF_MULTICAST;

Netdevs::Netdevs() {
  const int before = errno;
  const RewrittenPath path("/verbena/netdevs");
  const int fd = static_cast<int>(syscall(SYS_openat, AT_FDCWD, path.path(), O_RDONLY | O_CLOEXEC));
  constexpr size_t kRoom = kMaxAddresses * kMaxLine;
  char* text = fd < 0 ? nullptr : static_cast<char*>(malloc(kRoom));
  if (text != nullptr) {
    const ssize_t length = syscall(SYS_read, fd, text, kRoom - 1);
    text[length < 0 ? 0 : length] = '\0';
    addresses_ = static_cast<NetdevAddress*>(calloc(kMaxAddresses, sizeof(NetdevAddress)));
    char* rest = text;
    while (addresses_ != nullptr && count_ < kMaxAddresses) {
      char* const end = strchr(rest, '\n');
      if (end == nullptr) break;
      *end = '\0';
      if (Parse(rest, &addresses_[count_])) ++count_;
      rest = end + 1;
    }
    free(text);
  }
  if (fd >= 0) syscall(SYS_close, fd);
  errno = before;
}

Netdevs::~Netdevs() { free(addresses_); }

bool MayBeNetdev(const char* name) { return name != nullptr && strncmp(name, "verbena", 7) == 0; }

}  // namespace verbena::provider
