// SPDX-License-Identifier: Apache-2.0
//
// Shard: a set of QPs, on all NICs, with what runs them: lock, threads, timers,
// copies, doorbells. One pass is a list of named steps over everything that has
// work; threads run passes one at a time under the shard's lock and sleep when
// there is nothing to do.
//
// On scarce CPUs each CPU has a thread and whoever was woken runs the shard; with
// a CPU to spare one thread spins (docs/ARCHITECTURE.md, "Engine"). Shards share
// only the fabric and the NICs' tables of QPNs: one that is held up, by memory
// whose owner does not answer, holds up no other.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "nic_sim/device/context.h"
#include "nic_sim/engine/timer_heap.h"
#include "nic_sim/fabric/fabric.h"
#include "nic_sim/faults/device_faults.h"
#include "nic_sim/mem/dma_queue.h"
#include "nic_sim/qp/qp.h"
#include "nic_sim/queues/completion_queue.h"
#include "nic_sim/queues/shared_memory.h"
#include "nic_sim/trace/trace_ring.h"

struct rte_mempool;

namespace verbena::nic {

// Is told, under the shard's lock, when the link of some port has changed.
class LinkWatcher {
 public:
  virtual ~LinkWatcher() = default;
  virtual void OnLinkChange() = 0;
};

// What the engine sees of an opened device: where doorbells ring.
struct DoorbellSource {
  abi::ContextPage* page = nullptr;
  std::vector<Qp*>* qps = nullptr;  // by slot; may be shorter than kMaxQpSlots
  LinkWatcher* watcher = nullptr;
};

struct ShardCounters {
  uint64_t passes = 0;
  uint64_t sleeps = 0;
  uint64_t no_packet = 0;        // a requester had to wait for an mbuf
  uint64_t deadline_shifts = 0;  // the engine was starved for more than 10 ms
  uint64_t doorbells = 0;

  void Add(const ShardCounters& other) {
    passes += other.passes;
    sleeps += other.sleeps;
    no_packet += other.no_packet;
    deadline_shifts += other.deadline_shifts;
    doorbells += other.doorbells;
  }
};

class Shard final : public InboxOwner {
 public:
  struct Config {
    ShardId id = 0;
    abi::EngineMode mode = abi::kEngineThreadPerCpu;
    bool manual = false;       // no threads and no clock: RunPassAt
    std::vector<int> cpus;     // of the threads; -1: any
    bool before_apps = true;   // threads ask the kernel to run before applications
    std::vector<Nic*> nics;    // by PortId
    uint32_t max_regions = 0;  // of one NIC
    uint64_t seed = 0;         // of its keys; 0: nobody can guess them
  };
  // What it does not own; made by the first thread.
  struct Resources {
    rte_mempool* pool = nullptr;  // of the packets that it sends
    Fabric* fabric = nullptr;
    DeviceFaults* faults = nullptr;
  };
  using Prepare = std::function<bool(Resources*, std::string*)>;

  // Starts the threads; the first one calls `prepare`. nullptr with a sentence.
  static std::unique_ptr<Shard> Start(Config config, Prepare prepare, std::string* error);
  // One pass at the time `now`, if manual. True: there is more to do then.
  bool RunPassAt(transport::Time now);
  // Its QPs and doorbell sources are gone. Waits for the threads.
  ~Shard() override;

  ShardId id() const { return config_.id; }
  ShardLock& lock() { return lock_; }
  const SharedMemory& wake_page() const { return wake_memory_; }
  // Lets a sleeping thread look for work that somebody else made. Any thread.
  void Kick();
  // Once, if it is the one that serves the netdevs: starts the thread that looks
  // for frames from outside while the others sleep.
  void WatchWires();
  void OnForeignPackets() override { Kick(); }
  Fabric& fabric() { return *resources_.fabric; }
  DeviceFaults& faults() { return *resources_.faults; }

  // --- Under the lock ---
  transport::Time now() const { return now_; }
  // Reads the clock; control commands call it before they touch a QP.
  void UpdateNow();
  DmaQueue& dma() { return *dma_; }
  void MarkReady(Qp& qp);
  // Passes until what is posted to the QP has been sent, a few at most: a NIC is
  // faster than the command that destroys a QP, and programs rely on it.
  void SendPosted(Qp& qp);
  void MarkDirty(CompletionQueue& cq);
  // A rule meddles with completions, or one still waits.
  bool touches_completions() const {
    return resources_.faults->wants(DeviceFaults::kAtCompletion) | !delayed_.empty();
  }
  // Writes it when `delay` is over and those before it of the QP's queue are out.
  // False: not kept, there are too many; the caller writes it.
  bool Delay(Qp& qp, CompletionQueue& cq, const transport::Completion& completion,
             const CqeOrigin& origin, transport::Duration delay);
  // QPs that the application of `pid` has created here so far.
  std::shared_ptr<uint32_t> QpCountOf(pid_t pid);
  void AddSource(DoorbellSource* source);
  void RemoveSource(DoorbellSource* source);
  // For the first shard, which is there before the NICs.
  void AddNic(Nic* nic);
  RingBudget& ring_budget() { return ring_budget_; }
  uint32_t channel_count = 0;  // completion channels of all contexts
  // What its users have on a NIC.
  NicShare& share(const Nic& nic) { return *shares_[nic.config().index]; }
  const NicShare& share(const Nic& nic) const { return *shares_[nic.config().index]; }
  // Room in the engine's lists for the QPs and CQs that the shares count.
  void Reserve();
  void ForgetQp(Qp& qp);
  void ForgetCq(CompletionQueue& cq);
  const ShardCounters& counters() const { return counters_; }
  TraceRing& trace() { return trace_; }
  uint32_t free_packets() const;

