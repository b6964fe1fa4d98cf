// SPDX-License-Identifier: Apache-2.0
//
// CmProtocol: connections (RC, UC, XRC) and UD look-ups (SIDR) of one host as
// Linux' ib_cm handles them: both sides' state machines, retransmission,
// duplicates, MRA, stale connections, timewait. Sans-I/O.
//
// Thread: one at a time. Call order: after every call that takes `now`, drain
// PollEvent, then PollMad, then read next_timeout().
//
// Files: protocol.cc (requests of the owner, table, timers),
// protocol_receive.cc (messages).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "transport/base/result.h"
#include "transport/base/time.h"
#include "transport/cm/mad_packet.h"
#include "transport/cm/messages.h"
#include "transport/types.h"

namespace verbena::transport {

// A local communication id: the 32-bit number that the wire has. Never 0.
using CmId = uint32_t;

enum class CmState : uint8_t {
  kIdle,
  kReqSent,
  kReqReceived,
  kMraReqSent,      // passive; the MRA itself goes out when a REQ is repeated
  kMraReqReceived,  // active
  kRepSent,
  kRepReceived,
  kMraRepSent,      // active, as above
  kMraRepReceived,  // passive
  kEstablished,
  kDreqSent,
  kDreqReceived,
  kTimewait,
  kSidrReqSent,
  kSidrReqReceived,
};
const char* CmStateName(CmState state);

enum class CmQpType : uint8_t { kRc, kUc, kXrcInitiator, kXrcTarget };

enum class CmError : uint8_t {
  kInvalidState,     // not in this state; also: no such id
  kInvalidArgument,  // private data too long, bad value
  kNoRoom,           // too many connections
  kIsConnected,      // NotifyEstablished of an established one
};

// Where the messages and the data of a connection go.
struct CmPath {
  uint32_t nic = 0;
  uint8_t sgid_index = 0;
  Gid local_gid;
  Gid remote_gid;
  uint32_t flow_label = 0;  // 20 bits
  uint8_t traffic_class = 0;
  uint8_t hop_limit = 64;
  uint8_t sl = 0;
  uint8_t rate = 0;  // enum ibv_rate; 0: of the port
  Pmtu mtu = Pmtu::k1024;
  Pkey pkey = kDefaultPkey;
  uint8_t packet_life_time = 18;  // 4.096 us * 2^n
};

struct CmReqParameters {
  CmPath path;
  uint64_t service_id = 0;
  CmQpType qp_type = CmQpType::kRc;
  uint32_t qpn = 0;
  uint32_t starting_psn = 0;
  uint8_t responder_resources = 0;
  uint8_t initiator_depth = 0;
  uint8_t remote_response_timeout = 20;
  uint8_t local_response_timeout = 20;
  uint8_t max_cm_retries = 15;
  uint8_t flow_control = 0;
  uint8_t retry_count = 7;  // at most 7
  uint8_t rnr_retry = 7;    // at most 7
  uint8_t srq = 0;
  uint32_t ece_vendor_id = 0;
  uint32_t ece_options = 0;
  std::span<const std::byte> private_data;  // at most 92 bytes
};

struct CmRepParameters {
  uint32_t qpn = 0;
  uint32_t starting_psn = 0;
  uint8_t responder_resources = 0;
  uint8_t initiator_depth = 0;
  uint8_t flow_control = 0;
  uint8_t rnr_retry = 7;
  uint8_t srq = 0;
  uint32_t ece_vendor_id = 0;
  uint32_t ece_options = 0;
  std::span<const std::byte> private_data;  // at most 196 bytes
};

struct CmSidrReqParameters {
  CmPath path;
  uint64_t service_id = 0;
  Duration timeout = Duration::Milliseconds(4096);
  uint8_t max_cm_retries = 15;
  std::span<const std::byte> private_data;  // at most 216 bytes
};

struct CmSidrRepParameters {
  CmSidrStatus status = CmSidrStatus::kSuccess;
  uint32_t qpn = 0;
  uint32_t qkey = 0;
  std::span<const std::byte> private_data;  // at most 136 bytes
};

enum class CmEventType : uint8_t {
  kReqReceived,  // `id` is new
  kReqError,     // no answer to any REQ
  kRepReceived,
  kRepError,  // no answer to any REP
  kRtuReceived,
  kUserEstablished,
  kRejReceived,
  kMraReceived,
  kDreqReceived,
  kDreqError,
  kDrepReceived,
  kTimewaitExit,
  kSidrReqReceived,  // `id` is new
  kSidrReqError,
  kSidrRepReceived,
};
const char* CmEventTypeName(CmEventType type);

struct CmEvent {
  CmEventType type;
  CmId id = 0;
  // What was received, where a message was.
  std::variant<std::monostate, CmReq, CmRep, CmRej, CmSidrReq, CmSidrRep> message;
  uint32_t modifier = 0;  // of the message's MAD header (ECE options)
};

// What is known about one connection; read-only for others.
struct CmConnection {
  CmId id = 0;
  uint32_t remote_id = 0;
  CmState state = CmState::kIdle;
  CmQpType qp_type = CmQpType::kRc;
  bool active = false;
  CmPath path;
  uint64_t service_id = 0;
  uint64_t remote_ca_guid = 0;
  uint32_t local_qpn = 0;
  uint32_t remote_qpn = 0;
  uint32_t sq_psn = 0;
  uint32_t rq_psn = 0;
  uint8_t responder_resources = 0;
  uint8_t initiator_depth = 0;
  uint8_t retry_count = 0;
  uint8_t rnr_retry = 0;
  uint8_t ack_timeout = 0;  // local ACK timeout code for the QP
};

// Messages by attribute (CmAttribute - 0x10).
struct CmCounters {
  static constexpr size_t kAttributes = 11;
  std::array<uint64_t, kAttributes> sent{};
  std::array<uint64_t, kAttributes> resent{};
  std::array<uint64_t, kAttributes> received{};
  std::array<uint64_t, kAttributes> duplicates{};
  uint64_t malformed = 0;
  uint64_t no_room = 0;
};

class CmProtocol {
 public:
  struct Nic {
    uint64_t ca_guid = 0;  // host order
    uint8_t ack_delay = 15;
    std::vector<Gid> gids;  // by index
    // That it had, with their indices: connections with them go on.
    std::vector<std::pair<Gid, uint8_t>> former = {};
  };
  static constexpr size_t kMaxConnections = 65536;

