// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/nic_sim/mem/target_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

namespace verbena::nic::testing {
namespace {

constexpr size_t kPage = 4096;

struct Request {
  char what;
  uint64_t address;
  uint64_t bytes;
};

[[noreturn]] void Die(const char* what) {
  perror(what);
  _exit(99);
}

void ReadAll(int fd, void* to, size_t bytes) {
  auto* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = read(fd, at, bytes);
    if (got <= 0) Die("target process: read");
    at += got;
    bytes -= static_cast<size_t>(got);
  }
}

void WriteAll(int fd, const void* from, size_t bytes) {
  auto* at = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t put = send(fd, at, bytes, MSG_NOSIGNAL);
    if (put <= 0) Die("target process: write");
    at += put;
    bytes -= static_cast<size_t>(put);
  }
}

void* At(uint64_t address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

void* MapPages(void* where, size_t bytes, int flags) {
  void* memory =
      mmap(where, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (memory == MAP_FAILED) Die("target process: mmap");
  return memory;
}

void ExecSelf(int socket, const Request& request) {
  uint8_t fill;
  ReadAll(socket, &fill, 1);
  char arguments[4][32];
  snprintf(arguments[0], 32, "%d", socket);
  snprintf(arguments[1], 32, "%llu", static_cast<unsigned long long>(request.address));
  snprintf(arguments[2], 32, "%llu", static_cast<unsigned long long>(request.bytes));
  snprintf(arguments[3], 32, "%d", fill);
  execl("/proc/self/exe", "target", "--serve-after-exec", arguments[0], arguments[1], arguments[2],
        arguments[3], nullptr);
  Die("target process: exec");
}

// The child's life. Ends with the socket.
[[noreturn]] void Serve(int socket) {
  for (;;) {
    Request request;
    if (recv(socket, &request, sizeof(request), MSG_WAITALL) != sizeof(request)) _exit(0);
    char done = 1;
    switch (request.what) {
      case 'g':
        WriteAll(socket, At(request.address), request.bytes);
        continue;
      case 's':
        ReadAll(socket, At(request.address), request.bytes);
        break;
      case 'u':
        if (munmap(At(request.address), request.bytes) != 0) Die("target process: munmap");
        break;
      case 'd':
        if (prctl(PR_SET_DUMPABLE, 0) != 0) Die("target process: prctl");
        break;
      case 'r': {
        WriteAll(socket, &done, 1);
        const int64_t result = TargetProcess::bodies()[request.address]();
        WriteAll(socket, &result, sizeof(result));
        continue;
      }
      case 'e':
        ExecSelf(socket, request);
        break;
      default:
        _exit(98);
    }
    WriteAll(socket, &done, 1);
  }
}

void SendFd(int socket, int fd) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(header), &fd, sizeof(int));
  if (sendmsg(socket, &message, 0) != 1) Die("target process: sendmsg");
}

int ReceiveFd(int socket) {
  char byte;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != 1) Die("target process: recvmsg");
  int fd;
  memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
  return fd;
}

}  // namespace

std::vector<std::function<int64_t()>>& TargetProcess::bodies() {
  static auto& list = *new std::vector<std::function<int64_t()>>;
  return list;
}

TargetProcess::TargetProcess(size_t bytes) : bytes_((bytes + kPage - 1) / kPage * kPage) {
  std::random_device random;
  guard_magic_ = uint64_t{random()} << 32 | random();
  // Mapped here so that we know the addresses; the child gets its own copies.
  void* memory = MapPages(nullptr, bytes_, 0);
  void* guard = MapPages(nullptr, kPage, 0);
  address_ = reinterpret_cast<uintptr_t>(memory);
  guard_address_ = reinterpret_cast<uintptr_t>(guard);
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) Die("target process: socketpair");
  pid_ = fork();
  if (pid_ < 0) Die("target process: fork");
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(sockets[0]);
    memcpy(guard, &guard_magic_, sizeof(guard_magic_));
    memset(memory, 0, bytes_);
    const int fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    if (fd < 0) Die("target process: open");
    SendFd(sockets[1], fd);
    close(fd);
    Serve(sockets[1]);
  }
  close(sockets[1]);
  socket_ = sockets[0];
  fcntl(socket_, F_SETFD, FD_CLOEXEC);
  munmap(memory, bytes_);
  munmap(guard, kPage);
  mem_fd_ = ReceiveFd(socket_);
}

TargetProcess::~TargetProcess() {
  Kill();
  close(socket_);
  close(mem_fd_);
}

void TargetProcess::MaybeServeAfterExec(int argc, char** argv) {
  if (argc != 6 || strcmp(argv[1], "--serve-after-exec") != 0) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int socket = atoi(argv[2]);
  const size_t bytes = strtoull(argv[4], nullptr, 10);
  void* memory = MapPages(At(strtoull(argv[3], nullptr, 10)), bytes, MAP_FIXED_NOREPLACE);
  memset(memory, atoi(argv[5]), bytes);
  const char done = 1;
  WriteAll(socket, &done, 1);
  Serve(socket);
}

AddressSpace::Identity TargetProcess::identity() const {
  return {.pid = pid_,
          .mem_fd = fcntl(mem_fd_, F_DUPFD_CLOEXEC, 0),
          .guard_address = guard_address_,
          .guard_magic = guard_magic_};
}

std::unique_ptr<AddressSpace> TargetProcess::Open(AddressSpace::Backend backend) const {
  std::string why;
  auto space = AddressSpace::Open(identity(), &why, &backend);
  if (space == nullptr) fprintf(stderr, "%s\n", why.c_str());
  return space;
}

void TargetProcess::Command(char what, uint64_t address, uint64_t bytes) {
  Request request{what, address, bytes};
  WriteAll(socket_, &request, sizeof(request));
}

std::vector<std::byte> TargetProcess::Get(uint64_t address, size_t bytes) {
  Command('g', address, bytes);
  std::vector<std::byte> result(bytes);
  ReadAll(socket_, result.data(), bytes);
  return result;
}

void TargetProcess::Set(uint64_t address, std::span<const std::byte> bytes) {
  Command('s', address, bytes.size());
  WriteAll(socket_, bytes.data(), bytes.size());
  char done;
  ReadAll(socket_, &done, 1);
}

void TargetProcess::Unmap(uint64_t address, size_t bytes) {
  Command('u', address, bytes);
  char done;
  ReadAll(socket_, &done, 1);
}

void TargetProcess::Exec(uint8_t fill) {
  Command('e', address_, bytes_);
  WriteAll(socket_, &fill, 1);
  char done;
  ReadAll(socket_, &done, 1);
}

void TargetProcess::MakeNonDumpable() {
  Command('d', 0, 0);
  char done;
  ReadAll(socket_, &done, 1);
}

void TargetProcess::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void TargetProcess::Start(int body) {
  Command('r', static_cast<uint64_t>(body), 0);
  char done;
  ReadAll(socket_, &done, 1);
}

int64_t TargetProcess::Join() {
  int64_t result;
  ReadAll(socket_, &result, sizeof(result));
  return result;
}

}  // namespace verbena::nic::testing
