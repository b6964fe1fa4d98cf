// SPDX-License-Identifier: Apache-2.0
//
// Endpoints of libfabric's verbs provider for the tests: two in one process, each
// on a NIC of its own, with all that belongs to them.
#pragma once

#include <gtest/gtest.h>
#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace verbena::testing {

inline constexpr const char* kFirstNic = "127.88.0.1";
inline constexpr const char* kSecondNic = "127.88.0.2";

struct InfoDeleter {
  void operator()(fi_info* info) const { fi_freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, InfoDeleter>;

// Closes a fid of libfabric.
struct FidDeleter {
  template <typename T>
  void operator()(T* object) const {
    EXPECT_EQ(fi_close(&object->fid), 0);
  }
};
template <typename T>
using Fid = std::unique_ptr<T, FidDeleter>;

// A call that must give 0.
#define FI_OK(call)                                                    \
  do {                                                                 \
    const auto result_of_call = (call);                                \
    ASSERT_EQ(result_of_call, 0) << fi_strerror(int(-result_of_call)); \
  } while (false)

// The first answer of fi_getinfo for `provider` ("verbs", "verbs;ofi_rxm");
// nullptr if there is none. With FI_SOURCE in `flags` the address is the own one.
Info GetInfo(const char* provider, fi_ep_type type, uint64_t caps, const char* address,
             const char* service, uint64_t flags);

std::vector<uint8_t> Pattern(size_t bytes, uint32_t seed);

struct Outcome {
  fi_cq_tagged_entry entry{};
  int error = 0;  // of fi_errno; 0: it went well
};

// Domain, completion queue, memory.
class Side {
 public:
  explicit Side(Info info);
  ~Side();

  fi_info* info() const { return info_.get(); }
  fid_fabric* fabric() const { return fabric_.get(); }
  fid_domain* domain() const { return domain_.get(); }
  fid_cq* cq() const { return cq_.get(); }

  // Bytes that the device and the peer may reach, filled with `fill`.
  struct Memory {
    std::vector<uint8_t> bytes;
    Fid<fid_mr> region;
    void* descriptor() const { return fi_mr_desc(region.get()); }
    uint64_t key() const { return fi_mr_key(region.get()); }
    uint64_t address(const fi_info* info) const {
      return (info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0
                 ? reinterpret_cast<uint64_t>(bytes.data())
                 : 0;
    }
  };
  std::unique_ptr<Memory> Allocate(size_t bytes, uint8_t fill = 0);

  // Polls once; for progress, too.
  std::optional<Outcome> Poll();

 private:
  Info info_;
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
  Fid<fid_cq> cq_;
  uint64_t next_key_ = 1;
};

// Calls `done` until it is true; false after 20 s.
bool WaitUntil(const std::function<bool()>& done);

}  // namespace verbena::testing
