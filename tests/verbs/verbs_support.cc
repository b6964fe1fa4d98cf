// SPDX-License-Identifier: Apache-2.0
#include "tests/verbs/verbs_support.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "tests/verbs/deviations.h"

namespace verbena::testing {
namespace {

using Clock = std::chrono::steady_clock;

uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

uint64_t PatternWord(uint64_t id, uint64_t index) { return Mix(id * 0x10001 + index); }

std::map<std::string, RoleFunction>& Roles() {
  static auto* roles = new std::map<std::string, RoleFunction>;
  return *roles;
}

bool WaitReadable(int descriptor, Milliseconds limit) {
  const auto end = Clock::now() + limit;
  for (;;) {
    const auto left = std::chrono::duration_cast<Milliseconds>(end - Clock::now()).count();
    pollfd wait = {descriptor, POLLIN, 0};
    const int ready = poll(&wait, 1, left > 0 ? static_cast<int>(left) : 0);
    if (ready > 0) return true;
    if (left <= 0) return false;
  }
}

}  // namespace

void Require(bool good, const std::string& what) {
  if (!good) throw std::runtime_error(what + ": " + strerror(errno));
}

std::string DeviceUnderTest(const std::string& name) {
  const char* const names = getenv("VERBENA_TEST_DEVICES");
  if (names == nullptr) return name;
  const std::string both = names;
  const size_t comma = both.find(',');
  if (name == "verbena0" || comma == std::string::npos) return both.substr(0, comma);
  return name == "verbena1" ? both.substr(comma + 1) : name;
}

Owned<ibv_context> OpenDevice(const std::string& simulated) {
  const std::string name = DeviceUnderTest(simulated);
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  Require(list != nullptr, "ibv_get_device_list");
  ibv_context* context = nullptr;
  for (int i = 0; i < count; ++i) {
    if (name == ibv_get_device_name(list[i])) {
      context = ibv_open_device(list[i]);
      if (context == nullptr) {
        const int error = errno;
        ibv_free_device_list(list);
        errno = error;
        Require(false, "ibv_open_device " + name);
      }
      break;
    }
  }
  ibv_free_device_list(list);
  if (context == nullptr) errno = ENODEV;
  Require(context != nullptr, "device " + name);
  return Owned<ibv_context>(context);
}

Memory::Memory(ibv_pd* pd, size_t bytes, unsigned access) : size_(bytes) {
  Require(pd != nullptr, "PD");
  void* memory = mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  Require(memory != MAP_FAILED, "mmap");
  data_ = static_cast<uint8_t*>(memory);
  mr_.reset(ibv_reg_mr(pd, memory, bytes, static_cast<int>(access)));
  if (mr_ == nullptr) {
    const int error = errno;
    munmap(memory, std::max<size_t>(bytes, 1));
    errno = error;
    Require(false, "ibv_reg_mr of " + std::to_string(bytes) + " bytes");
  }
}

Memory::~Memory() {
  mr_.reset();
  munmap(data_, std::max<size_t>(size_, 1));
}

void Memory::Unmap(size_t offset, size_t length) {
  Require(munmap(data_ + offset, length) == 0, "munmap");
}

std::string PeerAddress::Text() const {
  char text[80];
  int at = snprintf(text, sizeof(text), "%u:%u:", qpn, psn);
  for (const uint8_t byte : gid.raw) {
    at += snprintf(text + at, sizeof(text) - static_cast<size_t>(at), "%02x", byte);
  }
  return text;
}

PeerAddress PeerAddress::Parse(const std::string& text) {
  PeerAddress result;
  char digits[33] = {};
  if (sscanf(text.c_str(), "%u:%u:%32s", &result.qpn, &result.psn, digits) != 3 ||
      strlen(digits) != 32) {
    throw std::runtime_error("bad address " + text);
  }
  for (size_t i = 0; i < 16; ++i) {
    unsigned byte = 0;
    sscanf(digits + 2 * i, "%2x", &byte);
    result.gid.raw[i] = static_cast<uint8_t>(byte);
  }
  return result;
}

RcEnd::RcEnd(const EndOptions& options) {
  owned_context_ = OpenDevice(options.device);
  context_ = owned_context_.get();
  owned_pd_.reset(ibv_alloc_pd(context_));
  Require(owned_pd_ != nullptr, "ibv_alloc_pd");
  pd_ = owned_pd_.get();
  CreateQp(options);
}

RcEnd::RcEnd(const RcEnd& other, const EndOptions& options)
    : RcEnd(other.context_, other.pd_, options) {}

RcEnd::RcEnd(ibv_context* context, ibv_pd* pd, const EndOptions& options)
    : context_(context), pd_(pd) {
  CreateQp(options);
}

void RcEnd::CreateQp(const EndOptions& options) {
  if (options.channel) {
    channel_.reset(ibv_create_comp_channel(context_));
    Require(channel_ != nullptr, "ibv_create_comp_channel");
  }
  send_cq_.reset(ibv_create_cq(context_, options.cqe, this, channel_.get(), 0));
  Require(send_cq_ != nullptr, "ibv_create_cq");
  recv_cq_.reset(ibv_create_cq(context_, options.cqe, this, channel_.get(), 0));
  Require(recv_cq_ != nullptr, "ibv_create_cq");
  ibv_qp_init_attr init = {};
  init.send_cq = send_cq_.get();
  init.recv_cq = recv_cq_.get();
  init.qp_type = options.type;
  init.srq = options.srq;
  init.sq_sig_all = options.sq_sig_all;
  init.cap.max_send_wr = options.send_wr;
  init.cap.max_recv_wr = options.recv_wr;
  init.cap.max_send_sge = options.sge;
  init.cap.max_recv_sge = options.sge;
  init.cap.max_inline_data = options.max_inline;
  if (options.send_ops != 0) {
    ibv_qp_init_attr_ex extended = {};
    extended.send_cq = init.send_cq;
    extended.recv_cq = init.recv_cq;
    extended.cap = init.cap;
    extended.qp_type = init.qp_type;
    extended.sq_sig_all = init.sq_sig_all;
    extended.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    extended.pd = pd_;
    extended.send_ops_flags = options.send_ops;
    qp_.reset(ibv_create_qp_ex(context_, &extended));
  } else {
    qp_.reset(ibv_create_qp(pd_, &init));
  }
  Require(qp_ != nullptr, "ibv_create_qp");
  gid_index_ = options.gid_index;
  // Close to the wrap-around of 24 bits for some QPs.
  static std::atomic<uint32_t> count{0};
  const uint32_t n = count.fetch_add(1);
  psn_ = n % 3 == 0
             ? 0xffffffu - n % 7
             : static_cast<uint32_t>(Mix(static_cast<uint64_t>(getpid()) * 977 + n)) & 0xffffffu;
}

PeerAddress RcEnd::address() const {
  PeerAddress result;
  result.qpn = qp_->qp_num;
  result.psn = psn_;
  Require(ibv_query_gid(context_, 1, gid_index_, &result.gid) == 0, "ibv_query_gid");
  return result;
}

int RcEnd::ToInit(const PathOptions& path) {
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_INIT;
  attr.pkey_index = 0;
  attr.port_num = 1;
  attr.qp_access_flags = path.access & ~static_cast<unsigned>(IBV_ACCESS_LOCAL_WRITE);
  return ibv_modify_qp(qp(), &attr,
                       IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

int RcEnd::ToRtr(const PeerAddress& peer, const PathOptions& path) {
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = path.mtu;
  attr.dest_qp_num = peer.qpn;
  attr.rq_psn = peer.psn;
  attr.max_dest_rd_atomic = path.rd_atomic;
  attr.min_rnr_timer = path.min_rnr_timer;
  attr.ah_attr.is_global = 1;
  attr.ah_attr.port_num = 1;
  attr.ah_attr.grh.dgid = peer.gid;
  attr.ah_attr.grh.sgid_index = static_cast<uint8_t>(gid_index_);
  attr.ah_attr.grh.hop_limit = 64;
  const int reliable = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  return ibv_modify_qp(qp(), &attr,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                           IBV_QP_RQ_PSN | (qp()->qp_type == IBV_QPT_RC ? reliable : 0));
}

int RcEnd::ToRts(const PathOptions& path) {
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = path.timeout;
  attr.retry_cnt = path.retry_cnt;
  attr.rnr_retry = path.rnr_retry;
  attr.sq_psn = psn_;
  attr.max_rd_atomic = path.rd_atomic;
  const int reliable =
      IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
  return ibv_modify_qp(qp(), &attr,
                       IBV_QP_STATE | IBV_QP_SQ_PSN | (qp()->qp_type == IBV_QPT_RC ? reliable : 0));
}

int RcEnd::ToState(ibv_qp_state state) {
  ibv_qp_attr attr = {};
  attr.qp_state = state;
  return ibv_modify_qp(qp(), &attr, IBV_QP_STATE);
}

void RcEnd::Connect(const PeerAddress& peer, const PathOptions& path) {
  int error = ToInit(path);
  if (error == 0) error = ToRtr(peer, path);
  if (error == 0) error = ToRts(path);
  errno = error;
  Require(error == 0, "ibv_modify_qp");
}

ibv_qp_state RcEnd::State() const {
  ibv_qp_attr attr = {};
  ibv_qp_init_attr init = {};
  const int error = ibv_query_qp(qp(), &attr, IBV_QP_STATE, &init);
  errno = error;
  Require(error == 0, "ibv_query_qp");
  return attr.qp_state;
}

int RcEnd::PostSend(ibv_send_wr wr, std::vector<ibv_sge> sges) {
  wr.sg_list = sges.empty() ? nullptr : sges.data();
  wr.num_sge = static_cast<int>(sges.size());
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(qp(), &wr, &bad);
}

int RcEnd::PostRecv(uint64_t wr_id, std::vector<ibv_sge> sges) {
  ibv_recv_wr wr = {};
  wr.wr_id = wr_id;
  wr.sg_list = sges.empty() ? nullptr : sges.data();
  wr.num_sge = static_cast<int>(sges.size());
  ibv_recv_wr* bad = nullptr;
  return ibv_post_recv(qp(), &wr, &bad);
}

void ConnectPair(RcEnd& a, RcEnd& b, const PathOptions& path) {
  a.Connect(b.address(), path);
  b.Connect(a.address(), path);
}

ibv_send_wr SendWr(uint64_t wr_id, ibv_wr_opcode opcode, unsigned flags) {
  ibv_send_wr wr = {};
  wr.wr_id = wr_id;
  wr.opcode = opcode;
  wr.send_flags = flags;
  return wr;
}

ibv_send_wr RdmaWr(uint64_t wr_id, ibv_wr_opcode opcode, uint64_t remote_address, uint32_t rkey,
                   unsigned flags) {
  ibv_send_wr wr = SendWr(wr_id, opcode, flags);
  wr.wr.rdma.remote_addr = remote_address;
  wr.wr.rdma.rkey = rkey;
  return wr;
}

ibv_send_wr AtomicWr(uint64_t wr_id, ibv_wr_opcode opcode, uint64_t remote_address, uint32_t rkey,
                     uint64_t compare_add, uint64_t swap) {
  ibv_send_wr wr = SendWr(wr_id, opcode);
  wr.wr.atomic.remote_addr = remote_address;
  wr.wr.atomic.rkey = rkey;
  wr.wr.atomic.compare_add = compare_add;
  wr.wr.atomic.swap = swap;
  return wr;
}

ibv_wc PollOne(ibv_cq* cq, Milliseconds limit) {
  const auto end = Clock::now() + limit;
  ibv_wc wc = {};
  for (uint32_t i = 0;; ++i) {
    const int count = ibv_poll_cq(cq, 1, &wc);
    if (count == 1) return wc;
    errno = count < 0 ? -count : errno;
    Require(count == 0, "ibv_poll_cq");
    if (i % 64 == 63) {
      errno = ETIMEDOUT;
      Require(Clock::now() < end, "no completion");
      sched_yield();
    }
  }
}

bool StaysEmpty(ibv_cq* cq, Milliseconds time) {
  const auto end = Clock::now() + time;
  ibv_wc wc = {};
  do {
    if (ibv_poll_cq(cq, 1, &wc) != 0) return false;
    usleep(1000);
  } while (Clock::now() < end);
  return true;
}

std::string Describe(const ibv_wc& wc) {
  return "wr " + std::to_string(wc.wr_id) + ": " + ibv_wc_status_str(wc.status) + " (opcode " +
         std::to_string(wc.opcode) + ", " + std::to_string(wc.byte_len) + " bytes)";
}

std::optional<ibv_async_event> NextAsyncEvent(ibv_context* context, Milliseconds limit) {
  if (!WaitReadable(context->async_fd, limit)) return std::nullopt;
  ibv_async_event event = {};
  Require(ibv_get_async_event(context, &event) == 0, "ibv_get_async_event");
  ibv_ack_async_event(&event);
  return event;
}

ibv_cq* NextCqEvent(ibv_comp_channel* channel, Milliseconds limit) {
  if (!WaitReadable(channel->fd, limit)) return nullptr;
  ibv_cq* cq = nullptr;
  void* cq_context = nullptr;
  Require(ibv_get_cq_event(channel, &cq, &cq_context) == 0, "ibv_get_cq_event");
  ibv_ack_cq_events(cq, 1);
  return cq;
}

uint8_t PatternByte(uint64_t id, uint64_t offset) {
  return static_cast<uint8_t>(PatternWord(id, offset / 8) >> (offset % 8 * 8));
}

void FillPattern(std::span<uint8_t> bytes, uint64_t id, uint64_t first_offset) {
  size_t at = 0;
  for (; at < bytes.size() && (first_offset + at) % 8 != 0; ++at) {
    bytes[at] = PatternByte(id, first_offset + at);
  }
  for (; at + 8 <= bytes.size(); at += 8) {
    const uint64_t word = PatternWord(id, (first_offset + at) / 8);
    memcpy(bytes.data() + at, &word, 8);
  }
  for (; at < bytes.size(); ++at) bytes[at] = PatternByte(id, first_offset + at);
}

std::optional<size_t> PatternMismatch(std::span<const uint8_t> bytes, uint64_t id,
                                      uint64_t first_offset) {
  for (size_t at = 0; at < bytes.size();) {
    if ((first_offset + at) % 8 == 0 && at + 8 <= bytes.size()) {
      uint64_t word;
      memcpy(&word, bytes.data() + at, 8);
      if (word == PatternWord(id, (first_offset + at) / 8)) {
        at += 8;
        continue;
      }
    }
    if (bytes[at] != PatternByte(id, first_offset + at)) return at;
    ++at;
  }
  return std::nullopt;
}

uint64_t Random::Next() {
  state_ += 0x9e3779b97f4a7c15ull;
  return Mix(state_);
}

uint64_t TestSeed() {
  const char* given = getenv("VERBENA_TEST_SEED");
  return given != nullptr ? strtoull(given, nullptr, 0) : 20240229;
}

bool RegisterRole(const char* name, RoleFunction function) {
  Roles()[name] = function;
  return true;
}

std::optional<int> RunRole(int argc, char** argv) {
  if (argc < 3 || strcmp(argv[1], "--role") != 0) return std::nullopt;
  const auto role = Roles().find(argv[2]);
  if (role == Roles().end()) {
    fprintf(stderr, "no role %s\n", argv[2]);
    return 126;
  }
  setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    return role->second(std::vector<std::string>(argv + 3, argv + argc));
  } catch (const std::exception& error) {
    printf("role %s: %s\n", argv[2], error.what());
    return 125;
  }
}

std::vector<std::string> RoleCommand(const std::string& name,
                                     const std::vector<std::string>& arguments) {
  char self[4096];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
  Require(length > 0, "readlink /proc/self/exe");
  std::vector<std::string> command = {std::string(self, static_cast<size_t>(length)), "--role",
                                      name};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

ProcessOptions RoleProcess(const std::string& name, const std::vector<std::string>& arguments) {
  ProcessOptions options;
  options.argv = RoleCommand(name, arguments);
  return options;
}

}  // namespace verbena::testing
