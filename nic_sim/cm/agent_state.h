// SPDX-License-Identifier: Apache-2.0
//
// The inside of CmAgent: files, ids and what joins them to the CM protocol.
//
// Files: cm_agent.cc (files, dispatch, events), address_commands.cc (create,
// bind, resolve, query, options), connection_commands.cc, multicast_commands.cc,
// protocol_events.cc, device_events.cc.
#pragma once

#include <rdma/rdma_user_cm.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "nic_sim/cm/cm_agent.h"
#include "nic_sim/cm/port_table.h"
#include "nic_sim/cm/router.h"
#include "nic_sim/cm/socket_address.h"
#include "transport/cm/protocol.h"

namespace verbena::nic {

// enum ibv_qp_type, as the ABI has it.
enum class CmIdQpType : uint8_t { kRc = 2, kUc = 3, kUd = 4, kXrcSend = 9, kXrcRecv = 10 };

enum class CmIdState : uint8_t {
  kIdle,
  kAddrQuery,
  kAddrResolved,
  kRouteQuery,
  kRouteResolved,
  kConnect,
  kDisconnect,
  kAddrBound,
  kListen,
};

inline constexpr uint32_t kUdpQkey = 0x01234567;
inline constexpr size_t kMaxCmIds = 65536;
inline constexpr size_t kMaxCmFiles = 65536;
inline constexpr uint32_t kMaxBacklog = 1024;
inline constexpr size_t kMaxHeldRequests = 256;
// Much shorter than any peer's patience (4 s), longer than a step of a program
// on a busy machine.
inline constexpr transport::Duration kListenGrace = transport::Duration::Milliseconds(500);
// How long after the end of a listener another is expected.
inline constexpr transport::Duration kListenAgain = transport::Duration::Milliseconds(1000);

// One rdma_cm id: what ucma and cma keep of it.
struct CmIdRecord : PortOwner {
  uint32_t id = 0;
  CmFileId file = 0;
  uint64_t uid = 0;  // 0: accepted by nobody yet, its events are dropped
  uint16_t port_space = 0;
  CmIdQpType qp_type = CmIdQpType::kRc;
  CmIdState state = CmIdState::kIdle;
  bool removed = false;  // its NIC is gone: it waits to be destroyed
  uint32_t events_reported = 0;

  SocketAddress destination;
  bool has_port = false;  // in the port table
  std::optional<LocalEnd> local;
  transport::Gid local_gid;
  transport::Gid remote_gid;
  transport::CmPath path;
  bool has_path = false;
  transport::Time resolve_until = transport::Time::Never();

  bool family_only_set = false;
  std::optional<uint8_t> tos;
  std::optional<uint8_t> ack_timeout;
  uint32_t backlog = 0;

  transport::CmId cm = 0;  // 0: nothing of the protocol yet
  uint32_t qpn = 0;
  uint8_t srq = 0;
  uint32_t qkey = 0;
  uint32_t starting_psn = 0;
  std::set<uint32_t> groups;

  bool datagram() const { return qp_type == CmIdQpType::kUd; }
};

struct CmGroupRecord {
  uint32_t id = 0;
  uint32_t owner = 0;  // the rdma_cm id
  uint64_t uid = 0;
  uint32_t nic = 0;
  transport::Gid mgid;
  bool send_only = false;
  uint32_t events_reported = 0;
};

struct CmQueuedEvent {
  rdma_ucm_event_resp response;
  uint32_t id = 0;     // counts as reported for this id
  uint32_t group = 0;  // and for this group, if any
  uint32_t child = 0;  // CONNECT_REQUEST: the new id
};

// A request for a port on which somebody, it may be hoped, is about to listen:
// it is bound (qperf tells its port before it calls rdma_listen), or its listener
// has just ended (perftest's servers listen anew for their second connection), or
// in another port space somebody listens, or just did, on a port of that number
// (perftest's second connection may be datagrams, its first never is).
struct CmHeldRequest {
  transport::MadPacket mad;
  uint64_t service_id = 0;
  transport::Time until;  // answered then, whoever listens
};

struct CmFileRecord {
  CmClient client;
  std::deque<CmQueuedEvent> events;
  std::set<uint32_t> ids;
};

class CmAgent::State {
 public:
  State(std::vector<CmNic> nics, CmPlatform& platform);

