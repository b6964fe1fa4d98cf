// SPDX-License-Identifier: Apache-2.0
//
// Commands for what memory there is beside plain regions: changed ones, null
// regions, windows, memory of the device, and what another context shares.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "nic_sim/device/device_context.h"

namespace verbena::nic {
namespace {

enum ReregFlags : uint32_t {
  kChangeTranslation = 1 << 0,
  kChangePd = 1 << 1,
  kChangeAccess = 1 << 2,
};

void Describe(const Region& region, abi::QueryMrReply* reply) {
  reply->handle = region.key;
  reply->pd = region.pd;
  reply->access = region.access;
  reply->address = region.address;
  reply->length = region.length;
  reply->iova = region.iova;
}

}  // namespace

// Nothing in the device refers to the old range: its copies are done when a
// command has the lock.
int DeviceContext::ReregMr(const abi::ReregMrRequest& request) {
  if (!mrs_.contains(request.handle)) return EINVAL;
  const Region* region = share_.regions.Find(request.handle);
  constexpr uint32_t kAll = kChangeTranslation | kChangePd | kChangeAccess;
  if (region == nullptr || request.flags == 0 || (request.flags & ~kAll) != 0) return EINVAL;
  Region wanted = *region;
  if ((request.flags & kChangeTranslation) != 0) {
    wanted.address = request.address;
    wanted.length = request.length;
    wanted.iova = request.iova;
  }
  if ((request.flags & kChangePd) != 0) {
    if (!pds_.contains(request.pd)) return EINVAL;
    wanted.pd = request.pd;
  }
  if ((request.flags & kChangeAccess) != 0) wanted.access = request.access;
  const PdId before = region->pd;
  if (const int error = share_.regions.Change(wanted); error != 0) return error;
  --pds_[before];
  ++pds_[wanted.pd];
  return 0;
}

int DeviceContext::AllocNullMr(uint32_t pd, abi::RegMrReply* reply) {
  const auto found = pds_.find(pd);
  if (found == pds_.end()) return EINVAL;
  if (share_.regions.size() - share_.regions.window_count() >= limits_.mrs) return ENOMEM;
  Region region;
  region.space = space_.get();
  region.kind = RegionKind::kNull;
  region.pd = pd;
  region.access = transport::kAccessLocalWrite;
  region.length = UINT64_MAX;
  region.owner = cookie_;
  uint32_t key = 0;
  if (const int error = share_.regions.Register(region, &key); error != 0) return error;
  mrs_.insert(key);
  ++found->second;
  reply->handle = reply->lkey = reply->rkey = key;
  return 0;
}

int DeviceContext::QueryMr(uint32_t lkey, abi::QueryMrReply* reply) {
  const Region* region = share_.regions.Find(lkey);
  if (region == nullptr || region->is_window() || !pds_.contains(region->pd)) return EINVAL;
  Describe(*region, reply);
  return 0;
}

// --- Memory windows ---

int DeviceContext::AllocMw(const abi::AllocMwRequest& request, uint32_t* rkey) {
  const auto pd = pds_.find(request.pd);
  if (pd == pds_.end() || request.type < 1 || request.type > 2) return EINVAL;
  if (share_.regions.window_count() >= limits_.mws) return ENOMEM;
  const RegionKind kind = request.type == 1 ? RegionKind::kWindow1 : RegionKind::kWindow2;
  const int error = share_.regions.AllocateWindow(kind, request.pd, cookie_, rkey);
  if (error != 0) return error;
  mws_.emplace(*rkey, request.pd);
  ++pd->second;
  return 0;
}

int DeviceContext::DeallocMw(uint32_t handle) {
  const auto found = mws_.find(handle);
  if (found == mws_.end()) return EINVAL;
  if (const Region* window = share_.regions.FindWindow(handle)) {
    share_.regions.Deregister(window->key);
  }
  --pds_[found->second];
  mws_.erase(found);
  return 0;
}

// --- Memory of the device ---

int DeviceContext::AllocDm(const abi::AllocDmRequest& request, int fd, uint32_t* handle) {
  struct stat st {};
  int error = 0;
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || request.length == 0 ||
      static_cast<uint64_t>(st.st_size) < request.length) {
    error = EINVAL;
  } else if (request.length > limits_.dm_bytes ||
             share_.dm_bytes > limits_.dm_bytes - request.length ||
             share_.dm_count >= limits_.dms) {
    error = ENOMEM;
  }
  if (error != 0) {
    close(fd);
    return error;
  }
  while (dms_.contains(next_dm_)) ++next_dm_;
  *handle = next_dm_++;
  dms_.emplace(*handle, DeviceMemory{.length = request.length, .fd = fd});
  share_.dm_bytes += request.length;
  ++share_.dm_count;
  return 0;
}

int DeviceContext::FreeDm(uint32_t handle) {
  const auto found = dms_.find(handle);
  if (found == dms_.end()) return EINVAL;
  close(found->second.fd);
  share_.dm_bytes -= found->second.length;
  --share_.dm_count;
  dms_.erase(found);
  return 0;
}

void DeviceContext::FreeMemoryObjects() {
  while (!mws_.empty()) DeallocMw(mws_.begin()->first);
  for (const uint32_t key : mrs_) share_.regions.Deregister(key);
  while (!dms_.empty()) FreeDm(dms_.begin()->first);
}

// --- What another context shares ---

const DeviceContext* DeviceContext::SourceOf(const abi::ImportRequest& request) const {
  const auto found = share_.contexts.find(request.cookie);
  return found == share_.contexts.end() ? nullptr : found->second;
}

int DeviceContext::ImportPd(const abi::ImportRequest& request) {
  const DeviceContext* source = SourceOf(request);
  if (source == nullptr || !source->pds_.contains(request.handle)) return EINVAL;
  if (pds_.emplace(request.handle, 0).second) imported_pds_.insert(request.handle);
  return 0;
}

int DeviceContext::ImportMr(const abi::ImportRequest& request, abi::QueryMrReply* reply) {
  const DeviceContext* source = SourceOf(request);
  if (source == nullptr || !source->mrs_.contains(request.handle)) return EINVAL;
  const Region* region = share_.regions.Find(request.handle);
  if (region == nullptr || region->pd != request.pd || !pds_.contains(request.pd)) return EINVAL;
  Describe(*region, reply);
  return 0;
}

int DeviceContext::ImportDm(const abi::ImportRequest& request, uint64_t* length, int* fd) {
  const DeviceContext* source = SourceOf(request);
  if (source == nullptr) return EINVAL;
  const auto found = source->dms_.find(request.handle);
  if (found == source->dms_.end()) return EINVAL;
  *fd = fcntl(found->second.fd, F_DUPFD_CLOEXEC, 3);
  if (*fd < 0) return ENOMEM;
  *length = found->second.length;
  return 0;
}

}  // namespace verbena::nic
