// SPDX-License-Identifier: Apache-2.0
//
// The objects behind the verbs handles. Each starts with what libibverbs and
// applications see; all are allocated zeroed with calloc (no C++ runtime here).
//
// Locks: Cq::lock before Qp::sq.lock or Qp::rq.lock, and of two CQs the one at
// the lower address first. Srq::lock alone. No lock is held across a system call.
#pragma once

#include <infiniband/verbs.h>
#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "nic_sim/abi/commands.h"
#include "nic_sim/abi/shared_memory.h"
#include "nic_sim/abi/work_queue.h"
#include "provider/command_channel.h"
#include "provider/event_pipe.h"
#include "provider/spin_lock.h"
#include "provider/verbs_abi.h"

namespace verbena::provider {

struct Context;
struct Cq;
struct Qp;
struct Srq;

struct Device {
  VerbsDevice base;
  uint32_t index;  // N of verbenaN
};

// A ring of the device, mapped into this process.
struct Ring {
  uint8_t* base;
  uint32_t slots;  // power of two; 0: no ring
  uint32_t stride;

  uint8_t* Slot(uint32_t index) const {
    return base + static_cast<size_t>(index & (slots - 1)) * stride;
  }
};

struct Segment {
  uint8_t* base;
  uint64_t bytes;
};

// Which QP a CQE belongs to. Written with both CQs of the QP locked: first the
// generation, then the pointer (release). A poller reads the pointer first
// (acquire): if the generation is the CQE's, then the QP is one of a CQ that
// the poller has locked, and cannot go away.
struct QpTableEntry {
  std::atomic<Qp*> qp;
  std::atomic<uint32_t> generation;
};

// The same for CQEs of XRC SRQs.
struct SrqTableEntry {
  std::atomic<Srq*> srq;
  std::atomic<uint32_t> generation;
};

struct Context {
  verbs_context verbs;
  CommandChannel channel;
  abi::DeviceAttributes attributes;
  abi::ContextPage* page;
  abi::WakePage* wake;
  const abi::StatusPage* status;
  QpTableEntry* qp_table;    // kMaxQpSlots
  SrqTableEntry* srq_table;  // kMaxSrqSlots; XRC SRQs only
  uint32_t fork_generation;
  bool on_valgrind;
  // After the death of the device, destroying succeeds (as in rdma-core).
  bool allow_disassociate_destroy;
  bool channel_open;
  void* guard_page;
  pid_t guard_owner;
  // Held from a command that creates a ring until the ring is mapped, since the
  // next reply may refer to the same segment. Zeroed memory is a valid mutex.
  pthread_mutex_t create_mutex;
  Segment* segments;  // by number, under create_mutex
  uint32_t segment_count;
  pthread_mutex_t drain_mutex;  // see EventDrain
  ReserveFds reserve;           // under drain_mutex

