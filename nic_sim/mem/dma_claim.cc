// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/mem/dma_claim.h"

#include <cinttypes>
#include <cstdio>
#include <cstdlib>

#include "nic_sim/mem/region_table.h"

namespace verbena::nic {
namespace {

using transport::MemoryAccess;

const char* NameOf(MemoryAccess access) {
  switch (access) {
    case MemoryAccess::kLocalRead:
      return "local read";
    case MemoryAccess::kLocalWrite:
      return "local write";
    case MemoryAccess::kRemoteRead:
      return "remote read";
    case MemoryAccess::kRemoteWrite:
      return "remote write";
    case MemoryAccess::kRemoteAtomic:
      return "remote atomic";
    case MemoryAccess::kRemoteFlush:
      return "remote flush";
  }
  return "unknown access";
}

uint32_t RightsOf(MemoryAccess access) {
  switch (access) {
    case MemoryAccess::kLocalRead:
      return 0;
    case MemoryAccess::kLocalWrite:
      return transport::kAccessLocalWrite;
    case MemoryAccess::kRemoteRead:
      return transport::kAccessRemoteRead;
    case MemoryAccess::kRemoteWrite:
      return transport::kAccessRemoteWrite | transport::kAccessLocalWrite;
    case MemoryAccess::kRemoteAtomic:
      return transport::kAccessRemoteAtomic | transport::kAccessLocalWrite;
    case MemoryAccess::kRemoteFlush:
      break;  // nothing is copied
  }
  return UINT32_MAX;
}

const char* WhatIsWrong(const FullDmaClaim& claim, const Region* region, const AddressSpace* space,
                        uint64_t address, uint64_t length) {
  if (region == nullptr) return "no region has this key";
  if (region->key != claim.key) return "the region has another key";
  if (region->pd != claim.pd) return "the region is of another protection domain";
  if (region->space != space) return "the region is of another process";
  if ((region->access & RightsOf(claim.access)) != RightsOf(claim.access)) {
    return "the region does not grant the right";
  }
  if (address < region->address || length > region->length ||
      address - region->address > region->length - length) {
    return "the range leaves the region";
  }
  return nullptr;
}

}  // namespace

std::string ViolationOf(const FullDmaClaim& claim, const AddressSpace* space, uint64_t address,
                        uint64_t length) {
  const Region* region = claim.table == nullptr ? nullptr : claim.table->Find(claim.key);
  const char* wrong = claim.table == nullptr ? "no claim was made"
                                             : WhatIsWrong(claim, region, space, address, length);
  if (wrong == nullptr) return {};
  char text[512];
  std::snprintf(text, sizeof text,
                "DMA check: %s: %s of %" PRIu64 " bytes at 0x%" PRIx64
                " of process %p, key 0x%" PRIx32 ", PD %" PRIu32,
                wrong, NameOf(claim.access), length, address, static_cast<const void*>(space),
                claim.key, claim.pd);
  std::string sentence = text;
  if (region != nullptr) {
    std::snprintf(text, sizeof text,
                  "; region: %" PRIu64 " bytes at 0x%" PRIx64 " (iova 0x%" PRIx64
                  ") of process %p, key 0x%" PRIx32 ", PD %" PRIu32 ", rights 0x%" PRIx32
                  ", context %" PRIu64,
                  region->length, region->address, region->iova,
                  static_cast<const void*>(region->space), region->key, region->pd, region->access,
                  region->owner);
    sentence += text;
  }
  return sentence;
}

void CheckClaim(const FullDmaClaim& claim, const AddressSpace* space, uint64_t address,
                uint64_t length) {
  const std::string violation = ViolationOf(claim, space, address, length);
  if (violation.empty()) return;
  std::fprintf(stderr, "%s\n", violation.c_str());
  std::abort();
}

}  // namespace verbena::nic