  CmFileId OpenFile(const CmClient& client);
  void CloseFile(CmFileId file, transport::Time now);
  CmReply Write(CmFileId file, std::span<const std::byte> bytes, transport::Time now);
  void HandleMad(const transport::MadPacket& mad, transport::Time now);
  void HandleTimeout(transport::Time now);
  transport::Time next_timeout() const;
  bool PollNotification(CmNotification* notification);
  void RemoveNic(uint32_t nic, transport::Time now);
  void RestoreNic(uint32_t nic);
  void AnnounceAddressChange(uint32_t nic, transport::Time now);
  void SetGids(uint32_t nic, std::vector<CmNic::Address> gids);
  // Where a command (bytes of a write) of the id leads; empty: to none, or unknown.
  std::optional<uint32_t> NicOf(CmFileId file, std::span<const std::byte> bytes) const;

  transport::CmProtocol& protocol() { return protocol_; }
  const std::unordered_map<CmFileId, CmFileRecord>& files() const { return files_; }
  const std::unordered_map<uint32_t, std::unique_ptr<CmIdRecord>>& ids() const { return ids_; }

 private:
  // One command: its structure and the room for the answer.
  struct Request {
    CmFileId file_id = 0;
    CmFileRecord* file = nullptr;
    std::span<const std::byte> in;     // `in` bytes
    std::span<const std::byte> extra;  // what follows them
    size_t out = 0;
    CmReply* reply = nullptr;
  };
  using Handler = int (State::*)(const Request&);
  struct Command {
    Handler handler;
    size_t in_bytes;   // the least that the structure needs
    size_t out_bytes;  // the least room for the answer
  };
  static const Command* FindCommand(uint32_t number);

  // Copies a command's structure; what older libraries do not have is zero.
  template <typename T>
  static T Load(const Request& request);
  // Answers with as much of `value` as there is room for.
  template <typename T>
  static void Answer(const Request& request, const T& value);

  // --- cm_agent.cc
  int GetEvent(const Request& request);
  int MigrateId(const Request& request);
  int DestroyId(const Request& request);
  // nullptr: ENOENT, or ENXIO for an id whose NIC is gone (Write() tells them apart).
  CmIdRecord* FindId(const Request& request, uint32_t id);
  CmIdRecord* NewId(CmFileId file);
  uint32_t NewIdNumber();
  void DestroyRecord(uint32_t id, bool silently);
  // All that an id holds besides its number and its events.
  void ReleaseRecord(CmIdRecord& record, bool silently);
  // Takes the events that `drop` names out of a file's queue; gives the ids of
  // connection requests that went with them.
  template <typename Drop>
  std::vector<uint32_t> DropEvents(CmFileId file, Drop drop);
  void Notify(CmFileId file, int32_t delta);
  void Queue(CmIdRecord& owner, CmQueuedEvent event);
  void QueuePlain(CmIdRecord& owner, uint32_t type, int32_t status);
  transport::Time Now() const { return now_; }

  // --- address_commands.cc
  int CreateId(const Request& request);
  int BindIp(const Request& request);
  int Bind(const Request& request);
  int ResolveIp(const Request& request);
  int ResolveAddr(const Request& request);
  int ResolveRoute(const Request& request);
  int QueryRoute(const Request& request);
  int Query(const Request& request);
  int QueryAddress(const Request& request, const CmIdRecord& record);
  int QueryGid(const Request& request, const CmIdRecord& record);
  int QueryPath(const Request& request, const CmIdRecord& record);
  int SetOption(const Request& request);
  int SetIdOption(CmIdRecord& record, uint32_t name, std::span<const std::byte> value);
  int SetPath(CmIdRecord& record, std::span<const std::byte> value);
  int BindRecord(CmIdRecord& record, const SocketAddress& address);
  int BindPort(CmIdRecord& record);
  int ResolveRecord(CmIdRecord& record, const SocketAddress* source,
                    const SocketAddress& destination, uint32_t timeout_ms);
  void FinishResolve(CmIdRecord& record, int error);
  void MakePath(CmIdRecord& record);
  template <typename Response>
  void FillDevice(const CmIdRecord& record, Response* response) const;

