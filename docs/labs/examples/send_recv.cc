// SPDX-License-Identifier: Apache-2.0
//
// send_recv: the whole sequence of verbs calls, from opening a device to closing it, in the order
// in which they happen. The client sends messages, the server receives them.
//
//   g++ -std=c++20 send_recv.cc -libverbs -o send_recv
//   send_recv -d verbena0                     the server
//   send_recv -d verbena1 127.88.0.1          the client
//
// Options: -s bytes of a message, -n messages (0: without end), -i milliseconds between two,
// -p TCP port, -t timeout of the QP.
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr uint32_t kReceives = 8;  // posted at a time

struct Options {
  const char* device = "verbena0";
  const char* server = nullptr;  // null: this end is the server
  const char* port = "18515";
  uint32_t size = 64, count = 4, pause_ms = 0;
  uint8_t timeout = 17;
};

// What one end tells the other, over TCP.
struct Address {
  uint32_t qpn, psn;
  ibv_gid gid;
};

[[noreturn]] void Fail(const char* what, int error = 0) {
  std::fprintf(stderr, "send_recv: %s%s%s\n", what, error != 0 ? ": " : "",
               error != 0 ? std::strerror(error) : "");
  std::exit(1);  // the kernel, here the NIC, frees what a process leaves
}

uint32_t Number(const char* text, unsigned long most) {
  char* end = nullptr;
  const unsigned long value = std::strtoul(text, &end, 10);
  if (*text == '\0' || *end != '\0' || value > most) Fail("an option's number is wrong");
  return static_cast<uint32_t>(value);
}

Options Parse(int argc, char** argv) {
  Options options;
  int option;
  while ((option = getopt(argc, argv, "d:p:s:n:i:t:")) != -1) {
    switch (option) {
      case 'd':
        options.device = optarg;
        break;
      case 'p':
        options.port = optarg;
        break;
      case 's':
        options.size = Number(optarg, 1 << 20);
        break;
      case 'n':
        options.count = Number(optarg, 1u << 31);
        break;
      case 'i':
        options.pause_ms = Number(optarg, 3600'000);
        break;
      case 't':
        options.timeout = static_cast<uint8_t>(Number(optarg, 31));
        break;
      default:
        Fail("usage: [-d DEVICE] [-p PORT] [-s SIZE] [-n COUNT] [-i MS] [-t TIMEOUT] [SERVER]");
    }
  }
  if (optind < argc) options.server = argv[optind];
  if (options.size == 0) options.size = 1;
  return options;
}

// --- TCP: a way to tell each other the addresses ---

int OpenTcp(const Options& options) {
  addrinfo hints = {};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = options.server == nullptr ? AI_PASSIVE : 0;
  addrinfo* address = nullptr;
  if (getaddrinfo(options.server, options.port, &hints, &address) != 0) Fail("no such address");
  for (int attempt = 0; attempt < 50; ++attempt) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0) Fail("socket", errno);
    if (options.server != nullptr) {
      if (connect(fd, address->ai_addr, address->ai_addrlen) == 0) {
        freeaddrinfo(address);
        return fd;
      }
      if (errno != ECONNREFUSED) Fail("connect", errno);
      close(fd);
      usleep(100'000);  // the server may start a moment later
      continue;
    }
    const int yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    if (bind(fd, address->ai_addr, address->ai_addrlen) != 0 || listen(fd, 1) != 0) {
      Fail("TCP port", errno);
    }
    freeaddrinfo(address);
    const int client = accept(fd, nullptr, nullptr);
    if (client < 0) Fail("accept", errno);
    close(fd);
    return client;
  }
  Fail("nobody listens there");
}

void Tell(int tcp, const void* data, size_t bytes) {
  if (send(tcp, data, bytes, MSG_NOSIGNAL) != static_cast<ssize_t>(bytes)) {
    Fail("the other end has gone", errno);
  }
}

