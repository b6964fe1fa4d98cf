// SPDX-License-Identifier: Apache-2.0
//
// XRC domains, and receiving QPs that another process has made.
#include <fcntl.h>

#include <cerrno>
#include <cstdlib>

#include "provider/provider.h"

namespace verbena::provider {

ibv_xrcd* OpenXrcd(ibv_context* ibv, ibv_xrcd_init_attr* attr) {
  constexpr uint32_t kNeeded = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
  Context* context = ToContext(ibv);
  int error = attr->comp_mask != kNeeded ? EINVAL : 0;
  if (error == 0 && Unusable(context)) error = EIO;
  Xrcd* xrcd = error == 0 ? static_cast<Xrcd*>(calloc(1, sizeof(Xrcd))) : nullptr;
  if (error == 0 && xrcd == nullptr) error = ENOMEM;
  if (error == 0) {
    abi::OpenXrcdRequest request = {};
    abi::HandleReply reply = {};
    request.header.op = abi::kCmdOpenXrcd;
    request.has_file = attr->fd >= 0;
    request.flags = static_cast<uint32_t>(attr->oflags);
    if (attr->fd >= 0 && fcntl(attr->fd, F_GETFD) < 0) {
      error = EBADF;
    } else {
      error = context->channel.Execute(&request, &reply, attr->fd >= 0 ? attr->fd : -1);
    }
    if (error == 0) xrcd->base.handle = reply.handle;
  }
  if (error != 0) {
    free(xrcd);
    errno = error;
    return nullptr;
  }
  xrcd->base.xrcd.context = ibv;
  return &xrcd->base.xrcd;
}

int CloseXrcd(ibv_xrcd* ibv) {
  Xrcd* xrcd = Downcast<Xrcd>(ibv);
  Context* context = ToContext(ibv->context);
  abi::HandleRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdCloseXrcd;
  request.handle = xrcd->base.handle;
  const int error = DestroyResult(context, context->channel.Execute(&request, &reply));
  if (error != 0) return error;
  free(xrcd);
  return 0;
}

ibv_qp* OpenQp(ibv_context* ibv, ibv_qp_open_attr* attr) {
  constexpr uint32_t kNeeded = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
  Context* context = ToContext(ibv);
  if ((attr->comp_mask & kNeeded) != kNeeded ||
      (attr->comp_mask & ~(kNeeded | IBV_QP_OPEN_ATTR_CONTEXT)) != 0 ||
      attr->qp_type != IBV_QPT_XRC_RECV || attr->xrcd == nullptr) {
    errno = EINVAL;
    return nullptr;
  }
  Qp* qp = static_cast<Qp*>(calloc(1, sizeof(Qp)));
  if (qp == nullptr) return nullptr;
  abi::OpenQpRequest request = {};
  abi::OpenQpReply reply = {};
  request.header.op = abi::kCmdOpenQp;
  request.xrcd = ToXrcd(attr->xrcd)->base.handle;
  request.qpn = attr->qp_num;
  request.user_handle = reinterpret_cast<uint64_t>(&qp->base.qp);
  const int error = context->channel.Execute(&request, &reply);
  if (error != 0) {
    free(qp);
    errno = error;
    return nullptr;
  }
  ibv_qp* base = &qp->base.qp;
  base->context = ibv;
  if ((attr->comp_mask & IBV_QP_OPEN_ATTR_CONTEXT) != 0) base->qp_context = attr->qp_context;
  base->handle = reply.handle;
  base->qp_num = attr->qp_num;
  base->qp_type = IBV_QPT_XRC_RECV;
  base->state = static_cast<ibv_qp_state>(reply.state);
  qp->state.store(reply.state, std::memory_order_relaxed);
  pthread_mutex_init(&base->mutex, nullptr);
  pthread_cond_init(&base->cond, nullptr);
  return base;
}

}  // namespace verbena::provider
