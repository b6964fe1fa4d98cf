// SPDX-License-Identifier: Apache-2.0
#include "provider/preload/daemon_tree.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "nic_sim/abi/commands.h"
#include "provider/run_folder.h"

namespace verbena::provider {
namespace {

constexpr size_t kTreeBytes = 128;
constexpr size_t kMaxPath = 1024;
constexpr char kVerbsFolder[] = "/sys/class/infiniband_verbs";

// Whole subtrees that are ours.
constexpr const char* kOurFolders[] = {
    "/sys/class/infiniband",     kVerbsFolder,
    "/sys/class/infiniband_mad", "/sys/class/infiniband_cm",
    "/sys/class/misc/rdma_cm",   "/sys/devices/virtual/verbena",
    "/dev/infiniband",
    "/verbena/netdevs",  // our own, beside what a kernel would show
};
// A NIC's network interface, with its number.
constexpr char kNetdevPrefix[] = "/sys/class/net/verbena";
constexpr char kUverbsPrefix[] = "/dev/infiniband/uverbs";
constexpr char kRdmaCmNode[] = "/dev/infiniband/rdma_cm";

class ErrnoKeeper {
 public:
  ErrnoKeeper() : errno_(errno) {}
  ~ErrnoKeeper() { errno = errno_; }
  ErrnoKeeper(const ErrnoKeeper&) = delete;
  ErrnoKeeper& operator=(const ErrnoKeeper&) = delete;

