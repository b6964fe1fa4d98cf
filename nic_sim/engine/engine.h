// SPDX-License-Identifier: Apache-2.0
//
// Engine: runs the QPs of all NICs. One pass is a list of named steps over
// everything that has work; threads run passes one at a time under the shard's
// lock and sleep when there is nothing to do.
//
// Today there is one shard. On scarce CPUs each CPU has a thread and whoever
// was woken runs the shard; with a CPU to spare one thread spins
// (docs/ARCHITECTURE.md, "Engine").
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "nic_sim/device/device.h"
#include "nic_sim/engine/timer_heap.h"
#include "nic_sim/fabric/fabric.h"
#include "nic_sim/mem/dma_queue.h"
#include "nic_sim/qp/qp.h"
#include "nic_sim/queues/completion_queue.h"
#include "nic_sim/queues/shared_memory.h"

struct rte_mempool;

namespace verbena::nic {

// What the engine sees of an opened device: where doorbells ring.
struct DoorbellSource {
  abi::ContextPage* page = nullptr;
  std::vector<Qp*>* qps = nullptr;  // by slot; may be shorter than kMaxQpSlots
};

struct EngineCounters {
  uint64_t passes = 0;
  uint64_t sleeps = 0;
  uint64_t no_packet = 0;        // a requester had to wait for an mbuf
  uint64_t deadline_shifts = 0;  // the engine was starved for more than 10 ms
  uint64_t doorbells = 0;
};

class Engine {
 public:
  // Starts EAL (on the first engine thread) and the threads. nullptr with a
  // sentence.
  static std::unique_ptr<Engine> Start(const DeviceOptions& options, std::string* error);
  ~Engine();

  // With DeviceOptions::Mode::kManual; see Device::RunPass.
  bool RunPassAt(transport::Time now);

  ShardLock& lock() { return lock_; }
  abi::EngineMode mode() const { return mode_; }
  uint32_t thread_count() const { return static_cast<uint32_t>(threads_.size()); }
  const SharedMemory& wake_page() const { return wake_memory_; }
  // Fills in what applications must know about the threads.
  void Describe(abi::StatusPage* page) const;

  // --- Under the lock ---
  transport::Time now() const { return now_; }
  // Reads the clock; control commands call it before they touch a QP.
  void UpdateNow();
  Fabric& fabric() { return *fabric_; }
  DmaQueue& dma() { return *dma_; }
  void MarkReady(Qp& qp);
  void MarkDirty(CompletionQueue& cq);
  void AddSource(DoorbellSource* source);
  void RemoveSource(DoorbellSource* source);
  // QPs come and go; the ports' table of NICs is fixed.
  void AddNic(Nic* nic);
  // Room for this many objects in the engine's lists.
  void Reserve(size_t qps, size_t cqs) {
    timers_.Reserve(qps);
    dirty_cqs_.reserve(cqs);
  }
  void ForgetQp(Qp& qp);
  void ForgetCq(CompletionQueue& cq);
  // Lets a sleeping thread look for work that a control command made.
  void Kick();
  const EngineCounters& counters() const { return counters_; }
  uint32_t free_packets() const;

 private:
  static constexpr uint32_t kBurst = 32;        // packets of one rx step or QP turn
  static constexpr uint32_t kTxBurst = 64;      // packets whose payload is fetched together
  static constexpr uint32_t kFetchBudget = 64;  // WQEs of one QP in one turn

  // A packet on its way out, before its payload is there.
  struct Outgoing {
    rte_mbuf* packet = nullptr;
    Qp* qp = nullptr;
    transport::Psn psn;
    bool response = false;
    bool failed = false;
  };

  explicit Engine(const DeviceOptions& options);

  // --- threads.cc
  bool Initialise(std::string* error);
  bool ChooseThreads(std::string* error);
  void ThreadMain(uint32_t index);
  void RunUntilIdle();
  bool HasReceived() const;
  bool HasWork();
  void Sleep(uint32_t index);
  void Wake(uint32_t index);

  // --- engine.cc
  // One pass. True if something is left to do (doorbells not looked at again).
  bool RunPass();
  void CheckStarvation();
  bool RunDoorbells();
  bool RunReceive();
  void Receive(Nic& nic, rte_mbuf* packet);
  void RunPlacements();
  bool RunQps();
  void Transmit(Qp& qp);
  bool BuildPacket(Qp& qp, const transport::TxPacket& tx, bool response, rte_mbuf* packet);
  void FlushOutgoing();
  void RunTimers();
  void RunNotifications();
  transport::Time NextDeadline() const;

  DeviceOptions options_;
  abi::EngineMode mode_ = abi::kEngineThreadPerCpu;
  std::vector<int> cpus_;  // of the threads; -1: any
  SharedMemory wake_memory_;
  abi::WakePage* wake_ = nullptr;
  std::vector<std::thread> threads_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> engine_holds_lock_{false};
  std::atomic<int> start_state_{0};  // threads that run; -1: one failed to start
  std::string start_error_;

  ShardLock lock_;
  // Everything below: under lock_.
  transport::Time now_;
  transport::Time planned_wake_ = transport::Time::Never();
  transport::Time last_pass_;
  std::unique_ptr<Fabric> fabric_;
  std::unique_ptr<DmaQueue> dma_;
  rte_mempool* pool_ = nullptr;
  std::vector<Nic*> nics_;  // by PortId
  std::vector<DoorbellSource*> sources_;
  Qp* ready_head_ = nullptr;
  Qp* ready_tail_ = nullptr;
  TimerHeap timers_;
  std::vector<CompletionQueue*> dirty_cqs_;
  std::vector<rte_mbuf*> received_;  // of this pass, until their bytes are placed
  Outgoing outgoing_[kTxBurst];
  uint32_t outgoing_count_ = 0;
  rte_mbuf* spare_ = nullptr;  // allocated before PollTransmit is asked
  bool notification_pending_ = false;
  uint32_t wqes_this_pass_ = 0;
  bool worked_this_pass_ = false;
  EngineCounters counters_;
};

}  // namespace verbena::nic
