// SPDX-License-Identifier: Apache-2.0
//
// Memory windows. Those of type 2 are bound by work requests of the application,
// those of type 1 by one that is made here.
#include <cerrno>
#include <cstdlib>

#include "provider/provider.h"

namespace verbena::provider {

ibv_mw* AllocMw(ibv_pd* pd, ibv_mw_type type) {
  if (type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2) {
    errno = EINVAL;
    return nullptr;
  }
  Mw* mw = static_cast<Mw*>(calloc(1, sizeof(Mw)));
  if (mw == nullptr) return nullptr;
  abi::AllocMwRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdAllocMw;
  request.pd = pd->handle;
  request.type = type;
  const int error = ToContext(pd->context)->channel.Execute(&request, &reply);
  if (error != 0) {
    free(mw);
    errno = error;
    return nullptr;
  }
  mw->base.context = pd->context;
  mw->base.pd = pd;
  mw->base.rkey = reply.handle;
  mw->base.handle = reply.handle;
  mw->base.type = type;
  return &mw->base;
}

int DeallocMw(ibv_mw* mw) {
  Context* context = ToContext(mw->context);
  abi::HandleRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdDeallocMw;
  request.handle = mw->handle;
  const int error = DestroyResult(context, context->channel.Execute(&request, &reply));
  if (error == 0) free(Downcast<Mw>(mw));
  return error;
}

int BindMw(ibv_qp* qp, ibv_mw* mw, ibv_mw_bind* bind) {
  const ibv_mw_bind_info& info = bind->bind_info;
  if (mw->type != IBV_MW_TYPE_1) return EINVAL;
  if (info.mr == nullptr && info.length != 0) return EINVAL;
  if (info.mr != nullptr && info.mr->context != mw->context) return EPERM;
  ibv_send_wr wr = {};
  wr.wr_id = bind->wr_id;
  wr.opcode = IBV_WR_BIND_MW;
  wr.send_flags = bind->send_flags;
  wr.bind_mw.mw = mw;
  wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
  wr.bind_mw.bind_info = info;
  ibv_send_wr* bad = nullptr;
  const int error = PostSend(qp, &wr, &bad);
  if (error == 0) mw->rkey = wr.bind_mw.rkey;
  return error;
}

}  // namespace verbena::provider
