// SPDX-License-Identifier: Apache-2.0
//
// verbena-probe: what scenarios need and no stock program does. Two RC QPs, A on
// the first device and B on the second (or the only one), in one process; one
// kind of work, and a line for each thing that comes of it:
//
//   completion STATUS, event NAME, data right|wrong, counter N, sent again ...
//
// Exit status: 0 all completions good and the data right, 1 not, 2 usage or set-up.
// Any libibverbs device; nothing in here is Verbena's own.
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

struct Options {
  std::string mode;
  long count = 10;
  long size = 4096;
  long mtu = 1024;
  long timeout = 10;  // 4.096 us * 2^timeout
  long retry = 7;
  long rnr = 7;
  long min_rnr = 1;  // 10 us
  long wait = 5000;  // ms until it gives up
  long pause = 0;    // ms: receives, or the fault of the mode, come so late
};

[[noreturn]] void Die(const char* what) {
  std::printf("cannot %s\n", what);
  std::exit(2);
}

ibv_mtu MtuOf(long bytes) {
  return bytes == 256    ? IBV_MTU_256
         : bytes == 512  ? IBV_MTU_512
         : bytes == 2048 ? IBV_MTU_2048
         : bytes == 4096 ? IBV_MTU_4096
                         : IBV_MTU_1024;
}

// One end: device, PD, CQ, QP and a buffer with rights for all.
struct End {
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_cq* cq = nullptr;
  ibv_qp* qp = nullptr;
  ibv_mr* mr = nullptr;
  std::vector<uint8_t> buffer;
  ibv_gid gid = {};
  const char* name = "";

  End() = default;
  End(const End&) = delete;
  End& operator=(const End&) = delete;
  ~End() {
    if (qp != nullptr) ibv_destroy_qp(qp);
    if (mr != nullptr) ibv_dereg_mr(mr);
    if (cq != nullptr) ibv_destroy_cq(cq);
    if (pd != nullptr) ibv_dealloc_pd(pd);
    if (context != nullptr) ibv_close_device(context);
  }

