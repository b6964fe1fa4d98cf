// SPDX-License-Identifier: Apache-2.0
#include "provider/doorbell.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace verbena::provider {
namespace {

void Wake(abi::WakeWord* thread) {
  if (thread->armed.exchange(0, std::memory_order_seq_cst) != 1) return;
  // Not private: the sleeper is another process.
  syscall(SYS_futex, &thread->armed, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

bool Sleeps(const abi::WakeWord& thread) {
  return thread.armed.load(std::memory_order_relaxed) != 0;
}

uint32_t ThreadCount(const Context* context) {
  const uint32_t count = context->status->thread_count;
  return count < abi::kMaxEngineThreads ? count : abi::kMaxEngineThreads;
}

// Engine thread that is pinned to the caller's CPU (or, with `other`, to
// another one if there is one); thread 0 if none is.
abi::WakeWord* ChooseThread(const Context* context, uint32_t count, bool other) {
  const uint32_t cpu = static_cast<uint32_t>(sched_getcpu());
  for (uint32_t i = 0; i < count; ++i) {
    if ((context->status->cpu[i] == cpu) != other) return &context->wake->threads[i];
  }
  return &context->wake->threads[0];
}

bool AllSleep(const abi::WakePage* wake, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    if (!Sleeps(wake->threads[i])) return false;
  }
  return true;
}

}  // namespace

void WakeAnyEngine(const Context* context) {
  abi::WakePage* wake = context->wake;
  const uint32_t count = ThreadCount(context);
  if (count != 0 && AllSleep(wake, count)) Wake(ChooseThread(context, count, false));
}

void WakeForSend(const Context* context, const Qp* qp, uint32_t producer, uint32_t outstanding) {
  abi::WakePage* wake = context->wake;
  const uint32_t count = ThreadCount(context);
  if (count == 0) return;
  if (context->status->mode == abi::kEngineSpinning) {
    if (Sleeps(wake->threads[0])) Wake(&wake->threads[0]);
    return;
  }
  if (outstanding > 1) {
    // Streaming: the engine looks again before it sleeps. If nobody is awake,
    // a thread on another CPU works while this one posts more.
    if (AllSleep(wake, count)) Wake(ChooseThread(context, count, true));
    return;
  }
  // Latency: the engine thread of this CPU needs no interrupt to another CPU,
  // just our CPU.
  abi::WakeWord* local = ChooseThread(context, count, false);
  if (Sleeps(*local)) {
    // A thread that runs on another CPU takes this on its way: waking ours
    // would only cost this CPU two switches.
    if (!AllSleep(wake, count)) return;
    Wake(local);
  }
  const uint32_t fetched = qp->record->sq_fetched.load(std::memory_order_acquire);
  if (static_cast<int32_t>(fetched - producer) < 0) sched_yield();
}

}  // namespace verbena::provider
