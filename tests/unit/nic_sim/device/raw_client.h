// SPDX-License-Identifier: Apache-2.0
//
// RawClient: an application that programs the device interface by hand, without
// libibverbs and without the command channel: it may also write what no
// provider would.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "nic_sim/device/device.h"

namespace verbena::testing {

class RawClient {
 public:
  struct Cq {
    uint32_t handle = 0;
    uint32_t slots = 0;
    std::byte* ring = nullptr;
    uint32_t consumer = 0;
  };
  struct Qp {
    uint32_t handle = 0;
    uint32_t qpn = 0;
    abi::QpCaps caps{};
    std::byte* sq = nullptr;
    std::byte* rq = nullptr;
    uint32_t sq_slots = 0, sq_stride = 0, rq_slots = 0, rq_stride = 0;
    uint32_t sq_producer = 0, rq_producer = 0;
    uint32_t type = 2;  // enum ibv_qp_type
  };
  struct Srq {
    uint32_t handle = 0;
    uint32_t slots = 0, stride = 0;
    std::byte* ring = nullptr;
    uint32_t producer = 0;
  };

  // Opens device `index` as this process, or as if it were another user's.
  RawClient(nic::Device& device, uint32_t index, uid_t uid = getuid());
  ~RawClient();

  nic::Context& context() { return *context_; }
  abi::ContextPage& page() { return *page_; }
  uint32_t pd() const { return pd_; }

  Cq CreateCq(uint32_t entries);
  Qp CreateQp(const Cq& send_cq, const Cq& recv_cq, abi::QpCaps caps = {64, 64, 4, 4, 64},
              uint32_t type = 2, const Srq* srq = nullptr);
  Srq CreateSrq(uint32_t max_wr, uint32_t max_sge, uint64_t user_handle = 0);
  // Copies the WQE into the next slot and makes it known.
  void WriteSrqRecv(Srq& srq, uint64_t wr_id, const std::vector<abi::Sge>& sges);
  // The next record of the event pipe, or nothing.
  std::optional<abi::AsyncEventRecord> NextEvent();
  uint32_t RegMr(void* address, size_t bytes, uint32_t access);
  // RESET → RTS towards `peer_qpn` at `peer_gid`.
  int Connect(const Qp& qp, uint32_t peer_qpn, const transport::Gid& peer_gid,
              uint8_t retry_cnt = 7, uint8_t timeout = 14);
  transport::Gid gid(uint32_t index = 1);

  // Copies the WQE and its SGEs into the next slot; Ring makes them known.
  // num_sge is filled in unless the WQE has one.
  void WriteSend(Qp& qp, const abi::SendWqe& wqe, const std::vector<abi::Sge>& sges);
  void WriteRecv(Qp& qp, uint64_t wr_id, const std::vector<abi::Sge>& sges);
  void Ring(Qp& qp);
  // Waits up to `milliseconds` for the next CQE.
  std::optional<abi::Cqe*> Poll(Cq& cq, int milliseconds = 2000);

 private:
  std::byte* Map(const abi::RingLocation& location, std::vector<int>* fds);

  nic::Device& device_;
  uint32_t index_;
  nic::Context* context_ = nullptr;
  abi::ContextPage* page_ = nullptr;
  std::byte* guard_ = nullptr;
  int events_ = -1;  // read end of the event pipe
  uint32_t pd_ = 0;
  std::vector<std::pair<std::byte*, size_t>> segments_;
};

// Starts a device with `nics` NICs for a test; checks that it started.
std::unique_ptr<nic::Device> StartDevice(uint32_t nics, bool strict = false, bool system = false);

}  // namespace verbena::testing
