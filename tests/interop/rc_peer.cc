// SPDX-License-Identifier: Apache-2.0
//
// One end of an RC connection for interoperability tests: the same program runs
// over Verbena and in a virtual machine over Linux rxe. One end is the
// requester, the other the responder; both get the same --ops and check data,
// statuses and memory after each group of work requests. They talk over a TCP
// connection that is no part of what is tested.
//
//   rc_peer --responder --device rxe0 --gid 1 --connect 10.99.0.1 --ops send:100
//   rc_peer --requester --device verbena0 --gid 1 --ops send:100
//
// OPS: groups, separated by ','; each is posted as one chain of operations,
// separated by '+'. Operation: NAME[:BYTES][!MOD...][@STATUS], status SUCCESS
// when not given. Names: send sendimm sendinv write writeimm read cas faa. Mods:
//   badkey  a wrong rkey                   oob    behind the end of the region
//   odd     an address not divisible by 8  fence  IBV_SEND_FENCE
//   mw      the memory window's rkey       mr     sendinv of the region's rkey
//   miss    cas that does not match
//
// Exit status: 0 all as expected, 1 not, 77 the device cannot do it.
#include <arpa/inet.h>
#include <getopt.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kNotSupported = 77;
constexpr uint32_t kImm = 0xc0ffee00;
constexpr size_t kData = 4096;  // below: the target of atomics
constexpr uint8_t kUntouched = 0xee;

struct Options {
  bool requester = false;
  std::string device = "verbena0";
  std::string connect;  // empty: listen
  std::string ops = "send:64";
  std::string mr_access = "lwra";
  std::string qp_access;  // empty: as mr_access
  int port = 7471;
  int gid = 1;
  int mtu = 1024;
  int timeout = 14;
  int retry = 7;
  int rnr_retry = 7;
  int min_rnr_timer = 12;
  int rd_atomic = 4;
  int recv_delay_ms = 0;
  int limit_ms = 30000;  // for each group
  uint32_t psn = 0x111111;
  uint32_t recv_bytes = 0;  // 0: as each message needs
};

[[noreturn]] void Stop(int status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::printf("%s: ", status == kNotSupported ? "not supported" : "FAILED");
  std::vprintf(format, arguments);
  std::printf(" (errno %d: %s)\n", errno, std::strerror(errno));
  va_end(arguments);
  std::fflush(stdout);
  std::_Exit(status);
}

const std::map<std::string, ibv_wc_status> kStatuses = {
    {"SUCCESS", IBV_WC_SUCCESS},
    {"LOC_LEN_ERR", IBV_WC_LOC_LEN_ERR},
    {"LOC_QP_OP_ERR", IBV_WC_LOC_QP_OP_ERR},
    {"LOC_PROT_ERR", IBV_WC_LOC_PROT_ERR},
    {"WR_FLUSH_ERR", IBV_WC_WR_FLUSH_ERR},
    {"LOC_ACCESS_ERR", IBV_WC_LOC_ACCESS_ERR},
    {"REM_INV_REQ_ERR", IBV_WC_REM_INV_REQ_ERR},
    {"REM_ACCESS_ERR", IBV_WC_REM_ACCESS_ERR},
    {"REM_OP_ERR", IBV_WC_REM_OP_ERR},
    {"RETRY_EXC_ERR", IBV_WC_RETRY_EXC_ERR},
    {"RNR_RETRY_EXC_ERR", IBV_WC_RNR_RETRY_EXC_ERR},
};

std::string StatusName(ibv_wc_status status) {
  for (const auto& [name, value] : kStatuses) {
    if (value == status) return name;
  }
  return std::to_string(status);
}

struct Op {
  std::string text;
  std::string name;
  uint32_t bytes = 8;
  std::set<std::string> mods;
  ibv_wc_status expected = IBV_WC_SUCCESS;
  size_t offset = 0;       // of its data in both buffers
  int receive = -1;        // index of the receive that it takes
  size_t recv_offset = 0;  // in the responder's buffer
  uint32_t recv_bytes = 0;

