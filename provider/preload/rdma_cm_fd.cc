// SPDX-License-Identifier: Apache-2.0
#include "provider/preload/rdma_cm_fd.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_user_cm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "nic_sim/abi/rdma_cm.h"
#include "provider/preload/daemon_connection.h"
#include "provider/preload/interpose.h"
#include "provider/run_folder.h"

namespace verbena::provider {
namespace {

// How long GET_EVENT waits when another thread has closed its file.
constexpr int kClosedMilliseconds = 10000;
// Inherited through exec: program starts look at so many descriptors.
constexpr int kInheritedFds = 32;
// Of rdma_ucm_event_resp before ECE; libraries of that time ask for no more.
constexpr size_t kOldEventBytes = 324;

std::atomic<bool> g_has_rdma_cm{false};

int Fail(int error) {
  errno = error;
  return -1;
}

void CloseFd(int fd) {
  const int before = errno;
  syscall(SYS_close, fd);
  errno = before;
}

// The command and its answer belong together.
class NoCancellation {
 public:
  NoCancellation() { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  ~NoCancellation() { pthread_setcancelstate(before_, nullptr); }
  NoCancellation(const NoCancellation&) = delete;
  NoCancellation& operator=(const NoCancellation&) = delete;

 private:
  int before_ = 0;
};

struct FdList {
  int fd[2];
  int count;
};

// Sends one message whatever the descriptor's O_NONBLOCK says. 0 or errno.
int Send(int fd, iovec* parts, size_t part_count, const FdList& fds) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(fds.fd))] = {};
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = part_count;
  if (fds.count > 0) {
    const size_t bytes = sizeof(int) * static_cast<size_t>(fds.count);
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* item = CMSG_FIRSTHDR(&message);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(bytes);
    memcpy(CMSG_DATA(item), fds.fd, bytes);
  }
  while (syscall(SYS_sendmsg, fd, &message, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN) {
      pollfd wait = {fd, POLLOUT, 0};
      syscall(SYS_poll, &wait, 1, -1);
      continue;
    }
    const bool dead = errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN;
    return dead ? EIO : errno;
  }
  return 0;
}