void Hear(int tcp, void* data, size_t bytes) {
  if (recv(tcp, data, bytes, MSG_WAITALL) != static_cast<ssize_t>(bytes)) {
    Fail("the other end has gone");
  }
}

// Both ends have come here.
void Meet(int tcp) {
  char word = 'm';
  Tell(tcp, &word, 1);
  Hear(tcp, &word, 1);
}

// Looks until a work request is done. Fast programs do not sleep between two looks.
ibv_wc WaitForCompletion(ibv_cq* cq, int tcp) {
  for (unsigned looks = 0;; ++looks) {
    ibv_wc wc;
    const int got = ibv_poll_cq(cq, 1, &wc);
    if (got < 0) Fail("ibv_poll_cq failed");
    if (got == 1 && wc.status != IBV_WC_SUCCESS) Fail(ibv_wc_status_str(wc.status));
    if (got == 1) return wc;
    char byte;
    if (looks > 1000) {
      if (recv(tcp, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) Fail("the other end has gone");
      usleep(200);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const Options options = Parse(argc, argv);
  const bool is_server = options.server == nullptr;

  // 1. The device.
  int devices = 0;
  ibv_device** list = ibv_get_device_list(&devices);
  if (list == nullptr) Fail("ibv_get_device_list", errno);
  ibv_context* context = nullptr;
  for (int i = 0; i < devices; ++i) {
    if (std::strcmp(ibv_get_device_name(list[i]), options.device) == 0) {
      context = ibv_open_device(list[i]);
    }
  }
  ibv_free_device_list(list);
  if (context == nullptr) Fail("cannot open the device");

  // 2. A protection domain: what belongs together.
  ibv_pd* pd = ibv_alloc_pd(context);
  if (pd == nullptr) Fail("ibv_alloc_pd", errno);

  // 3. Memory that the NIC may use: a slot for each receive.
  const size_t bytes = size_t{options.size} * kReceives;
  char* buffer = static_cast<char*>(std::calloc(1, bytes));
  if (buffer == nullptr) Fail("no memory");
  ibv_mr* region = ibv_reg_mr(pd, buffer, bytes, IBV_ACCESS_LOCAL_WRITE);
  if (region == nullptr) Fail("ibv_reg_mr", errno);

  // 4. A completion queue: here the NIC reports what is done.
  ibv_cq* cq = ibv_create_cq(context, 2 * kReceives, nullptr, nullptr, 0);
  if (cq == nullptr) Fail("ibv_create_cq", errno);

  // 5. A queue pair: a send queue and a receive queue. It begins in RESET.
  ibv_qp_init_attr init = {};
  init.send_cq = cq;
  init.recv_cq = cq;
  init.cap.max_send_wr = kReceives;
  init.cap.max_recv_wr = kReceives;
  init.cap.max_send_sge = 1;
  init.cap.max_recv_sge = 1;
  init.qp_type = IBV_QPT_RC;
  ibv_qp* qp = ibv_create_qp(pd, &init);
  if (qp == nullptr) Fail("ibv_create_qp", errno);

  // 6. RESET to INIT: now receives may be posted.
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_INIT;
  attr.pkey_index = 0;
  attr.port_num = 1;
  attr.qp_access_flags = 0;
  int error = ibv_modify_qp(qp, &attr,
                            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (error != 0) Fail("RESET to INIT", error);

  const auto post_receive = [&](uint32_t slot) {
    ibv_sge piece = {};
    piece.addr = reinterpret_cast<uintptr_t>(buffer + size_t{slot} * options.size);
    piece.length = options.size;
    piece.lkey = region->lkey;
    ibv_recv_wr wr = {};
    wr.wr_id = slot;
    wr.sg_list = &piece;
    wr.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    if (const int failed = ibv_post_recv(qp, &wr, &bad); failed != 0) Fail("ibv_post_recv", failed);
  };
  // Receives come first: a message that finds none is answered with RNR NAK.
  if (is_server) {
    for (uint32_t slot = 0; slot < kReceives; ++slot) post_receive(slot);
  }

  // 7. Who are you? A GID that is an IPv4 address (::ffff:a.b.c.d) means RoCEv2 over IPv4.
  Address mine = {}, peer = {};
  int gid_index = -1;
  for (int i = 0; i < 16; ++i) {
    ibv_gid gid;
    if (ibv_query_gid(context, 1, i, &gid) != 0) break;
    const unsigned char mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    if (std::memcmp(gid.raw, mapped, sizeof(mapped)) == 0) {
      gid_index = i;
      mine.gid = gid;
    }
  }
  if (gid_index < 0) Fail("no GID with an IPv4 address");
  mine.qpn = qp->qp_num;
  mine.psn = is_server ? 500 : 100;  // easy to see; others take a random one
  const int tcp = OpenTcp(options);
  Tell(tcp, &mine, sizeof(mine));
  Hear(tcp, &peer, sizeof(peer));

  // 8. INIT to RTR, ready to receive: the QP knows its peer.
  attr = {};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = IBV_MTU_1024;
  attr.dest_qp_num = peer.qpn;
  attr.rq_psn = peer.psn;
  attr.max_dest_rd_atomic = 1;
  attr.min_rnr_timer = 12;  // 0.64 ms
  attr.ah_attr.is_global = 1;
  attr.ah_attr.grh.dgid = peer.gid;
  attr.ah_attr.grh.sgid_index = static_cast<uint8_t>(gid_index);
  attr.ah_attr.grh.hop_limit = 64;
  attr.ah_attr.port_num = 1;
  error = ibv_modify_qp(qp, &attr,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (error != 0) Fail("INIT to RTR", error);

  // 9. RTR to RTS, ready to send: how long to wait for an ACK, and how often to try again.
  attr = {};
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = mine.psn;
  attr.timeout = options.timeout;  // 4.096 us * 2^timeout
  attr.retry_cnt = 7;
  attr.rnr_retry = 7;  // for ever
  attr.max_rd_atomic = 1;
  error = ibv_modify_qp(qp, &attr,
                        IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                            IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
  if (error != 0) Fail("RTR to RTS", error);
  Meet(tcp);

  // 10. The transfer.
  uint32_t done = 0;
  for (; options.count == 0 || done < options.count; ++done) {
    if (is_server) {
      const ibv_wc wc = WaitForCompletion(cq, tcp);
      const char* message = buffer + wc.wr_id * options.size;
      if (done < 10) std::printf("received %u bytes: \"%.60s\"\n", wc.byte_len, message);
      post_receive(static_cast<uint32_t>(wc.wr_id));
      continue;
    }
    std::snprintf(buffer, options.size, "message %u of the client", done);
    ibv_sge piece = {};
    piece.addr = reinterpret_cast<uintptr_t>(buffer);
    piece.length = options.size;
    piece.lkey = region->lkey;
    ibv_send_wr wr = {};
    wr.wr_id = done;
    wr.sg_list = &piece;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    if (const int failed = ibv_post_send(qp, &wr, &bad); failed != 0) Fail("ibv_post_send", failed);
    WaitForCompletion(cq, tcp);  // now, not before, the buffer may change
    usleep(options.pause_ms * 1000);
  }
  std::printf("%u messages of %u bytes %s\n", done, options.size, is_server ? "received" : "sent");

  // 11. Not before the other end has all it waits for; then in the opposite order.
  Meet(tcp);
  close(tcp);
  if ((error = ibv_destroy_qp(qp)) != 0) Fail("ibv_destroy_qp", error);
  if ((error = ibv_destroy_cq(cq)) != 0) Fail("ibv_destroy_cq", error);
  if ((error = ibv_dereg_mr(region)) != 0) Fail("ibv_dereg_mr", error);
  std::free(buffer);
  if ((error = ibv_dealloc_pd(pd)) != 0) Fail("ibv_dealloc_pd", error);
  if (ibv_close_device(context) != 0) Fail("ibv_close_device");
  return 0;
}
