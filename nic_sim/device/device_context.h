// SPDX-License-Identifier: Apache-2.0
//
// DeviceContext: one opened device of one application: its objects, rings and
// event pipe. Everything in here dies with it.
//
// Thread: control calls under the shard's lock, lock(); QpEventSink from the
// engine, under the same lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/device/context.h"
#include "nic_sim/engine/shard.h"
#include "nic_sim/mem/address_space.h"
#include "nic_sim/qp/nic.h"
#include "nic_sim/qp/qp.h"
#include "nic_sim/qp/xrc_domain.h"
#include "nic_sim/queues/completion_queue.h"
#include "nic_sim/queues/shared_memory.h"
#include "nic_sim/queues/shared_receive_queue.h"

namespace verbena::nic {

class DeviceContext final : public Context,
                            public QpEventSink,
                            public SrqEventSink,
                            public XrcOpener::Sink,
                            public LinkWatcher {
 public:
  DeviceContext(Shard& shard, Nic& nic, const UserLimits& limits, uint64_t cookie,
                ClientIdentity client, std::unique_ptr<AddressSpace> space, SharedMemory page);
  ~DeviceContext() override;

  pid_t pid() const override { return client_.pid; }
  uint64_t cookie() const override { return cookie_; }
  ShardLock& lock() override { return shard_.lock(); }
  void TraceCommand(uint32_t op, int error) override;
  int wake_page_fd() const override { return shard_.wake_page().fd(); }

  int AllocPd(uint32_t* handle) override;
  int DeallocPd(uint32_t handle) override;
  int RegMr(const abi::RegMrRequest& request, abi::RegMrReply* reply) override;
  int DeregMr(uint32_t handle) override;
  // memory_commands.cc
  int ReregMr(const abi::ReregMrRequest& request) override;
  int AllocNullMr(uint32_t pd, abi::RegMrReply* reply) override;
  int QueryMr(uint32_t lkey, abi::QueryMrReply* reply) override;
  int AllocMw(const abi::AllocMwRequest& request, uint32_t* rkey) override;
  int DeallocMw(uint32_t handle) override;
  int AllocDm(const abi::AllocDmRequest& request, int fd, uint32_t* handle) override;
  int FreeDm(uint32_t handle) override;
  int ImportPd(const abi::ImportRequest& request) override;
  int ImportMr(const abi::ImportRequest& request, abi::QueryMrReply* reply) override;
  int ImportDm(const abi::ImportRequest& request, uint64_t* length, int* fd) override;

  int CreateCq(const abi::CreateCqRequest& request, int channel_fd, abi::CreateCqReply* reply,
               SegmentFds* fds) override;
  int DestroyCq(uint32_t handle, abi::DestroyReply* reply) override;
  int ResizeCq(const abi::ResizeCqRequest& request, abi::CreateCqReply* reply,
               SegmentFds* fds) override;
  int FinishCqResize(uint32_t handle) override;
  int ModifyCq(const abi::ModifyCqRequest& request) override;
  int CreateQp(const abi::CreateQpRequest& request, abi::CreateQpReply* reply,
               SegmentFds* fds) override;
  int ModifyQp(const abi::ModifyQpRequest& request, abi::ModifyQpReply* reply) override;
  int QueryQp(uint32_t handle, abi::QueryQpReply* reply) override;
  int DestroyQp(uint32_t handle, abi::DestroyReply* reply) override;
  int CreateSrq(const abi::CreateSrqRequest& request, abi::CreateSrqReply* reply,
                SegmentFds* fds) override;
  int ModifySrq(const abi::ModifySrqRequest& request, abi::ModifySrqReply* reply,
                SegmentFds* fds) override;
  int FinishSrqResize(const abi::FinishSrqResizeRequest& request) override;
  int QuerySrq(uint32_t handle, abi::QuerySrqReply* reply) override;
  int DestroySrq(uint32_t handle, abi::DestroyReply* reply) override;
  int AttachMcast(const abi::McastRequest& request) override;
  int DetachMcast(const abi::McastRequest& request) override;
  // flow_commands.cc
  int CreateFlow(const abi::CreateFlowRequest& request, uint32_t* handle) override;
  int DestroyFlow(uint32_t handle) override;
  int CreateCounters(uint32_t* handle) override;
  int DestroyCounters(uint32_t handle) override;
  int ReadCounters(uint32_t handle, abi::ReadCountersReply* reply) override;
  int CreateRss(const abi::CreateRssRequest& request, uint32_t* handle) override;
  int DestroyRss(uint32_t handle) override;
  int LimitQpRate(const abi::LimitQpRateRequest& request) override;
  int OpenXrcd(const abi::OpenXrcdRequest& request, int fd, uint32_t* handle) override;
  int CloseXrcd(uint32_t handle) override;
  int OpenQp(const abi::OpenQpRequest& request, abi::OpenQpReply* reply) override;
  int CreateAh(const abi::CreateAhRequest& request, uint32_t* handle) override;
  int DestroyAh(uint32_t handle) override;
  int QueryPort(uint32_t port, abi::QueryPortReply* reply) override;
  int GetSegment(uint32_t segment, SegmentFds* fds) override;

  int InjectedError(uint16_t op) override;
  int CheckFault(const abi::CheckFaultRequest& request) override;
  bool removed() const override { return removed_; }
  // fault_commands.cc: what rules want of all contexts.
  void SetCheckedVerbs(uint32_t verbs) {
    page_->checked_verbs.store(verbs, std::memory_order_relaxed);
  }
  void Remove() { removed_ = true; }
  // Of a rule whose time has come: qp_error, event. Gives the subjects that it hit.
  std::vector<FaultSubject> ApplyFault(const DeviceFaults::Due& due);
  void ReportGidChange(const Nic& nic);
  FaultSubject fault_subject() const;

  const AddressHandle* FindAh(uint32_t handle) const override;
  void OnQpEvent(Qp& qp, transport::AsyncEventType type) override;
  void OnCqOverrun(CompletionQueue& cq) override;
  void OnInjectedEvent(Qp& qp, CompletionQueue* cq, uint8_t type) override;
  void OnLinkChange() override;
  void OnSrqEvent(SharedReceiveQueue& srq, transport::AsyncEventType type) override;
  void OnXrcQpEvent(Qp& target, XrcOpener& opener, transport::AsyncEventType type) override;

  // For listings.
  const Nic& nic() const { return nic_; }
  const NicShare& share() const { return share_; }
  const ClientIdentity& client() const { return client_; }
  const AddressSpace& space() const { return *space_; }
  const RingAllocator& rings() const { return rings_; }
  const std::unordered_map<uint32_t, uint32_t>& pds() const { return pds_; }
  const std::unordered_set<uint32_t>& mrs() const { return mrs_; }
  const std::unordered_map<uint32_t, uint32_t>& mws() const { return mws_; }
  const std::vector<std::unique_ptr<CompletionQueue>>& cqs() const { return cqs_; }
  const std::vector<Qp*>& qps() const { return qps_; }
  // Receiving XRC QPs are listed with the first of those who have them open.
  template <typename Visitor>
  void ForEachXrcQp(Visitor visit) const {
    for (const auto& [handle, entry] : xrc_qps_) {
      if (entry.target->openers.front() == entry.opener.get()) visit(*entry.target->qp);
    }
  }
  const std::vector<std::unique_ptr<SharedReceiveQueue>>& srqs() const { return srqs_; }
  const std::unordered_map<uint32_t, AddressHandle>& ahs() const { return ahs_; }
  // Calls visit(handle, bytes).
  template <typename Visitor>
  void ForEachDm(Visitor visit) const {
    for (const auto& [handle, memory] : dms_) visit(handle, memory.length);
  }
  // Calls visit(handle, domain, objects made through it).
  template <typename Visitor>
  void ForEachXrcd(Visitor visit) const {
    for (const auto& [handle, entry] : xrcds_) visit(handle, *entry.domain, entry.objects);
  }
  // Calls visit(handle, QPN, 0: of a QP that spreads).
  template <typename Visitor>
  void ForEachFlow(Visitor visit) const {
    for (const auto& [handle, flow] : flows_) {
      visit(handle, flow.qp != nullptr ? flow.qp->qpn().value() : 0);
    }
  }

 private:
  CompletionQueue* FindCq(uint32_t handle) const {
    return handle < cqs_.size() ? cqs_[handle].get() : nullptr;
  }
  Qp* FindQp(uint32_t handle) const {
    if (handle < qps_.size()) return qps_[handle];
    const auto found = xrc_qps_.find(handle);
    return found == xrc_qps_.end() ? nullptr : found->second.target->qp.get();
  }
  // The context that an import names; nullptr: there is none.
  const DeviceContext* SourceOf(const abi::ImportRequest& request) const;
  void FreeMemoryObjects();
  SharedReceiveQueue* FindSrq(uint32_t handle) const {
    return handle < srqs_.size() ? srqs_[handle].get() : nullptr;
  }
  // Takes `fd` over unless there is an error.
  int ChannelOf(int fd, std::shared_ptr<EventChannel>* channel);
  int CheckQpRequest(const abi::CreateQpRequest& request) const;
  void DeleteQp(Qp* qp);
  void SendPosted(Qp& qp);
  void Detach(Qp& qp, const transport::Gid& group);
  void DestroyFlowsOf(const Qp& qp);
  void ForgetSrq(SharedReceiveQueue& srq);
  int CreateXrcTarget(const abi::CreateQpRequest& request, abi::CreateQpReply* reply);
  uint32_t AddOpener(XrcTarget* target, uint32_t xrcd, uint64_t user_handle);
  uint32_t CloseXrcQp(uint32_t handle);  // gives the events written for it
  void ReleaseDomain(XrcDomain* domain);
  void ReleaseXrc();
  // Into the context's pipe and the trace. `qpn`: of an event of a QP.
  bool WriteEvent(uint64_t element, transport::AsyncEventType type, uint32_t qpn = 0);

  Shard& shard_;
  Nic& nic_;
  NicShare& share_;
  const UserLimits& limits_;
  uint64_t cookie_;
  ClientIdentity client_;
  std::unique_ptr<AddressSpace> space_;
  SharedMemory memory_;
  abi::ContextPage* page_;
  RingAllocator rings_;
  DoorbellSource source_;
  bool link_up_;  // as the application was told
  std::atomic<bool> removed_{false};
  std::shared_ptr<uint32_t> qp_count_;  // of the application

  // A piece of device memory: the file that backs it.
  struct DeviceMemory {
    uint64_t length = 0;
    int fd = -1;
  };

  std::unordered_map<uint32_t, uint32_t> pds_;  // handle → objects in it
  std::unordered_set<uint32_t> imported_pds_;   // of those; they count elsewhere
  std::unordered_map<uint32_t, uint32_t> mws_;  // handle = first key → PD
  std::unordered_map<uint32_t, DeviceMemory> dms_;
  uint32_t next_dm_ = 1;
  std::unordered_set<uint32_t> mrs_;  // handle = key
  std::unordered_map<uint32_t, AddressHandle> ahs_;
  uint32_t next_ah_ = 1;
  std::vector<std::unique_ptr<CompletionQueue>> cqs_;      // by slot
  std::vector<Qp*> qps_;                                   // by slot, owned
  std::vector<std::unique_ptr<SharedReceiveQueue>> srqs_;  // by slot
  struct XrcdHandle {
    XrcDomain* domain = nullptr;
    uint32_t objects = 0;  // SRQs and QPs made through it
  };
  struct XrcQpHandle {
    XrcTarget* target = nullptr;
    std::unique_ptr<XrcOpener> opener;
  };
  std::unordered_map<uint32_t, XrcdHandle> xrcds_;
  uint32_t next_xrcd_ = 1;
  std::unordered_map<uint32_t, XrcQpHandle> xrc_qps_;  // handles beyond the slots
  uint32_t next_xrc_qp_ = abi::kMaxQpSlots;
  std::vector<std::weak_ptr<EventChannel>> channels_;
  struct Flow {
    Qp* qp = nullptr;               // or
    uint32_t rss = abi::kNoHandle;  // this
    uint32_t counters = abi::kNoHandle;
  };
  struct CountersObject {
    std::shared_ptr<FlowCounters> counts;
    uint32_t flows = 0;  // rules that count here
  };
  std::unordered_map<uint32_t, Flow> flows_;  // by the fabric's id
  std::unordered_map<uint32_t, CountersObject> counters_;
  uint32_t next_counters_ = 1;
  struct Rss {
    std::shared_ptr<const RssTable> table;
    uint32_t flows = 0;  // rules that lead here
  };
  std::unordered_map<uint32_t, Rss> rss_;
  uint32_t next_rss_ = abi::kFirstRssHandle;
};

}  // namespace verbena::nic
