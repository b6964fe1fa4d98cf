// SPDX-License-Identifier: Apache-2.0
//
// The command channel between provider and device: what the mailbox of a NIC
// and the kernel's uverbs commands are on real hardware.
//
// Transport: SOCK_SEQPACKET unix socket, one message per command and one per
// reply, descriptors by SCM_RIGHTS. A connection starts with Hello. A device
// connection is one ibv_context; when it closes, or its process dies, all its
// objects are freed. Commands of one connection are answered in order.
//
// Every request starts with CommandHeader and every reply with ReplyHeader; a
// request of the wrong size is answered with EINVAL. Handles are checked by the
// device against the connection's own objects (EINVAL if unknown).
#pragma once

#include <cstddef>
#include <cstdint>

#include "nic_sim/abi/shared_memory.h"
#include "nic_sim/abi/work_queue.h"

namespace verbena::abi {

inline constexpr uint32_t kMagic = 0x4e425256;  // "VRBN"
inline constexpr uint16_t kVersionMin = 1;
inline constexpr uint16_t kVersionMax = 1;
inline constexpr uint32_t kMaxMessageBytes = 4096;  // of a device connection
inline constexpr uint32_t kMaxControlRequestBytes = 65536;
inline constexpr uint32_t kControlChunkBytes = 32768;

// Kinds of connection on the daemon's one socket.
enum ClientKind : uint32_t {
  kClientDevice = 1,
  // JSON requests, one per message. A reply is one or more messages, each with
  // a first byte 'M' (more follows) or 'L' (last), then a piece of JSON text.
  kClientControl = 2,
  kClientRdmaCm = 3,  // an opened /dev/infiniband/rdma_cm, rdma_cm.h
  // Stands for a NETLINK_RDMA socket: after the head of a Hello each message is
  // one netlink request, each answer one or more messages of at most
  // kMaxNetlinkReply bytes as the kernel would send them.
  kClientNetlink = 4,
  // RefreshHello: the device writes its counters into the tree's files and
  // answers with one byte.
  kClientRefresh = 5,
};

inline constexpr uint32_t kMaxNetlinkRequest = 4096;
inline constexpr uint32_t kMaxNetlinkReply = 4096;  // what libmnl has room for

struct RefreshHello {
  uint32_t magic;
  uint32_t kind;
  char device[24];  // "verbena0"
};
static_assert(sizeof(RefreshHello) == 32);

// Structure sizes that both sides must agree on, in this order.
struct AbiSizes {
  uint16_t context_page_kib;
  uint16_t qp_record;
  uint16_t cq_record;
  uint16_t wake_page;
  uint16_t send_wqe;
  uint16_t recv_wqe;
  uint16_t cqe;
  uint16_t srq_record;

