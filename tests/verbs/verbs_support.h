// SPDX-License-Identifier: Apache-2.0
//
// What the verbs conformance tests share: owners for verbs objects, a connected RC end, registered
// memory, completion helpers, data patterns, and roles (the test program started again as another
// process). Only the public <infiniband/verbs.h> is used.
//
// Set-up errors throw std::runtime_error with errno in words: GoogleTest reports them as failures.
#pragma once

#include <infiniband/verbs.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tests/testing/process.h"

namespace verbena::testing {

struct VerbsDeleter {
  void operator()(ibv_context* object) const { ibv_close_device(object); }
  void operator()(ibv_pd* object) const { ibv_dealloc_pd(object); }
  void operator()(ibv_mr* object) const { ibv_dereg_mr(object); }
  void operator()(ibv_cq* object) const { ibv_destroy_cq(object); }
  void operator()(ibv_qp* object) const { ibv_destroy_qp(object); }
  void operator()(ibv_srq* object) const { ibv_destroy_srq(object); }
  void operator()(ibv_ah* object) const { ibv_destroy_ah(object); }
  void operator()(ibv_mw* object) const { ibv_dealloc_mw(object); }
  void operator()(ibv_dm* object) const { ibv_free_dm(object); }
  void operator()(ibv_wq* object) const { ibv_destroy_wq(object); }
  void operator()(ibv_rwq_ind_table* object) const { ibv_destroy_rwq_ind_table(object); }
  void operator()(ibv_comp_channel* object) const { ibv_destroy_comp_channel(object); }
};
template <typename T>
using Owned = std::unique_ptr<T, VerbsDeleter>;

// Throws "WHAT: strerror(errno)" if `object` is null.
void Require(bool good, const std::string& what);

Owned<ibv_context> OpenDevice(const std::string& name = "verbena0");

inline constexpr unsigned kAllAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                       IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

// Anonymous mapping, registered. Released in the right order.
class Memory {
 public:
  Memory(ibv_pd* pd, size_t bytes, unsigned access = kAllAccess);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<uint8_t> bytes() const { return {data_, size_}; }
  uint64_t address(size_t offset = 0) const { return reinterpret_cast<uint64_t>(data_) + offset; }
  ibv_sge sge(size_t offset, size_t length) const {
    return {address(offset), static_cast<uint32_t>(length), mr_->lkey};
  }
  uint32_t lkey() const { return mr_->lkey; }
  uint32_t rkey() const { return mr_->rkey; }
  ibv_mr* mr() const { return mr_.get(); }
  // Takes the pages away below the registration.
  void Unmap(size_t offset, size_t length);

 private:
  uint8_t* data_;
  size_t size_;
  Owned<ibv_mr> mr_;
};

struct EndOptions {
  std::string device = "verbena0";
  int gid_index = 1;
  uint32_t send_wr = 64;
  uint32_t recv_wr = 64;
  uint32_t sge = 8;
  uint32_t max_inline = 0;
  int cqe = 256;
  bool sq_sig_all = false;
  bool channel = false;
  ibv_qp_type type = IBV_QPT_RC;  // or UC
  ibv_srq* srq = nullptr;
  uint64_t send_ops = 0;  // IBV_QP_EX_WITH_*: an extended QP
};

struct PathOptions {
  ibv_mtu mtu = IBV_MTU_1024;
  uint8_t timeout = 14;  // 67 ms
  uint8_t retry_cnt = 7;
  uint8_t rnr_retry = 7;
  uint8_t min_rnr_timer = 8;  // 0.16 ms
  uint8_t rd_atomic = 16;
  unsigned access = kAllAccess;
};

// How another QP is reached; travels between processes as text.
struct PeerAddress {
  uint32_t qpn = 0;
  uint32_t psn = 0;
  ibv_gid gid = {};

  std::string Text() const;  // "qpn:psn:32 hex digits"
  static PeerAddress Parse(const std::string& text);
};

// One RC (or UC) QP with everything that it needs.
class RcEnd {
 public:
  explicit RcEnd(const EndOptions& options = {});
  // A further QP on the objects of `other`, which must live longer.
  RcEnd(const RcEnd& other, const EndOptions& options);
  RcEnd(ibv_context* context, ibv_pd* pd, const EndOptions& options = {});

  ibv_context* context() const { return context_; }
  ibv_pd* pd() const { return pd_; }
  ibv_cq* send_cq() const { return send_cq_.get(); }
  ibv_cq* recv_cq() const { return recv_cq_.get(); }
  ibv_comp_channel* channel() const { return channel_.get(); }
  ibv_qp* qp() const { return qp_.get(); }
  PeerAddress address() const;

