// SPDX-License-Identifier: Apache-2.0
//
// The memory that the device and an application share: the "BAR" of the NIC.
//
// Everything in here may be read or written by a hostile application at any
// time. Rules for the device side: indices from applications are hints and are
// clamped; a WQE is copied once and the copy is validated; positions, counts
// and ownership are decided by counters in daemon-private memory only.
//
// Who maps what:
//   context memfd   one per opened device (ibv_context): ContextPage, doorbell
//                   bits, QP, CQ and SRQ
//                   records. Read-write on both sides.
//   ring segments   few per context, created on demand by the device: SQ, RQ
//                   and CQ rings. Read-write on both sides.
//   wake page       one per user of a daemon: how to wake a sleeping engine
//                   thread.
//   status page     one per daemon, read-only for applications.
// All are memfds created and sealed (no shrink) by the device. docs/PRM.md is
// the reference for programmers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace verbena::abi {

inline constexpr uint32_t kMaxQpSlots = 16384;   // QPs of one context
inline constexpr uint32_t kMaxCqSlots = 16384;   // CQs of one context
inline constexpr uint32_t kMaxSrqSlots = 16384;  // SRQs of one context
inline constexpr uint32_t kBlockBytes = 64;      // granule of WQEs and CQEs
inline constexpr uint32_t kMaxEngineThreads = 8;

// One 128-byte record per QP slot. Producer indices count WQEs from 0, modulo
// 2^32, and are never reduced by the ring size.
struct QpRecord {
  // Written by the application (release, after the WQE), read by the device.
  std::atomic<uint32_t> sq_producer;
  std::atomic<uint32_t> rq_producer;
  uint32_t reserved0[14];
  // Written by the device (release): WQEs of the SQ that it has fetched. The
  // application uses it only to choose how to wake the engine.
  std::atomic<uint32_t> sq_fetched;
  // Written by the device: number of enum ibv_qp_state. After posting to the RQ
  // (producer, then FullFence) the application looks here: in ERR it also rings
  // the doorbell, so that the receive is flushed. The device stores ERR, then
  // FullFence, then reads rq_producer.
  std::atomic<uint32_t> state;
  uint32_t reserved1[14];
};
static_assert(sizeof(QpRecord) == 128);

// How a CQ is armed for a completion event (ibv_req_notify_cq).
enum CqArm : uint32_t {
  kCqNotArmed = 0,
  kCqArmedSolicited = 1,
  kCqArmedAny = 2,
};

// One 64-byte record per CQ slot.
struct CqRecord {
  // CQEs consumed, modulo 2^32; written by the application (release).
  std::atomic<uint32_t> consumer;
  // CqArm. The application raises it (never from kCqArmedAny to
  // kCqArmedSolicited); the device exchanges it with kCqNotArmed when it sends
  // the event. Application: store arm, FullFence, poll the ring once more.
  // Device: store CQE, FullFence, read arm. One of the two sees the other.
  std::atomic<uint32_t> arm;
  uint32_t reserved[14];
};
static_assert(sizeof(CqRecord) == 64);

// One 64-byte record per SRQ slot. An SRQ is a ring of receive WQEs as an RQ is,
// but QPs take from it in any order: a WQE is copied out whole when a message
// begins, and its slot is free when `taken` has passed it.
struct SrqRecord {
  // Written by the application: WQEs posted (release, after the WQE), and which
  // of two rings they are in (before the producer; see ModifySrqRequest).
  std::atomic<uint32_t> producer;
  std::atomic<uint32_t> ring;
  uint32_t reserved0[6];
  // Written by the device (release): WQEs whose slots are free again.
  std::atomic<uint32_t> taken;
  uint32_t reserved1[7];
};
static_assert(sizeof(SrqRecord) == 64);

