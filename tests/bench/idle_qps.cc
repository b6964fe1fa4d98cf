// SPDX-License-Identifier: Apache-2.0
//
// idle_qps N: opens the first device, connects N QPs to themselves (RTS, receives posted), prints
// "ready" and waits to be killed. The load of tools/bench --idle-qps.
#include <infiniband/verbs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

[[noreturn]] void Fail(const char* what, int error) {
  fprintf(stderr, "idle_qps: %s: %s\n", what, strerror(error));
  exit(1);
}

void ConnectToItself(ibv_qp* qp, const ibv_gid& gid) {
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = 1;
  int error = ibv_modify_qp(qp, &attr,
                            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (error != 0) Fail("INIT", error);
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = IBV_MTU_1024;
  attr.dest_qp_num = qp->qp_num;
  attr.ah_attr.is_global = 1;
  attr.ah_attr.port_num = 1;
  attr.ah_attr.grh.dgid = gid;
  attr.ah_attr.grh.sgid_index = 1;
  error = ibv_modify_qp(qp, &attr,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (error != 0) Fail("RTR", error);
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = 14;
  attr.retry_cnt = 7;
  attr.rnr_retry = 7;
  error = ibv_modify_qp(qp, &attr,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  if (error != 0) Fail("RTS", error);
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? atoi(argv[1]) : 10000;
  ibv_device** list = ibv_get_device_list(nullptr);
  if (list == nullptr || list[0] == nullptr) Fail("no device", ENODEV);
  ibv_context* context = ibv_open_device(list[0]);
  if (context == nullptr) Fail("ibv_open_device", errno);
  ibv_pd* pd = ibv_alloc_pd(context);
  ibv_cq* cq = ibv_create_cq(context, 1024, nullptr, nullptr, 0);
  if (pd == nullptr || cq == nullptr) Fail("PD and CQ", errno);
  ibv_gid gid = {};
  if (ibv_query_gid(context, 1, 1, &gid) != 0) Fail("ibv_query_gid", errno);
  for (int i = 0; i < count; ++i) {
    ibv_qp_init_attr init = {};
    init.send_cq = init.recv_cq = cq;
    init.qp_type = IBV_QPT_RC;
    init.cap = {16, 16, 1, 1, 0};
    ibv_qp* qp = ibv_create_qp(pd, &init);
    if (qp == nullptr) Fail("ibv_create_qp", errno);
    ConnectToItself(qp, gid);
    ibv_recv_wr wr = {};
    ibv_recv_wr* bad = nullptr;
    if (const int error = ibv_post_recv(qp, &wr, &bad)) Fail("ibv_post_recv", error);
  }
  printf("ready\n");
  fflush(stdout);
  for (;;) pause();
}