  // modify_qp; the result is its return value.
  int ToInit(const PathOptions& path = {});
  int ToRtr(const PeerAddress& peer, const PathOptions& path = {});
  int ToRts(const PathOptions& path = {});
  int ToState(ibv_qp_state state);
  void Connect(const PeerAddress& peer, const PathOptions& path = {});  // throws
  void DestroyQp() { qp_.reset(); }

  ibv_qp_state State() const;  // by ibv_query_qp

  // Return values of ibv_post_*; a null list means no SGE.
  int PostSend(ibv_send_wr wr, std::vector<ibv_sge> sges = {});
  int PostRecv(uint64_t wr_id, std::vector<ibv_sge> sges = {});

 private:
  void CreateQp(const EndOptions& options);

  Owned<ibv_context> owned_context_;
  ibv_context* context_ = nullptr;
  Owned<ibv_pd> owned_pd_;
  ibv_pd* pd_ = nullptr;
  Owned<ibv_comp_channel> channel_;
  Owned<ibv_cq> send_cq_;
  Owned<ibv_cq> recv_cq_;
  Owned<ibv_qp> qp_;
  int gid_index_ = 1;
  uint32_t psn_ = 0;
};

void ConnectPair(RcEnd& a, RcEnd& b, const PathOptions& path = {});

ibv_send_wr SendWr(uint64_t wr_id, ibv_wr_opcode opcode = IBV_WR_SEND,
                   unsigned flags = IBV_SEND_SIGNALED);
ibv_send_wr RdmaWr(uint64_t wr_id, ibv_wr_opcode opcode, uint64_t remote_address, uint32_t rkey,
                   unsigned flags = IBV_SEND_SIGNALED);
ibv_send_wr AtomicWr(uint64_t wr_id, ibv_wr_opcode opcode, uint64_t remote_address, uint32_t rkey,
                     uint64_t compare_add, uint64_t swap = 0);

// Next completion; throws when none comes within the limit.
ibv_wc PollOne(ibv_cq* cq, Milliseconds limit = Milliseconds(20000));
// True if nothing arrives for `time`.
bool StaysEmpty(ibv_cq* cq, Milliseconds time);
// "wr 3: transport retry counter exceeded"
std::string Describe(const ibv_wc& wc);

// Next async event (acknowledged), or nothing within the limit.
std::optional<ibv_async_event> NextAsyncEvent(ibv_context* context, Milliseconds limit);
// Next completion event: its CQ (event acknowledged), or null within the limit.
ibv_cq* NextCqEvent(ibv_comp_channel* channel, Milliseconds limit);

// Deterministic bytes: byte `offset` of message `id`.
uint8_t PatternByte(uint64_t id, uint64_t offset);
void FillPattern(std::span<uint8_t> bytes, uint64_t id, uint64_t first_offset = 0);
// Offset of the first difference, or nothing.
std::optional<size_t> PatternMismatch(std::span<const uint8_t> bytes, uint64_t id,
                                      uint64_t first_offset = 0);

// splitmix64; a test prints its seed.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next();
  // 0 .. limit-1
  uint64_t Below(uint64_t limit) { return limit == 0 ? 0 : Next() % limit; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }

 private:
  uint64_t state_;
};

// $VERBENA_TEST_SEED or a fixed one, printed by failing tests through SCOPED_TRACE.
uint64_t TestSeed();

// A role: the part of a test that runs in another process. Registered by
// VERBENA_ROLE(name) { ... return exit status; } with `arguments`.
using RoleFunction = int (*)(const std::vector<std::string>& arguments);
bool RegisterRole(const char* name, RoleFunction function);
std::optional<int> RunRole(int argc, char** argv);  // for main()
#define VERBENA_ROLE(name)                                                                         \
  static int Role_##name(const std::vector<std::string>& arguments);                               \
  static const bool role_registered_##name = ::verbena::testing::RegisterRole(#name, Role_##name); \
  static int Role_##name([[maybe_unused]] const std::vector<std::string>& arguments)

// This program again, as role `name`, in this environment.
ProcessOptions RoleProcess(const std::string& name, const std::vector<std::string>& arguments = {});
// argv of the above, to be started under another daemon.
std::vector<std::string> RoleCommand(const std::string& name,
                                     const std::vector<std::string>& arguments = {});

}  // namespace verbena::testing