  // --- connection_commands.cc
  int Connect(const Request& request);
  int Listen(const Request& request);
  int Accept(const Request& request);
  int Reject(const Request& request);
  int Disconnect(const Request& request);
  int InitQpAttr(const Request& request);
  int NotifyId(const Request& request);
  int ConnectReliable(CmIdRecord& record, const rdma_ucm_conn_param& param,
                      const rdma_ucm_ece& ece);
  int ConnectDatagram(CmIdRecord& record, const rdma_ucm_conn_param& param);
  int AcceptRecord(CmIdRecord& record, const rdma_ucm_conn_param& param, const rdma_ucm_ece& ece);
  int FillQpAttr(const CmIdRecord& record, uint32_t qp_state, ib_uverbs_qp_attr* attr) const;
  void StopListening(CmIdRecord& record);

  // --- multicast_commands.cc
  int JoinIpMulticast(const Request& request);
  int JoinMulticast(const Request& request);
  int LeaveMulticast(const Request& request);
  int JoinRecord(const Request& request, CmIdRecord& record, const SocketAddress& group,
                 uint64_t uid, bool send_only);
  void LeaveGroupRecord(uint32_t group);

  // --- protocol_events.cc
  void DrainProtocol();
  void HandleRequest(const transport::CmEvent& event);
  void HandleEvent(CmIdRecord& record, const transport::CmEvent& event);
  void HandleSidrAnswer(CmIdRecord& record, const transport::CmSidrRep& rep);
  CmIdRecord* FindListener(uint64_t service_id, const transport::RdmaIpHeader& header,
                           CmIdQpType type);
  void FillAhAttr(const transport::CmPath& path, ib_uverbs_ah_attr* attr) const;
  bool EnterDisconnect(CmIdRecord& record);
  // The service of a request that nobody listens for yet, but may soon.
  std::optional<uint64_t> AwaitedService(const transport::MadPacket& mad) const;
  // Hands on what was held for `service_id`.
  void ReleaseHeld(uint64_t service_id);

  // --- device_events.cc
  std::vector<uint32_t> IdsBoundTo(uint32_t nic) const;
  bool IsRemoved(uint32_t nic) const { return nics_[nic].removed; }

  std::vector<CmNic> nics_;
  CmPlatform& platform_;
  Router router_;
  PortTable ports_;
  transport::CmProtocol protocol_;
  transport::Time now_;

  std::unordered_map<CmFileId, CmFileRecord> files_;
  std::unordered_map<uint32_t, std::unique_ptr<CmIdRecord>> ids_;
  std::unordered_map<uint32_t, CmGroupRecord> groups_;
  std::unordered_map<transport::CmId, uint32_t> by_cm_;  // protocol id → id
  std::map<uint64_t, std::set<uint32_t>> listeners_;     // service id → ids
  std::deque<CmHeldRequest> held_;                       // oldest first
  // Services whose listener has ended, with the end of the hope for another.
  std::deque<std::pair<uint64_t, transport::Time>> ended_listeners_;  // oldest first
  std::set<uint32_t> resolving_;
  transport::Time next_resolve_ = transport::Time::Never();
  std::deque<CmNotification> notifications_;
  CmFileId next_file_ = 1;
  uint32_t next_id_ = 1;
};

// A structure of the ABI from the front of `bytes`, zero where they end.
template <typename T>
T LoadStruct(std::span<const std::byte> bytes) {
  T value;
  std::memset(&value, 0, sizeof(value));
  std::memcpy(&value, bytes.data(), std::min(bytes.size(), sizeof(value)));
  return value;
}

template <typename T>
T CmAgent::State::Load(const Request& request) {
  return LoadStruct<T>(request.in);
}

template <typename T>
void CmAgent::State::Answer(const Request& request, const T& value) {
  const auto* p = reinterpret_cast<const std::byte*>(&value);
  request.reply->response.assign(p, p + std::min(request.out, sizeof(value)));
}

template <typename T>
std::span<const std::byte> ObjectBytes(const T& object) {
  return std::as_bytes(std::span(&object, 1));
}

// The bytes of an array of the ABI.
template <size_t kBytes>
std::span<const std::byte> BytesOf(const uint8_t (&array)[kBytes], size_t size) {
  return std::as_bytes(std::span(array, std::min(size, kBytes)));
}

}  // namespace verbena::nic
