// SPDX-License-Identifier: Apache-2.0
//
// What a hostile user of a system-wide daemon may try, by hand: no provider, only the socket and
// the shared pages.
//
//   hostile_client SOCKET MODE [UID]
//
// Prints "ready" when the attack is on and goes on until it is killed. Modes:
//   hold-fetch, hold-placement   a WQE whose payload, or whose target, lies in a page that never
//                                answers
//   hold-guard    the same page as guard page of Hello: the daemon waits while it opens the device
//   commands      as many commands as go through
//   connections   as many connections as go through
//   quota         takes objects until nothing more is given, says how many, and asks on
//   doorbells     sets every doorbell bit and wakes every engine thread, all the time
//   burn          only uses its CPU (the control)
// hold-*: root makes the page, by userfaultfd, and then becomes user UID. (Through /proc/PID/mem,
// which the daemon uses for other users than its own, Linux fails at such a page at once.)
#include <fcntl.h>
#include <grp.h>
#include <linux/futex.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "nic_sim/abi/shared_memory.h"
#include "transport/qp_state.h"
#include "transport/types.h"

namespace verbena::testing {
namespace {

constexpr size_t kPage = 4096;
constexpr uint64_t kMagic = 0x1122334455667788;

[[noreturn]] void Die(const char* what) {
  std::fprintf(stderr, "%s: %s\n", what, std::strerror(errno));
  std::exit(1);
}

void Ready() {
  std::puts("ready");
  std::fflush(stdout);
}

std::byte* NewPage() {
  void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) Die("mmap");
  return static_cast<std::byte*>(page);
}

uint64_t AddressOf(const void* memory) {
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(memory));
}

void Become(uid_t uid) {
  if (setgroups(0, nullptr) != 0 || setgid(uid) != 0 || setuid(uid) != 0) Die("setuid");
  prctl(PR_SET_DUMPABLE, 1);  // as after exec
}

// A page that blocks whoever touches it; then this process is user `uid`.
std::byte* NewDeadPage(uid_t uid) {
  const int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
  if (device < 0) Die("/dev/userfaultfd");
  const int fd = ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC);
  if (fd < 0) Die("USERFAULTFD_IOC_NEW");
  uffdio_api api{};
  api.api = UFFD_API;
  if (ioctl(fd, UFFDIO_API, &api) != 0) Die("UFFDIO_API");
  std::byte* page = NewPage();
  uffdio_register range{};
  range.range = {.start = AddressOf(page), .len = kPage};
  range.mode = UFFDIO_REGISTER_MODE_MISSING;
  if (ioctl(fd, UFFDIO_REGISTER, &range) != 0) Die("UFFDIO_REGISTER");
  if (uid != 0) Become(uid);
  return page;  // `fd` stays open as long as this process lives
}

