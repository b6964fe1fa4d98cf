// SPDX-License-Identifier: Apache-2.0
//
// Regions of other kinds than plain ones: changed, null, of a dma-buf, of the
// device's memory; and advice about those that are paged on demand.
#include <fcntl.h>
#include <linux/dma-buf.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "provider/provider.h"

namespace verbena::provider {
namespace {

size_t PageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

int QueryMr(ibv_context* context, uint32_t lkey, abi::QueryMrReply* reply) {
  abi::HandleRequest request = {};
  request.header.op = abi::kCmdQueryMr;
  request.handle = lkey;
  return ToContext(context)->channel.Execute(&request, reply);
}

// Brings the pages of a range in, as the first access would.
int Populate(uint64_t address, uint64_t length, bool write) {
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
  const uint64_t page = PageBytes();
  const uint64_t start = address / page * page;
  const uint64_t end = (address + length + page - 1) / page * page;
  if (length == 0) return 0;
  if (madvise(reinterpret_cast<void*>(start), end - start,
              write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0) {
    return 0;
  }
  // A kernel without them (before 5.14) brings the pages in at the first access.
  return errno == EINVAL ? 0 : EFAULT;
}

int AdviseOne(ibv_pd* pd, ibv_advise_mr_advice advice, uint32_t flags, const ibv_sge& sge) {
  abi::QueryMrReply mr = {};
  int error = QueryMr(pd->context, sge.lkey, &mr);
  if (error == EIO) return error;
  if (error != 0 || (mr.access & IBV_ACCESS_ON_DEMAND) == 0) return ENOENT;
  if (mr.pd != pd->handle) return EPERM;
  const bool write = advice == IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE;
  if (write && (mr.access & IBV_ACCESS_LOCAL_WRITE) == 0) return EPERM;
  const uint64_t offset = sge.addr - mr.iova;
  if (offset > mr.length || sge.length > mr.length - offset) return EFAULT;
  if (advice == IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT) return 0;
  error = Populate(mr.address + offset, sge.length, write);
  // Without FLUSH nobody waits for the result, only the range is checked.
  return (flags & IBV_ADVISE_MR_FLAG_FLUSH) != 0 ? error : 0;
}

bool IsDmaBuf(int fd) {
  // A null synchronisation: only dma-bufs know the request.
  dma_buf_sync sync = {};
  sync.flags = DMA_BUF_SYNC_READ | DMA_BUF_SYNC_START;
  if (ioctl(fd, DMA_BUF_IOCTL_SYNC, &sync) != 0) return false;
  sync.flags = DMA_BUF_SYNC_READ | DMA_BUF_SYNC_END;
  ioctl(fd, DMA_BUF_IOCTL_SYNC, &sync);
  return true;
}

ibv_mr* Fail(int error) {
  errno = error;
  return nullptr;
}

bool InRange(const Dm* dm, uint64_t offset, size_t length) {
  return offset <= dm->length && length <= dm->length - offset;
}

// Hardware moves words of 4 bytes.
bool IsWords(uint64_t offset, size_t length) { return offset % 4 == 0 && length % 4 == 0; }

int CopyToDm(ibv_dm* ibv, uint64_t offset, const void* from, size_t length) {
  Dm* dm = Downcast<Dm>(ibv);
  if (!InRange(dm, offset, length) || !IsWords(offset, length)) return EFAULT;
  memcpy(dm->memory + offset, from, length);
  return 0;
}

int CopyFromDm(void* to, ibv_dm* ibv, uint64_t offset, size_t length) {
  const Dm* dm = Downcast<Dm>(ibv);
  if (!InRange(dm, offset, length) || !IsWords(offset, length)) return EFAULT;
  memcpy(to, dm->memory + offset, length);
  return 0;
}

}  // namespace

ibv_mr* AllocNullMr(ibv_pd* pd) {
  Mr* mr = static_cast<Mr*>(calloc(1, sizeof(Mr)));
  if (mr == nullptr) return nullptr;
  abi::HandleRequest request = {};
  abi::RegMrReply reply = {};
  request.header.op = abi::kCmdAllocNullMr;
  request.handle = pd->handle;
  const int error = ToContext(pd->context)->channel.Execute(&request, &reply);
  if (error != 0) {
    free(mr);
    return Fail(error);
  }
  ibv_mr* ibv = &mr->base.mr;
  mr->base.mr_type = kMrTypeNull;
  ibv->context = pd->context;
  ibv->pd = pd;
  ibv->addr = nullptr;
  ibv->length = SIZE_MAX;
  ibv->handle = reply.handle;
  ibv->lkey = reply.lkey;
  return ibv;
}

int ReregMr(VerbsMr* mr, int flags, ibv_pd* pd, void* address, size_t length, int access) {
  Context* context = ToContext(mr->mr.context);
  abi::ReregMrRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdReregMr;
  request.handle = mr->mr.handle;
  request.flags = static_cast<uint32_t>(flags);
  const bool range = (flags & IBV_REREG_MR_CHANGE_TRANSLATION) != 0;
  const bool rights = (flags & IBV_REREG_MR_CHANGE_ACCESS) != 0;
  const unsigned effective = static_cast<unsigned>(rights ? access : mr->access);
  if ((flags & IBV_REREG_MR_CHANGE_PD) != 0) request.pd = pd->handle;
  if (range || rights) {
    const int error = CheckRegion(
        context,
        range ? reinterpret_cast<uint64_t>(address) : reinterpret_cast<uint64_t>(mr->mr.addr),
        range ? length : mr->mr.length, effective);
    if (error != 0) return error;
  }
  if (range) {
    request.address = reinterpret_cast<uint64_t>(address);
    request.length = length;
    request.iova = (effective & IBV_ACCESS_ZERO_BASED) != 0 ? 0 : request.address;
  }
  request.access = DeviceAccess(effective);
  const int error = context->channel.Execute(&request, &reply);
  if (error == 0 && rights) mr->access = access;
  return error;
}

int AdviseMr(ibv_pd* pd, ibv_advise_mr_advice advice, uint32_t flags, ibv_sge* sges,
             uint32_t count) {
  if (advice != IBV_ADVISE_MR_ADVICE_PREFETCH && advice != IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE &&
      advice != IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT) {
    return EOPNOTSUPP;
  }
  if ((flags & ~static_cast<uint32_t>(IBV_ADVISE_MR_FLAG_FLUSH)) != 0 || count == 0) return EINVAL;
  for (uint32_t i = 0; i < count; ++i) {
    const int error = AdviseOne(pd, advice, flags, sges[i]);
    if (error != 0) return error;
  }
  return 0;
}

// The buffer is mapped here, and the device reaches the mapping as it does other
// memory.
ibv_mr* RegDmabufMr(ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
  constexpr int kAllowed = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                           IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
                           static_cast<int>(IBV_ACCESS_OPTIONAL_RANGE);
  if ((access & ~kAllowed) != 0 || length == 0) return Fail(EINVAL);
  if (!IsDmaBuf(fd)) return Fail(errno == EBADF ? EBADF : EINVAL);
  const uint64_t page = PageBytes();
  const uint64_t start = offset / page * page;
  uint64_t end;
  if (__builtin_add_overflow(offset, length, &end)) return Fail(EINVAL);
  const off_t size = lseek(fd, 0, SEEK_END);
  if (size >= 0 && end > static_cast<uint64_t>(size)) return Fail(EINVAL);
  const bool write = (access & IBV_ACCESS_LOCAL_WRITE) != 0;
  const size_t bytes = static_cast<size_t>(end - start);
  void* mapping = mmap(nullptr, bytes, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd,
                       static_cast<off_t>(start));
  if (mapping == MAP_FAILED) return Fail(errno);
  ibv_mr* ibv = RegMr(pd, static_cast<uint8_t*>(mapping) + (offset - start), length, iova, access);
  if (ibv == nullptr) {
    const int error = errno;
    munmap(mapping, bytes);
    return Fail(error);
  }
  Mr* mr = Downcast<Mr>(ibv);
  mr->base.mr_type = kMrTypeDmabuf;
  mr->mapping = mapping;
  mr->mapping_bytes = bytes;
  return ibv;
}

void InitDm(Dm* dm, ibv_context* context, Context* owner, uint32_t handle, uint8_t* memory,
            size_t length) {
  dm->owner = owner;
  dm->base.dm.context = context;
  dm->base.dm.memcpy_to_dm = CopyToDm;
  dm->base.dm.memcpy_from_dm = CopyFromDm;
  dm->base.dm.comp_mask = IBV_DM_MASK_HANDLE;
  dm->base.dm.handle = handle;
  dm->base.handle = handle;
  dm->memory = memory;
  dm->length = length;
  const size_t page = PageBytes();
  dm->mapped_bytes = (length + page - 1) / page * page;
}

ibv_dm* AllocDm(ibv_context* ibv, ibv_alloc_dm_attr* attr) {
  Context* context = ContextOfThisProcess(ToContext(ibv));
  if (context == nullptr) return nullptr;
  const size_t page = PageBytes();
  // What is mapped is aligned to a page.
  if (attr->comp_mask != 0 || attr->length == 0 || attr->length > context->attributes.max_dm_size ||
      attr->log_align_req >= 64 || (uint64_t{1} << attr->log_align_req) > page) {
    errno = EINVAL;
    return nullptr;
  }
  if (Unusable(context)) {
    errno = EIO;
    return nullptr;
  }
  const size_t bytes = (attr->length + page - 1) / page * page;
  const int fd = static_cast<int>(syscall(SYS_memfd_create, "verbena-dm", MFD_CLOEXEC));
  void* memory = MAP_FAILED;
  int error = fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0 ? ENOMEM : 0;
  if (error == 0) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) error = ENOMEM;
  }
  abi::AllocDmRequest request = {};
  abi::DmReply reply = {};
  request.header.op = abi::kCmdAllocDm;
  request.length = attr->length;
  Dm* dm = static_cast<Dm*>(calloc(1, sizeof(Dm)));
  if (error == 0 && dm == nullptr) error = ENOMEM;
  if (error == 0) error = context->channel.Execute(&request, &reply, fd);
  if (fd >= 0) close(fd);
  if (error != 0) {
    if (memory != MAP_FAILED) munmap(memory, bytes);
    free(dm);
    errno = error;
    return nullptr;
  }
  InitDm(dm, ibv, context, reply.handle, static_cast<uint8_t*>(memory), attr->length);
  return &dm->base.dm;
}

