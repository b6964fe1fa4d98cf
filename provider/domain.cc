// SPDX-License-Identifier: Apache-2.0
//
// Protection, thread and parent domains. The device knows the first only.
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "provider/provider.h"

namespace verbena::provider {
namespace {

// resource_type of a parent domain's allocator: work request ids of a QP. The
// upper half would be the kernel's number of the driver; this one has none.
constexpr uint64_t kResourceQp = 1;
constexpr size_t kAlignment = 64;

}  // namespace

ibv_pd* AllocPd(ibv_context* ibv) {
  Pd* pd = static_cast<Pd*>(calloc(1, sizeof(Pd)));
  if (pd == nullptr) return nullptr;
  abi::HandleRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdAllocPd;
  const int error = ToContext(ibv)->channel.Execute(&request, &reply);
  if (error != 0) {
    free(pd);
    errno = error;
    return nullptr;
  }
  pd->base.context = ibv;
  pd->base.handle = reply.handle;
  return &pd->base;
}

int DeallocPd(ibv_pd* ibv) {
  Pd* pd = ToPd(ibv);
  if (pd->references.load() != 0) return EBUSY;
  if (pd->protection != nullptr) return DeallocParentDomain(pd);
  Context* context = ToContext(ibv->context);
  abi::HandleRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdDeallocPd;
  request.handle = ibv->handle;
  const int error = DestroyResult(context, context->channel.Execute(&request, &reply));
  if (error == 0) free(pd);
  return error;
}

ibv_td* AllocTd(ibv_context* context, ibv_td_init_attr* attr) {
  if (attr->comp_mask != 0) {
    errno = EINVAL;
    return nullptr;
  }
  Td* td = static_cast<Td*>(calloc(1, sizeof(Td)));
  if (td == nullptr) return nullptr;
  td->base.context = context;
  return &td->base;
}

int DeallocTd(ibv_td* ibv) {
  Td* td = Downcast<Td>(ibv);
  if (td->references.load() != 0) return EBUSY;
  free(td);
  return 0;
}

ibv_pd* AllocParentDomain(ibv_context* context, ibv_parent_domain_init_attr* attr) {
  constexpr uint32_t kMask =
      IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
  const bool allocators = (attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) != 0;
  if ((attr->comp_mask & ~kMask) != 0 || attr->pd == nullptr || attr->pd->context != context ||
      (attr->td != nullptr && attr->td->context != context) ||
      (allocators && (attr->alloc == nullptr || attr->free == nullptr))) {
    errno = EINVAL;
    return nullptr;
  }
  Pd* domain = static_cast<Pd*>(calloc(1, sizeof(Pd)));
  if (domain == nullptr) return nullptr;
  Pd* given = ToPd(attr->pd);
  // One on top of another stands on the same protection domain.
  domain->protection = given->protection != nullptr ? given->protection : given;
  domain->td = attr->td != nullptr ? Downcast<Td>(attr->td) : nullptr;
  if (allocators) {
    domain->alloc = attr->alloc;
    domain->free = attr->free;
  }
  if ((attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT) != 0) {
    domain->pd_context = attr->pd_context;
  }
  domain->base.context = context;
  domain->base.handle = attr->pd->handle;
  domain->protection->references.fetch_add(1);
  if (domain->td != nullptr) domain->td->references.fetch_add(1);
  return &domain->base;
}

int DeallocParentDomain(Pd* domain) {
  domain->protection->references.fetch_sub(1);
  if (domain->td != nullptr) domain->td->references.fetch_sub(1);
  free(domain);
  return 0;
}

void* AllocFrom(ibv_pd* ibv, size_t bytes, Pd** domain) {
  Pd* pd = ibv != nullptr ? ToPd(ibv) : nullptr;
  *domain = nullptr;
  if (pd != nullptr && pd->alloc != nullptr) {
    void* memory = pd->alloc(ibv, pd->pd_context, bytes, kAlignment, kResourceQp);
    if (memory != IBV_ALLOCATOR_USE_DEFAULT) {
      if (memory == nullptr) return nullptr;
      memset(memory, 0, bytes);
      pd->references.fetch_add(1);
      *domain = pd;
      return memory;
    }
  }
  return calloc(1, bytes);
}

void FreeTo(Pd* domain, void* memory) {
  if (memory == nullptr) return;
  if (domain == nullptr) {
    free(memory);
    return;
  }
  domain->free(&domain->base, domain->pd_context, memory, kResourceQp);
  domain->references.fetch_sub(1);
}

}  // namespace verbena::provider