class Client {
 public:
  explicit Client(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
    socket_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      Die("connect");
    }
  }
  ~Client() { close(socket_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void SendHello(std::byte* guard) {
    abi::Hello hello{};
    hello.magic = abi::kMagic;
    hello.kind = abi::kClientDevice;
    hello.version_min = abi::kVersionMin;
    hello.version_max = abi::kVersionMax;
    hello.sizes = abi::kAbiSizes;
    hello.guard_address = AddressOf(guard);
    hello.guard_magic = kMagic;
    std::strncpy(hello.comm, "hostile", sizeof hello.comm);
    const int memory = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    if (memory < 0) Die("/proc/self/mem");
    Send(&hello, sizeof hello, memory);
    close(memory);
  }

  void Open() {
    std::byte* guard = NewPage();
    std::memcpy(guard, &kMagic, sizeof kMagic);
    SendHello(guard);
    abi::HelloReply reply{};
    const std::vector<int> fds = Receive(&reply, sizeof reply);
    errno = reply.error;
    if (reply.error != 0 || fds.size() < 3) Die("the device does not open");
    page_ = Map<abi::ContextPage>(fds[0]);
    wake_ = Map<abi::WakePage>(fds[1]);
    for (const int fd : fds) close(fd);
  }

  abi::ContextPage& page() { return *page_; }
  abi::WakePage& wake() { return *wake_; }
  int fd() const { return socket_; }

  // 0 or an errno.
  template <typename Request, typename Reply>
  int Command(abi::CommandOp op, Request request, Reply* reply, std::vector<int>* fds = nullptr,
              int fd = -1) {
    request.header = {op, sizeof request, ++sequence_};
    Send(&request, sizeof request, fd);
    *reply = Reply{};
    std::vector<int> got = Receive(reply, sizeof *reply);
    if (fds != nullptr) {
      *fds = std::move(got);
    } else {
      for (const int fd : got) close(fd);
    }
    return reply->header.error;
  }
  void Send(const void* data, size_t bytes, int fd = -1) {
    iovec vector{const_cast<void*>(data), bytes};
    msghdr message{};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (fd >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    if (sendmsg(socket_, &message, MSG_NOSIGNAL) < 0) Die("sendmsg");
  }

 private:
  std::vector<int> Receive(void* data, size_t bytes) {
    iovec vector{data, bytes};
    msghdr message{};
    alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (recvmsg(socket_, &message, MSG_CMSG_CLOEXEC) <= 0) Die("recvmsg");
    std::vector<int> fds;
    for (cmsghdr* h = CMSG_FIRSTHDR(&message); h != nullptr; h = CMSG_NXTHDR(&message, h)) {
      fds.resize((h->cmsg_len - CMSG_LEN(0)) / sizeof(int));
      std::memcpy(fds.data(), CMSG_DATA(h), fds.size() * sizeof(int));
    }
    return fds;
  }
  template <typename T>
  static T* Map(int fd) {
    void* data = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) Die("mmap of a shared page");
    return static_cast<T*>(data);
  }

  int socket_ = -1;
  uint32_t sequence_ = 0;
  abi::ContextPage* page_ = nullptr;
  abi::WakePage* wake_ = nullptr;
};

struct Objects {
  uint32_t pd = 0;
  uint32_t cq = 0;
  abi::CreateQpReply qp{};
  std::byte* rings = nullptr;  // segment 0
};

void Must(int error, const char* what) {
  errno = error;
  if (error != 0) Die(what);
}

Objects Create(Client& client) {
  Objects objects;
  abi::HandleReply pd;
  Must(client.Command(abi::kCmdAllocPd, abi::HandleRequest{}, &pd), "alloc_pd");
  objects.pd = pd.handle;
  abi::CreateCqRequest cq_request{};
  cq_request.cqe = 64;
  abi::CreateCqReply cq;
  std::vector<int> fds;
  Must(client.Command(abi::kCmdCreateCq, cq_request, &cq, &fds), "create_cq");
  if (fds.size() != 1) Die("no segment");
  objects.rings = static_cast<std::byte*>(
      mmap(nullptr, cq.ring.segment_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0));
  if (objects.rings == MAP_FAILED) Die("mmap of rings");
  objects.cq = cq.handle;
  abi::CreateQpRequest request{};
  request.srq = request.xrcd = abi::kNoHandle;
  request.pd = objects.pd;
  request.send_cq = request.recv_cq = objects.cq;
  request.type = 2;  // RC
  request.caps = {16, 16, 1, 1, 0};
  Must(client.Command(abi::kCmdCreateQp, request, &objects.qp), "create_qp");
  return objects;
}

// Connects the QP to itself.
void Connect(Client& client, const Objects& objects) {
  using namespace transport;
  abi::ModifyQpRequest request{};
  abi::ModifyQpReply reply;
  request.handle = objects.qp.handle;
  abi::QpAttr& attr = request.attr;
  attr.port_num = 1;
  attr.access_flags = 15;
  attr.path_mtu = 5;
  attr.dest_qpn = objects.qp.qpn;
  attr.max_dest_rd_atomic = attr.max_rd_atomic = 1;
  attr.timeout = 14;
  attr.retry_cnt = attr.rnr_retry = 7;
  attr.ah.is_global = attr.ah.port_num = attr.ah.sgid_index = 1;
  Gid::FromIpv4((127u << 24) | (88u << 16) | 1).Store(reinterpret_cast<std::byte*>(attr.ah.dgid));
  const uint32_t masks[] = {kQpAttrState | kQpAttrPkeyIndex | kQpAttrPort | kQpAttrAccessFlags,
                            kQpAttrState | kQpAttrAv | kQpAttrPathMtu | kQpAttrDestQpn |
                                kQpAttrRqPsn | kQpAttrMaxDestRdAtomic | kQpAttrMinRnrTimer,
                            kQpAttrState | kQpAttrTimeout | kQpAttrRetryCnt | kQpAttrRnrRetry |
                                kQpAttrSqPsn | kQpAttrMaxQpRdAtomic};
  for (uint32_t i = 0; i < 3; ++i) {
    attr.state = i + 1;
    request.mask = masks[i];
    Must(client.Command(abi::kCmdModifyQp, request, &reply), "modify_qp");
  }
}

uint32_t Register(Client& client, const Objects& objects, std::byte* page) {
  abi::RegMrRequest request{};
  request.pd = objects.pd;
  request.access = 15;
  request.address = request.iova = AddressOf(page);
  request.length = kPage;
  abi::RegMrReply reply;
  Must(client.Command(abi::kCmdRegMr, request, &reply), "reg_mr");
  return reply.lkey;
}

void WakeAll(Client& client) {
  for (abi::WakeWord& word : client.wake().threads) {
    word.armed.store(0);
    syscall(SYS_futex, &word.armed, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }
}

[[noreturn]] void HoldPage(const std::string& socket, std::byte* dead, bool placement) {
  Client client(socket);
  client.Open();
  const Objects objects = Create(client);
  Connect(client, objects);
  std::byte* good = NewPage();
  good[0] = std::byte{1};
  const uint32_t dead_key = Register(client, objects, dead);
  const uint32_t good_key = Register(client, objects, good);
  abi::SendWqe wqe{};
  wqe.opcode = 0;  // RDMA WRITE
  wqe.num_sge = 1;
  wqe.remote_address = AddressOf(placement ? dead : good);
  wqe.rkey = placement ? dead_key : good_key;
  const abi::Sge sge{.address = AddressOf(placement ? good : dead),
                     .length = 64,
                     .lkey = placement ? good_key : dead_key};
  std::byte* slot = objects.rings + objects.qp.sq.offset;
  std::memcpy(slot, &wqe, sizeof wqe);
  std::memcpy(slot + sizeof wqe, &sge, sizeof sge);
  const uint32_t qp = objects.qp.handle;
  client.page().qp[qp].sq_producer.store(1);
  client.page().doorbell_bits[qp / 64].fetch_or(uint64_t{1} << (qp % 64));
  client.page().doorbell_summary[0].fetch_or(1);
  WakeAll(client);
  usleep(20000);
  Ready();
  for (;;) pause();
}

[[noreturn]] void HoldGuard(const std::string& socket, std::byte* dead) {
  Client client(socket);
  client.SendHello(dead);
  usleep(20000);
  Ready();
  for (;;) pause();
}

[[noreturn]] void FloodCommands(const std::string& socket) {
  Client client(socket);
  client.Open();
  Ready();
  for (;;) {
    abi::HandleReply pd;
    abi::HandleReply none;
    client.Command(abi::kCmdAllocPd, abi::HandleRequest{}, &pd);
    abi::HandleRequest request{};
    request.handle = pd.handle;
    client.Command(abi::kCmdDeallocPd, request, &none);
  }
}

[[noreturn]] void FloodConnections(const std::string& socket) {
  Ready();
  for (;;) {
    Client client(socket);
    std::byte* guard = NewPage();
    client.SendHello(guard);  // its magic is wrong
    munmap(guard, kPage);
  }
}

template <typename Request, typename Reply>
void TakeAllOf(Client& client, const char* what, abi::CommandOp op, const Request& request,
               Reply reply, int fd = -1) {
  uint32_t count = 0;
  int error;
  while ((error = client.Command(op, request, &reply, nullptr, fd)) == 0) ++count;
  std::printf("%u %s, then %s\n", count, what, std::strerror(error));
}

void TakeAllOthers(Client& client, uint32_t pd) {
  abi::AllocMwRequest mw{};
  mw.pd = pd;
  mw.type = 2;
  TakeAllOf(client, "MWs", abi::kCmdAllocMw, mw, abi::HandleReply{});
  abi::AllocDmRequest dm{};
  dm.length = 4096;
  const int memory = memfd_create("dm", MFD_CLOEXEC);
  if (memory < 0 || ftruncate(memory, 4096) != 0) Die("memfd_create");
  TakeAllOf(client, "DMs", abi::kCmdAllocDm, dm, abi::HandleReply{}, memory);
  abi::CreateAhRequest ah{};
  ah.pd = pd;
  ah.attr.is_global = ah.attr.port_num = ah.attr.sgid_index = 1;
  transport::Gid::FromIpv4((127u << 24) | (88u << 16) | 1)
      .Store(reinterpret_cast<std::byte*>(ah.attr.dgid));
  TakeAllOf(client, "AHs", abi::kCmdCreateAh, ah, abi::HandleReply{});
  TakeAllOf(client, "XRC domains", abi::kCmdOpenXrcd, abi::OpenXrcdRequest{}, abi::HandleReply{});
  abi::CreateSrqRequest srq{};
  srq.pd = pd;
  srq.max_wr = srq.max_sge = 1;
  srq.xrcd = srq.cq = abi::kNoHandle;
  TakeAllOf(client, "SRQs", abi::kCmdCreateSrq, srq, abi::CreateSrqReply{});
  TakeAllOf(client, "PDs", abi::kCmdAllocPd, abi::HandleRequest{}, abi::HandleReply{});
}

[[noreturn]] void TakeAll(const std::string& socket) {
  Client client(socket);
  client.Open();
  abi::HandleReply pd{};
  Must(client.Command(abi::kCmdAllocPd, abi::HandleRequest{}, &pd), "alloc_pd");
  abi::CreateCqRequest cq_request{};
  cq_request.cqe = 1;
  abi::CreateCqReply cq{};
  Must(client.Command(abi::kCmdCreateCq, cq_request, &cq), "create_cq");
  abi::CreateQpRequest request{};
  request.srq = request.xrcd = abi::kNoHandle;
  request.pd = pd.handle;
  request.send_cq = request.recv_cq = cq.handle;
  request.type = 2;
  request.caps = {1, 1, 1, 1, 0};
  abi::CreateQpReply qp{};
  uint32_t qps = 0;
  int error = 0;
  while ((error = client.Command(abi::kCmdCreateQp, request, &qp)) == 0) ++qps;
  std::printf("%u QPs, then %s\n", qps, std::strerror(error));
  cq_request.cqe = 1u << 20;
  uint32_t cqs = 0;
  while ((error = client.Command(abi::kCmdCreateCq, cq_request, &cq)) == 0) ++cqs;
  std::printf("%u CQs of 64 MiB, then %s\n", cqs, std::strerror(error));
  TakeAllOthers(client, pd.handle);
  Ready();
  for (;;) client.Command(abi::kCmdCreateQp, request, &qp);
}

[[noreturn]] void SpinDoorbells(const std::string& socket) {
  Client client(socket);
  client.Open();
  const Objects objects = Create(client);
  Connect(client, objects);
  Ready();
  for (;;) {
    for (auto& bits : client.page().doorbell_bits) bits.store(~uint64_t{0});
    for (auto& summary : client.page().doorbell_summary) summary.store(~uint64_t{0});
    WakeAll(client);
  }
}

[[noreturn]] void Burn() {
  Ready();
  for (;;) asm volatile("");
}

}  // namespace
}  // namespace verbena::testing

int main(int argc, char** argv) {
  using namespace verbena::testing;
  if (argc < 3) return 2;
  const std::string socket = argv[1];
  const std::string mode = argv[2];
  if (mode.starts_with("hold-")) {
    if (argc < 4) return 2;
    std::byte* dead = NewDeadPage(static_cast<uid_t>(std::atoi(argv[3])));
    if (mode == "hold-fetch") HoldPage(socket, dead, /*placement=*/false);
    if (mode == "hold-placement") HoldPage(socket, dead, /*placement=*/true);
    if (mode == "hold-guard") HoldGuard(socket, dead);
  }
  if (mode == "commands") FloodCommands(socket);
  if (mode == "connections") FloodConnections(socket);
  if (mode == "quota") TakeAll(socket);
  if (mode == "doorbells") SpinDoorbells(socket);
  if (mode == "burn") Burn();
  return 2;
}
