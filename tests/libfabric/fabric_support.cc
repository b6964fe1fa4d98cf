// SPDX-License-Identifier: Apache-2.0
#include "tests/libfabric/fabric_support.h"

#include <sched.h>

#include <chrono>
#include <cstring>

namespace verbena::testing {

Info GetInfo(const char* provider, fi_ep_type type, uint64_t caps, const char* address,
             const char* service, uint64_t flags) {
  const Info hints(fi_allocinfo());
  hints->fabric_attr->prov_name = strdup(provider);
  hints->ep_attr->type = type;
  hints->caps = caps;
  hints->mode = FI_CONTEXT | FI_MSG_PREFIX;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  fi_info* info = nullptr;
  if (fi_getinfo(FI_VERSION(1, 17), address, service, flags, hints.get(), &info) != 0) {
    return nullptr;
  }
  return Info(info);
}

std::vector<uint8_t> Pattern(size_t bytes, uint32_t seed) {
  std::vector<uint8_t> pattern(bytes);
  uint32_t state = seed * 2654435761u + 1;
  for (uint8_t& byte : pattern) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<uint8_t>(state >> 24);
  }
  return pattern;
}

Side::Side(Info info) : info_(std::move(info)) {
  fid_fabric* fabric = nullptr;
  fid_domain* domain = nullptr;
  fid_cq* cq = nullptr;
  EXPECT_EQ(fi_fabric(info_->fabric_attr, &fabric, nullptr), 0);
  fabric_.reset(fabric);
  EXPECT_EQ(fi_domain(fabric, info_.get(), &domain, nullptr), 0);
  domain_.reset(domain);
  fi_cq_attr attr{};
  attr.size = 1024;
  attr.format = info_->ep_attr->type == FI_EP_RDM ? FI_CQ_FORMAT_TAGGED : FI_CQ_FORMAT_DATA;
  EXPECT_EQ(fi_cq_open(domain, &attr, &cq, nullptr), 0);
  cq_.reset(cq);
}

Side::~Side() = default;

std::unique_ptr<Side::Memory> Side::Allocate(size_t bytes, uint8_t fill) {
  auto memory = std::make_unique<Memory>();
  memory->bytes.assign(bytes, fill);
  fid_mr* region = nullptr;
  // A key of our own counts only where the provider does not choose.
  EXPECT_EQ(fi_mr_reg(domain_.get(), memory->bytes.data(), bytes,
                      FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0,
                      next_key_++, 0, &region, nullptr),
            0);
  memory->region.reset(region);
  return memory;
}

std::optional<Outcome> Side::Poll() {
  Outcome outcome;
  const ssize_t count = fi_cq_read(cq_.get(), &outcome.entry, 1);
  if (count == 1) return outcome;
  if (count != -FI_EAVAIL) {
    EXPECT_EQ(count, -FI_EAGAIN);
    return std::nullopt;
  }
  fi_cq_err_entry error{};
  EXPECT_EQ(fi_cq_readerr(cq_.get(), &error, 0), 1);
  outcome.entry.op_context = error.op_context;
  outcome.entry.flags = error.flags;
  outcome.error = error.err;
  return outcome;
}

bool WaitUntil(const std::function<bool()>& done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    sched_yield();
  }
  return true;
}

}  // namespace verbena::testing
