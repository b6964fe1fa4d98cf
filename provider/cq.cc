// SPDX-License-Identifier: Apache-2.0
//
// Creation, destruction and arming of completion queues; polling is in
// poll_cq.cc.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "provider/doorbell.h"
#include "provider/fault_check.h"
#include "provider/provider.h"

namespace verbena::provider {
namespace {

uint32_t Log2(uint32_t power_of_two) { return static_cast<uint32_t>(__builtin_ctz(power_of_two)); }

uint32_t CeilPowerOfTwo(uint32_t value) {
  return value <= 1 ? 1 : 1u << (32 - __builtin_clz(value - 1));
}

void DestroyOnDevice(Context* context, uint32_t handle) {
  abi::HandleRequest request = {};
  abi::DestroyReply reply = {};
  request.header.op = abi::kCmdDestroyCq;
  request.handle = handle;
  context->channel.Execute(&request, &reply);
}

int Create(Context* context, Cq* cq, int cqe, int comp_vector, int event_fd, uint32_t flags) {
  abi::CreateCqRequest request = {};
  abi::CreateCqReply reply = {};
  request.header.op = abi::kCmdCreateCq;
  request.cqe = static_cast<uint32_t>(cqe);
  request.comp_vector = static_cast<uint32_t>(comp_vector);
  request.user_handle = reinterpret_cast<uint64_t>(&cq->base.cq);
  request.has_channel = event_fd >= 0;
  request.flags = flags;
  const CreateGuard guard(context);
  ReplyFds fds;
  int error = context->channel.Execute(&request, &reply, event_fd, &fds);
  if (error != 0) return error;
  int fd_index = 0;
  error = MapRing(context, reply.ring, &fds, &fd_index, sizeof(abi::Cqe), &cq->ring);
  if (error == 0 && (cq->ring.slots == 0 || reply.handle >= abi::kMaxCqSlots)) error = EIO;
  if (error != 0) {
    DestroyOnDevice(context, reply.handle);
    return error;
  }
  cq->slot = reply.handle;
  cq->record = &context->page->cq[reply.handle];
  cq->record->consumer.store(0, std::memory_order_release);
  cq->slots_log2 = Log2(cq->ring.slots);
  cq->base.cq.handle = reply.handle;
  cq->base.cq.cqe = static_cast<int>(reply.cqe);
  return 0;
}

// Waits until the application has acknowledged `reported` completion events
// and `reported_async` asynchronous ones (ibv_destroy_cq(3)).
void WaitForAcks(ibv_cq* cq, uint32_t reported, uint32_t reported_async) {
  pthread_mutex_lock(&cq->mutex);
  while (static_cast<int32_t>(reported - cq->comp_events_completed) > 0 ||
         static_cast<int32_t>(reported_async - cq->async_events_completed) > 0) {
    pthread_cond_wait(&cq->cond, &cq->mutex);
  }
  pthread_mutex_unlock(&cq->mutex);
}

// CQEs that lie there, at most `limit`.
uint32_t CountCqes(const Cq* cq, uint32_t limit) {
  uint32_t count = 0;
  for (uint32_t index = cq->consumer; count < limit; ++count, ++index) {
    const auto* cqe = reinterpret_cast<const abi::Cqe*>(cq->ring.Slot(index));
    const uint32_t expected = ((index >> cq->slots_log2) & 1) ^ 1;
    if ((cqe->phase.load(std::memory_order_acquire) & 1) != expected) break;
  }
  return count;
}

// Whether it is known if more than `entries` CQEs will lie in the CQ when all
// that was posted is done.
bool IsDecided(Cq* cq, uint32_t entries) {
  const SpinGuard guard(cq->lock);
  if (CountCqes(cq, entries + 1) > entries) return true;
  uint64_t outstanding = 0;
  for (const Qp* qp = cq->senders; qp != nullptr; qp = qp->sq.next) {
    outstanding +=
        qp->sq.head.load(std::memory_order_relaxed) - qp->sq.tail.load(std::memory_order_relaxed);
  }
  return outstanding <= entries;
}

// A CQ that gets smaller is judged by what was posted before: the device, which
// may be asleep, has a moment to carry it out, as one of hardware would have.
void LetDeviceCatchUp(const Context* context, Cq* cq, uint32_t entries) {
  constexpr int kLongestWaitMs = 100;
  for (int waited_ms = 0; waited_ms < kLongestWaitMs && !IsDecided(cq, entries); ++waited_ms) {
    WakeAnyEngine(context);
    usleep(1000);
  }
}

}  // namespace

ibv_cq* CreateCq(ibv_context* ibv, int cqe, ibv_comp_channel* channel, int comp_vector) {
  Cq* cq = CreateCqWith(ibv, cqe, channel, comp_vector, 0);
  return cq != nullptr ? &cq->base.cq : nullptr;
}

Cq* CreateCqWith(ibv_context* ibv, int cqe, ibv_comp_channel* channel, int comp_vector,
                 uint32_t flags) {
  Context* context = ToContext(ibv);
  if (cqe < 1 || comp_vector < 0 || comp_vector >= ibv->num_comp_vectors) {
    errno = EINVAL;
    return nullptr;
  }
  if (Unusable(context)) {
    errno = EIO;
    return nullptr;
  }
  Cq* cq = static_cast<Cq*>(calloc(1, sizeof(Cq)));
  if (cq == nullptr) return nullptr;
  int error = 0;
  int event_fd = -1;
  if (channel != nullptr) {
    event_fd = ReopenPipe(channel->fd, O_WRONLY);
    if (event_fd < 0) error = -event_fd;
  }
  if (error == 0) error = Create(context, cq, cqe, comp_vector, event_fd, flags);
  if (event_fd >= 0) close(event_fd);
  if (error != 0) {
    free(cq);
    errno = error;
    return nullptr;
  }
  return cq;  // libibverbs fills in the rest
}

int DestroyCq(ibv_cq* ibv) {
  Cq* cq = ToCq(ibv);
  Context* context = ToContext(ibv->context);
  EventDrain completions(&context->drain_mutex, &context->reserve, ibv->context->cmd_fd);
  EventDrain events(&context->drain_mutex, &context->reserve, ibv->context->cmd_fd);
  int error = 0;
  if (!context->DeviceDead()) {
    if (ibv->channel != nullptr) error = completions.Open(ibv->channel->fd);
    if (error == 0) error = events.Open(ibv->context->async_fd);
    if (error != 0) return error;
  }
  abi::HandleRequest request = {};
  abi::DestroyReply reply = {};
  request.header.op = abi::kCmdDestroyCq;
  request.handle = ibv->handle;
  error = context->channel.Execute(&request, &reply);
  if (error == 0) {
    // Events that nobody has read yet must not be read any more.
    const uint64_t element = reinterpret_cast<uint64_t>(ibv);
    if (reply.comp_events != 0 && ibv->channel != nullptr) {
      reply.comp_events -= completions.Take(sizeof(uint64_t), element);
    }
    if (reply.async_events != 0) {
      reply.async_events -= events.Take(sizeof(abi::AsyncEventRecord), element);
    }
    WaitForAcks(ibv, reply.comp_events, reply.async_events);
  } else if (DestroyResult(context, error) != 0) {
    return error;
  }
  free(cq);
  return 0;
}

// Whoever polls meanwhile finds in the old ring what was written before the
// device went over to the new one; the numbers of CQEs go on.
int ResizeCq(ibv_cq* ibv, int cqe) {
  Cq* cq = ToCq(ibv);
  Context* context = ToContext(ibv->context);
  if (cqe < 1) return EINVAL;
  abi::ResizeCqRequest request = {};
  abi::CreateCqReply reply = {};
  request.header.op = abi::kCmdResizeCq;
  request.handle = ibv->handle;
  request.cqe = static_cast<uint32_t>(cqe);
  if (cqe < ibv->cqe) LetDeviceCatchUp(context, cq, CeilPowerOfTwo(request.cqe));
  const CreateGuard guard(context);
  ReplyFds fds;
  int error = context->channel.Execute(&request, &reply, -1, &fds);
  if (error != 0) return error;
  int fd_index = 0;
  Ring ring;
  error = MapRing(context, reply.ring, &fds, &fd_index, sizeof(abi::Cqe), &ring);
  if (error == 0 && ring.slots == 0) error = EIO;
  // The device writes where we cannot look: nothing can be done but to say so.
  if (error != 0) return error;
  {
    const SpinGuard lock(cq->lock);
    cq->ring = ring;
    cq->slots_log2 = Log2(ring.slots);
  }
  ibv->cqe = static_cast<int>(reply.cqe);
  abi::HandleRequest finish = {};
  abi::HandleReply finished = {};
  finish.header.op = abi::kCmdFinishCqResize;
  finish.handle = ibv->handle;
  context->channel.Execute(&finish, &finished);
  return 0;
}

int ModifyCq(ibv_cq* ibv, ibv_modify_cq_attr* attr) {
  if (attr->attr_mask != IBV_CQ_ATTR_MODERATE) return EINVAL;
  abi::ModifyCqRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdModifyCq;
  request.handle = ibv->handle;
  request.count = attr->moderate.cq_count;
  request.period_us = attr->moderate.cq_period;
  return ToContext(ibv->context)->channel.Execute(&request, &reply);
}

// The application polls once more after arming (ibv_req_notify_cq(3)); the
// fence pairs with the device's between its CQE and its look at `arm`.
int ReqNotifyCq(ibv_cq* ibv, int solicited_only) {
  Cq* cq = ToCq(ibv);
  if (Unusable(ToContext(ibv->context))) return EIO;
  const int injected = InjectedError(ToContext(ibv->context), abi::kCheckReqNotifyCq, 0);
  if (injected != 0) [[unlikely]]
    return injected;
  const uint32_t wanted = solicited_only != 0 ? abi::kCqArmedSolicited : abi::kCqArmedAny;
  uint32_t current = cq->record->arm.load(std::memory_order_relaxed);
  while (current < wanted && !cq->record->arm.compare_exchange_weak(current, wanted)) {
  }
  abi::FullFence();
  return 0;
}

}  // namespace verbena::provider