  bool is_send() const { return name.starts_with("send"); }
  bool is_atomic() const { return name == "cas" || name == "faa"; }
  bool takes_receive() const { return is_send() || name == "writeimm"; }
  bool has(const char* mod) const { return mods.contains(mod); }
};
using Group = std::vector<Op>;

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

Op ParseOp(const std::string& text) {
  Op op;
  op.text = text;
  std::string rest = text;
  if (const size_t at = rest.find('@'); at != std::string::npos) {
    const auto status = kStatuses.find(rest.substr(at + 1));
    if (status == kStatuses.end()) Stop(2, "unknown status in '%s'", text.c_str());
    op.expected = status->second;
    rest.resize(at);
  }
  const std::vector<std::string> words = Split(rest, '!');
  op.mods = {words.begin() + 1, words.end()};
  const size_t colon = words[0].find(':');
  op.name = words[0].substr(0, colon);
  if (colon != std::string::npos) {
    op.bytes = static_cast<uint32_t>(std::stoul(words[0].substr(colon + 1)));
  }
  static const std::set<std::string> kNames = {"send",     "sendimm", "sendinv", "write",
                                               "writeimm", "read",    "cas",     "faa"};
  if (!kNames.contains(op.name)) Stop(2, "unknown operation '%s'", text.c_str());
  return op;
}

// Lays the operations out in memory; both ends do the same.
std::vector<Group> ParseOps(const Options& options, size_t* buffer_bytes, int* receives) {
  std::vector<Group> groups;
  size_t end = kData;
  *receives = 0;
  for (const std::string& group : Split(options.ops, ',')) {
    groups.emplace_back();
    for (const std::string& text : Split(group, '+')) {
      Op op = ParseOp(text);
      op.offset = end;
      end += (op.bytes + 127) / 64 * 64;
      groups.back().push_back(op);
    }
  }
  for (Group& group : groups) {
    for (Op& op : group) {
      if (!op.takes_receive()) continue;
      op.receive = (*receives)++;
      op.recv_offset = end;
      op.recv_bytes = options.recv_bytes != 0 ? options.recv_bytes
                      : op.is_send()          ? op.bytes + 32
                                              : 64;
      end += (op.recv_bytes + 127) / 64 * 64;
    }
  }
  *buffer_bytes = end + 64;
  return groups;
}

// Lines over TCP.
class Channel {
 public:
  explicit Channel(const Options& options) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(options.port));
    const int on = 1;
    if (options.connect.empty()) {
      const int listener = socket(AF_INET, SOCK_STREAM, 0);
      setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
      if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
          listen(listener, 1) != 0) {
        Stop(1, "cannot listen on port %d", options.port);
      }
      pollfd file{.fd = listener, .events = POLLIN, .revents = 0};
      if (poll(&file, 1, 30000) != 1) Stop(1, "nobody connects");
      fd_ = accept(listener, nullptr, nullptr);
      close(listener);
    } else {
      if (inet_pton(AF_INET, options.connect.c_str(), &address.sin_addr) != 1) {
        Stop(2, "'%s' is no IPv4 address", options.connect.c_str());
      }
      const auto end = Clock::now() + std::chrono::seconds(30);
      do {
        if (fd_ >= 0) close(fd_);
        fd_ = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) break;
        if (Clock::now() > end) Stop(1, "cannot connect");
        std::this_thread::sleep_for(milliseconds(50));
      } while (true);
    }
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }

  void Write(std::string line) {
    line += '\n';
    if (send(fd_, line.data(), line.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(line.size())) {
      Stop(1, "the other end is gone");
    }
  }

  std::string Read(int limit_ms) {
    const auto end = Clock::now() + milliseconds(limit_ms);
    while (buffer_.find('\n') == std::string::npos) {
      const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now()).count();
      pollfd file{.fd = fd_, .events = POLLIN, .revents = 0};
      if (left <= 0 || poll(&file, 1, static_cast<int>(left)) != 1) {
        Stop(1, "no word from the other end");
      }
      char bytes[1024];
      const ssize_t got = recv(fd_, bytes, sizeof bytes, 0);
      if (got <= 0) Stop(1, "the other end is gone");
      buffer_.append(bytes, static_cast<size_t>(got));
    }
    const size_t newline = buffer_.find('\n');
    std::string line = buffer_.substr(0, newline);
    buffer_.erase(0, newline + 1);
    return line;
  }

 private:
  int fd_ = -1;
  std::string buffer_;
};