// Receives one message. Bytes, 0 if the device is gone, or -errno.
ssize_t Receive(int fd, iovec* parts, size_t part_count) {
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = part_count;
  ssize_t got;
  do {
    got = syscall(SYS_recvmsg, fd, &message, 0);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return errno == ECONNRESET ? 0 : -errno;
  return got;
}

// Takes tokens back whose events are gone. Those that are not there have been
// taken by threads that will ask for their events, in vain.
void Withdraw(int fd, uint32_t surplus) {
  abi::RdmaCmWithdrawn withdrawn = {abi::kRdmaCmWithdrawn, 0};
  char token;
  while (withdrawn.tokens < surplus &&
         syscall(SYS_recvfrom, fd, &token, 1, MSG_DONTWAIT, nullptr, nullptr) == 1) {
    ++withdrawn.tokens;
  }
  iovec part = {&withdrawn, sizeof(withdrawn)};
  if (withdrawn.tokens > 0) Send(fd, &part, 1, {{-1, -1}, 0});
}

// Carries out a command: sends `parts`, and `other_fd` if it is one. The
// response goes to `response`, of `room` bytes. 0 or errno.
int Transact(int fd, iovec* parts, size_t part_count, int other_fd, void* response, size_t room) {
  int ends[2];
  if (syscall(SYS_socketpair, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return errno;
  // A closed stdout must not lead into our answer.
  const int mine = KeepOffStandardFds(ends[0]);
  FdList fds = {{ends[1], other_fd}, other_fd < 0 ? 1 : 2};
  int error = mine < 0 ? -mine : Send(fd, parts, part_count, fds);
  CloseFd(ends[1]);
  if (mine < 0) return error;
  abi::RdmaCmReply reply = {};
  if (error == 0) {
    iovec answer[] = {{&reply, sizeof(reply)}, {response, room}};
    const ssize_t got = Receive(mine, answer, 2);
    if (got < 0) {
      error = static_cast<int>(-got);
    } else if (got < static_cast<ssize_t>(sizeof(reply)) || reply.error < 0) {
      error = EIO;
    } else {
      error = reply.error;
    }
  }
  CloseFd(mine);
  if (reply.surplus > 0) Withdraw(other_fd < 0 ? fd : other_fd, reply.surplus);
  return error;
}

// Offset of the pointer to the response in a command's payload; -1: it has none.
int ResponseOffset(uint32_t command) {
  switch (command) {
    case RDMA_USER_CM_CMD_CREATE_ID:
      return offsetof(rdma_ucm_create_id, response);
    case RDMA_USER_CM_CMD_DESTROY_ID:
    case RDMA_USER_CM_CMD_LEAVE_MCAST:
      return offsetof(rdma_ucm_destroy_id, response);
    case RDMA_USER_CM_CMD_QUERY_ROUTE:
    case RDMA_USER_CM_CMD_QUERY:
      return offsetof(rdma_ucm_query, response);
    case RDMA_USER_CM_CMD_INIT_QP_ATTR:
      return offsetof(rdma_ucm_init_qp_attr, response);
    case RDMA_USER_CM_CMD_GET_EVENT:
      return offsetof(rdma_ucm_get_event, response);
    case RDMA_USER_CM_CMD_MIGRATE_ID:
      return offsetof(rdma_ucm_migrate_id, response);
    case RDMA_USER_CM_CMD_JOIN_IP_MCAST:
      return offsetof(rdma_ucm_join_ip_mcast, response);
    case RDMA_USER_CM_CMD_JOIN_MCAST:
      return offsetof(rdma_ucm_join_mcast, response);
    default:
      return -1;
  }
}

template <typename T>
bool ReadField(const char* payload, size_t bytes, size_t offset, T* value) {
  if (offset + sizeof(T) > bytes) return false;
  memcpy(value, payload + offset, sizeof(T));
  return true;
}

// Takes the token of one event, waiting as the descriptor says. 0 or errno.
int TakeToken(int fd) {
  char token;
  // libc's function: a cancellation point, and restarted or not as the
  // interrupting signal's handler wants.
  const ssize_t got = VERBENA_NEXT(recv)(fd, &token, 1, 0);
  if (got == 1) return 0;
  return got == 0 || errno == ECONNRESET ? EIO : errno;
}

// 0, errno, or EBADF: another thread has closed the file since write() began.
int TakeEvent(int fd, iovec* command, void* response, size_t room) {
  while (true) {
    if (const int error = TakeToken(fd); error != 0) return error == ENOTSOCK ? EBADF : error;
    const NoCancellation no_cancellation;
    // What has the number now is none of ours.
    if (!IsRdmaCm(fd)) return EBADF;
    const int error = Transact(fd, command, 1, -1, response, room);
    // Withdrawn by another thread between the two.
    if (error != EAGAIN) return error;
  }
}

int GetEvent(int fd, iovec* command, void* response, size_t room) {
  if (room < kOldEventBytes) return ENOSPC;
  const int error = TakeEvent(fd, command, response, room);
  if (error == EBADF) {
    // On Linux write() holds the file and waits on. Programs close it under their own event thread
    // and end soon; EBADF, which that thread takes for a failure, would be faster than they.
    poll(nullptr, 0, kClosedMilliseconds);
  }
  return error;
}

int Carry(int fd, const void* buffer, size_t bytes) {
  rdma_ucm_cmd_hdr header;
  if (bytes < sizeof(header)) return EINVAL;
  if (buffer == nullptr) return EFAULT;
  memcpy(&header, buffer, sizeof(header));
  const size_t request_bytes = sizeof(header) + header.in;
  if (request_bytes > bytes || request_bytes > abi::kMaxRdmaCmRequest) return EINVAL;
  const char* payload = static_cast<const char*>(buffer) + sizeof(header);
  iovec parts[2] = {{const_cast<void*>(buffer), request_bytes}, {}};
  size_t part_count = 1;

  uint64_t response = 0;
  size_t room = 0;
  if (const int offset = ResponseOffset(header.cmd); offset >= 0) {
    if (!ReadField(payload, header.in, static_cast<size_t>(offset), &response)) return EINVAL;
    room = header.out;
  }
  void* const answer = reinterpret_cast<void*>(response);
  if (header.cmd == RDMA_USER_CM_CMD_GET_EVENT) return GetEvent(fd, parts, answer, room);

  int other_fd = -1;
  if (header.cmd == RDMA_USER_CM_CMD_MIGRATE_ID) {
    uint32_t old_file;
    if (!ReadField(payload, header.in, offsetof(rdma_ucm_migrate_id, fd), &old_file)) return EINVAL;
    other_fd = static_cast<int>(old_file);
    if (syscall(SYS_fcntl, other_fd, F_GETFD) < 0) return ENOENT;
    if (!IsRdmaCm(other_fd)) return EINVAL;
  }
  if (header.cmd == RDMA_USER_CM_CMD_SET_OPTION) {
    rdma_ucm_set_option option;
    if (!ReadField(payload, header.in, 0, &option)) return EINVAL;
    if (option.optlen > abi::kMaxRdmaCmRequest - request_bytes) return EINVAL;
    parts[part_count++] = {reinterpret_cast<void*>(option.optval), option.optlen};
  }
  const NoCancellation no_cancellation;
  return Transact(fd, parts, part_count, other_fd, answer, room);
}

// 0 or errno.
int SayHello(int fd) {
  abi::RdmaCmHello hello = {};
  hello.magic = abi::kMagic;
  hello.kind = abi::kClientRdmaCm;
  hello.version_min = abi::kVersionMin;
  hello.version_max = abi::kVersionMax;
  const int comm =
      static_cast<int>(syscall(SYS_openat, AT_FDCWD, "/proc/self/comm", O_RDONLY | O_CLOEXEC));
  if (comm >= 0) {
    const ssize_t length = syscall(SYS_read, comm, hello.comm, sizeof(hello.comm));
    if (length > 0) hello.comm[length - 1] = '\0';  // in place of the newline
    CloseFd(comm);
  }
  iovec request = {&hello, sizeof(hello)};
  if (const int error = Send(fd, &request, 1, {{fd, -1}, 1}); error != 0) return error;
  abi::RdmaCmHelloReply reply = {};
  iovec answer = {&reply, sizeof(reply)};
  const ssize_t got = Receive(fd, &answer, 1);
  if (got < 0) return static_cast<int>(-got);
  if (got != sizeof(reply) || reply.magic != abi::kMagic || reply.error < 0) return EIO;
  return reply.error;
}

// 0 or errno.
int Connect(int fd) {
  if (const int error = BindName(fd, abi::kRdmaCmSocketPrefix); error != 0) return error;
  if (const int error = ConnectToDaemon(fd); error != 0) return error;
  return SayHello(fd);
}

__attribute__((constructor)) void LookForInherited() {
  for (int fd = 0; fd < kInheritedFds && !HasRdmaCm(); ++fd) {
    if (IsRdmaCm(fd)) g_has_rdma_cm.store(true, std::memory_order_relaxed);
  }
  static_cast<void>(NextFunction<"recv">::Find());
}

}  // namespace

int OpenRdmaCm(int flags) {
  const int cloexec = (flags & O_CLOEXEC) != 0 ? SOCK_CLOEXEC : 0;
  const int fd = static_cast<int>(syscall(SYS_socket, AF_UNIX, SOCK_SEQPACKET | cloexec, 0));
  if (fd < 0) return -1;
  int error = 0;
  {
    const NoCancellation no_cancellation;
    error = Connect(fd);
  }
  if (error == 0 && (flags & O_NONBLOCK) != 0 &&
      syscall(SYS_fcntl, fd, F_SETFL, O_RDWR | O_NONBLOCK) != 0) {
    error = errno;
  }
  if (error != 0) {
    CloseFd(fd);
    return Fail(error);
  }
  g_has_rdma_cm.store(true, std::memory_order_relaxed);
  return fd;
}

bool IsRdmaCm(int fd) { return HasName(fd, abi::kRdmaCmSocketPrefix); }

bool HasRdmaCm() { return g_has_rdma_cm.load(std::memory_order_relaxed); }

ssize_t WriteRdmaCm(int fd, const void* buffer, size_t bytes) {
  pthread_testcancel();
  const int error = Carry(fd, buffer, bytes);
  return error == 0 ? static_cast<ssize_t>(bytes) : Fail(error);
}

}  // namespace verbena::provider
