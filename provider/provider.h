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
struct Pd;
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
  Context* parent;  // of a forked child's own context, see ContextOfThisProcess
  Context* next_child;
  uint64_t cookie;  // of the context whose objects ibv_import_* names
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
  uint32_t rwq_tables;  // that are there; atomically
  Segment* segments;    // by number, under create_mutex
  uint32_t segment_count;
  pthread_mutex_t drain_mutex;  // see EventDrain
  ReserveFds reserve;           // under drain_mutex

  bool DeviceDead() const { return channel.DeviceDead(); }
};

struct Td {
  ibv_td base;
  std::atomic<uint32_t> references;  // parent domains
};

// A protection domain, or a parent domain: then `protection` is the former, whose
// handle it has too.
struct Pd {
  ibv_pd base;
  Pd* protection;
  Td* td;
  std::atomic<uint32_t> references;  // parent domains; of one: QPs with memory of its allocator
  void* (*alloc)(ibv_pd* pd, void* pd_context, size_t size, size_t alignment, uint64_t type);
  void (*free)(ibv_pd* pd, void* pd_context, void* pointer, uint64_t type);
  void* pd_context;
};

struct Mr {
  VerbsMr base;
  // Of a dma-buf: where this provider has mapped it.
  void* mapping;
  size_t mapping_bytes;
};

struct Mw {
  ibv_mw base;
};

struct Dm {
  VerbsDm base;
  Context* owner;   // whose command channel knows it
  uint8_t* memory;  // mapped by this process
  size_t length;
  size_t mapped_bytes;
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
  Srq* srqs;      // XRC SRQs with this CQ
  // ibv_start_poll … ibv_end_poll: the completion that is looked at.
  ibv_wc current;
  uint64_t current_ns;
  uint32_t current_flow_tag;
  bool single_threaded;  // constant; the lock is not taken by those
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
  // After the death of the device: the next WQE to be flushed.
  bool flushing;
  uint32_t flushed;
  // Constant:
  uint32_t max_sge;
  abi::SrqRecord* record;
  uint32_t slot;
  uint32_t generation;
  Cq* cq;  // XRC: where its receives complete
  // XRC: list of the SRQs of that CQ, under the CQ's lock.
  Srq* next;
  Srq** link;
};