 private:
  int errno_;
};

struct Tree {
  char text[kTreeBytes];
  SocketPath socket;  // empty: of no daemon
};

// The tree of the first daemon that answered; fixed from then on. Published by
// kReady (release).
enum CacheState : uint32_t { kEmpty, kFilling, kReady };
std::atomic<uint32_t> g_cache_state{kEmpty};
Tree g_cache;
std::atomic<bool> g_warned{false};

// False without trace for nearly all paths of a program.
bool MayBeOurs(const char* path) {
  return path[0] == '/' &&
         (strstr(path, "infiniband") != nullptr || strstr(path, "rdma_cm") != nullptr ||
          strstr(path, "verbena") != nullptr);
}

// Removes empty, "." and ".." components as text: nothing of ours is reached
// through links. False if the path is too long for one of ours.
bool Normalise(const char* path, char* out, size_t size) {
  size_t used = 0;
  while (*path != '\0') {
    while (*path == '/') ++path;
    const size_t length = strcspn(path, "/");
    const char* component = path;
    path += length;
    if (length == 0 || (length == 1 && component[0] == '.')) continue;
    if (length == 2 && component[0] == '.' && component[1] == '.') {
      while (used > 0 && out[--used] != '/') {
      }
      continue;
    }
    if (used + 1 + length >= size) return false;
    out[used++] = '/';
    memcpy(out + used, component, length);
    used += length;
  }
  out[used] = '\0';
  return true;
}

bool IsBelow(const char* path, const char* folder) {
  const size_t length = strlen(folder);
  return strncmp(path, folder, length) == 0 && (path[length] == '\0' || path[length] == '/');
}

bool IsOurs(const char* path) {
  for (const char* folder : kOurFolders) {
    if (IsBelow(path, folder)) return true;
  }
  const size_t length = sizeof(kNetdevPrefix) - 1;
  return strncmp(path, kNetdevPrefix, length) == 0 && path[length] >= '0' && path[length] <= '9';
}

DeviceNode NodeOf(const char* path) {
  if (strcmp(path, kRdmaCmNode) == 0) return {DeviceNode::kRdmaCm, 0};
  const size_t length = sizeof(kUverbsPrefix) - 1;
  if (strncmp(path, kUverbsPrefix, length) != 0) return {};
  const char* digits = path + length;
  if (*digits < '0' || *digits > '9') return {};
  unsigned number = 0;
  for (; *digits >= '0' && *digits <= '9' && number < 1000; ++digits) {
    number = number * 10 + static_cast<unsigned>(*digits - '0');
  }
  if (*digits != '\0' || number >= 1000) return {};
  return {DeviceNode::kUverbs, number};
}

// A daemon with a full backlog is one that lives.
bool Answers(const SocketPath& path) {
  const int fd = static_cast<int>(
      syscall(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd < 0) return false;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path.text, sizeof(address.sun_path));
  const bool answers = syscall(SYS_connect, fd, &address, sizeof(address)) == 0 || errno == EAGAIN;
  syscall(SYS_close, fd);
  return answers;
}

void TreeOf(const SocketPath& socket, Tree* tree) {
  constexpr char kSuffix[] = ".sock";
  size_t length = strlen(socket.text);
  const size_t suffix = sizeof(kSuffix) - 1;
  if (length > suffix && strcmp(socket.text + length - suffix, kSuffix) == 0) length -= suffix;
  static_assert(sizeof(socket.text) + sizeof(abi::kTreeSuffix) <= kTreeBytes);
  memcpy(tree->text, socket.text, length);
  memcpy(tree->text + length, abi::kTreeSuffix, sizeof(abi::kTreeSuffix));
  tree->socket = socket;
}

void WarnOnce(const SocketPath* sockets, int count) {
  if (secure_getenv("IBV_SHOW_WARNINGS") == nullptr) return;
  if (g_warned.exchange(true, std::memory_order_relaxed)) return;
  const char* parts[] = {"verbena: no daemon is running at ",
                         count > 0 ? sockets[0].text : "any known place",
                         ", so there is no device; `verbena up` starts one\n"};
  char line[256];
  size_t used = 0;
  for (const char* part : parts) {
    const size_t length = strlen(part);
    if (used + length > sizeof(line)) return;
    memcpy(line + used, part, length);
    used += length;
  }
  syscall(SYS_write, STDERR_FILENO, line, used);
}

// A tree with an empty list of devices, made on demand in the own run folder.
void NoDevices(Tree* tree) {
  char* text = tree->text;
  tree->socket.text[0] = '\0';
  // Where nothing can be made, nothing is found either.
  if (!OwnRunFolder(text, kTreeBytes - 64)) {
    strcpy(text, "/dev/null");
    return;
  }
  syscall(SYS_mkdir, text, 0700);
  if (!IsPrivateFolder(text, geteuid())) {
    strcpy(text, "/dev/null");
    return;
  }
  char folder[kTreeBytes];
  strcat(text, "/.no-daemon");
  strcat(text, abi::kTreeSuffix);
  strcpy(folder, text);
  syscall(SYS_mkdir, folder, 0700);
  for (const char* part : {"/sys", "/class", "/infiniband_verbs"}) {
    strcat(folder, part);
    syscall(SYS_mkdir, folder, 0700);
  }
}

void FindTree(Tree* tree) {
  if (g_cache_state.load(std::memory_order_acquire) == kReady) {
    *tree = g_cache;
    return;
  }
  SocketPath sockets[kMaxSocketPaths];
  const int count = FindSocketPaths(sockets);
  for (int i = 0; i < count; ++i) {
    if (!Answers(sockets[i])) continue;
    TreeOf(sockets[i], tree);
    uint32_t expected = kEmpty;
    if (g_cache_state.compare_exchange_strong(expected, kFilling, std::memory_order_relaxed)) {
      g_cache = *tree;
      g_cache_state.store(kReady, std::memory_order_release);
    }
    return;
  }
  WarnOnce(sockets, count);
  NoDevices(tree);
}

// Asks the daemon to bring the counters of a device up to date, if `path` is one
// of them: /sys/class/infiniband/DEVICE/ports/1/[hw_]counters/NAME, or the same
// below the devices' own folder.
void RefreshCounters(const Tree& tree, const char* path) {
  if (tree.socket.text[0] == '\0') return;
  if (strstr(path, "/counters/") == nullptr && strstr(path, "/hw_counters/") == nullptr) return;
  const char* ports = strstr(path, "/ports/");
  if (ports == nullptr) return;
  const char* device = ports;
  while (device > path && device[-1] != '/') --device;
  abi::RefreshHello hello = {abi::kMagic, abi::kClientRefresh, {}};
  const size_t length = static_cast<size_t>(ports - device);
  if (length >= sizeof(hello.device)) return;
  memcpy(hello.device, device, length);
  const int fd = static_cast<int>(syscall(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (fd < 0) return;
  // A daemon that hangs leaves the numbers as they were.
  const timeval second = {1, 0};
  syscall(SYS_setsockopt, fd, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof(second));
  syscall(SYS_setsockopt, fd, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof(second));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, tree.socket.text, sizeof(address.sun_path));
  char answer;
  if (syscall(SYS_connect, fd, &address, sizeof(address)) == 0 &&
      syscall(SYS_sendto, fd, &hello, sizeof(hello), MSG_NOSIGNAL, nullptr, 0) ==
          static_cast<long>(sizeof(hello))) {
    syscall(SYS_recvfrom, fd, &answer, sizeof(answer), 0, nullptr, nullptr);
  }
  syscall(SYS_close, fd);
}

// Length of `folder` if `text` lies in it, else 0.
size_t FolderLength(const char* text, size_t length, const char* folder) {
  const size_t bytes = strlen(folder);
  return length > bytes && memcmp(text, folder, bytes) == 0 && text[bytes] == '/' ? bytes : 0;
}

// The tree's folder without links, as the kernel spells it.
bool ResolveTree(const Tree& tree, char* resolved, size_t size) {
  const int fd =
      static_cast<int>(syscall(SYS_openat, AT_FDCWD, tree.text, O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (fd < 0) return false;
  char link[32];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t length =
      static_cast<ssize_t>(syscall(SYS_readlinkat, AT_FDCWD, link, resolved, size - 1));
  syscall(SYS_close, fd);
  if (length <= 0) return false;
  resolved[length] = '\0';
  return true;
}

}  // namespace

RewrittenPath::RewrittenPath(const char* path) : path_(path) {
  if (path == nullptr || !MayBeOurs(path)) return;
  const ErrnoKeeper errno_keeper;
  char plain[kMaxPath];
  if (!Normalise(path, plain, sizeof(plain)) || !IsOurs(plain)) return;
  Tree tree;
  FindTree(&tree);
  RefreshCounters(tree, plain);
  const size_t tree_bytes = strlen(tree.text);
  memcpy(buffer_, tree.text, tree_bytes);
  size_t plain_bytes = strlen(plain);
  memcpy(buffer_ + tree_bytes, plain, plain_bytes);
  // Means "and it is a folder" to the kernel.
  if (path[strlen(path) - 1] == '/') buffer_[tree_bytes + plain_bytes++] = '/';
  buffer_[tree_bytes + plain_bytes] = '\0';
  static_assert(sizeof(buffer_) >= kMaxPath + kTreeBytes);
  path_ = buffer_;
  ours_ = true;
  node_ = NodeOf(plain);
}

bool FindDaemon(SocketPath* socket) {
  const ErrnoKeeper errno_keeper;
  Tree tree;
  FindTree(&tree);
  *socket = tree.socket;
  return socket->text[0] != '\0';
}

size_t StripTree(char* text, size_t length) {
  const ErrnoKeeper errno_keeper;
  Tree tree;
  FindTree(&tree);
  size_t extra = FolderLength(text, length, tree.text);
  if (extra == 0) {
    char resolved[4096];
    if (!ResolveTree(tree, resolved, sizeof(resolved))) return length;
    extra = FolderLength(text, length, resolved);
  }
  memmove(text, text + extra, length - extra);
  return length - extra;
}

void StripTree(char* text) { text[StripTree(text, strlen(text))] = '\0'; }

}  // namespace verbena::provider
