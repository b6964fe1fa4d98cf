// SPDX-License-Identifier: Apache-2.0
//
// A device without an engine: the daemon's socket, its tree of files and its
// shared memory, with answers and completions that the test decides. One per
// process, because the preload looks for a daemon once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "nic_sim/abi/shared_memory.h"
#include "nic_sim/abi/work_queue.h"

namespace verbena::provider {

// How the next reply is spoiled.
enum class Spoil {
  kNothing,
  kTooShort,
  kTooLong,
  kWrongSequence,
  kHeaderOnly,
  kCloseConnection,
};

class FakeDevice {
 public:
  // Makes DIR/fake.sock and DIR/fake.tree in a new folder below /tmp, sets
  // VERBENA_SOCKET and serves until destruction.
  FakeDevice();
  ~FakeDevice();
  FakeDevice(const FakeDevice&) = delete;
  FakeDevice& operator=(const FakeDevice&) = delete;

  // The one of this process, made at first use.
  static FakeDevice& Get();

  const std::string& folder() const { return folder_; }
  std::string socket_path() const { return folder_ + "/fake.sock"; }
  std::string tree() const { return folder_ + "/fake.tree"; }

  // What the next Hello is answered with.
  void SetHelloError(int error) { hello_error_ = error; }
  void SetHelloVersion(uint16_t version) { hello_version_ = version; }
  // Applies to the next command of this kind, once.
  void FailNext(abi::CommandOp op, int error);
  void SpoilNext(Spoil how) { spoil_ = how; }
  abi::Hello hello() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return hello_;
  }

  // Last request of a kind, zero if there was none.
  template <typename Request>
  Request Last(abi::CommandOp op) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Request request = {};
    const std::vector<uint8_t>& bytes = last_[op];
    if (bytes.size() == sizeof(request)) memcpy(&request, bytes.data(), bytes.size());
    return request;
  }

  // Shared memory of the context that was opened last.
  abi::ContextPage* page() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return page_;
  }
  abi::WakePage* wake() { return wake_; }
  abi::StatusPage* status() { return status_; }

  struct QpView {
    uint32_t qpn;
    uint32_t generation;
    abi::QpCaps caps;
    uint8_t* sq;
    uint32_t sq_slots;
    uint32_t sq_stride;
    uint8_t* rq;
    uint32_t rq_slots;
    uint32_t rq_stride;
    uint64_t user_handle;
    const abi::SendWqe& Send(uint32_t index) const;
    const abi::Sge* SendSges(uint32_t index) const;
    const uint8_t* SendInline(uint32_t index) const;
    const abi::RecvWqe& Recv(uint32_t index) const;
    const abi::Sge* RecvSges(uint32_t index) const;
  };
  QpView Qp(uint32_t handle);

  // What a CQE is made of.
  struct Completion {
    uint32_t qp;
    bool send;
    uint32_t wqe_index;
    uint64_t wr_id = 0;
    uint8_t status = 0;
    uint8_t opcode = 0;
    uint8_t flags = 0;
    uint8_t sl = 0;
    uint32_t byte_len = 0;
    uint32_t imm_or_inv = 0;
    uint32_t src_qpn = 0;
    uint32_t vendor_err = 0;
    uint32_t generations_ago = 0;
  };
  // Appends a CQE to a CQ.
  void Complete(uint32_t cq, const Completion& completion);
  uint32_t cq_slots(uint32_t cq);
  // Completion event, async event.
  void SendCompEvent(uint32_t cq);
  void SendQpEvent(uint32_t qp, uint32_t type);

  // Waits until every client has hung up; false after some seconds.
  bool WaitForNoClients();

 private:
  struct Cq {
    uint8_t* ring;
    uint32_t slots;
    uint32_t produced;
    uint64_t user_handle;
    int event_fd;
    uint32_t comp_events;
  };
  struct Client;

  void MakeTree();
  void Serve();
  void Handle(Client* client);
  void HandleHello(Client* client, const std::vector<uint8_t>& bytes);
  void HandleCommand(Client* client, const std::vector<uint8_t>& bytes, int fd);
  abi::RingLocation MakeRing(uint32_t slots, uint32_t stride, std::vector<int>* fds,
                             uint8_t** base);
  void Reply(Client* client, std::vector<uint8_t> bytes, const std::vector<int>& fds);

  std::string folder_;
  int listener_ = -1;
  int stop_[2] = {-1, -1};
  std::thread thread_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::atomic<int> client_count_{0};

  std::atomic<int> hello_error_{0};
  std::atomic<uint16_t> hello_version_{abi::kVersionMax};
  std::atomic<Spoil> spoil_{Spoil::kNothing};
  std::map<uint16_t, int> fail_;
  std::map<uint16_t, std::vector<uint8_t>> last_;
  abi::Hello hello_ = {};

  abi::ContextPage* page_ = nullptr;
  abi::WakePage* wake_ = nullptr;
  abi::StatusPage* status_ = nullptr;
  int wake_fd_ = -1;
  int status_fd_ = -1;
  int async_write_fd_ = -1;
  uint8_t* segment_ = nullptr;
  uint32_t segment_number_ = 0;
  bool segment_sent_ = false;
  uint64_t segment_used_ = 0;

  std::map<uint32_t, Cq> cqs_;
  std::map<uint32_t, QpView> qps_;
  std::map<uint32_t, uint32_t> async_events_;
  uint32_t next_handle_ = 1;
  uint32_t next_generation_ = 100;
};

}  // namespace verbena::provider
