// SPDX-License-Identifier: Apache-2.0
//
// Objects of another context, in this process or another one
// (ibv_import_device(3)).
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "provider/provider.h"

namespace verbena::provider {
namespace {

abi::ImportRequest RequestFor(const Context* context, abi::CommandOp op, uint32_t handle,
                              uint32_t pd) {
  abi::ImportRequest request = {};
  request.header.op = op;
  request.cookie = context->cookie;
  request.handle = handle;
  request.pd = pd;
  return request;
}

}  // namespace

ibv_pd* ImportPd(ibv_context* ibv, uint32_t handle) {
  Context* context = ToContext(ibv);
  Pd* pd = static_cast<Pd*>(calloc(1, sizeof(Pd)));
  if (pd == nullptr) return nullptr;
  abi::ImportRequest request = RequestFor(context, abi::kCmdImportPd, handle, 0);
  abi::HandleReply reply = {};
  const int error = context->channel.Execute(&request, &reply);
  if (error != 0) {
    free(pd);
    errno = error;
    return nullptr;
  }
  pd->base.context = ibv;
  pd->base.handle = handle;
  return &pd->base;
}

void UnimportPd(ibv_pd* pd) { free(ToPd(pd)); }

ibv_mr* ImportMr(ibv_pd* pd, uint32_t handle) {
  Context* context = ToContext(pd->context);
  Mr* mr = static_cast<Mr*>(calloc(1, sizeof(Mr)));
  if (mr == nullptr) return nullptr;
  abi::ImportRequest request = RequestFor(context, abi::kCmdImportMr, handle, pd->handle);
  abi::QueryMrReply reply = {};
  const int error = context->channel.Execute(&request, &reply);
  if (error != 0) {
    free(mr);
    errno = error;
    return nullptr;
  }
  mr->base.mr_type = kMrTypeImported;
  ibv_mr* ibv = &mr->base.mr;
  ibv->context = pd->context;
  ibv->pd = pd;
  ibv->addr = nullptr;  // it is memory of who exports it
  ibv->length = reply.length;
  ibv->handle = handle;
  ibv->lkey = handle;
  ibv->rkey = handle;
  return ibv;
}

void UnimportMr(ibv_mr* mr) { free(Downcast<Mr>(mr)); }

ibv_dm* ImportDm(ibv_context* ibv, uint32_t handle) {
  Context* context = ToContext(ibv);
  Dm* dm = static_cast<Dm*>(calloc(1, sizeof(Dm)));
  if (dm == nullptr) return nullptr;
  abi::ImportRequest request = RequestFor(context, abi::kCmdImportDm, handle, 0);
  abi::DmReply reply = {};
  ReplyFds fds;
  int error = context->channel.Execute(&request, &reply, -1, &fds);
  const int fd = error == 0 ? fds.Take(0) : -1;
  if (error == 0 && fd < 0) error = EMFILE;
  void* memory = MAP_FAILED;
  if (error == 0) {
    // A file that is shorter than it should be would be a trap.
    const off_t size = lseek(fd, 0, SEEK_END);
    if (reply.length == 0 || size < 0 || static_cast<uint64_t>(size) < reply.length) {
      error = EIO;
    } else {
      InitDm(dm, ibv, context, handle, nullptr, reply.length);
      memory = mmap(nullptr, dm->mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (memory == MAP_FAILED) error = ENOMEM;
    }
    close(fd);
  }
  if (error != 0) {
    free(dm);
    errno = error;
    return nullptr;
  }
  dm->memory = static_cast<uint8_t*>(memory);
  return &dm->base.dm;
}

void UnimportDm(ibv_dm* ibv) {
  Dm* dm = Downcast<Dm>(ibv);
  munmap(dm->memory, dm->mapped_bytes);
  free(dm);
}

}  // namespace verbena::provider