  // `seed` decides the ids, nothing else.
  CmProtocol(std::vector<Nic> nics, uint32_t seed);
  ~CmProtocol();
  CmProtocol(const CmProtocol&) = delete;
  CmProtocol& operator=(const CmProtocol&) = delete;

  // The GID table of a NIC is another.
  void SetGids(uint32_t nic, std::vector<Gid> gids);

  // REQ and SIDR_REQ for `service_id` are taken from now on; calls are counted.
  void Listen(uint64_t service_id);
  void StopListening(uint64_t service_id);

  Result<CmId, CmError> SendReq(const CmReqParameters& parameters, Time now);
  Result<CmId, CmError> SendSidrReq(const CmSidrReqParameters& parameters, Time now);
  Result<void, CmError> SendRep(CmId id, const CmRepParameters& parameters, Time now);
  Result<void, CmError> SendRtu(CmId id, std::span<const std::byte> private_data, Time now);
  Result<void, CmError> SendRej(CmId id, CmRejectReason reason, std::span<const std::byte> info,
                                std::span<const std::byte> private_data, Time now);
  // `delayed`: sent only when the peer repeats its message.
  Result<void, CmError> SendMra(CmId id, uint8_t service_timeout, bool delayed, Time now);
  Result<void, CmError> SendDreq(CmId id, Time now);
  Result<void, CmError> SendDrep(CmId id, Time now);
  Result<void, CmError> SendSidrRep(CmId id, const CmSidrRepParameters& parameters, Time now);
  // The QP saw a packet of the peer before the RTU came.
  Result<void, CmError> NotifyEstablished(CmId id, Time now);
  // Forgets the id; tells the peer what it must know (REJ, DREQ once, DREP,
  // SIDR reject). `silently`: a new request is dropped so that the peer asks
  // again later.
  void Destroy(CmId id, Time now, bool silently = false);