int AccessFlags(const std::string& letters) {
  int flags = 0;
  for (const char c : letters) {
    if (c == 'l') flags |= IBV_ACCESS_LOCAL_WRITE;
    if (c == 'w') flags |= IBV_ACCESS_REMOTE_WRITE;
    if (c == 'r') flags |= IBV_ACCESS_REMOTE_READ;
    if (c == 'a') flags |= IBV_ACCESS_REMOTE_ATOMIC;
  }
  return flags;
}

struct PeerInfo {
  uint32_t qpn = 0, psn = 0, rkey = 0, mw_rkey = 0;
  uint64_t address = 0;
  std::string gid;

  std::string Text() const {
    std::ostringstream out;
    out << qpn << ' ' << psn << ' ' << rkey << ' ' << mw_rkey << ' ' << address << ' ' << gid;
    return out.str();
  }
  static PeerInfo Parse(const std::string& text) {
    PeerInfo info;
    std::istringstream in(text);
    in >> info.qpn >> info.psn >> info.rkey >> info.mw_rkey >> info.address >> info.gid;
    if (!in) Stop(1, "bad line '%s'", text.c_str());
    return info;
  }
};

class Peer {
 public:
  explicit Peer(const Options& options) : options_(options) {
    groups_ = ParseOps(options_, &buffer_bytes_, &receives_);
  }
  int Run();

 private:
  void Open();
  void MoveTo(ibv_qp_state state);
  void BindWindow();
  void PostReceives();
  bool Poll(ibv_wc* wc, int limit_ms);
  ibv_send_wr MakeWr(const Op& op, ibv_sge* sge, uint64_t id);
  void Require(const Group& group);
  void Respond(const Group& group);
  void CheckReceive(const Op& op);
  void Wrong(const char* format, ...);

  // What stands in memory before anything is sent.
  static uint8_t Pattern(const Op& op, size_t i, bool requester) {
    return static_cast<uint8_t>(op.offset / 64 * 31 + i * 7 + (i >> 8) * 13 + (requester ? 1 : 0));
  }
  uint64_t* word() { return reinterpret_cast<uint64_t*>(buffer_); }

  const Options options_;
  std::vector<Group> groups_;
  size_t buffer_bytes_ = 0;
  int receives_ = 0;
  std::unique_ptr<Channel> channel_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_mr* mr_ = nullptr;
  ibv_qp* qp_ = nullptr;
  ibv_mw* mw_ = nullptr;
  uint8_t* buffer_ = nullptr;
  PeerInfo own_, peer_;
  int wrong_ = 0;
  uint64_t target_ = 0;  // what the responder's word must hold
  bool broken_ = false;  // an error has ended the connection
  uint64_t next_id_ = 0;
  std::map<uint64_t, ibv_wc> receive_wcs_;
};

void Peer::Wrong(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::printf("WRONG: ");
  std::vprintf(format, arguments);
  std::printf("\n");
  std::fflush(stdout);
  va_end(arguments);
  ++wrong_;
}

