// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/nic_sim/device/raw_client.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "transport/qp_state.h"

namespace verbena::testing {

namespace {
constexpr uint64_t kGuardMagic = 0x1122334455667788;

void WriteSges(std::byte* to, const std::vector<abi::Sge>& sges) {
  for (size_t i = 0; i < sges.size(); ++i) {
    std::memcpy(to + i * sizeof(abi::Sge), &sges[i], sizeof(abi::Sge));
  }
}
}  // namespace

std::unique_ptr<nic::Device> StartDevice(uint32_t nics, bool strict, bool system) {
  std::string error;
  nic::DeviceOptions options;
  options.instance = "test-" + std::to_string(getpid());
  options.run_folder = ::testing::TempDir();
  options.nics = nics;
  options.strict = strict;
  options.system = system;
  auto device = nic::Device::Start(options, &error);
  EXPECT_NE(device, nullptr) << error;
  return device;
}

RawClient::RawClient(nic::Device& device, uint32_t index, uid_t uid)
    : device_(device), index_(index) {
  guard_ = static_cast<std::byte*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  std::memcpy(guard_, &kGuardMagic, sizeof kGuardMagic);
  abi::Hello hello{};
  hello.device_index = index;
  hello.guard_address = reinterpret_cast<uint64_t>(guard_);
  hello.guard_magic = kGuardMagic;
  abi::HelloReply reply{};
  int fd = -1;
  std::string why;
  // Other users' memory is only reached through what they opened.
  const int memory = uid == geteuid() ? -1 : open("/proc/self/mem", O_RDWR | O_CLOEXEC);
  int pipe_ends[2] = {-1, -1};
  EXPECT_EQ(pipe2(pipe_ends, O_CLOEXEC | O_NONBLOCK), 0);
  events_ = pipe_ends[0];
  const int error = device_.OpenContext(hello,
                                        {.pid = getpid(),
                                         .uid = uid,
                                         .comm = "test",
                                         .mem_fd = memory,
                                         .async_write_fd = pipe_ends[1]},
                                        &reply, &fd, &context_, &why);
  EXPECT_EQ(error, 0) << why;
  page_ = static_cast<abi::ContextPage*>(
      mmap(nullptr, sizeof(abi::ContextPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  close(fd);
  const std::lock_guard lock(context_->lock());
  EXPECT_EQ(context_->AllocPd(&pd_), 0);
}

RawClient::~RawClient() {
  device_.CloseContext(context_);
  munmap(page_, sizeof(abi::ContextPage));
  munmap(guard_, 4096);
  close(events_);
  for (auto& [data, bytes] : segments_) munmap(data, bytes);
}

std::byte* RawClient::Map(const abi::RingLocation& location, std::vector<int>* fds) {
  if (location.new_segment != 0) {
    EXPECT_FALSE(fds->empty());
    EXPECT_EQ(location.segment, segments_.size());
    void* data =
        mmap(nullptr, location.segment_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds->front(), 0);
    EXPECT_NE(data, MAP_FAILED);
    close(fds->front());
    fds->erase(fds->begin());
    segments_.emplace_back(static_cast<std::byte*>(data), location.segment_bytes);
  }
  return segments_[location.segment].first + location.offset;
}

RawClient::Cq RawClient::CreateCq(uint32_t entries) {
  const std::lock_guard lock(context_->lock());
  abi::CreateCqRequest request{};
  request.cqe = entries;
  abi::CreateCqReply reply{};
  std::vector<int> fds;
  EXPECT_EQ(context_->CreateCq(request, -1, &reply, &fds), 0);
  Cq cq{.handle = reply.handle, .slots = reply.ring.slots};
  cq.ring = Map(reply.ring, &fds);
  return cq;
}

RawClient::Qp RawClient::CreateQp(const Cq& send_cq, const Cq& recv_cq, abi::QpCaps caps,
                                  uint32_t type, const Srq* srq) {
  const std::lock_guard lock(context_->lock());
  abi::CreateQpRequest request{};
  request.srq = srq != nullptr ? srq->handle : abi::kNoHandle;
  request.xrcd = abi::kNoHandle;
  request.pd = pd_;
  request.send_cq = send_cq.handle;
  request.recv_cq = recv_cq.handle;
  request.type = type;
  request.caps = caps;
  abi::CreateQpReply reply{};
  std::vector<int> fds;
  EXPECT_EQ(context_->CreateQp(request, &reply, &fds), 0);
  Qp qp{.handle = reply.handle, .qpn = reply.qpn, .caps = reply.caps};
  qp.type = type;
  qp.sq = Map(reply.sq, &fds);
  if (reply.rq.slots != 0) qp.rq = Map(reply.rq, &fds);
  qp.sq_slots = reply.sq.slots;
  qp.sq_stride = reply.sq.stride;
  qp.rq_slots = reply.rq.slots;
  qp.rq_stride = reply.rq.stride;
  return qp;
}

RawClient::Srq RawClient::CreateSrq(uint32_t max_wr, uint32_t max_sge, uint64_t user_handle) {
  const std::lock_guard lock(context_->lock());
  abi::CreateSrqRequest request{};
  request.pd = pd_;
  request.max_wr = max_wr;
  request.max_sge = max_sge;
  request.user_handle = user_handle;
  request.xrcd = request.cq = abi::kNoHandle;
  abi::CreateSrqReply reply{};
  std::vector<int> fds;
  EXPECT_EQ(context_->CreateSrq(request, &reply, &fds), 0);
  Srq srq{.handle = reply.handle, .slots = reply.ring.slots, .stride = reply.ring.stride};
  srq.ring = Map(reply.ring, &fds);
  return srq;
}

void RawClient::WriteSrqRecv(Srq& srq, uint64_t wr_id, const std::vector<abi::Sge>& sges) {
  std::byte* slot = srq.ring + uint64_t{srq.producer++ % srq.slots} * srq.stride;
  const abi::RecvWqe wqe{
      .wr_id = wr_id, .num_sge = static_cast<uint32_t>(sges.size()), .reserved = 0};
  std::memcpy(slot, &wqe, sizeof wqe);
  WriteSges(slot + sizeof wqe, sges);
  page_->srq[srq.handle].producer.store(srq.producer);
}

std::optional<abi::AsyncEventRecord> RawClient::NextEvent() {
  abi::AsyncEventRecord record{};
  if (read(events_, &record, sizeof record) != sizeof record) return std::nullopt;
  return record;
}

uint32_t RawClient::RegMr(void* address, size_t bytes, uint32_t access) {
  const std::lock_guard lock(context_->lock());
  abi::RegMrRequest request{};
  request.pd = pd_;
  request.access = access;
  request.address = request.iova = reinterpret_cast<uint64_t>(address);
  request.length = bytes;
  abi::RegMrReply reply{};
  EXPECT_EQ(context_->RegMr(request, &reply), 0);
  return reply.lkey;
}

transport::Gid RawClient::gid(uint32_t index) { return device_.nic_info(index_).gids[index]; }

int RawClient::Connect(const Qp& qp, uint32_t peer_qpn, const transport::Gid& peer_gid,
                       uint8_t retry_cnt, uint8_t timeout) {
  using namespace transport;
  const std::lock_guard lock(context_->lock());
  abi::ModifyQpRequest request{};
  abi::ModifyQpReply reply{};
  request.handle = qp.handle;
  abi::QpAttr& attr = request.attr;
  const bool is_rc = qp.type == 2;
  attr.port_num = 1;
  attr.access_flags = 15 | transport::kAccessFlushGlobal;
  attr.path_mtu = 3;
  attr.dest_qpn = peer_qpn;
  attr.max_dest_rd_atomic = attr.max_rd_atomic = 4;
  attr.min_rnr_timer = 12;
  attr.timeout = timeout;
  attr.retry_cnt = retry_cnt;
  attr.rnr_retry = 7;
  attr.ah.is_global = 1;
  attr.ah.port_num = 1;
  attr.ah.sgid_index = peer_gid.IsV4Mapped() ? 1 : 0;
  peer_gid.Store(reinterpret_cast<std::byte*>(attr.ah.dgid));
  attr.state = 1;
  request.mask = kQpAttrState | kQpAttrPkeyIndex | kQpAttrPort | kQpAttrAccessFlags;
  if (const int error = context_->ModifyQp(request, &reply)) return error;
  attr.state = 2;
  request.mask = kQpAttrState | kQpAttrAv | kQpAttrPathMtu | kQpAttrDestQpn | kQpAttrRqPsn |
                 (is_rc ? kQpAttrMaxDestRdAtomic | kQpAttrMinRnrTimer : 0);
  if (const int error = context_->ModifyQp(request, &reply)) return error;
  attr.state = 3;
  constexpr uint32_t kReliable =
      kQpAttrTimeout | kQpAttrRetryCnt | kQpAttrRnrRetry | kQpAttrMaxQpRdAtomic;
  request.mask = kQpAttrState | kQpAttrSqPsn | (is_rc ? kReliable : 0);
  return context_->ModifyQp(request, &reply);
}

void RawClient::WriteSend(Qp& qp, const abi::SendWqe& wqe, const std::vector<abi::Sge>& sges) {
  std::byte* slot = qp.sq + uint64_t{qp.sq_producer++ % qp.sq_slots} * qp.sq_stride;
  abi::SendWqe with_count = wqe;
  if (wqe.num_sge == 0) with_count.num_sge = static_cast<uint8_t>(sges.size());
  std::memcpy(slot, &with_count, sizeof with_count);
  WriteSges(slot + sizeof wqe, sges);
}

void RawClient::WriteRecv(Qp& qp, uint64_t wr_id, const std::vector<abi::Sge>& sges) {
  std::byte* slot = qp.rq + uint64_t{qp.rq_producer++ % qp.rq_slots} * qp.rq_stride;
  const abi::RecvWqe wqe{
      .wr_id = wr_id, .num_sge = static_cast<uint32_t>(sges.size()), .reserved = 0};
  std::memcpy(slot, &wqe, sizeof wqe);
  WriteSges(slot + sizeof wqe, sges);
  page_->qp[qp.handle].rq_producer.store(qp.rq_producer);
}

void RawClient::Ring(Qp& qp) {
  page_->qp[qp.handle].sq_producer.store(qp.sq_producer);
  page_->doorbell_bits[qp.handle / 64].fetch_or(uint64_t{1} << (qp.handle % 64));
  page_->doorbell_summary[qp.handle / 64 / 64].fetch_or(uint64_t{1} << (qp.handle / 64 % 64));
  device_.Kick();
}

std::optional<abi::Cqe*> RawClient::Poll(Cq& cq, int milliseconds) {
  auto* cqe = reinterpret_cast<abi::Cqe*>(cq.ring) + cq.consumer % cq.slots;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  while (cqe->phase.load(std::memory_order_acquire) != abi::PhaseOf(cq.consumer, cq.slots)) {
    if (std::chrono::steady_clock::now() > end) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  page_->cq[cq.handle].consumer.store(++cq.consumer, std::memory_order_release);
  return cqe;
}

}  // namespace verbena::testing
