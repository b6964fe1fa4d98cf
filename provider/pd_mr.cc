// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>

#include "provider/memory_check.h"
#include "provider/provider.h"

namespace verbena::provider {
namespace {

constexpr unsigned kDeviceAccess =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
    IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_ON_DEMAND |
    1u << 8;  // FLUSH_GLOBAL; the headers may be older
// Without meaning here, but no reason to fail: HUGETLB qualifies ON_DEMAND only.
// Optional bits (relaxed ordering) are hints by definition.
constexpr unsigned kIgnoredAccess =
    unsigned{IBV_ACCESS_HUGETLB} | unsigned{IBV_ACCESS_OPTIONAL_RANGE};

int CheckAccess(unsigned access) {
  if ((access & ~(kDeviceAccess | kIgnoredAccess)) != 0) return EINVAL;
  if ((access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) != 0 &&
      (access & IBV_ACCESS_LOCAL_WRITE) == 0) {
    return EINVAL;
  }
  return 0;
}

int Register(Context* context, Mr* mr, const abi::RegMrRequest& wanted) {
  int error = CheckRegion(context, wanted.address, wanted.length, wanted.access);
  if (error != 0) return error;
  abi::RegMrRequest request = wanted;
  request.access &= kDeviceAccess;
  if ((request.access & IBV_ACCESS_ZERO_BASED) != 0) request.iova = 0;
  uint64_t end;
  if (request.length != 0 && __builtin_add_overflow(request.iova, request.length - 1, &end)) {
    return EINVAL;
  }
  abi::RegMrReply reply = {};
  request.header.op = abi::kCmdRegMr;
  error = context->channel.Execute(&request, &reply);
  if (error != 0) return error;
  mr->base.mr.handle = reply.handle;
  mr->base.mr.lkey = reply.lkey;
  mr->base.mr.rkey = reply.rkey;
  return 0;
}

}  // namespace

int CheckRegion(const Context* context, uint64_t address, uint64_t length, unsigned access) {
  if (Unusable(context)) return EIO;
  const int error = CheckAccess(access);
  if (error != 0) return error;
  uint64_t end;
  if (__builtin_add_overflow(address, length, &end)) return EINVAL;
  if (length == 0) return (access & IBV_ACCESS_ZERO_BASED) != 0 ? 0 : EINVAL;
  // Pages that are wanted on demand need not be there yet; so are those of an
  // implicit region, which is the whole address space.
  if ((access & IBV_ACCESS_ON_DEMAND) != 0) return 0;
  return CheckRange(address, length, (access & IBV_ACCESS_LOCAL_WRITE) != 0, !context->on_valgrind);
}

unsigned DeviceAccess(unsigned access) { return access & kDeviceAccess; }

ibv_mr* RegMr(ibv_pd* pd, void* address, size_t length, uint64_t iova, int access) {
  Mr* mr = static_cast<Mr*>(calloc(1, sizeof(Mr)));
  if (mr == nullptr) return nullptr;
  abi::RegMrRequest request = {};
  request.pd = pd->handle;
  request.access = static_cast<uint32_t>(access);
  request.address = reinterpret_cast<uint64_t>(address);
  request.length = length;
  request.iova = iova;
  const int error = Register(ToContext(pd->context), mr, request);
  if (error != 0) {
    free(mr);
    errno = error;
    return nullptr;
  }
  // libibverbs reads it when it undoes its fork protection.
  mr->base.access = access;
  mr->base.mr.context = pd->context;
  mr->base.mr.pd = pd;
  mr->base.mr.addr = address;
  mr->base.mr.length = length;
  return &mr->base.mr;
}

int DeregMr(VerbsMr* mr) {
  Context* context = ToContext(mr->mr.context);
  abi::HandleRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdDeregMr;
  request.handle = mr->mr.handle;
  const int error = DestroyResult(context, context->channel.Execute(&request, &reply));
  if (error != 0) return error;
  Mr* own = Downcast<Mr>(mr);
  if (own->mapping != nullptr) munmap(own->mapping, own->mapping_bytes);
  free(own);
  return 0;
}

}  // namespace verbena::provider
