// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "provider/provider.h"

namespace verbena::provider {

abi::AhAttr ToAbi(const ibv_ah_attr& attr) {
  abi::AhAttr to = {};
  to.dlid = attr.dlid;
  to.sl = attr.sl;
  to.src_path_bits = attr.src_path_bits;
  to.static_rate = attr.static_rate;
  to.is_global = attr.is_global != 0;
  to.port_num = attr.port_num;
  // Without is_global applications may leave the GRH uninitialised.
  if (to.is_global != 0) {
    memcpy(to.dgid, attr.grh.dgid.raw, sizeof(to.dgid));
    to.flow_label = attr.grh.flow_label;
    to.sgid_index = attr.grh.sgid_index;
    to.hop_limit = attr.grh.hop_limit;
    to.traffic_class = attr.grh.traffic_class;
  }
  return to;
}

ibv_ah_attr FromAbi(const abi::AhAttr& attr) {
  ibv_ah_attr to = {};
  memcpy(to.grh.dgid.raw, attr.dgid, sizeof(attr.dgid));
  to.grh.flow_label = attr.flow_label;
  to.grh.sgid_index = attr.sgid_index;
  to.grh.hop_limit = attr.hop_limit;
  to.grh.traffic_class = attr.traffic_class;
  to.dlid = attr.dlid;
  to.sl = attr.sl;
  to.src_path_bits = attr.src_path_bits;
  to.static_rate = attr.static_rate;
  to.is_global = attr.is_global;
  to.port_num = attr.port_num;
  return to;
}

ibv_ah* CreateAh(ibv_pd* pd, ibv_ah_attr* attr) {
  Ah* ah = static_cast<Ah*>(calloc(1, sizeof(Ah)));
  if (ah == nullptr) return nullptr;
  abi::CreateAhRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdCreateAh;
  request.pd = pd->handle;
  request.attr = ToAbi(*attr);
  const int error = ToContext(pd->context)->channel.Execute(&request, &reply);
  if (error != 0) {
    free(ah);
    errno = error;
    return nullptr;
  }
  ah->base.context = pd->context;
  ah->base.pd = pd;
  ah->base.handle = reply.handle;
  return &ah->base;
}

int DestroyAh(ibv_ah* ah) {
  Context* context = ToContext(ah->context);
  abi::HandleRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdDestroyAh;
  request.handle = ah->handle;
  const int error = DestroyResult(context, context->channel.Execute(&request, &reply));
  if (error == 0) free(Downcast<Ah>(ah));
  return error;
}

namespace {

int ChangeGroup(ibv_qp* qp, const ibv_gid* gid, uint16_t op) {
  abi::McastRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = op;
  request.handle = qp->handle;
  memcpy(request.gid, gid->raw, sizeof(request.gid));
  return ToContext(qp->context)->channel.Execute(&request, &reply);
}

}  // namespace

// A RoCE group is named by its GID alone.
int AttachMcast(ibv_qp* qp, const ibv_gid* gid, uint16_t) {
  return ChangeGroup(qp, gid, abi::kCmdAttachMcast);
}

int DetachMcast(ibv_qp* qp, const ibv_gid* gid, uint16_t) {
  return ChangeGroup(qp, gid, abi::kCmdDetachMcast);
}

}  // namespace verbena::provider