  void Open(const char* which, ibv_device* device, const Options& o, int cqes) {
    name = which;
    context = ibv_open_device(device);
    if (context == nullptr) Die("open the device");
    // Events are asked for, not waited for.
    fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) | O_NONBLOCK);
    pd = ibv_alloc_pd(context);
    cq = ibv_create_cq(context, cqes, nullptr, nullptr, 0);
    if (pd == nullptr || cq == nullptr) Die("create PD and CQ");
    buffer.resize(static_cast<size_t>(o.size * o.count) + 64);
    mr = ibv_reg_mr(pd, buffer.data(), buffer.size(),
                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                        IBV_ACCESS_REMOTE_ATOMIC);
    ibv_qp_init_attr init = {};
    init.qp_type = IBV_QPT_RC;
    init.send_cq = init.recv_cq = cq;
    init.cap = {static_cast<uint32_t>(o.count + 1), static_cast<uint32_t>(o.count + 1), 1, 1, 0};
    init.sq_sig_all = 1;
    qp = ibv_create_qp(pd, &init);
    if (mr == nullptr || qp == nullptr) Die("create MR and QP");
    if (ibv_query_gid(context, 1, 1, &gid) != 0) Die("query GID 1");
  }

  void Connect(const End& peer, const Options& o) {
    ibv_qp_attr a = {};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    if (ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS))
      Die("modify to INIT");
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = MtuOf(o.mtu);
    a.dest_qp_num = peer.qp->qp_num;
    a.max_dest_rd_atomic = 4;
    a.min_rnr_timer = static_cast<uint8_t>(o.min_rnr);
    a.ah_attr.is_global = 1;
    a.ah_attr.port_num = 1;
    a.ah_attr.grh.dgid = peer.gid;
    a.ah_attr.grh.sgid_index = 1;
    a.ah_attr.grh.hop_limit = 64;
    if (ibv_modify_qp(qp, &a,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
      Die("modify to RTR");
    a.qp_state = IBV_QPS_RTS;
    a.timeout = static_cast<uint8_t>(o.timeout);
    a.retry_cnt = static_cast<uint8_t>(o.retry);
    a.rnr_retry = static_cast<uint8_t>(o.rnr);
    a.max_rd_atomic = 4;
    if (ibv_modify_qp(qp, &a,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                          IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
      Die("modify to RTS");
  }

  void ToError() const {
    ibv_qp_attr a = {};
    a.qp_state = IBV_QPS_ERR;
    if (ibv_modify_qp(qp, &a, IBV_QP_STATE)) Die("modify to ERR");
  }

  ibv_sge Piece(long index, long bytes) const {
    return {reinterpret_cast<uint64_t>(buffer.data()) + static_cast<uint64_t>(index * bytes),
            static_cast<uint32_t>(bytes), mr->lkey};
  }

  void Receive(long index, const Options& o) const {
    ibv_sge sge = Piece(index, o.size);
    ibv_recv_wr wr = {}, *bad = nullptr;
    wr.wr_id = static_cast<uint64_t>(index);
    wr.sg_list = &sge;
    wr.num_sge = 1;
    if (ibv_post_recv(qp, &wr, &bad)) Die("post a receive");
  }

  void Send(ibv_wr_opcode opcode, long index, long bytes, const End& peer) const {
    const bool atomic = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
    ibv_sge sge = Piece(index, bytes);
    ibv_send_wr wr = {}, *bad = nullptr;
    wr.wr_id = static_cast<uint64_t>(index);
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    const uint64_t base = reinterpret_cast<uint64_t>(peer.buffer.data());
    if (atomic) {
      wr.wr.atomic = {base, 1, 0, peer.mr->rkey};
    } else {
      wr.wr.rdma = {base + static_cast<uint64_t>(index * bytes), peer.mr->rkey};
    }
    if (ibv_post_send(qp, &wr, &bad)) Die("post a send");
  }

  void PrintEvents() const {
    ibv_async_event event;
    while (ibv_get_async_event(context, &event) == 0) {
      std::printf("event %s %s\n", name, ibv_event_type_str(event.event_type));
      ibv_ack_async_event(&event);
    }
  }
};

// Prints each kind of completion with its number once.
class Tally {
 public:
  void Add(const End& end, const ibv_wc& wc) {
    ++counts_[std::string(end.name) + " " + ibv_wc_status_str(wc.status)];
    good_ &= wc.status == IBV_WC_SUCCESS;
  }
  bool Print() const {
    for (const auto& [what, count] : counts_)
      std::printf("completion %s: %ld\n", what.c_str(), count);
    return good_;
  }

 private:
  std::map<std::string, long> counts_;
  bool good_ = true;
};

// Until so many completions came, or the time is over.
bool Poll(const End& end, long wanted, Clock::time_point until, Tally* tally) {
  while (wanted > 0) {
    ibv_wc wc[16];
    const int got = ibv_poll_cq(end.cq, 16, wc);
    if (got < 0) {
      std::printf("the CQ is in error\n");
      return false;
    }
    for (int i = 0; i < got; ++i) tally->Add(end, wc[i]);
    wanted -= got;
    if (wanted > 0 && Clock::now() > until) {
      std::printf("%ld completions of %s are missing\n", wanted, end.name);
      return false;
    }
    if (got == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

uint8_t ByteAt(size_t i) { return static_cast<uint8_t>(i * 31 + i / 251 + 7); }

bool Compare(const std::vector<uint8_t>& buffer, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    if (buffer[i] == ByteAt(i)) continue;
    std::printf("data wrong at byte %zu\n", i);
    return false;
  }
  std::printf("data right: %zu bytes\n", bytes);
  return true;
}

int Run(const Options& o) {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  if (list == nullptr || count == 0) Die("find a device");
  const bool overrun = o.mode == "overrun";
  End a, b;
  a.Open("A", list[0], o, overrun ? 1 : static_cast<int>(o.count) + 1);
  b.Open("B", list[count > 1 ? 1 : 0], o, static_cast<int>(o.count) + 1);
  ibv_free_device_list(list);
  a.Connect(b, o);
  b.Connect(a, o);
  const auto bytes = static_cast<size_t>(o.size * o.count);
  if (o.mode != "atomic")
    for (size_t i = 0; i < bytes; ++i) (o.mode == "read" ? b : a).buffer[i] = ByteAt(i);
  const Clock::time_point until = Clock::now() + milliseconds(o.wait);
  std::printf("ready: A %#x, B %#x\n", a.qp->qp_num, b.qp->qp_num);
  std::fflush(stdout);

  Tally tally;
  bool good = true;
  const std::map<std::string, ibv_wr_opcode> opcodes = {
      {"write", IBV_WR_RDMA_WRITE},   {"read", IBV_WR_RDMA_READ},
      {"send", IBV_WR_SEND},          {"peer_error", IBV_WR_RDMA_WRITE},
      {"overrun", IBV_WR_RDMA_WRITE}, {"atomic", IBV_WR_ATOMIC_FETCH_AND_ADD}};
  const auto opcode = opcodes.find(o.mode);
  if (opcode == opcodes.end()) return 2;
  const bool is_send = o.mode == "send";
  const bool is_atomic = o.mode == "atomic";
  const auto receive_all = [&] {
    for (long i = 0; i < o.count; ++i) b.Receive(i, o);
  };
  if (is_send && o.pause == 0) receive_all();
  if (o.mode == "peer_error") b.ToError();
  for (long i = 0; i < o.count; ++i) a.Send(opcode->second, i, is_atomic ? 8 : o.size, b);
  if (is_send && o.pause > 0) {
    std::this_thread::sleep_for(milliseconds(o.pause));
    receive_all();
  }
  if (overrun) {
    // Nobody polls; the QP must be told.
    for (ibv_qp_attr q = {}; q.qp_state != IBV_QPS_ERR && Clock::now() < until;) {
      ibv_qp_init_attr init;
      if (ibv_query_qp(a.qp, &q, IBV_QP_STATE, &init)) Die("query the QP");
      std::this_thread::sleep_for(milliseconds(1));
      if (q.qp_state == IBV_QPS_ERR) std::printf("QP A is in ERR\n");
    }
    std::this_thread::sleep_for(milliseconds(20));
  } else {
    good &= Poll(a, o.count, until, &tally);
    if (is_send && good && tally.Print()) {
      tally = {};
      good &= Poll(b, o.count, until, &tally);
    }
  }
  good &= tally.Print();
  if (is_atomic) {
    uint64_t counter = 0;
    std::memcpy(&counter, b.buffer.data(), 8);
    std::printf("counter %llu\n", static_cast<unsigned long long>(counter));
    for (long i = 0; i < o.count; ++i) {
      uint64_t before = 0;
      std::memcpy(&before, a.buffer.data() + i * 8, 8);
      if (before == static_cast<uint64_t>(i)) continue;
      std::printf("returned value %ld is %llu\n", i, static_cast<unsigned long long>(before));
      good = false;
    }
    good &= counter == static_cast<uint64_t>(o.count);
  } else if (good && !overrun) {
    good &= Compare((o.mode == "read" ? a : b).buffer, bytes);
  }
  a.PrintEvents();
  b.PrintEvents();
  std::fflush(stdout);
  return good && !overrun ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  std::map<std::string, long*> numbers = {
      {"--count", &o.count},     {"--size", &o.size},   {"--mtu", &o.mtu},
      {"--timeout", &o.timeout}, {"--retry", &o.retry}, {"--rnr", &o.rnr},
      {"--min-rnr", &o.min_rnr}, {"--wait", &o.wait},   {"--pause", &o.pause}};
  if (argc > 1) o.mode = argv[1];
  for (int i = 2; i + 1 < argc; i += 2) {
    const auto number = numbers.find(argv[i]);
    if (number == numbers.end()) o.mode.clear();
    if (number != numbers.end()) *number->second = std::strtol(argv[i + 1], nullptr, 0);
  }
  if (o.mode.empty() || argc % 2 != 0 || o.count < 1 || o.count > 1000 || o.size < 8 ||
      o.size > (1 << 20)) {
    std::printf(
        "verbena-probe write|read|send|atomic|peer_error|overrun [--count N] [--size N] "
        "[--mtu N] [--timeout N] [--retry N] [--rnr N] [--min-rnr N] [--wait MS] "
        "[--pause MS]\n");
    return 2;
  }
  return Run(o);
}