  bool DeviceDead() const { return channel.DeviceDead(); }
};

struct Pd {
  ibv_pd base;
};

struct Mr {
  VerbsMr base;
};

struct Ah {
  ibv_ah base;
};

struct Xrcd {
  VerbsXrcd base;
};

struct Cq {
  VerbsCq base;
  SpinLock lock;
  // Under lock:
  Ring ring;
  uint32_t slots_log2;
  uint32_t consumer;
  uint32_t empty_polls;
  Qp* senders;    // QPs with this send CQ, by Qp::sq
  Qp* receivers;  // QPs with this receive CQ, by Qp::rq
  // Constant:
  abi::CqRecord* record;
  uint32_t slot;
};

// One of the two work queues of a QP.
struct WorkQueue {
  SpinLock lock;
  Ring ring;
  uint32_t capacity;  // WQEs, <= ring.slots
  uint32_t max_sge;
  std::atomic<uint32_t> head;  // WQEs posted; written under lock
  std::atomic<uint32_t> tail;  // WQEs completed; written with the CQ locked
  uint64_t* wr_ids;            // by slot; under lock
  // List of the QPs of one CQ, under the CQ's lock.
  Qp* next;
  Qp** link;
};

struct Srq {
  VerbsSrq base;
  SpinLock lock;
  // Under lock:
  Ring ring;
  uint32_t capacity;  // WQEs, <= ring.slots
  uint32_t head;      // WQEs posted
  // Constant:
  uint32_t max_sge;
  abi::SrqRecord* record;
  uint32_t slot;
  uint32_t generation;
  Cq* cq;  // XRC: where its receives complete
};

struct Qp {
  VerbsQp base;
  WorkQueue sq;
  WorkQueue rq;
  // XRC_SEND: both are the send CQ. XRC_RECV: none, and nothing of the above.
  Cq* send_cq;
  Cq* recv_cq;
  abi::QpRecord* record;
  uint32_t slot;
  uint32_t generation;
  uint32_t max_inline;
  bool signal_all;
  // enum ibv_qp_state as far as the application knows it: the device moves a
  // QP to ERR and SQE by itself.
  std::atomic<uint32_t> state;
  ibv_qp_cap cap;
};

template <typename To, typename From>
To* Downcast(From* object) {
  return reinterpret_cast<To*>(object);
}

inline Context* ToContext(ibv_context* context) {
  return reinterpret_cast<Context*>(reinterpret_cast<char*>(context) -
                                    offsetof(Context, verbs.context));
}
inline Cq* ToCq(ibv_cq* cq) { return Downcast<Cq>(cq); }
inline Qp* ToQp(ibv_qp* qp) { return Downcast<Qp>(qp); }
inline Xrcd* ToXrcd(ibv_xrcd* xrcd) { return Downcast<Xrcd>(xrcd); }
inline Srq* ToSrq(ibv_srq* srq) { return Downcast<Srq>(srq); }

// Number of fork()s that led to this process. Contexts of another generation
// belong to the parent.
extern std::atomic<uint32_t> g_fork_generation;

// True if the context cannot be used: it is the parent's, or its device died.
inline bool Unusable(const Context* context) {
  return context->fork_generation != g_fork_generation.load(std::memory_order_relaxed) ||
         context->DeviceDead();
}

// An errno of a destroy command, 0 if the object is to be freed nevertheless.
int DestroyResult(const Context* context, int error);

// Maps what a RingLocation says; `fd_index` counts the descriptors of the
// reply. With create_mutex. 0 or an errno.
int MapRing(Context* context, const abi::RingLocation& location, ReplyFds* fds, int* fd_index,
            uint32_t min_stride, Ring* ring);

// device.cc
int QueryDevice(ibv_context* context, const ibv_query_device_ex_input* input,
                ibv_device_attr_ex* attr, size_t attr_size);
int QueryPort(ibv_context* context, uint8_t port, ibv_port_attr* attr);
// pd_mr.cc
ibv_pd* AllocPd(ibv_context* context);
int DeallocPd(ibv_pd* pd);
ibv_mr* RegMr(ibv_pd* pd, void* address, size_t length, uint64_t iova, int access);
int DeregMr(VerbsMr* mr);
// ah.cc
ibv_ah* CreateAh(ibv_pd* pd, ibv_ah_attr* attr);
int DestroyAh(ibv_ah* ah);
abi::AhAttr ToAbi(const ibv_ah_attr& attr);
ibv_ah_attr FromAbi(const abi::AhAttr& attr);
// cq.cc
ibv_cq* CreateCq(ibv_context* context, int cqe, ibv_comp_channel* channel, int comp_vector);
int DestroyCq(ibv_cq* cq);
int ReqNotifyCq(ibv_cq* cq, int solicited_only);
// poll_cq.cc
int PollCq(ibv_cq* cq, int num_entries, ibv_wc* wc);
// qp.cc
ibv_qp* CreateQp(ibv_pd* pd, ibv_qp_init_attr* attr);
ibv_qp* CreateQpEx(ibv_context* context, ibv_qp_init_attr_ex* attr);
int DestroyQp(ibv_qp* qp);
// srq.cc
ibv_srq* CreateSrq(ibv_pd* pd, ibv_srq_init_attr* attr);
ibv_srq* CreateSrqEx(ibv_context* context, ibv_srq_init_attr_ex* attr);
int ModifySrq(ibv_srq* srq, ibv_srq_attr* attr, int mask);
int QuerySrq(ibv_srq* srq, ibv_srq_attr* attr);
int DestroySrq(ibv_srq* srq);
int GetSrqNum(ibv_srq* srq, uint32_t* number);
// xrc.cc
ibv_xrcd* OpenXrcd(ibv_context* context, ibv_xrcd_init_attr* attr);
int CloseXrcd(ibv_xrcd* xrcd);
ibv_qp* OpenQp(ibv_context* context, ibv_qp_open_attr* attr);
// modify_qp.cc
int ModifyQp(ibv_qp* qp, ibv_qp_attr* attr, int mask);
int QueryQp(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init_attr);
// post_send.cc, post_recv.cc
int PostSend(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad_wr);
int PostRecv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad_wr);
int PostSrqRecv(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr** bad_wr);

// Serialises the creation of rings, see Context::create_mutex.
class CreateGuard {
 public:
  explicit CreateGuard(Context* context) : context_(context) {
    pthread_mutex_lock(&context_->create_mutex);
  }
  ~CreateGuard() { pthread_mutex_unlock(&context_->create_mutex); }
  CreateGuard(const CreateGuard&) = delete;
  CreateGuard& operator=(const CreateGuard&) = delete;

 private:
  NoCancellation no_cancellation_;
  Context* context_;
};

// Locks the CQs of a QP, which may be the same one.
class QpCqsGuard {
 public:
  explicit QpCqsGuard(const Qp* qp) : QpCqsGuard(qp->send_cq, qp->recv_cq) {}
  QpCqsGuard(Cq* a, Cq* b) : first_(a < b ? a : b), second_(a < b ? b : a) {
    first_->lock.Lock();
    if (second_ != first_) second_->lock.Lock();
  }
  ~QpCqsGuard() {
    if (second_ != first_) second_->lock.Unlock();
    first_->lock.Unlock();
  }
  QpCqsGuard(const QpCqsGuard&) = delete;
  QpCqsGuard& operator=(const QpCqsGuard&) = delete;

 private:
  Cq* first_;
  Cq* second_;
};

}  // namespace verbena::provider