 private:
  static constexpr size_t kTraceEvents = 32768;
  static constexpr uint32_t kBurst = 32;        // packets of one rx step or QP turn
  static constexpr uint32_t kTxBurst = 64;      // packets whose payload is fetched together
  static constexpr uint32_t kFetchBudget = 64;  // WQEs of one QP in one turn

  // A completion that a rule delays.
  struct DelayedCompletion {
    transport::Time release;
    Qp* qp = nullptr;
    CompletionQueue* cq = nullptr;
    transport::Completion completion;
    CqeOrigin origin;
  };

  // A packet on its way out, before its payload is there.
  struct Outgoing {
    rte_mbuf* packet = nullptr;
    Qp* qp = nullptr;
    transport::Psn psn;
    bool response = false;
    bool failed = false;
  };

  Shard(Config config, Prepare prepare);

  // --- shard_threads.cc
  bool Prepared(uint32_t index, std::string* error);
  void ThreadMain(uint32_t index);
  void WatchMain(const std::vector<int>& descriptors);
  void RunUntilIdle();
  bool HasReceived() const;
  bool HasWork();
  // True: there is work, or somebody has woken it.
  bool Sleep(uint32_t index);
  bool IsWokenInVain(bool woken);
  void Wake(uint32_t index);

  // --- shard.cc
  // One pass. True if something is left to do (doorbells not looked at again).
  bool RunPass();
  void CheckStarvation();
  void CheckLinks();
  bool RunDoorbells();
  bool RunReceive();
  void Receive(Nic& nic, rte_mbuf* packet);
  void ReceiveFrame(Nic& nic, rte_mbuf* packet);
  void ReceiveFromGroup(Nic& nic, const transport::PacketView& packet);
  void TraceReceived(const Nic& nic, const transport::PacketView& packet, transport::Qpn qpn,
                     DropReason reason);
  void TraceDma(uint64_t bytes, bool placed);
  void RunPlacements();
  bool RunQps();
  void Transmit(Qp& qp);
  void ReleaseWaiting();
  bool BuildPacket(Qp& qp, const transport::TxPacket& tx, bool response, rte_mbuf* packet);
  void FlushOutgoing();
  void RunTimers();
  void RunDelayed();
  void RunNotifications();
  transport::Time NextDeadline() const;

  Config config_;
  Prepare prepare_;
  Resources resources_;
  SharedMemory wake_memory_;
  abi::WakePage* wake_ = nullptr;
  std::vector<std::thread> threads_;
  std::thread watcher_;
  int watcher_stop_ = -1;  // eventfd
  std::atomic<bool> stop_{false};
  std::atomic<bool> engine_holds_lock_{false};
  std::atomic<uint32_t> vain_wakes_{0};  // in a row, of all threads
  std::atomic<bool> progress_{false};    // a WQE or packet moved since IsWokenInVain asked
  std::atomic<int> start_state_{0};      // threads that run; -1: one failed to start
  std::string start_error_;

  ShardLock lock_;
  // Everything below: under lock_.
  transport::Time now_;
  transport::Time planned_wake_ = transport::Time::Never();
  transport::Time last_pass_;
  std::unique_ptr<DmaQueue> dma_;
  RingBudget ring_budget_;
  std::vector<std::unique_ptr<NicShare>> shares_;  // by NIC
  std::vector<DoorbellSource*> sources_;
  Qp* ready_head_ = nullptr;
  Qp* ready_tail_ = nullptr;
  TimerHeap timers_;
  // How long the packets of this pass had waited in the receive queues.
  transport::Duration queue_wait_;
  std::vector<Qp*> waiting_for_netdev_;
  std::vector<CompletionQueue*> dirty_cqs_;
  std::vector<DelayedCompletion> delayed_;  // of a QP's queue in order
  std::map<pid_t, std::weak_ptr<uint32_t>> qp_counts_;
  std::vector<rte_mbuf*> received_;  // of this pass, until their bytes are placed
  Outgoing outgoing_[kTxBurst];
  uint32_t outgoing_count_ = 0;
  rte_mbuf* spare_ = nullptr;  // allocated before PollTransmit is asked
  transport::Time next_notification_ = transport::Time::Never();
  uint32_t seen_link_changes_ = 0;
  uint32_t wqes_this_pass_ = 0;
  bool worked_this_pass_ = false;
  ShardCounters counters_;
  TraceRing trace_{kTraceEvents};
  uint64_t traced_placed_ = 0, traced_fetched_ = 0;  // bytes of copies that are in the trace
};

}  // namespace verbena::nic