void Peer::Open() {
  int count = 0;
  ibv_device** devices = ibv_get_device_list(&count);
  for (int i = 0; i < count; ++i) {
    if (options_.device == ibv_get_device_name(devices[i])) context_ = ibv_open_device(devices[i]);
  }
  if (context_ == nullptr) Stop(1, "no device %s", options_.device.c_str());
  pd_ = ibv_alloc_pd(context_);
  cq_ = ibv_create_cq(context_, 512, nullptr, nullptr, 0);
  buffer_ = static_cast<uint8_t*>(std::aligned_alloc(4096, (buffer_bytes_ + 4095) / 4096 * 4096));
  if (pd_ == nullptr || cq_ == nullptr || buffer_ == nullptr) Stop(1, "no PD, CQ or memory");
  std::memset(buffer_, kUntouched, buffer_bytes_);
  std::memset(buffer_, 0, 64);
  for (const Group& group : groups_) {
    for (const Op& op : group) {
      // What will be read from here; the rest stays untouched.
      const bool source = (op.name == "read") != options_.requester;
      for (size_t i = 0; source && i < op.bytes; ++i) {
        buffer_[op.offset + i] = Pattern(op, i, options_.requester);
      }
    }
  }
  const bool needs_window = options_.ops.find("mw") != std::string::npos ||
                            (options_.ops.find("sendinv") != std::string::npos &&
                             options_.ops.find("!mr") == std::string::npos);
  int access = AccessFlags(options_.mr_access) | IBV_ACCESS_LOCAL_WRITE;
  if (needs_window && !options_.requester) access |= IBV_ACCESS_MW_BIND;
  mr_ = ibv_reg_mr(pd_, buffer_, buffer_bytes_, access);
  if (mr_ == nullptr) {
    Stop(errno == EOPNOTSUPP && needs_window ? kNotSupported : 1, "ibv_reg_mr");
  }
  if (needs_window && !options_.requester) {
    mw_ = ibv_alloc_mw(pd_, IBV_MW_TYPE_2);
    if (mw_ == nullptr) Stop(errno == EOPNOTSUPP ? kNotSupported : 1, "ibv_alloc_mw");
  }
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq_;
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = init.cap.max_recv_wr = 128;
  init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  qp_ = ibv_create_qp(pd_, &init);
  if (qp_ == nullptr) Stop(1, "ibv_create_qp");
  ibv_gid gid{};
  if (ibv_query_gid(context_, 1, options_.gid, &gid) != 0) Stop(1, "ibv_query_gid");
  own_.qpn = qp_->qp_num;
  own_.psn = options_.psn;
  own_.rkey = mr_->rkey;
  own_.address = reinterpret_cast<uint64_t>(buffer_);
  for (const uint8_t byte : gid.raw) {
    char text[3];
    std::snprintf(text, sizeof text, "%02x", byte);
    own_.gid += text;
  }
}

void Peer::MoveTo(ibv_qp_state state) {
  ibv_qp_attr attr{};
  attr.qp_state = state;
  int mask = IBV_QP_STATE;
  if (state == IBV_QPS_INIT) {
    attr.port_num = 1;
    attr.qp_access_flags = static_cast<unsigned>(
        AccessFlags(options_.qp_access.empty() ? options_.mr_access : options_.qp_access));
    mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  } else if (state == IBV_QPS_RTR) {
    attr.path_mtu = options_.mtu == 256    ? IBV_MTU_256
                    : options_.mtu == 512  ? IBV_MTU_512
                    : options_.mtu == 1024 ? IBV_MTU_1024
                    : options_.mtu == 2048 ? IBV_MTU_2048
                                           : IBV_MTU_4096;
    attr.dest_qp_num = peer_.qpn;
    attr.rq_psn = peer_.psn;
    attr.max_dest_rd_atomic = static_cast<uint8_t>(options_.rd_atomic);
    attr.min_rnr_timer = static_cast<uint8_t>(options_.min_rnr_timer);
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.sgid_index = static_cast<uint8_t>(options_.gid);
    attr.ah_attr.grh.hop_limit = 64;
    for (size_t i = 0; i < 16; ++i) {
      attr.ah_attr.grh.dgid.raw[i] =
          static_cast<uint8_t>(std::stoul(peer_.gid.substr(2 * i, 2), nullptr, 16));
    }
    mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
            IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  } else {
    attr.sq_psn = options_.psn;
    attr.timeout = static_cast<uint8_t>(options_.timeout);
    attr.retry_cnt = static_cast<uint8_t>(options_.retry);
    attr.rnr_retry = static_cast<uint8_t>(options_.rnr_retry);
    attr.max_rd_atomic = static_cast<uint8_t>(options_.rd_atomic);
    mask |= IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
            IBV_QP_MAX_QP_RD_ATOMIC;
  }
  if (const int error = ibv_modify_qp(qp_, &attr, mask); error != 0) {
    errno = error;
    Stop(1, "ibv_modify_qp to state %d", state);
  }
}