  bool operator==(const AbiSizes&) const = default;
};
inline constexpr AbiSizes kAbiSizes = {sizeof(ContextPage) / 1024,
                                       sizeof(QpRecord),
                                       sizeof(CqRecord),
                                       sizeof(WakePage),
                                       sizeof(SendWqe),
                                       sizeof(RecvWqe),
                                       sizeof(Cqe),
                                       sizeof(SrqRecord)};

// First message of a client. Control clients send only the first 8 bytes.
// Device clients attach at most one descriptor: /proc/self/mem, read-write.
struct Hello {
  uint32_t magic;
  uint32_t kind;  // ClientKind
  uint16_t version_min;
  uint16_t version_max;
  uint32_t device_index;  // N of verbenaN
  AbiSizes sizes;
  // A private page of the application at a random address, not inherited by
  // fork, that starts with guard_magic. Every remote copy touches it first.
  uint64_t guard_address;
  uint64_t guard_magic;
  char comm[16];  // process name for `verbena list`; need not be terminated
};
static_assert(sizeof(Hello) == 64);

// Attributes of the device; see ibv_query_device(3) for the meanings.
struct DeviceAttributes {
  uint64_t node_guid;  // as in memory: network byte order
  uint64_t sys_image_guid;
  uint64_t max_mr_size;
  uint64_t page_size_cap;
  uint64_t max_msg_size;
  uint64_t device_cap_flags;
  uint64_t max_dm_size;
  uint32_t vendor_id;
  uint32_t vendor_part_id;
  uint32_t hw_ver;
  uint32_t max_qp;
  uint32_t max_qp_wr;
  uint32_t max_sge;
  uint32_t max_sge_rd;
  uint32_t max_inline;
  uint32_t max_cq;
  uint32_t max_cqe;
  uint32_t max_mr;
  uint32_t max_pd;
  uint32_t max_ah;
  uint32_t max_srq;
  uint32_t max_srq_wr;
  uint32_t max_srq_sge;
  uint32_t max_mw;
  uint32_t max_mcast_grp;
  uint32_t max_mcast_qp_attach;
  uint32_t max_total_mcast_qp_attach;
  uint32_t max_qp_rd_atom;
  uint32_t max_res_rd_atom;
  uint32_t max_qp_init_rd_atom;
  uint32_t atomic_cap;  // enum ibv_atomic_cap
  uint32_t max_pkeys;
  uint32_t local_ca_ack_delay;
  uint32_t phys_port_count;
  uint32_t num_comp_vectors;
  char fw_version[32];
};
static_assert(sizeof(DeviceAttributes) == 200);

// Reply to Hello. `error` 0: descriptors are, in this order: context memfd,
// wake page memfd, status page memfd (read-only), read end of the async event
// pipe (16-byte records as ib_uverbs_async_event_desc). Errors: EPROTO (version
// or sizes differ, both sides' values are in here), ENODEV (no such device),
// EPERM (the device may not read the application's memory), ENOMEM, EBUSY.
struct HelloReply {
  uint32_t magic;
  int32_t error;
  uint16_t version;  // chosen
  uint16_t version_min;
  uint16_t version_max;
  uint16_t reserved0;
  AbiSizes sizes;
  uint64_t cookie;  // names this context for ibv_import_device
  uint32_t reserved1[2];
  DeviceAttributes attributes;
};
static_assert(sizeof(HelloReply) == 48 + sizeof(DeviceAttributes));

enum CommandOp : uint16_t {
  kCmdAllocPd = 1,
  kCmdDeallocPd,
  kCmdRegMr,
  kCmdDeregMr,
  kCmdCreateCq,
  kCmdDestroyCq,
  kCmdCreateQp,
  kCmdModifyQp,
  kCmdQueryQp,
  kCmdDestroyQp,
  kCmdCreateAh,
  kCmdDestroyAh,
  kCmdQueryPort,
  kCmdGetSegment,
  // Families of objects have numbers of their own.
  kCmdCreateSrq = 32,
  kCmdModifySrq,
  kCmdFinishSrqResize,
  kCmdQuerySrq,
  kCmdDestroySrq,
  kCmdOpenXrcd = 40,
  kCmdCloseXrcd,
  kCmdOpenQp,  // an XRC_RECV QP of this domain, by its number
  kCmdReregMr = 64,
  kCmdAllocNullMr,  // HandleRequest with handle = PD, RegMrReply
  kCmdQueryMr,      // HandleRequest with handle = lkey
  kCmdAllocMw,
  kCmdDeallocMw,
  kCmdAllocDm,
  kCmdFreeDm,
  kCmdImportPd,
  kCmdImportMr,
  kCmdImportDm,
  kCmdResizeCq = 80,
  kCmdFinishCqResize,  // HandleRequest with handle = CQ
  kCmdModifyCq,
  kCmdAttachMcast = 96,
  kCmdDetachMcast,
  kCmdCreateFlow = 112,
  kCmdDestroyFlow,     // HandleRequest
  kCmdCreateCounters,  // HandleRequest, HandleReply
  kCmdDestroyCounters,
  kCmdReadCounters,  // HandleRequest, ReadCountersReply
  kCmdLimitQpRate = 120,
  kCmdCreateRss = 124,
  kCmdDestroyRss,  // HandleRequest
  kCmdCheckFault = 160,
};

// Verbs that the application's side does without a command.
enum FaultCheckVerb : uint32_t {
  kCheckPostSend = 0,
  kCheckPostRecv,
  kCheckPostSrqRecv,
  kCheckPollCq,
  kCheckReqNotifyCq,
  kCheckVerbs,  // their number
};

// "None" where a request names an object that need not be.
inline constexpr uint32_t kNoHandle = 0xffffffff;

struct CommandHeader {
  uint16_t op;
  uint16_t size;  // of the whole request
  uint32_t sequence;
};
static_assert(sizeof(CommandHeader) == 8);

struct ReplyHeader {
  uint32_t sequence;
  int32_t error;  // 0 or a positive errno
};
static_assert(sizeof(ReplyHeader) == 8);

// Requests and replies that carry one handle, or nothing.
// Whether this call of `verb` is to fail: the error of the reply is its errno. Sent
// only while ContextPage::checked_verbs asks for it.
struct CheckFaultRequest {
  CommandHeader header;
  uint32_t verb;    // FaultCheckVerb
  uint32_t handle;  // of the QP, CQ or SRQ
};

struct HandleRequest {
  CommandHeader header;
  uint32_t handle;
  uint32_t reserved;
};
struct HandleReply {
  ReplyHeader header;
  uint32_t handle;
  uint32_t reserved;
};

struct RegMrRequest {
  CommandHeader header;
  uint32_t pd;
  uint32_t access;  // enum ibv_access_flags
  uint64_t address;
  uint64_t length;
  uint64_t iova;  // address that peers and SGEs use; 0 with ZERO_BASED
};
struct RegMrReply {
  ReplyHeader header;
  uint32_t handle;
  uint32_t lkey;
  uint32_t rkey;
  uint32_t reserved;
};

// Bits of enum ibv_rereg_mr_flags: 1 the range (address, length, iova), 2 the PD,
// 4 the rights. The keys stay.
struct ReregMrRequest {
  CommandHeader header;
  uint32_t handle;
  uint32_t flags;
  uint32_t pd;
  uint32_t access;
  uint64_t address;
  uint64_t length;
  uint64_t iova;
};

// What a key names, for QueryMr (of a PD of this context) and ImportMr.
struct QueryMrReply {
  ReplyHeader header;
  uint32_t handle;
  uint32_t pd;
  uint32_t access;
  uint32_t reserved;
  uint64_t address;
  uint64_t length;
  uint64_t iova;
};

struct AllocMwRequest {
  CommandHeader header;
  uint32_t pd;
  uint32_t type;  // 1 or 2
};

// Memory of the device. The application makes the memfd that backs it and sends
// it, to be had by who imports it; the device keeps the account, of max_dm_size
// over all users, and copies from and to it as it does with other memory.
struct AllocDmRequest {
  CommandHeader header;
  uint64_t length;  // > 0, at most the size of the memfd
};
// ImportDm: the memfd comes with it.
struct DmReply {
  ReplyHeader header;
  uint32_t handle;
  uint32_t reserved;
  uint64_t length;
};

// An object of the context that `cookie` names (CommandFdContent), which must be
// of the same user and NIC. The handle is the importer's own from then on; it is
// given back with the command that destroys such an object, and the object
// itself lives as long as its own context.
struct ImportRequest {
  CommandHeader header;
  uint64_t cookie;
  uint32_t handle;
  uint32_t pd;  // ImportMr: a PD of the importer, the one that the MR is of
};

// Where a ring lies. If the segment is new to this context, its memfd comes
// with the reply (descriptors in the order of the rings in the reply, one per
// new segment); the client maps it whole and may then close it. A client that
// could not (no descriptors, no memory) asks for it with GetSegment:
// HandleRequest with handle = segment, HandleReply and the memfd.
struct RingLocation {
  uint32_t segment;
  uint32_t new_segment;  // 1: a descriptor comes with this reply
  uint64_t segment_bytes;
  uint64_t offset;  // 64-byte aligned
  uint32_t slots;   // power of two; 0: no such ring
  uint32_t stride;  // bytes
};
static_assert(sizeof(RingLocation) == 32);

// Descriptor: the write end of the completion channel's pipe, if has_channel.
struct CreateCqRequest {
  CommandHeader header;
  uint32_t cqe;  // wanted entries, >= 1
  uint32_t comp_vector;
  uint64_t user_handle;  // echoed in completion and async events
  uint32_t has_channel;
  uint32_t flags;  // CqFlags
};
enum CqFlags : uint32_t {
  // A CQE that finds the ring full takes the place of the oldest, without an
  // event. Who asks for that sees to it that there is room.
  kCqIgnoreOverrun = 1 << 0,
};
struct CreateCqReply {
  ReplyHeader header;
  uint32_t handle;  // = CQ slot
  uint32_t cqe;     // usable entries
  RingLocation ring;
};

// The reply has a second ring, into which the device has moved the CQEs that are
// not consumed, each to the slot of its number, and into which it writes from now
// on. The first one stays as it is until FinishCqResize, which is sent when
// nobody reads it any more. EINVAL: there are more CQEs than that; EBUSY: the
// last resize is not finished.
struct ResizeCqRequest {
  CommandHeader header;
  uint32_t handle;
  uint32_t cqe;
};

// Completion events of an armed CQ wait until so many CQEs are there or so much
// time has passed since the first of them. 0 and 0: they do not wait.
struct ModifyCqRequest {
  CommandHeader header;
  uint32_t handle;
  uint32_t count;
  uint32_t period_us;
  uint32_t reserved;
};

// Events that were written for the destroyed object: the provider waits until
// the application has acknowledged as many (ibv_destroy_cq(3)).
struct DestroyReply {
  ReplyHeader header;
  uint32_t comp_events;
  uint32_t async_events;
};

struct QpCaps {
  uint32_t max_send_wr;
  uint32_t max_recv_wr;
  uint32_t max_send_sge;
  uint32_t max_recv_sge;
  uint32_t max_inline;
};

struct CreateQpRequest {
  CommandHeader header;
  uint32_t pd;       // XRC_RECV: kNoHandle
  uint32_t send_cq;  // XRC_RECV: kNoHandle
  uint32_t recv_cq;  // XRC_SEND, XRC_RECV: kNoHandle
  uint32_t type;     // enum ibv_qp_type
  uint32_t sq_sig_all;
  QpCaps caps;
  uint64_t user_handle;
  uint32_t srq;           // receives come from there, or kNoHandle
  uint32_t xrcd;          // XRC_RECV, or kNoHandle
  uint32_t create_flags;  // enum ibv_qp_create_flags; kQpBlockSelfMulticast alone
  uint32_t reserved;
};
// A multicast datagram of the QP's own does not come back to it.
inline constexpr uint32_t kQpBlockSelfMulticast = 1u << 1;
struct CreateQpReply {
  ReplyHeader header;
  uint32_t handle;  // = QP slot
  uint32_t qpn;
  uint32_t generation;
  QpCaps caps;  // actual
  RingLocation sq;
  RingLocation rq;
};

// ibv_ah_attr with a fixed layout.
struct AhAttr {
  uint8_t dgid[16];
  uint32_t flow_label;
  uint16_t dlid;  // without is_global: as QueryPortReply::lid
  uint8_t sgid_index;
  uint8_t hop_limit;
  uint8_t traffic_class;
  uint8_t sl;
  uint8_t src_path_bits;
  uint8_t static_rate;
  uint8_t is_global;
  uint8_t port_num;
  uint8_t reserved[2];
};
static_assert(sizeof(AhAttr) == 32);

// ibv_qp_attr with a fixed layout; masks and numbers are those of verbs.
struct QpAttr {
  uint32_t state;
  uint32_t cur_state;
  uint32_t path_mtu;
  uint32_t path_mig_state;
  uint32_t qkey;
  uint32_t rq_psn;
  uint32_t sq_psn;
  uint32_t dest_qpn;
  uint32_t access_flags;
  uint32_t rate_limit;
  uint16_t pkey_index;
  uint16_t alt_pkey_index;
  uint8_t en_sqd_async_notify;
  uint8_t sq_draining;
  uint8_t max_rd_atomic;
  uint8_t max_dest_rd_atomic;
  uint8_t min_rnr_timer;
  uint8_t port_num;
  uint8_t timeout;
  uint8_t retry_cnt;
  uint8_t rnr_retry;
  uint8_t alt_port_num;
  uint8_t alt_timeout;
  uint8_t reserved;
  AhAttr ah;
  AhAttr alt_ah;
};
static_assert(sizeof(QpAttr) == 56 + 64);

struct ModifyQpRequest {
  CommandHeader header;
  uint32_t handle;
  uint32_t mask;  // enum ibv_qp_attr_mask, only bits below 21
  QpAttr attr;
};
struct ModifyQpReply {
  ReplyHeader header;
  uint32_t state;
  uint32_t generation;  // changes on RESET: older CQEs are stale, indices are 0
};

struct QueryQpReply {
  ReplyHeader header;
  QpAttr attr;
  QpCaps caps;
  uint32_t reserved;
};

struct CreateSrqRequest {
  CommandHeader header;
  uint32_t pd;
  uint32_t type;  // enum ibv_srq_type: basic or XRC
  uint32_t max_wr;
  uint32_t max_sge;
  uint64_t user_handle;
  uint32_t xrcd;  // XRC, else kNoHandle
  uint32_t cq;    // XRC: where its receives complete, else kNoHandle
};
struct CreateSrqReply {
  ReplyHeader header;
  uint32_t handle;  // = SRQ slot
  uint32_t srqn;
  uint32_t generation;
  uint32_t max_wr;  // actual
  uint32_t max_sge;
  uint32_t reserved;
  RingLocation ring;
};

// Bits of `mask` are those of enum ibv_srq_attr_mask. With a new max_wr the reply
// has a second ring and nothing is changed yet, neither the limit: the client
// copies the WQEs that are outstanding into it, each into the slot of its
// number, stores SrqRecord::ring, and ends with FinishSrqResize.
struct ModifySrqRequest {
  CommandHeader header;
  uint32_t handle;
  uint32_t mask;
  uint32_t max_wr;
  uint32_t srq_limit;  // the event comes when fewer WQEs are left; 0: never
};
struct ModifySrqReply {
  ReplyHeader header;
  uint32_t max_wr;
  uint32_t ring_number;  // value of SrqRecord::ring that means the new ring
  RingLocation ring;
};
struct FinishSrqResizeRequest {
  CommandHeader header;
  uint32_t handle;
  uint32_t commit;  // 0: the second ring is given up
};
struct QuerySrqReply {
  ReplyHeader header;
  uint32_t max_wr;
  uint32_t max_sge;
  uint32_t srq_limit;  // 0 after its event
  uint32_t reserved;
};

// Descriptor: the file that the domain is known by, if has_file.
struct OpenXrcdRequest {
  CommandHeader header;
  uint32_t has_file;
  uint32_t flags;  // O_CREAT, O_EXCL
};
struct OpenQpRequest {
  CommandHeader header;
  uint32_t xrcd;
  uint32_t qpn;
  uint64_t user_handle;
};
struct OpenQpReply {
  ReplyHeader header;
  uint32_t handle;  // for ModifyQp, QueryQp and DestroyQp, which gives it up
  uint32_t state;
};

struct CreateAhRequest {
  CommandHeader header;
  uint32_t pd;
  uint32_t reserved;
  AhAttr attr;
};

// UD QPs only. A group may be named as ::ffff:a.b.c.d or as ff0e::ffff:a.b.c.d,
// which is the same. Attaching twice is attaching once. Errors: EINVAL, ENOMEM.
struct McastRequest {
  CommandHeader header;
  uint32_t handle;  // of the QP
  uint32_t reserved;
  uint8_t gid[16];
};

// One layer that a frame must have. `value` and `mask` are laid out like the
// ibv_flow_*_filter of this type, in network byte order.
struct FlowSpec {
  uint32_t type;  // enum ibv_flow_spec_type: ETH, IPV4, IPV4_EXT, IPV6, TCP, UDP
  uint8_t value[40];
  uint8_t mask[40];
};
static_assert(sizeof(FlowSpec) == 84);
inline constexpr uint32_t kMaxFlowSpecs = 10;

// Frames for a raw packet QP. Errors: EINVAL (no raw packet QP, specs that
// contradict each other, no such counters), EOPNOTSUPP (a layer or flag that is not
// looked at), ENOMEM.
struct CreateFlowRequest {
  CommandHeader header;
  uint32_t qp;
  uint32_t type;   // enum ibv_flow_attr_type
  uint32_t flags;  // enum ibv_flow_flags
  uint16_t priority;
  uint8_t port;
  uint8_t spec_count;
  uint32_t action;    // FlowAction
  uint32_t tag;       // 24 bits, for the completion
  uint32_t counters;  // of CreateCounters, or kNoHandle
  uint32_t reserved;
  FlowSpec specs[kMaxFlowSpecs];
};
static_assert(sizeof(CreateFlowRequest) == 40 + kMaxFlowSpecs * sizeof(FlowSpec));
enum FlowAction : uint32_t { kFlowDeliver = 0, kFlowDrop = 1 };

// Frames that rules with these counters have taken. DestroyCounters: EBUSY while
// a rule has them.
struct ReadCountersReply {
  ReplyHeader header;
  uint64_t packets;
  uint64_t bytes;
};

// Spreads the frames of flow rules over receiving QPs by a Toeplitz hash; the
// handle stands in CreateFlowRequest::qp. Errors: EINVAL (fields that exclude each
// other, a QP that is no raw packet QP), ENOMEM. DestroyRss: EBUSY while a rule has
// it. A QP that is gone gets nothing.
struct CreateRssRequest {
  CommandHeader header;
  uint32_t fields;  // enum ibv_rx_hash_fields
  uint8_t log_size;
  uint8_t reserved[3];
  uint8_t key[40];
  uint32_t qps[128];  // 2^log_size handles
};
static_assert(sizeof(CreateRssRequest) == 568);
inline constexpr uint32_t kMaxLogRssSize = 7;
inline constexpr uint32_t kFirstRssHandle = 1u << 30;
inline constexpr uint32_t kRssFields = 0xff;  // of the bits that are known

// Raw packet QPs. 0 kbit/s: no limit. EINVAL: not in RTS, more than kMaxRateKbps.
struct LimitQpRateRequest {
  CommandHeader header;
  uint32_t qp;
  uint32_t kbps;
  uint32_t max_burst_bytes;  // sent at once at most; 0: as the device likes
  uint32_t typical_bytes;    // of a packet; a hint
};
inline constexpr uint32_t kMaxRateKbps = 100'000'000;

// HandleRequest with handle = port number (1).
struct QueryPortReply {
  ReplyHeader header;
  uint64_t max_msg_size;
  uint32_t port_cap_flags;
  uint32_t bad_pkey_count;
  uint32_t qkey_violation_count;
  uint16_t gid_table_len;
  uint16_t pkey_table_len;
  uint16_t lid;   // of the daemon's own (nic_sim/qp/lid.h); RoCE drivers show 0
  uint8_t state;  // enum ibv_port_state
  uint8_t max_mtu;
  uint8_t active_mtu;
  uint8_t max_vl_num;
  uint8_t active_width;
  uint8_t active_speed;
  uint8_t phys_state;
  uint8_t link_layer;
  uint8_t reserved[6];
};
static_assert(sizeof(QueryPortReply) == 48);

// Record of the async event pipe; layout of ib_uverbs_async_event_desc.
struct AsyncEventRecord {
  uint64_t element;  // user_handle of the CQ, QP or SRQ, or the port number
  uint32_t event_type;
  uint32_t reserved;
};
static_assert(sizeof(AsyncEventRecord) == 16);

// What the memfd behind an opened /dev/infiniband/uverbsN holds. The preload
// creates it at open(), the provider adds the cookie and seals it. It lets
// stateless interposers recognise the descriptor after dup, fork, SCM_RIGHTS.
struct CommandFdContent {
  uint64_t magic;  // kCommandFdMagic
  uint32_t device_index;
  uint32_t kind;  // 0: uverbs
  uint64_t cookie;
  uint64_t reserved[5];
};
static_assert(sizeof(CommandFdContent) == 64);
inline constexpr uint64_t kCommandFdMagic = 0x5645524245414246ull;
// ioctl(2) on such a descriptor, answered by the preload: the thread's next
// request of the kernel's to allocate an async event descriptor gets this one.
inline constexpr unsigned long kIoctlPassAsyncFd = 0x56420001ul;

// Device numbers that the preload reports: uverbsN is 231:(192 + N).
inline constexpr uint32_t kUverbsMajor = 231;
inline constexpr uint32_t kUverbsFirstMinor = 192;

// Index of the simulated network interface of verbenaN, out of the way of the
// kernel's.
constexpr uint32_t NetdevIndex(uint32_t device_index) { return 1'000'000 + device_index; }

// The fake /sys and /dev of a daemon whose socket is DIR/NAME.sock lie below
// DIR/NAME.tree/ (…/sys/class/infiniband, …/dev/infiniband), complete before
// the socket accepts connections.
inline constexpr char kTreeSuffix[] = ".tree";

}  // namespace verbena::abi
