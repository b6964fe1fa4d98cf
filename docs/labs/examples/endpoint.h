// SPDX-License-Identifier: Apache-2.0
//
// What the examples share: a device, memory, a completion queue, a connected RC queue pair, and a
// TCP connection over which both ends tell each other where they are. send_recv.cc does the same
// without this file, call by call; read that first.
//
// Errors are exceptions with a sentence; what was opened is closed by destructors.
#pragma once

#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace lab {

// An error of a call that has set errno.
inline std::runtime_error Failed(const std::string& what, int error = errno) {
  return std::runtime_error(what + ": " + std::strerror(error));
}

struct Options {
  std::string device = "verbena0";
  std::string server;          // empty: this end is the server
  std::string port = "18515";  // TCP
  uint32_t size = 64;          // bytes of a message
  uint32_t count = 4;          // messages; 0: without end
  uint32_t pause_ms = 0;       // between two messages
  uint32_t clients = 1;        // that the server of atomic_lock waits for
  uint8_t timeout = 17;        // 4.096 us * 2^17 = 0.54 s until a request is sent again

  bool is_server() const { return server.empty(); }
  bool more(uint32_t done) const { return count == 0 || done < count; }
  void Pause() const { std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms)); }
};

inline Options Parse(int argc, char** argv) {
  Options options;
  const auto number = [](const char* text, unsigned long most) {
    char* end = nullptr;
    const unsigned long value = std::strtoul(text, &end, 10);
    if (*text == '\0' || *end != '\0' || value > most) {
      throw std::runtime_error(std::string("not a number up to ") + std::to_string(most) + ": " +
                               text);
    }
    return static_cast<uint32_t>(value);
  };
  int option;
  while ((option = getopt(argc, argv, "d:p:s:n:i:c:t:")) != -1) {
    switch (option) {
      case 'd':
        options.device = optarg;
        break;
      case 'p':
        options.port = std::to_string(number(optarg, 65535));
        break;
      case 's':
        options.size = number(optarg, 1 << 20);
        break;
      case 'n':
        options.count = number(optarg, 1u << 31);
        break;
      case 'i':
        options.pause_ms = number(optarg, 3600'000);
        break;
      case 'c':
        options.clients = number(optarg, 64);
        break;
      case 't':
        options.timeout = static_cast<uint8_t>(number(optarg, 31));
        break;
      default:
        throw std::runtime_error(std::string("usage: ") + argv[0] +
                                 " [-d DEVICE] [-p PORT] [-s SIZE] [-n COUNT] [-i PAUSE_MS]"
                                 " [-c CLIENTS] [-t TIMEOUT] [SERVER]");
    }
  }
  if (optind < argc) options.server = argv[optind];
  options.size = std::max(options.size, 1u);
  return options;
}

// --- The other channel: TCP ---

class Tcp {
 public:
  explicit Tcp(int fd = -1) : fd_(fd) {}
  ~Tcp() {
    if (fd_ >= 0) close(fd_);
  }
  Tcp(Tcp&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Tcp(const Tcp&) = delete;
  Tcp& operator=(const Tcp&) = delete;

  static Tcp Listen(const Options& options) { return Open(options, nullptr); }
  static Tcp Connect(const Options& options) { return Open(options, options.server.c_str()); }
  Tcp Accept() const {
    Tcp peer(accept(fd_, nullptr, nullptr));
    if (peer.fd_ < 0) throw Failed("accept");
    return peer;
  }

  void Send(const void* data, size_t bytes) const {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t sent = send(fd_, from, bytes, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) throw Failed("the other end has gone");
      from += sent;
      bytes -= static_cast<size_t>(sent);
    }
  }
  void Receive(void* data, size_t bytes) const {
    char* to = static_cast<char*>(data);
    while (bytes > 0) {
      const ssize_t got = recv(fd_, to, bytes, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw Failed("recv");
      if (got == 0) throw std::runtime_error("the other end has gone");
      to += got;
      bytes -= static_cast<size_t>(got);
    }
  }
  // Both ends have come here.
  void Meet() const {
    char word = 'm';
    Send(&word, 1);
    Receive(&word, 1);
  }
  void SetNoDelay() const {
    const int yes = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
  }
  // Has the other end said something, or closed its side? (Does not wait.)
  bool readable() const {
    pollfd ready = {fd_, POLLIN, 0};
    return poll(&ready, 1, 0) > 0;
  }
  // Has the other end closed its side? (Does not wait.)
  bool closed() const {
    char byte;
    return recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
  }

 private:
  // `host`: to connect to; null: to listen.
  static Tcp Open(const Options& options, const char* host) {
    addrinfo hints = {};
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = host == nullptr ? AI_PASSIVE : 0;
    addrinfo* found = nullptr;
    if (const int error = getaddrinfo(host, options.port.c_str(), &hints, &found); error != 0) {
      throw std::runtime_error(std::string(host ? host : "") + ": " + gai_strerror(error));
    }
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> address(found, freeaddrinfo);
    // The server may start a moment later than the client.
    for (int attempt = 0;; ++attempt) {
      Tcp tcp(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (tcp.fd_ < 0) throw Failed("socket");
      if (host != nullptr) {
        if (connect(tcp.fd_, found->ai_addr, found->ai_addrlen) == 0) return tcp;
        if (errno != ECONNREFUSED || attempt == 50) throw Failed(std::string("connect to ") + host);
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        continue;
      }
      const int yes = 1;
      setsockopt(tcp.fd_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
      if (bind(tcp.fd_, found->ai_addr, found->ai_addrlen) != 0 || listen(tcp.fd_, 16) != 0) {
        throw Failed("TCP port " + options.port);
      }
      return tcp;
    }
  }

  int fd_;
};

// --- The device ---

class Device {
 public:
  explicit Device(const std::string& name) {
    int count = 0;
    ibv_device** all = ibv_get_device_list(&count);
    if (all == nullptr) throw Failed("ibv_get_device_list");
    for (int i = 0; i < count && context_ == nullptr; ++i) {
      if (name == ibv_get_device_name(all[i])) context_ = ibv_open_device(all[i]);
    }
    ibv_free_device_list(all);
    if (context_ == nullptr) throw std::runtime_error("cannot open a device named " + name);
    pd_ = ibv_alloc_pd(context_);
    if (pd_ == nullptr) {
      const int error = errno;
      ibv_close_device(context_);
      throw Failed("ibv_alloc_pd", error);
    }
    // RoCEv2 over IPv4: a GID that is an IPv4 address, ::ffff:a.b.c.d.
    for (int i = 0; i < 16; ++i) {
      ibv_gid gid;
      if (ibv_query_gid(context_, 1, i, &gid) != 0) break;
      const unsigned char mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
      if (std::memcmp(gid.raw, mapped, sizeof(mapped)) == 0) {
        gid_ = gid;
        gid_index_ = static_cast<uint8_t>(i);
      }
    }
  }
  ~Device() {
    ibv_dealloc_pd(pd_);
    ibv_close_device(context_);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  ibv_context* context() const { return context_; }
  ibv_pd* pd() const { return pd_; }
  const ibv_gid& gid() const { return gid_; }
  uint8_t gid_index() const { return gid_index_; }

 private:
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_gid gid_ = {};
  uint8_t gid_index_ = 0;
};

// Memory that the NIC may use. `rights`: what others may do with it.
class Memory {
 public:
  Memory(const Device& device, size_t bytes, int rights) : bytes_(bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    data_ = static_cast<char*>(std::aligned_alloc(page, (bytes + page - 1) / page * page));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_, 0, bytes);
    region_ = ibv_reg_mr(device.pd(), data_, bytes, rights);
    if (region_ == nullptr) {
      const int error = errno;
      std::free(data_);
      throw Failed("ibv_reg_mr", error);
    }
  }
  ~Memory() {
    ibv_dereg_mr(region_);
    std::free(data_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  size_t size() const { return bytes_; }
  uint32_t lkey() const { return region_->lkey; }
  uint32_t rkey() const { return region_->rkey; }
  uint64_t address() const { return reinterpret_cast<uintptr_t>(data_); }
  // A piece of it, for a work request.
  ibv_sge Piece(size_t offset, size_t bytes) const {
    return {.addr = address() + offset, .length = static_cast<uint32_t>(bytes), .lkey = lkey()};
  }

 private:
  char* data_;
  size_t bytes_;
  ibv_mr* region_;
};

// A completion queue, with a channel for those who want to sleep.
class Completions {
 public:
  explicit Completions(const Device& device, int entries = 64) {
    channel_ = ibv_create_comp_channel(device.context());
    if (channel_ == nullptr) throw Failed("ibv_create_comp_channel");
    cq_ = ibv_create_cq(device.context(), entries, nullptr, channel_, 0);
    if (cq_ == nullptr) {
      const int error = errno;
      ibv_destroy_comp_channel(channel_);
      throw Failed("ibv_create_cq", error);
    }
  }
  ~Completions() {
    if (events_ > 0) ibv_ack_cq_events(cq_, events_);
    ibv_destroy_cq(cq_);
    ibv_destroy_comp_channel(channel_);
  }
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  ibv_cq* cq() const { return cq_; }

  // One completion, if there is one.
  bool Poll(ibv_wc* wc) const {
    const int got = ibv_poll_cq(cq_, 1, wc);
    if (got < 0) throw std::runtime_error("ibv_poll_cq failed");
    if (got > 0 && wc->status != IBV_WC_SUCCESS) {
      throw std::runtime_error(std::string("a work request failed: ") +
                               ibv_wc_status_str(wc->status));
    }
    return got > 0;
  }

  // Looks until there is one. Fast programs only look; this one also lets others have the CPU,
  // and notices that the other end has gone.
  ibv_wc Wait(const Tcp& peer) const {
    ibv_wc wc;
    for (unsigned looks = 0; !Poll(&wc); ++looks) {
      if (looks < 1000) continue;
      if (looks % 64 == 0 && peer.closed() && !Poll(&wc)) {
        throw std::runtime_error("the other end has gone");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return wc;
  }

  // Sleeps until there is one: ask for an event, look once more, sleep.
  ibv_wc WaitForEvent(const Tcp& peer) {
    ibv_wc wc;
    while (true) {
      if (Poll(&wc)) return wc;
      if (const int error = ibv_req_notify_cq(cq_, 0); error != 0) {
        throw Failed("ibv_req_notify_cq", error);
      }
      if (Poll(&wc)) return wc;  // it came before we had asked
      pollfd ready = {channel_->fd, POLLIN, 0};
      const int events = poll(&ready, 1, 500);
      if (events < 0 && errno != EINTR) throw Failed("poll");
      if (events <= 0) {
        if (peer.closed()) throw std::runtime_error("the other end has gone");
        continue;
      }
      ibv_cq* which;
      void* its_context;
      if (ibv_get_cq_event(channel_, &which, &its_context) != 0) throw Failed("ibv_get_cq_event");
      ++events_;
    }
  }

 private:
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;
  unsigned events_ = 0;  // each is acknowledged before the CQ ends
};

// What one end tells the other: who it is, and which memory of it may be used.
struct Address {
  uint32_t qpn, psn, rkey;
  uint32_t unused;
  uint64_t memory;
  ibv_gid gid;
};

class Connection {
 public:
  // `shared`: memory whose key the other end gets.
  Connection(const Device& device, const Completions& completions, Tcp tcp, const Options& options,
             const Memory& shared, int remote_rights)
      : tcp_(std::move(tcp)) {
    ibv_qp_init_attr init = {};
    init.send_cq = completions.cq();
    init.recv_cq = completions.cq();
    init.cap.max_send_wr = 16;
    init.cap.max_recv_wr = 16;
    init.cap.max_send_sge = 1;
    init.cap.max_recv_sge = 1;
    init.qp_type = IBV_QPT_RC;
    qp_ = ibv_create_qp(device.pd(), &init);
    if (qp_ == nullptr) throw Failed("ibv_create_qp");
    try {
      ToInit(remote_rights);
      Address mine = {};
      mine.qpn = qp_->qp_num;
      mine.psn = options.is_server() ? 500 : 100;  // easy to see; others take a random one
      mine.rkey = shared.rkey();
      mine.memory = shared.address();
      mine.gid = device.gid();
      tcp_.Send(&mine, sizeof(mine));
      tcp_.Receive(&peer_, sizeof(peer_));
      ToReadyToReceive(device);
      ToReadyToSend(mine.psn, options.timeout);
    } catch (...) {
      ibv_destroy_qp(qp_);
      throw;
    }
  }
  ~Connection() { ibv_destroy_qp(qp_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  const Tcp& tcp() const { return tcp_; }
  // The other end's memory.
  uint64_t remote_address() const { return peer_.memory; }
  uint32_t remote_key() const { return peer_.rkey; }

  void PostReceive(uint64_t id, ibv_sge piece) const {
    ibv_recv_wr wr = {};
    wr.wr_id = id;
    wr.sg_list = &piece;
    wr.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    if (const int error = ibv_post_recv(qp_, &wr, &bad); error != 0) {
      throw Failed("ibv_post_recv", error);
    }
  }
  // SEND, or RDMA_WRITE and RDMA_READ at `offset` of the other end's memory.
  void Post(ibv_wr_opcode opcode, uint64_t id, ibv_sge piece, uint64_t offset = 0) const {
    ibv_send_wr wr = {};
    wr.wr_id = id;
    wr.sg_list = &piece;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.rdma.remote_addr = peer_.memory + offset;
    wr.wr.rdma.rkey = peer_.rkey;
    PostSend(&wr);
  }
  // COMPARE_SWAP (swap if the word is `compare`) or FETCH_ADD of a word of the other end's memory;
  // `piece` gets what it was.
  void PostAtomic(ibv_wr_opcode opcode, uint64_t id, ibv_sge piece, uint64_t offset,
                  uint64_t compare_or_add, uint64_t swap = 0) const {
    ibv_send_wr wr = {};
    wr.wr_id = id;
    wr.sg_list = &piece;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.atomic.remote_addr = peer_.memory + offset;
    wr.wr.atomic.rkey = peer_.rkey;
    wr.wr.atomic.compare_add = compare_or_add;
    wr.wr.atomic.swap = swap;
    PostSend(&wr);
  }

 private:
  void PostSend(ibv_send_wr* wr) const {
    ibv_send_wr* bad = nullptr;
    if (const int error = ibv_post_send(qp_, wr, &bad); error != 0) {
      throw Failed("ibv_post_send", error);
    }
  }
  void Modify(ibv_qp_attr* attr, int mask, const char* what) const {
    if (const int error = ibv_modify_qp(qp_, attr, mask); error != 0) throw Failed(what, error);
  }
  void ToInit(int remote_rights) const {
    ibv_qp_attr attr = {};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qp_access_flags = static_cast<unsigned>(remote_rights);
    Modify(&attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
           "RESET to INIT");
  }
  void ToReadyToReceive(const Device& device) const {
    ibv_qp_attr attr = {};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = peer_.qpn;
    attr.rq_psn = peer_.psn;
    attr.max_dest_rd_atomic = 4;  // READs and atomics of the other end at a time
    attr.min_rnr_timer = 12;      // "no receive posted": ask again after 0.64 ms
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.dgid = peer_.gid;
    attr.ah_attr.grh.sgid_index = device.gid_index();
    attr.ah_attr.grh.hop_limit = 64;
    attr.ah_attr.port_num = 1;
    Modify(&attr,
           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
           "INIT to RTR");
  }
  void ToReadyToSend(uint32_t psn, uint8_t timeout) const {
    ibv_qp_attr attr = {};
    attr.qp_state = IBV_QPS_RTS;
    attr.sq_psn = psn;
    attr.timeout = timeout;
    attr.retry_cnt = 7;
    attr.rnr_retry = 7;  // for ever
    attr.max_rd_atomic = 4;
    Modify(&attr,
           IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
               IBV_QP_MAX_QP_RD_ATOMIC,
           "RTR to RTS");
  }

  Tcp tcp_;
  ibv_qp* qp_ = nullptr;
  Address peer_ = {};
};

// What every main() does with errors.
template <typename Run>
int Main(int argc, char** argv, Run run) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    run(Parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 1;
  }
}

}  // namespace lab