// The context memfd.
//
// Ringing the doorbell for QP slot s (application side; always after posting
// to the SQ, after posting to the RQ only if QpRecord::state says ERR):
//   1. write the WQEs; QpRecord::sq_producer = new index (release)
//   2. FullFence()
//   3. if bit s of doorbell_bits is clear: set it (fetch_or), then set the bit
//      of that word in doorbell_summary (fetch_or)
//   4. wake an engine thread if all sleep, see WakePage
// Device: exchange(summary word, 0), then exchange(bits word, 0), FullFence,
// then read the producers. A set bit without news costs the device one look.
struct ContextPage {
  // Written by the device. Bit n: the verb FaultCheckVerb n may be made to fail; the
  // application asks kCmdCheckFault before it does its work.
  std::atomic<uint32_t> checked_verbs;
  // 1: the device was removed, and has forgotten this context. As after the engine's
  // death (StatusPage::device_dead).
  std::atomic<uint32_t> removed;
  uint8_t reserved0[56];
  std::atomic<uint64_t> doorbell_summary[kMaxQpSlots / 64 / 64];  // 4 words
  uint8_t reserved1[64 - 32];
  uint8_t reserved2[4096 - 128];
  std::atomic<uint64_t> doorbell_bits[kMaxQpSlots / 64];  // 256 words
  uint8_t reserved3[2048];
  QpRecord qp[kMaxQpSlots];
  CqRecord cq[kMaxCqSlots];
  SrqRecord srq[kMaxSrqSlots];
};
static_assert(offsetof(ContextPage, doorbell_summary) == 64);
static_assert(offsetof(ContextPage, doorbell_bits) == 4096);
static_assert(offsetof(ContextPage, qp) == 8192);
static_assert(offsetof(ContextPage, cq) == 8192 + 128 * kMaxQpSlots);
static_assert(offsetof(ContextPage, srq) == 8192 + 128 * kMaxQpSlots + 64 * kMaxCqSlots);
static_assert(sizeof(ContextPage) == 8192 + 128 * kMaxQpSlots + 64 * (kMaxCqSlots + kMaxSrqSlots));
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// One engine thread as seen by applications. `armed` is 1 while the thread
// sleeps in futex_wait(&armed, 1) or is about to.
struct alignas(64) WakeWord {
  std::atomic<uint32_t> armed;
  uint32_t reserved[15];
};
static_assert(sizeof(WakeWord) == 64);
inline constexpr uint32_t kAnyCpu = 0xffffffff;

enum EngineMode : uint32_t {
  // One thread per CPU, whoever was woken runs the engine; they never spin for
  // long. poll_cq yields after some empty polls.
  kEngineThreadPerCpu = 0,
  // One thread with a CPU of its own, which spins.
  kEngineSpinning = 1,
};

// Waking without lost wake-ups. Engine: armed = 1; FullFence; look at every
// doorbell again; nothing: futex_wait(&armed, 1). Application, after step 3 of
// the doorbell: a thread whose `armed` is 0 will look again before it sleeps,
// then nothing is to be done; otherwise exchange(armed, 0) on the chosen thread
// and futex_wake (shared) if it was 1. Both read with FullFence in between.
//
// All clients of a user write here, so it holds nothing but these words, and the
// engine sleeps no longer than kMaxSleepMs: a client that spoils them can delay
// the others by that much.
struct WakePage {
  uint32_t reserved[16];
  WakeWord threads[kMaxEngineThreads];
};
inline constexpr uint32_t kMaxSleepMs = 100;
static_assert(sizeof(WakePage) == 64 + 64 * kMaxEngineThreads);

// Read-only for applications.
struct StatusPage {
  // 0, or 1 after the engine has died (store-release by the supervisor). From
  // then on poll_cq gives flush completions for outstanding WRs and every other
  // call fails with EIO.
  std::atomic<uint32_t> device_dead;
  // Constant from the first client on.
  uint32_t mode;                    // EngineMode
  uint32_t thread_count;            // of the engine, 1 to kMaxEngineThreads
  uint32_t cpu[kMaxEngineThreads];  // that each is pinned to, or kAnyCpu
  uint32_t reserved[5];
};
static_assert(sizeof(StatusPage) == 64);

// A full (store-load) barrier. gcc's thread sanitizer rejects
// atomic_thread_fence, hence a locked operation there.
inline void FullFence() {
#if defined(__SANITIZE_THREAD__)
  static thread_local std::atomic<uint32_t> word{0};
  word.fetch_add(1, std::memory_order_seq_cst);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace verbena::abi