int FreeDm(ibv_dm* ibv) {
  Dm* dm = Downcast<Dm>(ibv);
  Context* context = dm->owner;
  abi::HandleRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdFreeDm;
  request.handle = dm->base.handle;
  const int error = DestroyResult(context, context->channel.Execute(&request, &reply));
  if (error != 0) return error;
  munmap(dm->memory, dm->mapped_bytes);
  free(dm);
  return 0;
}

ibv_mr* RegDmMr(ibv_pd* pd, ibv_dm* ibv, uint64_t offset, size_t length, unsigned int access) {
  constexpr unsigned kAllowed = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
                                IBV_ACCESS_ZERO_BASED | IBV_ACCESS_OPTIONAL_RANGE;
  const Dm* dm = Downcast<Dm>(ibv);
  // Memory of the device has no address but the offset.
  if (!InRange(dm, offset, length) || (access & ~kAllowed) != 0 ||
      (access & IBV_ACCESS_ZERO_BASED) == 0) {
    return Fail(EINVAL);
  }
  ibv_mr* mr = RegMr(pd, dm->memory + offset, length, 0, static_cast<int>(access));
  if (mr == nullptr) return nullptr;
  Downcast<Mr>(mr)->base.mr_type = kMrTypeDm;
  mr->addr = nullptr;
  return mr;
}

}  // namespace verbena::provider