// What ibv_wr_* is building, from wr_start (which takes sq.lock) to wr_complete
// or wr_abort. Slots are invisible to the device until the producer index says
// otherwise, so the WQEs are built in their places.
struct WrBuilder {
  uint32_t allowed;  // enum ibv_qp_create_send_ops_flags
  uint32_t head;     // WQEs posted and begun
  uint32_t tail;
  int error;          // the first; nothing is posted then
  abi::SendWqe* wqe;  // the newest, or NULL
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
  WrBuilder builder;
  uint64_t* wr_ids;  // of both queues
  Pd* domain;        // parent domain whose allocator gave wr_ids, or NULL
  // What it spreads over; then it has no queues and no state.
  ibv_rwq_ind_table* rss_table;
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
inline Cq* ToCq(ibv_cq_ex* cq) { return Downcast<Cq>(cq); }
inline Pd* ToPd(ibv_pd* pd) { return Downcast<Pd>(pd); }
inline ibv_cq_ex* ToCqEx(Cq* cq) { return reinterpret_cast<ibv_cq_ex*>(cq); }
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

// The context by which a forked child of its opener has objects that are no part
// of the parent's: one of its own, made when it is first needed. The context
// itself in the process that opened it. NULL with errno.
Context* ContextOfThisProcess(Context* context);

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
// 0, or why a region cannot be like this (EINVAL, EOPNOTSUPP, EFAULT, EIO).
int CheckRegion(const Context* context, uint64_t address, uint64_t length, unsigned access);
unsigned DeviceAccess(unsigned access);  // the rights that the device knows
// domain.cc
ibv_td* AllocTd(ibv_context* context, ibv_td_init_attr* attr);
int DeallocTd(ibv_td* td);
ibv_pd* AllocParentDomain(ibv_context* context, ibv_parent_domain_init_attr* attr);
int DeallocParentDomain(Pd* domain);
// Zeroed, by the domain's allocator if it has one and wants to; then *domain is
// set, else NULL.
void* AllocFrom(ibv_pd* pd, size_t bytes, Pd** domain);
void FreeTo(Pd* domain, void* memory);
// memory.cc
ibv_mr* AllocNullMr(ibv_pd* pd);
int ReregMr(VerbsMr* mr, int flags, ibv_pd* pd, void* address, size_t length, int access);
int AdviseMr(ibv_pd* pd, ibv_advise_mr_advice advice, uint32_t flags, ibv_sge* sges,
             uint32_t count);
ibv_mr* RegDmabufMr(ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access);
ibv_dm* AllocDm(ibv_context* context, ibv_alloc_dm_attr* attr);
int FreeDm(ibv_dm* dm);
ibv_mr* RegDmMr(ibv_pd* pd, ibv_dm* dm, uint64_t offset, size_t length, unsigned int access);
// import.cc
ibv_pd* ImportPd(ibv_context* context, uint32_t handle);
void UnimportPd(ibv_pd* pd);
ibv_mr* ImportMr(ibv_pd* pd, uint32_t handle);
void UnimportMr(ibv_mr* mr);
ibv_dm* ImportDm(ibv_context* context, uint32_t handle);
void UnimportDm(ibv_dm* dm);
void InitDm(Dm* dm, ibv_context* context, Context* owner, uint32_t handle, uint8_t* memory,
            size_t length);
// mw.cc
ibv_mw* AllocMw(ibv_pd* pd, ibv_mw_type type);
int DeallocMw(ibv_mw* mw);
int BindMw(ibv_qp* qp, ibv_mw* mw, ibv_mw_bind* bind);
// ah.cc
ibv_ah* CreateAh(ibv_pd* pd, ibv_ah_attr* attr);
int DestroyAh(ibv_ah* ah);
int AttachMcast(ibv_qp* qp, const ibv_gid* gid, uint16_t lid);
int DetachMcast(ibv_qp* qp, const ibv_gid* gid, uint16_t lid);
abi::AhAttr ToAbi(const ibv_ah_attr& attr);
ibv_ah_attr FromAbi(const abi::AhAttr& attr);
// cq.cc
ibv_cq* CreateCq(ibv_context* context, int cqe, ibv_comp_channel* channel, int comp_vector);
// `flags`: abi::CqFlags. NULL with errno.
Cq* CreateCqWith(ibv_context* context, int cqe, ibv_comp_channel* channel, int comp_vector,
                 uint32_t flags);
int DestroyCq(ibv_cq* cq);
int ReqNotifyCq(ibv_cq* cq, int solicited_only);
int ResizeCq(ibv_cq* cq, int cqe);
int ModifyCq(ibv_cq* cq, ibv_modify_cq_attr* attr);
// cq_ex.cc
ibv_cq_ex* CreateCqEx(ibv_context* context, ibv_cq_init_attr_ex* attr);
int QueryRtValues(ibv_context* context, ibv_values_ex* values);
// poll_cq.cc
int PollCq(ibv_cq* cq, int num_entries, ibv_wc* wc);
// One completion into cq->current, with the CQ locked. 0, ENOENT or EIO.
int NextCompletion(Cq* cq);
// After a poll in vain, with the CQ locked: should the thread give its CPU up, because that has
// become usual?
bool IsIdle(const Cq* cq);
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
// flow.cc
ibv_flow* CreateFlow(ibv_qp* qp, ibv_flow_attr* attr);
int DestroyFlow(ibv_flow* flow);
ibv_counters* CreateCounters(ibv_context* context, ibv_counters_init_attr* attr);
int DestroyCounters(ibv_counters* counters);
int AttachCountersPointFlow(ibv_counters* counters, ibv_counter_attach_attr* attr, ibv_flow* flow);
int ReadCounters(ibv_counters* counters, uint64_t* values, uint32_t count, uint32_t flags);
// rss.cc
ibv_wq* CreateWq(ibv_context* context, ibv_wq_init_attr* attr);
int ModifyWq(ibv_wq* wq, ibv_wq_attr* attr);
int DestroyWq(ibv_wq* wq);
ibv_rwq_ind_table* CreateRwqIndTable(ibv_context* context, ibv_rwq_ind_table_init_attr* attr);
int DestroyRwqIndTable(ibv_rwq_ind_table* table);
int CreateRss(Context* context, Qp* qp, ibv_rwq_ind_table* table, const ibv_rx_hash_conf& hash);
int DestroyRss(Qp* qp);
// qp_ex.cc
// 0, or EOPNOTSUPP if a QP of that type does not have all of `ops`.
int CheckSendOps(ibv_qp_type type, uint64_t ops);
void MakeExtended(Qp* qp, uint64_t ops);
// Release of the libibverbs in this process (44), 0 if that is not known.
int LibraryRelease();
int QueryQpDataInOrder(ibv_qp* qp, ibv_wr_opcode opcode, uint32_t flags);
// modify_qp.cc
int ModifyQp(ibv_qp* qp, ibv_qp_attr* attr, int mask);
int QueryQp(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init_attr);
int ModifyQpRateLimit(ibv_qp* qp, ibv_qp_rate_limit_attr* attr);
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
