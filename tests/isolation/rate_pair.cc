// SPDX-License-Identifier: Apache-2.0
//
// A pair of processes that exchange messages over verbena0 and verbena1 through libibverbs, and
// count them in a shared file.
//
//   rate_pair stream|ping COUNTER_FILE
//
// stream: RDMA WRITEs of 64 KiB, 16 outstanding. ping: SENDs of 64 bytes to and fro. The file's
// first 8 bytes are the number of messages so far. Prints "ready" when it runs; ends when it is
// killed, its other half with it. Any error ends it with status 1.
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr uint32_t kStreamBytes = 65536;
constexpr uint32_t kPingBytes = 64;
constexpr int kWindow = 16;
constexpr size_t kBuffer = size_t{1} << 20;

void Must(bool good, const char* what) {
  if (good) return;
  std::perror(what);
  std::exit(1);
}

struct End {
  ibv_cq* cq = nullptr;
  ibv_qp* qp = nullptr;
  ibv_mr* mr = nullptr;
  char* memory = nullptr;
};

struct Address {
  uint32_t qpn;
  uint32_t rkey;
  uint64_t memory;
  ibv_gid gid;
};

End Open(const char* device, Address* mine) {
  End end;
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  ibv_context* context = nullptr;
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(ibv_get_device_name(list[i]), device) == 0) context = ibv_open_device(list[i]);
  }
  Must(context != nullptr, "ibv_open_device");
  ibv_pd* pd = ibv_alloc_pd(context);
  Must(pd != nullptr, "ibv_alloc_pd");
  end.memory = static_cast<char*>(
      mmap(nullptr, kBuffer, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  end.mr = ibv_reg_mr(pd, end.memory, kBuffer, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  Must(end.mr != nullptr, "ibv_reg_mr");
  end.cq = ibv_create_cq(context, 256, nullptr, nullptr, 0);
  Must(end.cq != nullptr, "ibv_create_cq");
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = end.cq;
  init.cap = {.max_send_wr = 64,
              .max_recv_wr = 64,
              .max_send_sge = 1,
              .max_recv_sge = 1,
              .max_inline_data = 0};
  init.qp_type = IBV_QPT_RC;
  init.sq_sig_all = 1;
  end.qp = ibv_create_qp(pd, &init);
  Must(end.qp != nullptr, "ibv_create_qp");
  mine->qpn = end.qp->qp_num;
  mine->rkey = end.mr->rkey;
  mine->memory = reinterpret_cast<uintptr_t>(end.memory);
  Must(ibv_query_gid(context, 1, 1, &mine->gid) == 0, "ibv_query_gid");
  return end;
}

void Connect(const End& end, const Address& peer) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = 1;
  attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  Must(ibv_modify_qp(end.qp, &attr,
                     IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0,
       "INIT");
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = IBV_MTU_4096;
  attr.dest_qp_num = peer.qpn;
  attr.min_rnr_timer = 1;
  attr.ah_attr.is_global = 1;
  attr.ah_attr.port_num = 1;
  attr.ah_attr.grh.dgid = peer.gid;
  attr.ah_attr.grh.sgid_index = 1;
  attr.ah_attr.grh.hop_limit = 64;
  Must(ibv_modify_qp(end.qp, &attr,
                     IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                         IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0,
       "RTR");
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = 18;  // 1 s
  attr.retry_cnt = 7;
  attr.rnr_retry = 7;
  Must(ibv_modify_qp(end.qp, &attr,
                     IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                         IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0,
       "RTS");
}

void PostSend(const End& end, ibv_wr_opcode opcode, uint32_t bytes, const Address& peer) {
  ibv_sge sge{
      .addr = reinterpret_cast<uintptr_t>(end.memory), .length = bytes, .lkey = end.mr->lkey};
  ibv_send_wr wr{};
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = opcode;
  wr.wr.rdma.remote_addr = peer.memory;
  wr.wr.rdma.rkey = peer.rkey;
  ibv_send_wr* bad = nullptr;
  Must(ibv_post_send(end.qp, &wr, &bad) == 0, "ibv_post_send");
}

void PostRecv(const End& end) {
  ibv_sge sge{
      .addr = reinterpret_cast<uintptr_t>(end.memory), .length = kPingBytes, .lkey = end.mr->lkey};
  ibv_recv_wr wr{};
  wr.sg_list = &sge;
  wr.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  Must(ibv_post_recv(end.qp, &wr, &bad) == 0, "ibv_post_recv");
}

// Waits for one; true if it is a receive.
bool Wait(const End& end) {
  ibv_wc wc;
  int count = 0;
  while ((count = ibv_poll_cq(end.cq, 1, &wc)) == 0) {
  }
  if (count < 0 || wc.status != IBV_WC_SUCCESS) {
    std::fprintf(stderr, "completion: %s\n", ibv_wc_status_str(wc.status));
    std::exit(1);
  }
  return (wc.opcode & IBV_WC_RECV) != 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const bool stream = std::string(argv[1]) == "stream";
  const int file = open(argv[2], O_RDWR);
  void* page = mmap(nullptr, 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  Must(page != MAP_FAILED, "the counter file");
  auto* counter = static_cast<std::atomic<uint64_t>*>(page);
  int pair[2];
  Must(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0, "socketpair");
  const bool active = fork() != 0;
  if (!active) prctl(PR_SET_PDEATHSIG, SIGKILL);
  Address mine{};
  Address peer{};
  const End end = Open(active ? "verbena0" : "verbena1", &mine);
  const int channel = pair[active ? 0 : 1];
  close(pair[active ? 1 : 0]);
  Must(write(channel, &mine, sizeof mine) == sizeof mine, "write");
  Must(read(channel, &peer, sizeof peer) == sizeof peer, "read");
  Connect(end, peer);
  PostRecv(end);
  char word = 0;
  Must(write(channel, &word, 1) == 1 && read(channel, &word, 1) == 1, "the other half");
  if (active) {
    std::puts("ready");
    std::fflush(stdout);
  }
  if (stream) {
    if (!active) {
      // Until the other half is gone.
      return static_cast<int>(read(channel, &word, 1)) < 0;
    }
    for (int i = 0; i < kWindow; ++i) PostSend(end, IBV_WR_RDMA_WRITE, kStreamBytes, peer);
    for (;;) {
      Wait(end);
      counter->fetch_add(1, std::memory_order_relaxed);
      PostSend(end, IBV_WR_RDMA_WRITE, kStreamBytes, peer);
    }
  }
  for (bool first = active;; first = true) {
    if (first) PostSend(end, IBV_WR_SEND, kPingBytes, peer);
    while (!Wait(end)) {
    }
    PostRecv(end);
    if (active) counter->fetch_add(1, std::memory_order_relaxed);
  }
}