  void HandleMad(const MadPacket& mad, Time now);
  void HandleTimeout(Time now);

  bool PollEvent(CmEvent* event);
  bool PollMad(MadPacket* mad);
  Time next_timeout() const;

  // nullptr: no such id. Valid until the next call.
  const CmConnection* Find(CmId id) const;
  size_t connection_count() const { return connections_.size(); }
  const CmCounters& counters() const { return counters_; }

 private:
  struct Connection;
  using PeerKey = std::pair<uint64_t, uint32_t>;  // CA GUID and comm id or QPN

  // --- protocol.cc
  Connection* FindConnection(CmId id) const;
  Connection* FindPair(CmId local, uint32_t remote) const;
  Connection* NewConnection();
  void Remove(Connection& connection);
  void SetDeadline(Connection& connection, Time deadline);
  template <typename Message>
  MadPacket Make(const CmPath& path, uint64_t tid, const Message& message, uint32_t modifier = 0);
  // Sends and repeats until StopRepeating or the retries are used up.
  void SendRepeated(Connection& connection, const MadPacket& mad, Time now);
  void StopRepeating(Connection& connection);
  void Send(const MadPacket& mad);
  void Emit(CmEventType type, const Connection& connection);
  uint64_t OwnTid(const Connection& connection) const;
  void ForgetPeer(Connection& connection);
  void ResetToIdle(Connection& connection);
  void EnterTimewait(Connection& connection, Time now);
  void HandleGivenUp(Connection& connection, Time now);

  // --- protocol_receive.cc
  bool PathBack(const MadPacket& mad, CmPath* path) const;
  void HandleReq(const MadPacket& mad, const MadHeader& header, Time now);
  void HandleDuplicateReq(Connection& connection, const MadPacket& mad, const MadHeader& header,
                          const CmReq& req);
  void HandleRep(const MadPacket& mad, const MadHeader& header, Time now);
  void HandleDuplicateRep(const CmRep& rep, const MadHeader& header);
  void HandleRtu(const MadPacket& mad, Time now);
  void HandleRej(const MadPacket& mad, Time now);
  void HandleMra(const MadPacket& mad, Time now);
  void HandleDreq(const MadPacket& mad, const MadHeader& header, Time now);
  void HandleDrep(const MadPacket& mad, Time now);
  void HandleSidrReq(const MadPacket& mad, const MadHeader& header, Time now);
  void HandleSidrRep(const MadPacket& mad, const MadHeader& header, Time now);
  void AnswerRej(const CmPath& back, uint64_t tid, uint32_t local_id, uint32_t remote_id,
                 CmRejected message, CmRejectReason reason);
  void DisconnectStale(const PeerKey& qpn, Time now);
  void CountDuplicate(CmAttribute attribute);

  std::vector<Nic> nics_;
  uint32_t id_mask_;
  uint32_t next_id_ = 1;
  std::unordered_map<CmId, std::unique_ptr<Connection>> connections_;
  std::unordered_map<uint64_t, uint32_t> listeners_;  // service id → count
  std::map<PeerKey, CmId> remote_ids_;
  std::map<PeerKey, CmId> remote_qpns_;
  std::map<std::pair<Gid, uint32_t>, CmId> sidr_requests_;  // sender and request id
  std::set<std::pair<int64_t, CmId>> deadlines_;
  std::deque<CmEvent> events_;
  std::deque<MadPacket> outgoing_;
  CmCounters counters_;
};

// IBTA time code to milliseconds as Linux rounds it: 4.096 us * 2^code, at
// least 1.
Duration CmTime(uint8_t code);

// The local ACK timeout code of a path, from the packet life time and the
// responder's ACK delay (both codes). 0-31.
uint8_t CmAckTimeout(uint8_t ack_delay, uint8_t packet_life_time);

}  // namespace verbena::transport