bool Peer::Poll(ibv_wc* wc, int limit_ms) {
  const auto end = Clock::now() + milliseconds(limit_ms);
  while (true) {
    const int got = ibv_poll_cq(cq_, 1, wc);
    if (got == 1) return true;
    if (got < 0) Stop(1, "ibv_poll_cq");
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void Peer::BindWindow() {
  ibv_send_wr wr{};
  ibv_send_wr* bad = nullptr;
  wr.opcode = IBV_WR_BIND_MW;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.bind_mw.mw = mw_;
  wr.bind_mw.rkey = own_.mw_rkey = ibv_inc_rkey(mw_->rkey);
  wr.bind_mw.bind_info = {.mr = mr_,
                          .addr = own_.address,
                          .length = buffer_bytes_,
                          .mw_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ};
  ibv_wc wc;
  if (ibv_post_send(qp_, &wr, &bad) != 0 || !Poll(&wc, 5000) || wc.status != IBV_WC_SUCCESS) {
    Stop(1, "the memory window cannot be bound");
  }
}

void Peer::PostReceives() {
  for (const Group& group : groups_) {
    for (const Op& op : group) {
      if (op.receive < 0) continue;
      ibv_sge sge{reinterpret_cast<uint64_t>(buffer_ + op.recv_offset), op.recv_bytes, mr_->lkey};
      ibv_recv_wr wr{};
      ibv_recv_wr* bad = nullptr;
      wr.wr_id = static_cast<uint64_t>(op.receive);
      wr.sg_list = &sge;
      wr.num_sge = 1;
      if (ibv_post_recv(qp_, &wr, &bad) != 0) Stop(1, "ibv_post_recv");
    }
  }
}

ibv_send_wr Peer::MakeWr(const Op& op, ibv_sge* sge, uint64_t id) {
  static const std::map<std::string, ibv_wr_opcode> kOpcodes = {
      {"send", IBV_WR_SEND},
      {"sendimm", IBV_WR_SEND_WITH_IMM},
      {"sendinv", IBV_WR_SEND_WITH_INV},
      {"write", IBV_WR_RDMA_WRITE},
      {"writeimm", IBV_WR_RDMA_WRITE_WITH_IMM},
      {"read", IBV_WR_RDMA_READ},
      {"cas", IBV_WR_ATOMIC_CMP_AND_SWP},
      {"faa", IBV_WR_ATOMIC_FETCH_AND_ADD}};
  *sge = {reinterpret_cast<uint64_t>(buffer_ + op.offset), op.bytes, mr_->lkey};
  ibv_send_wr wr{};
  wr.wr_id = id;
  wr.sg_list = sge;
  wr.num_sge = op.bytes != 0 ? 1 : 0;
  wr.opcode = kOpcodes.at(op.name);
  wr.send_flags = IBV_SEND_SIGNALED | (op.has("fence") ? unsigned{IBV_SEND_FENCE} : 0u);
  uint32_t rkey = op.has("mw") ? peer_.mw_rkey : peer_.rkey;
  if (op.has("badkey")) rkey ^= 0x5a;
  uint64_t address = peer_.address + (op.is_atomic() ? 0 : op.offset);
  if (op.has("oob")) address = peer_.address + buffer_bytes_ - 16;
  if (op.has("odd")) address += 4;
  if (op.name == "sendinv") {
    wr.invalidate_rkey = op.has("mr") ? peer_.rkey : peer_.mw_rkey;
  } else {
    wr.imm_data = htonl(kImm + static_cast<uint32_t>(op.receive));
  }
  if (op.is_atomic()) {
    wr.wr.atomic.remote_addr = address;
    wr.wr.atomic.rkey = rkey;
    wr.wr.atomic.compare_add = op.name == "faa" ? 0x0102030405060708u : target_;
    if (op.has("miss")) wr.wr.atomic.compare_add ^= 1;
    wr.wr.atomic.swap = 0x1122334455667788u + op.offset;
  } else {
    wr.wr.rdma.remote_addr = address;
    wr.wr.rdma.rkey = rkey;
  }
  return wr;
}

// Posts the group as one chain, checks completions and what came back.
void Peer::Require(const Group& group) {
  std::vector<ibv_send_wr> wrs(group.size());
  std::vector<ibv_sge> sges(group.size());
  std::vector<uint64_t> originals(group.size());
  for (size_t i = 0; i < group.size(); ++i) {
    wrs[i] = MakeWr(group[i], &sges[i], next_id_++);
    if (i > 0) wrs[i - 1].next = &wrs[i];
    originals[i] = target_;
    if (group[i].expected != IBV_WC_SUCCESS) continue;
    if (group[i].name == "cas" && !group[i].has("miss")) target_ = wrs[i].wr.atomic.swap;
    if (group[i].name == "faa") target_ += wrs[i].wr.atomic.compare_add;
  }
  ibv_send_wr* bad = nullptr;
  const auto start = Clock::now();
  if (ibv_post_send(qp_, wrs.data(), &bad) != 0) Stop(1, "ibv_post_send");
  std::ostringstream report;
  report << "group " << target_;
  for (size_t i = 0; i < group.size(); ++i) {
    const Op& op = group[i];
    ibv_wc wc;
    if (!Poll(&wc, options_.limit_ms)) {
      Wrong("%s: no completion", op.text.c_str());
      broken_ = true;
      break;
    }
    std::printf("%s: %s after %.1f ms\n", op.text.c_str(), StatusName(wc.status).c_str(),
                std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    if (wc.wr_id != wrs[i].wr_id) Wrong("%s: completion out of order", op.text.c_str());
    const ibv_wc_status expected = broken_ ? IBV_WC_WR_FLUSH_ERR : op.expected;
    if (wc.status != expected) {
      Wrong("%s: %s expected", op.text.c_str(), StatusName(expected).c_str());
    }
    if (wc.status != IBV_WC_SUCCESS) broken_ = true;
    report << ' ' << wc.status;
    if (wc.status != IBV_WC_SUCCESS) continue;
    if (op.is_atomic()) {
      uint64_t original = 0;
      std::memcpy(&original, buffer_ + op.offset, sizeof original);
      if (original != originals[i]) {
        Wrong("%s: original value %016lx, not %016lx", op.text.c_str(), original, originals[i]);
      }
    }
    if (op.name == "read") {
      for (size_t b = 0; b < op.bytes; ++b) {
        if (buffer_[op.offset + b] == Pattern(op, b, false)) continue;
        Wrong("%s: byte %zu is wrong", op.text.c_str(), b);
        break;
      }
    }
    if ((op.name == "read" || op.is_atomic()) && buffer_[op.offset + op.bytes] != kUntouched) {
      Wrong("%s: written behind its end", op.text.c_str());
    }
  }
  channel_->Write(report.str());
  const std::string answer = channel_->Read(options_.limit_ms);
  if (answer != "good") Wrong("the responder says: %s", answer.c_str());
}

void Peer::CheckReceive(const Op& op) {
  ibv_wc wc{};
  const auto id = static_cast<uint64_t>(op.receive);
  while (!receive_wcs_.contains(id)) {
    if (!Poll(&wc, 5000)) {
      Wrong("%s: no receive completion", op.text.c_str());
      return;
    }
    receive_wcs_[wc.wr_id] = wc;
  }
  wc = receive_wcs_[id];
  std::printf("%s: receive %s, %u bytes\n", op.text.c_str(), StatusName(wc.status).c_str(),
              wc.byte_len);
  if (wc.status != IBV_WC_SUCCESS) {
    Wrong("%s: the receive failed", op.text.c_str());
    return;
  }
  if (wc.byte_len != op.bytes) Wrong("%s: %u bytes received", op.text.c_str(), wc.byte_len);
  const bool has_imm = op.name == "sendimm" || op.name == "writeimm";
  if (((wc.wc_flags & IBV_WC_WITH_IMM) != 0) != has_imm) Wrong("%s: imm flag", op.text.c_str());
  if (has_imm && ntohl(wc.imm_data) != kImm + static_cast<uint32_t>(op.receive)) {
    Wrong("%s: immediate %x", op.text.c_str(), ntohl(wc.imm_data));
  }
  // rxe passes the kernel's bit on (1 << 2), which is another one than that of verbs.
  constexpr unsigned kKernelWithInvalidate = 1 << 2;
  const unsigned inv =
      IBV_WC_WITH_INV | (options_.device.starts_with("rxe") ? kKernelWithInvalidate : 0u);
  if (op.name == "sendinv" && ((wc.wc_flags & inv) == 0 || wc.invalidated_rkey != own_.mw_rkey)) {
    Wrong("%s: flags %x, invalidated key %x, not %x", op.text.c_str(), wc.wc_flags,
          wc.invalidated_rkey, own_.mw_rkey);
  }
}

// The requester has its completions: the memory here must show it.
void Peer::Respond(const Group& group) {
  std::istringstream report(channel_->Read(options_.limit_ms + 10000));
  std::string word_text;
  uint64_t target = 0;
  report >> word_text >> target;
  const int wrong_before = wrong_;
  for (const Op& op : group) {
    int status = -1;
    if (!(report >> status) || status != IBV_WC_SUCCESS) {
      broken_ = true;
      // One whose retries ran out may have come in part.
      const bool refused = op.name == "write" && status == op.expected;
      for (size_t i = 0; refused && i < op.bytes; ++i) {
        if (buffer_[op.offset + i] == kUntouched) continue;
        Wrong("%s: refused, but byte %zu was written", op.text.c_str(), i);
        break;
      }
      continue;
    }
    if (op.takes_receive()) CheckReceive(op);
    const bool written = op.is_send() || op.name == "write" || op.name == "writeimm";
    const uint8_t* data = buffer_ + (op.is_send() ? op.recv_offset : op.offset);
    for (size_t i = 0; written && i < op.bytes; ++i) {
      if (data[i] == Pattern(op, i, true)) continue;
      Wrong("%s: byte %zu is wrong", op.text.c_str(), i);
      break;
    }
    if (written && data[op.bytes] != kUntouched) Wrong("%s: written behind", op.text.c_str());
  }
  if (*word() != target) Wrong("the atomics' target is %016lx, not %016lx", *word(), target);
  channel_->Write(wrong_ == wrong_before ? "good" : "bad data or completion");
}

int Peer::Run() {
  Open();
  MoveTo(IBV_QPS_INIT);
  channel_ = std::make_unique<Channel>(options_);
  channel_->Write(own_.Text());
  peer_ = PeerInfo::Parse(channel_->Read(30000));
  MoveTo(IBV_QPS_RTR);
  MoveTo(IBV_QPS_RTS);
  if (mw_ != nullptr) BindWindow();
  if (!options_.requester && options_.recv_delay_ms == 0) PostReceives();
  channel_->Write(std::to_string(own_.mw_rkey));
  peer_.mw_rkey = static_cast<uint32_t>(std::stoul(channel_->Read(30000)));
  if (!options_.requester && options_.recv_delay_ms != 0) {
    std::this_thread::sleep_for(milliseconds(options_.recv_delay_ms));
    PostReceives();
  }
  for (const Group& group : groups_) {
    if (broken_) break;
    options_.requester ? Require(group) : Respond(group);
  }
  // After an error the responder's receives tell why.
  ibv_wc wc;
  while (!options_.requester && broken_ && Poll(&wc, 300)) {
    std::printf("receive %lu: %s\n", wc.wr_id, StatusName(wc.status).c_str());
  }
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  if (ibv_query_qp(qp_, &attr, IBV_QP_STATE, &init) == 0) {
    std::printf("QP state %d\n", attr.qp_state);
  }
  std::printf("%s\n", wrong_ == 0 ? "all as expected" : "not as expected");
  std::fflush(stdout);
  return wrong_ == 0 ? 0 : 1;
}

Options ParseOptions(int argc, char** argv) {
  Options o;
  const option long_options[] = {{"requester", no_argument, nullptr, 'q'},
                                 {"responder", no_argument, nullptr, 's'},
                                 {"device", required_argument, nullptr, 'd'},
                                 {"connect", required_argument, nullptr, 'c'},
                                 {"ops", required_argument, nullptr, 'o'},
                                 {"mr-access", required_argument, nullptr, 'A'},
                                 {"qp-access", required_argument, nullptr, 'Q'},
                                 {"port", required_argument, nullptr, 'p'},
                                 {"gid", required_argument, nullptr, 'g'},
                                 {"mtu", required_argument, nullptr, 'm'},
                                 {"timeout", required_argument, nullptr, 'T'},
                                 {"retry", required_argument, nullptr, 'R'},
                                 {"rnr-retry", required_argument, nullptr, 'N'},
                                 {"min-rnr-timer", required_argument, nullptr, 'M'},
                                 {"rd-atomic", required_argument, nullptr, 'G'},
                                 {"recv-delay", required_argument, nullptr, 'D'},
                                 {"recv-bytes", required_argument, nullptr, 'L'},
                                 {"limit", required_argument, nullptr, 'W'},
                                 {"psn", required_argument, nullptr, 'P'},
                                 {nullptr, 0, nullptr, 0}};
  int letter;
  while ((letter = getopt_long(argc, argv, "", long_options, nullptr)) != -1) {
    const auto number = [] { return static_cast<int>(std::strtol(optarg, nullptr, 0)); };
    switch (letter) {
      case 'q':
        o.requester = true;
        break;
      case 's':
        o.requester = false;
        break;
      case 'd':
        o.device = optarg;
        break;
      case 'c':
        o.connect = optarg;
        break;
      case 'o':
        o.ops = optarg;
        break;
      case 'A':
        o.mr_access = optarg;
        break;
      case 'Q':
        o.qp_access = optarg;
        break;
      case 'p':
        o.port = number();
        break;
      case 'g':
        o.gid = number();
        break;
      case 'm':
        o.mtu = number();
        break;
      case 'T':
        o.timeout = number();
        break;
      case 'R':
        o.retry = number();
        break;
      case 'N':
        o.rnr_retry = number();
        break;
      case 'M':
        o.min_rnr_timer = number();
        break;
      case 'G':
        o.rd_atomic = number();
        break;
      case 'D':
        o.recv_delay_ms = number();
        break;
      case 'L':
        o.recv_bytes = static_cast<uint32_t>(number());
        break;
      case 'W':
        o.limit_ms = number();
        break;
      case 'P':
        o.psn = static_cast<uint32_t>(number());
        break;
      default:
        std::_Exit(2);
    }
  }
  return o;
}

}  // namespace

int main(int argc, char** argv) { return Peer(ParseOptions(argc, argv)).Run(); }
