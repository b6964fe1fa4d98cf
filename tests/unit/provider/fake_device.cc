// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/provider/fake_device.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace verbena::provider {
namespace {

constexpr uint64_t kSegmentBytes = 1 << 22;

// The fake device cannot go on without: a broken machine, not a failed test.
void Must(bool condition, const char* what) {
  if (condition) return;
  perror(what);
  abort();
}

int MakeMemory(const char* name, uint64_t bytes) {
  const int fd = memfd_create(name, MFD_CLOEXEC);
  Must(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0, name);
  return fd;
}

template <typename T>
T* Map(int fd, uint64_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  Must(base != MAP_FAILED, "mmap");
  return static_cast<T*>(base);
}

uint32_t PowerOfTwo(uint32_t at_least) {
  uint32_t value = 1;
  while (value < at_least) value *= 2;
  return value;
}

template <typename T>
std::vector<uint8_t> Bytes(const T& value) {
  std::vector<uint8_t> bytes(sizeof(value));
  memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

template <typename T>
T From(const std::vector<uint8_t>& bytes) {
  T value = {};
  Must(bytes.size() == sizeof(value), "request of an unexpected size");
  memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

void Write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

}  // namespace

struct FakeDevice::Client {
  int fd;
  bool greeted = false;
  bool gone = false;
};

const abi::SendWqe& FakeDevice::QpView::Send(uint32_t index) const {
  return *reinterpret_cast<const abi::SendWqe*>(sq + (index % sq_slots) * sq_stride);
}
const abi::Sge* FakeDevice::QpView::SendSges(uint32_t index) const {
  return reinterpret_cast<const abi::Sge*>(&Send(index) + 1);
}
const uint8_t* FakeDevice::QpView::SendInline(uint32_t index) const {
  return reinterpret_cast<const uint8_t*>(&Send(index) + 1);
}
const abi::RecvWqe& FakeDevice::QpView::Recv(uint32_t index) const {
  return *reinterpret_cast<const abi::RecvWqe*>(rq + (index % rq_slots) * rq_stride);
}
const abi::Sge* FakeDevice::QpView::RecvSges(uint32_t index) const {
  return reinterpret_cast<const abi::Sge*>(&Recv(index) + 1);
}

FakeDevice& FakeDevice::Get() {
  static FakeDevice device;
  return device;
}

FakeDevice::FakeDevice() {
  char folder[] = "/tmp/fake-device-XXXXXX";
  Must(mkdtemp(folder) != nullptr, "mkdtemp");
  folder_ = folder;
  MakeTree();
  setenv("VERBENA_SOCKET", socket_path().c_str(), 1);
  wake_fd_ = MakeMemory("wake", sizeof(abi::WakePage));
  status_fd_ = MakeMemory("status", sizeof(abi::StatusPage));
  wake_ = Map<abi::WakePage>(wake_fd_, sizeof(abi::WakePage));
  status_ = Map<abi::StatusPage>(status_fd_, sizeof(abi::StatusPage));
  status_->thread_count = 1;
  status_->cpu[0] = abi::kAnyCpu;

  listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  snprintf(address.sun_path, sizeof(address.sun_path), "%s", socket_path().c_str());
  Must(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0, "bind");
  Must(listen(listener_, 16) == 0, "listen");
  Must(pipe2(stop_, O_CLOEXEC) == 0, "pipe2");
  thread_ = std::thread([this] { Serve(); });
}

FakeDevice::~FakeDevice() {
  close(stop_[1]);
  thread_.join();
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void FakeDevice::MakeTree() {
  const std::filesystem::path root = tree();
  const std::filesystem::path sys = root / "sys/class";
  const std::filesystem::path real = root / "sys/devices/virtual/verbena/infiniband/verbena0";
  Write(real / "node_type", "1: CA\n");
  Write(real / "node_guid", "0200:00ff:fe00:0001\n");
  Write(real / "fw_ver", "1.0\n");
  Write(real / "ports/1/gids/0", "fe80:0000:0000:0000:0000:00ff:fe00:0001\n");
  Write(real / "ports/1/gid_attrs/types/0", "RoCE v2\n");
  Write(real / "ports/1/gid_attrs/ndevs/0", "lo\n");
  Write(real / "ports/1/pkeys/0", "0xffff\n");
  std::filesystem::create_directories(sys / "infiniband");
  std::filesystem::create_directory_symlink("../../devices/virtual/verbena/infiniband/verbena0",
                                            sys / "infiniband/verbena0");
  Write(sys / "infiniband_verbs/abi_version", "6\n");
  Write(sys / "infiniband_verbs/uverbs0/ibdev", "verbena0\n");
  Write(sys / "infiniband_verbs/uverbs0/dev", "231:192\n");
  Write(sys / "infiniband_verbs/uverbs0/abi_version", "1\n");
  Write(root / "dev/infiniband/uverbs0", "");
}

void FakeDevice::FailNext(abi::CommandOp op, int error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fail_[op] = error;
}

FakeDevice::QpView FakeDevice::Qp(uint32_t handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return qps_.at(handle);
}

uint32_t FakeDevice::cq_slots(uint32_t cq) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return cqs_.at(cq).slots;
}

void FakeDevice::Complete(uint32_t cq, const Completion& completion) {
  const QpView qp = Qp(completion.qp);
  const std::lock_guard<std::mutex> lock(mutex_);
  Cq& to = cqs_.at(cq);
  auto* cqe = reinterpret_cast<abi::Cqe*>(to.ring + (to.produced % to.slots) * sizeof(abi::Cqe));
  cqe->wr_id = completion.wr_id;
  cqe->status = completion.status;
  cqe->opcode = completion.opcode;
  cqe->flags = completion.flags;
  if (completion.send) cqe->flags |= abi::kCqeSend;
  cqe->sl = completion.sl;
  cqe->byte_len = completion.byte_len;
  cqe->imm_or_inv = completion.imm_or_inv;
  cqe->qpn = qp.qpn;
  cqe->src_qpn = completion.src_qpn;
  cqe->vendor_err = completion.vendor_err;
  cqe->wqe_index = completion.wqe_index;
  cqe->qp_slot = static_cast<uint16_t>(completion.qp);
  cqe->qp_generation = qp.generation - completion.generations_ago;
  cqe->phase.store(abi::PhaseOf(to.produced, to.slots), std::memory_order_release);
  ++to.produced;
}

void FakeDevice::SendCompEvent(uint32_t cq) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Cq& to = cqs_.at(cq);
  Must(write(to.event_fd, &to.user_handle, 8) == 8, "completion event");
  ++to.comp_events;
}

void FakeDevice::SendQpEvent(uint32_t qp, uint32_t type) {
  const std::lock_guard<std::mutex> lock(mutex_);
  abi::AsyncEventRecord record = {qps_.at(qp).user_handle, type, 0};
  Must(write(async_write_fd_, &record, sizeof(record)) == sizeof(record), "async event");
  ++async_events_[qp];
}

bool FakeDevice::WaitForNoClients() {
  for (int i = 0; i < 500 && client_count_ != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return client_count_ == 0;
}

void FakeDevice::Serve() {
  while (true) {
    std::vector<pollfd> waits = {{stop_[0], POLLIN, 0}, {listener_, POLLIN, 0}};
    for (const auto& client : clients_) waits.push_back({client->fd, POLLIN, 0});
    poll(waits.data(), waits.size(), -1);
    if (waits[0].revents != 0) return;
    const size_t known = clients_.size();
    if (waits[1].revents != 0) {
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd >= 0) clients_.push_back(std::make_unique<Client>(Client{.fd = fd}));
    }
    for (size_t i = 0; i < known; ++i) {
      if (waits[2 + i].revents != 0) Handle(clients_[i].get());
    }
    std::erase_if(clients_, [this](const std::unique_ptr<Client>& client) {
      if (!client->gone) return false;
      if (client->greeted) --client_count_;
      close(client->fd);
      return true;
    });
  }
}

void FakeDevice::Handle(Client* client) {
  std::vector<uint8_t> bytes(abi::kMaxMessageBytes);
  iovec part = {bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = recvmsg(client->fd, &message, MSG_CMSG_CLOEXEC);
  if (got <= 0) {
    client->gone = true;
    return;
  }
  int fd = -1;
  if (const cmsghdr* item = CMSG_FIRSTHDR(&message); item != nullptr) {
    memcpy(&fd, CMSG_DATA(item), sizeof(fd));
  }
  bytes.resize(static_cast<size_t>(got));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (client->greeted) {
    HandleCommand(client, bytes, fd);
  } else {
    if (fd >= 0) close(fd);
    HandleHello(client, bytes);
  }
}

void FakeDevice::HandleHello(Client* client, const std::vector<uint8_t>& bytes) {
  constexpr uint32_t kNetlinkHello[2] = {abi::kMagic, abi::kClientNetlink};
  if (bytes == Bytes(kNetlinkHello)) {  // libibverbs asks; here nobody answers
    client->gone = true;
    return;
  }
  hello_ = From<abi::Hello>(bytes);
  abi::HelloReply reply = {};
  reply.magic = abi::kMagic;
  reply.error = hello_error_.exchange(0);
  reply.version = hello_version_.exchange(abi::kVersionMax);
  reply.version_min = reply.version;
  reply.version_max = reply.version;
  if (reply.version != abi::kVersionMax) reply.error = EPROTO;
  reply.sizes = abi::kAbiSizes;
  reply.cookie = 0x1122334455667788;
  reply.attributes.max_qp = 16384;
  reply.attributes.max_sge = 32;
  reply.attributes.vendor_id = 0xffffff;
  reply.attributes.device_cap_flags = 1ull << 40 | 1u << 14;
  reply.attributes.phys_port_count = 1;
  reply.attributes.num_comp_vectors = 4;
  strcpy(reply.attributes.fw_version, "9.8.7");
  if (reply.error != 0) {
    Reply(client, Bytes(reply), {});
    client->gone = true;
    return;
  }
  client->greeted = true;
  ++client_count_;
  const int context_fd = MakeMemory("context", sizeof(abi::ContextPage));
  page_ = Map<abi::ContextPage>(context_fd, sizeof(abi::ContextPage));
  segment_ = nullptr;
  segment_number_ = 0;
  segment_sent_ = false;
  segment_used_ = 0;
  int async[2];
  Must(pipe2(async, O_CLOEXEC) == 0, "pipe2");
  if (async_write_fd_ >= 0) close(async_write_fd_);
  async_write_fd_ = async[1];
  Reply(client, Bytes(reply), {context_fd, wake_fd_, status_fd_, async[0]});
  close(context_fd);
  close(async[0]);
}

abi::RingLocation FakeDevice::MakeRing(uint32_t slots, uint32_t stride, std::vector<int>* fds,
                                       uint8_t** base) {
  abi::RingLocation location = {};
  if (slots == 0) return location;
  if (segment_ == nullptr) {
    const int fd = MakeMemory("segment", kSegmentBytes);
    segment_ = Map<uint8_t>(fd, kSegmentBytes);
    fds->push_back(fd);
    location.new_segment = 1;
  }
  location.segment = segment_number_;
  location.segment_bytes = kSegmentBytes;
  location.offset = segment_used_;
  location.slots = slots;
  location.stride = stride;
  *base = segment_ + segment_used_;
  segment_used_ += abi::RoundUp(slots * stride, 64);
  Must(segment_used_ <= kSegmentBytes, "segment");
  return location;
}

void FakeDevice::HandleCommand(Client* client, const std::vector<uint8_t>& bytes, int fd) {
  abi::CommandHeader header;
  memcpy(&header, bytes.data(), sizeof(header));
  last_[header.op] = bytes;
  const abi::ReplyHeader ok = {header.sequence, 0};
  if (const auto failure = fail_.find(header.op); failure != fail_.end()) {
    const abi::ReplyHeader failed = {header.sequence, failure->second};
    fail_.erase(failure);
    if (fd >= 0) close(fd);
    Reply(client, Bytes(failed), {});
    return;
  }
  std::vector<int> fds;
  switch (header.op) {
    case abi::kCmdAllocPd:
    case abi::kCmdCreateAh:
      Reply(client, Bytes(abi::HandleReply{ok, next_handle_++, 0}), {});
      break;
    case abi::kCmdDeallocPd:
    case abi::kCmdDeregMr:
    case abi::kCmdDestroyAh:
      Reply(client, Bytes(abi::HandleReply{ok, 0, 0}), {});
      break;
    case abi::kCmdRegMr: {
      const uint32_t handle = next_handle_++;
      Reply(client, Bytes(abi::RegMrReply{ok, handle, handle << 8 | 1, handle << 8 | 2, 0}), {});
      break;
    }
    case abi::kCmdCreateCq: {
      const auto request = From<abi::CreateCqRequest>(bytes);
      Cq cq = {};
      cq.slots = PowerOfTwo(request.cqe);
      cq.user_handle = request.user_handle;
      cq.event_fd = fd;
      abi::CreateCqReply reply = {};
      reply.header = ok;
      reply.handle = next_handle_++;
      reply.cqe = cq.slots;
      reply.ring = MakeRing(cq.slots, sizeof(abi::Cqe), &fds, &cq.ring);
      cqs_[reply.handle] = cq;
      Reply(client, Bytes(reply), fds);
      break;
    }
    case abi::kCmdDestroyCq: {
      const auto request = From<abi::HandleRequest>(bytes);
      const Cq cq = cqs_.at(request.handle);
      cqs_.erase(request.handle);
      if (cq.event_fd >= 0) close(cq.event_fd);
      Reply(client, Bytes(abi::DestroyReply{ok, cq.comp_events, 0}), {});
      break;
    }
    case abi::kCmdCreateQp: {
      const auto request = From<abi::CreateQpRequest>(bytes);
      QpView qp = {};
      qp.qpn = 0x4321;
      qp.generation = ++next_generation_;
      qp.caps = request.caps;
      qp.user_handle = request.user_handle;
      qp.sq_slots = PowerOfTwo(request.caps.max_send_wr);
      qp.rq_slots = PowerOfTwo(request.caps.max_recv_wr);
      qp.sq_stride = abi::SendStride(request.caps.max_send_sge, request.caps.max_inline);
      qp.rq_stride = abi::RecvStride(request.caps.max_recv_sge);
      abi::CreateQpReply reply = {};
      reply.header = ok;
      reply.handle = next_handle_++;
      reply.qpn = qp.qpn;
      reply.generation = qp.generation;
      reply.caps = request.caps;
      reply.sq = MakeRing(qp.sq_slots, qp.sq_stride, &fds, &qp.sq);
      reply.rq = MakeRing(qp.rq_slots, qp.rq_stride, &fds, &qp.rq);
      qps_[reply.handle] = qp;
      page_->qp[reply.handle].state = 0;
      Reply(client, Bytes(reply), fds);
      break;
    }
    case abi::kCmdModifyQp: {
      const auto request = From<abi::ModifyQpRequest>(bytes);
      QpView& qp = qps_.at(request.handle);
      // Bit 0 is IBV_QP_STATE, state 0 is RESET.
      const uint32_t state =
          (request.mask & 1) != 0 ? request.attr.state : page_->qp[request.handle].state.load();
      if (state == 0) qp.generation = ++next_generation_;
      page_->qp[request.handle].state = state;
      Reply(client, Bytes(abi::ModifyQpReply{ok, state, qp.generation}), {});
      break;
    }
    case abi::kCmdQueryQp: {
      const auto request = From<abi::HandleRequest>(bytes);
      abi::QueryQpReply reply = {};
      reply.header = ok;
      reply.attr.state = page_->qp[request.handle].state;
      reply.attr.dest_qpn = 0x777;
      reply.attr.ah.is_global = 1;
      reply.attr.ah.sgid_index = 3;
      reply.caps = qps_.at(request.handle).caps;
      Reply(client, Bytes(reply), {});
      break;
    }
    case abi::kCmdDestroyQp: {
      const auto request = From<abi::HandleRequest>(bytes);
      qps_.erase(request.handle);
      Reply(client, Bytes(abi::DestroyReply{ok, 0, async_events_[request.handle]}), {});
      break;
    }
    case abi::kCmdQueryPort: {
      abi::QueryPortReply reply = {};
      reply.header = ok;
      reply.state = 4;
      reply.max_mtu = 5;
      reply.active_mtu = 4;
      reply.gid_table_len = 16;
      reply.pkey_table_len = 1;
      reply.link_layer = 2;
      reply.active_speed = 32;
      reply.max_msg_size = 1u << 31;
      Reply(client, Bytes(reply), {});
      break;
    }
    default:
      Reply(client, Bytes(abi::ReplyHeader{header.sequence, EINVAL}), {});
  }
  for (const int sent : fds) close(sent);
}

void FakeDevice::Reply(Client* client, std::vector<uint8_t> bytes, const std::vector<int>& fds) {
  if (client->greeted && client_count_ > 0 && bytes.size() != sizeof(abi::HelloReply)) {
    switch (spoil_.exchange(Spoil::kNothing)) {
      case Spoil::kNothing:
        break;
      case Spoil::kTooShort:
        bytes.resize(4);
        break;
      case Spoil::kTooLong:
        bytes.resize(bytes.size() + 8);
        break;
      case Spoil::kWrongSequence:
        ++bytes[0];
        break;
      case Spoil::kHeaderOnly:
        bytes.resize(sizeof(abi::ReplyHeader));
        break;
      case Spoil::kCloseConnection:
        client->gone = true;
        return;
    }
  }
  iovec part = {bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* item = CMSG_FIRSTHDR(&message);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    memcpy(CMSG_DATA(item), fds.data(), fds.size() * sizeof(int));
  }
  sendmsg(client->fd, &message, MSG_NOSIGNAL);
}

}  // namespace verbena::provider
