// SPDX-License-Identifier: Apache-2.0
//
// CmAgent: files, dispatch of commands, events.
#include "nic_sim/cm/cm_agent.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "nic_sim/cm/agent_state.h"

namespace verbena::nic {
namespace {

using transport::CmProtocol;
using transport::Gid;
using transport::MadPacket;
using transport::Time;

std::vector<CmProtocol::Nic> ProtocolNics(const std::vector<CmNic>& nics) {
  std::vector<CmProtocol::Nic> result;
  for (const CmNic& nic : nics) {
    CmProtocol::Nic entry{.ca_guid = nic.node_guid, .ack_delay = nic.ack_delay, .gids = {}};
    for (const CmNic::Address& address : nic.gids) entry.gids.push_back(address.gid);
    result.push_back(std::move(entry));
  }
  return result;
}

const char* StateName(CmIdState state) {
  static constexpr const char* kNames[] = {"idle",        "addr_query",     "addr_resolved",
                                           "route_query", "route_resolved", "connect",
                                           "disconnect",  "addr_bound",     "listen"};
  return kNames[static_cast<size_t>(state)];
}

}  // namespace

CmAgent::State::State(std::vector<CmNic> nics, CmPlatform& platform)
    : nics_(std::move(nics)),
      platform_(platform),
      router_(nics_, platform),
      protocol_(ProtocolNics(nics_), platform.Random()) {}

// --- Commands

const CmAgent::State::Command* CmAgent::State::FindCommand(uint32_t number) {
  // Connect and accept of libraries that do not know ECE end before it; the
  // event of the oldest ends behind the union.
  static const std::map<uint32_t, Command> kCommands = {
      {RDMA_USER_CM_CMD_CREATE_ID,
       {&State::CreateId, sizeof(rdma_ucm_create_id), sizeof(rdma_ucm_create_id_resp)}},
      {RDMA_USER_CM_CMD_DESTROY_ID,
       {&State::DestroyId, sizeof(rdma_ucm_destroy_id), sizeof(rdma_ucm_destroy_id_resp)}},
      {RDMA_USER_CM_CMD_BIND_IP, {&State::BindIp, sizeof(rdma_ucm_bind_ip), 0}},
      {RDMA_USER_CM_CMD_RESOLVE_IP, {&State::ResolveIp, sizeof(rdma_ucm_resolve_ip), 0}},
      {RDMA_USER_CM_CMD_RESOLVE_ROUTE, {&State::ResolveRoute, sizeof(rdma_ucm_resolve_route), 0}},
      {RDMA_USER_CM_CMD_QUERY_ROUTE,
       {&State::QueryRoute, sizeof(rdma_ucm_query),
        offsetof(rdma_ucm_query_route_resp, ibdev_index)}},
      {RDMA_USER_CM_CMD_CONNECT, {&State::Connect, offsetof(rdma_ucm_connect, ece), 0}},
      {RDMA_USER_CM_CMD_LISTEN, {&State::Listen, sizeof(rdma_ucm_listen), 0}},
      {RDMA_USER_CM_CMD_ACCEPT, {&State::Accept, offsetof(rdma_ucm_accept, ece), 0}},
      {RDMA_USER_CM_CMD_REJECT, {&State::Reject, sizeof(rdma_ucm_reject), 0}},
      {RDMA_USER_CM_CMD_DISCONNECT, {&State::Disconnect, sizeof(rdma_ucm_disconnect), 0}},
      {RDMA_USER_CM_CMD_INIT_QP_ATTR,
       {&State::InitQpAttr, sizeof(rdma_ucm_init_qp_attr), sizeof(ib_uverbs_qp_attr)}},
      {RDMA_USER_CM_CMD_GET_EVENT,
       {&State::GetEvent, sizeof(rdma_ucm_get_event), offsetof(rdma_ucm_event_resp, reserved)}},
      {RDMA_USER_CM_CMD_SET_OPTION, {&State::SetOption, sizeof(rdma_ucm_set_option), 0}},
      {RDMA_USER_CM_CMD_NOTIFY, {&State::NotifyId, sizeof(rdma_ucm_notify), 0}},
      {RDMA_USER_CM_CMD_JOIN_IP_MCAST,
       {&State::JoinIpMulticast, sizeof(rdma_ucm_join_ip_mcast), sizeof(rdma_ucm_create_id_resp)}},
      {RDMA_USER_CM_CMD_LEAVE_MCAST,
       {&State::LeaveMulticast, sizeof(rdma_ucm_destroy_id), sizeof(rdma_ucm_destroy_id_resp)}},
      {RDMA_USER_CM_CMD_MIGRATE_ID,
       {&State::MigrateId, sizeof(rdma_ucm_migrate_id), sizeof(rdma_ucm_migrate_resp)}},
      {RDMA_USER_CM_CMD_QUERY,
       {&State::Query, sizeof(rdma_ucm_query), sizeof(rdma_ucm_query_path_resp)}},
      {RDMA_USER_CM_CMD_BIND, {&State::Bind, sizeof(rdma_ucm_bind), 0}},
      {RDMA_USER_CM_CMD_RESOLVE_ADDR, {&State::ResolveAddr, sizeof(rdma_ucm_resolve_addr), 0}},
      {RDMA_USER_CM_CMD_JOIN_MCAST,
       {&State::JoinMulticast, sizeof(rdma_ucm_join_mcast), sizeof(rdma_ucm_create_id_resp)}},
  };
  const auto it = kCommands.find(number);
  return it == kCommands.end() ? nullptr : &it->second;
}

CmReply CmAgent::State::Write(CmFileId file, std::span<const std::byte> bytes, Time now) {
  now_ = now;
  CmReply reply;
  const auto it = files_.find(file);
  if (it == files_.end()) {
    reply.error = EBADF;
    return reply;
  }
  if (bytes.size() < sizeof(rdma_ucm_cmd_hdr)) {
    reply.error = EINVAL;
    return reply;
  }
  const auto header = LoadStruct<rdma_ucm_cmd_hdr>(bytes);
  const auto body = bytes.subspan(sizeof(header));
  if (header.cmd > RDMA_USER_CM_CMD_JOIN_MCAST || header.in > body.size()) {
    reply.error = EINVAL;
    return reply;
  }
  const Command* command = FindCommand(header.cmd);
  if (command == nullptr) {
    reply.error = ENOSYS;
    return reply;
  }
  if (header.out < command->out_bytes) {
    reply.error = ENOSPC;
    return reply;
  }
  if (header.in < command->in_bytes) {
    reply.error = EINVAL;
    return reply;
  }
  const Request request{.file_id = file,
                        .file = &it->second,
                        .in = body.first(header.in),
                        .extra = body.subspan(header.in),
                        .out = header.out,
                        .reply = &reply};
  const int error = (this->*command->handler)(request);
  if (error != ENOENT || reply.error != ENXIO) reply.error = error;
  if (reply.error != 0) reply.response.clear();
  DrainProtocol();
  return reply;
}

// --- Files and ids

CmFileId CmAgent::State::OpenFile(const CmClient& client) {
  if (files_.size() >= kMaxCmFiles) return 0;
  while (next_file_ == 0 || files_.contains(next_file_)) ++next_file_;
  const CmFileId file = next_file_++;
  files_[file].client = client;
  return file;
}

void CmAgent::State::CloseFile(CmFileId file, Time now) {
  now_ = now;
  const auto it = files_.find(file);
  if (it == files_.end()) return;
  while (!it->second.ids.empty()) DestroyRecord(*it->second.ids.begin(), false);
  files_.erase(it);
  std::erase_if(notifications_, [file](const CmNotification& n) { return n.file == file; });
  DrainProtocol();
}

CmIdRecord* CmAgent::State::FindId(const Request& request, uint32_t id) {
  const auto it = ids_.find(id);
  if (it == ids_.end() || it->second->file != request.file_id) return nullptr;
  if (!it->second->removed) return it->second.get();
  request.reply->error = ENXIO;
  return nullptr;
}

uint32_t CmAgent::State::NewIdNumber() {
  while (next_id_ == 0 || ids_.contains(next_id_) || groups_.contains(next_id_)) ++next_id_;
  return next_id_++;
}

CmIdRecord* CmAgent::State::NewId(CmFileId file) {
  if (ids_.size() >= kMaxCmIds) return nullptr;
  auto record = std::make_unique<CmIdRecord>();
  record->id = NewIdNumber();
  record->file = file;
  record->starting_psn = platform_.Random() & 0xffffff;
  files_.at(file).ids.insert(record->id);
  return (ids_[record->id] = std::move(record)).get();
}

void CmAgent::State::ReleaseRecord(CmIdRecord& record, bool silently) {
  StopListening(record);
  while (!record.groups.empty()) LeaveGroupRecord(*record.groups.begin());
  resolving_.erase(record.id);
  if (record.cm != 0) {
    by_cm_.erase(record.cm);
    protocol_.Destroy(record.cm, now_, silently);
    record.cm = 0;
  }
  if (record.has_port) ports_.Release(record.port_space, record);
  record.has_port = false;
}

void CmAgent::State::DestroyRecord(uint32_t id, bool silently) {
  const auto it = ids_.find(id);
  if (it == ids_.end()) return;
  CmIdRecord& record = *it->second;
  const std::vector<uint32_t> children =
      DropEvents(record.file, [id](const CmQueuedEvent& event) { return event.id == id; });
  ReleaseRecord(record, silently);
  files_.at(record.file).ids.erase(id);
  ids_.erase(it);
  // Connections that wait for the listener that is gone.
  for (const uint32_t child : children) DestroyRecord(child, false);
}

int CmAgent::State::DestroyId(const Request& request) {
  const auto command = Load<rdma_ucm_destroy_id>(request);
  const auto it = ids_.find(command.id);
  if (it == ids_.end() || it->second->file != request.file_id) return ENOENT;
  const rdma_ucm_destroy_id_resp response{.events_reported = it->second->events_reported};
  DestroyRecord(command.id, false);
  Answer(request, response);
  return 0;
}

int CmAgent::State::MigrateId(const Request& request) {
  const auto command = Load<rdma_ucm_migrate_id>(request);
  const auto from = files_.find(command.fd);
  if (from == files_.end() || from->second.client.uid != request.file->client.uid) return EINVAL;
  const auto it = ids_.find(command.id);
  if (it == ids_.end() || it->second->file != from->first) return ENOENT;
  CmIdRecord& record = *it->second;
  if (record.removed) return ENXIO;
  Answer(request, rdma_ucm_migrate_resp{.events_reported = record.events_reported});
  if (from->first == request.file_id) return 0;

  std::vector<uint32_t> moving = {record.id};
  int32_t moved = 0;
  auto& old_events = from->second.events;
  for (auto event = old_events.begin(); event != old_events.end();) {
    if (event->id != record.id) {
      ++event;
      continue;
    }
    if (event->child != 0) moving.push_back(event->child);
    request.file->events.push_back(*event);
    event = old_events.erase(event);
    ++moved;
  }
  for (const uint32_t id : moving) {
    // A connection that was not reported yet may have been destroyed or moved
    // by someone who guessed its id.
    const auto member = ids_.find(id);
    if (member == ids_.end() || member->second->file != from->first) continue;
    from->second.ids.erase(id);
    request.file->ids.insert(id);
    member->second->file = request.file_id;
  }
  Notify(from->first, -moved);
  Notify(request.file_id, moved);
  return 0;
}

// --- Events

void CmAgent::State::Notify(CmFileId file, int32_t delta) {
  if (delta != 0) notifications_.push_back({.file = file, .delta = delta});
}

bool CmAgent::State::PollNotification(CmNotification* notification) {
  if (notifications_.empty()) return false;
  *notification = notifications_.front();
  notifications_.pop_front();
  return true;
}

template <typename Drop>
std::vector<uint32_t> CmAgent::State::DropEvents(CmFileId file, Drop drop) {
  std::vector<uint32_t> children;
  const auto dropped = std::erase_if(files_.at(file).events, [&](const CmQueuedEvent& event) {
    if (!drop(event)) return false;
    if (event.child != 0) children.push_back(event.child);
    return true;
  });
  Notify(file, -static_cast<int32_t>(dropped));
  return children;
}

void CmAgent::State::Queue(CmIdRecord& owner, CmQueuedEvent event) {
  // Until an application has accepted a connection it knows no name for it.
  if (owner.uid == 0) return;
  event.id = owner.id;
  files_.at(owner.file).events.push_back(event);
  Notify(owner.file, 1);
}

void CmAgent::State::QueuePlain(CmIdRecord& owner, uint32_t type, int32_t status) {
  CmQueuedEvent event{};
  event.response.uid = owner.uid;
  event.response.id = owner.id;
  event.response.event = type;
  event.response.status = static_cast<uint32_t>(status);
  Queue(owner, event);
}

int CmAgent::State::GetEvent(const Request& request) {
  if (request.file->events.empty()) return EAGAIN;
  const CmQueuedEvent event = request.file->events.front();
  request.file->events.pop_front();
  CmIdRecord& owner = *ids_.at(event.id);
  ++owner.events_reported;
  if (event.group != 0) {
    const auto group = groups_.find(event.group);
    if (group != groups_.end()) ++group->second.events_reported;
  }
  if (event.child != 0) ++owner.backlog;
  Answer(request, event.response);
  return 0;
}

// --- Packets and time

std::optional<uint64_t> CmAgent::State::AwaitedService(const MadPacket& mad) const {
  transport::CmParseError error;
  const auto header = transport::ParseCmHeader(mad.bytes, &error);
  if (!header) return std::nullopt;
  uint64_t service_id;
  const std::byte* data = mad.bytes.data() + transport::kMadHeaderBytes;
  if (header->attribute == transport::CmAttribute::kReq) {
    service_id = transport::CmReq::Load(data).service_id;
  } else if (header->attribute == transport::CmAttribute::kSidrReq) {
    service_id = transport::CmSidrReq::Load(data).service_id;
  } else {
    return std::nullopt;
  }
  if (service_id >> 32 != 0 || listeners_.contains(service_id)) return std::nullopt;
  const auto port = static_cast<uint16_t>(service_id);
  for (const auto& [ended, until] : ended_listeners_) {
    if (static_cast<uint16_t>(ended) == port && now_ < until) return service_id;
  }
  for (const uint16_t other : {RDMA_PS_TCP, RDMA_PS_UDP}) {
    if (listeners_.contains(transport::CmServiceId(other, port))) return service_id;
  }
  const auto* owners = ports_.OwnersOf(static_cast<uint16_t>(service_id >> 16), port);
  if (owners == nullptr) return std::nullopt;
  const bool may_listen = std::any_of(owners->begin(), owners->end(), [](const PortOwner* owner) {
    return static_cast<const CmIdRecord*>(owner)->state == CmIdState::kAddrBound;
  });
  return may_listen ? std::optional(service_id) : std::nullopt;
}

void CmAgent::State::ReleaseHeld(uint64_t service_id) {
  std::deque<CmHeldRequest> others;
  for (const CmHeldRequest& held : std::exchange(held_, {})) {
    if (held.service_id == service_id) {
      protocol_.HandleMad(held.mad, now_);
    } else {
      others.push_back(held);
    }
  }
  held_ = std::move(others);
}

void CmAgent::State::HandleMad(const MadPacket& mad, Time now) {
  now_ = now;
  if (mad.nic < nics_.size() && IsRemoved(mad.nic)) return;
  const auto service = held_.size() < kMaxHeldRequests ? AwaitedService(mad) : std::nullopt;
  if (service) {
    held_.push_back({.mad = mad, .service_id = *service, .until = now + kListenGrace});
    return;
  }
  protocol_.HandleMad(mad, now);
  DrainProtocol();
}

void CmAgent::State::HandleTimeout(Time now) {
  now_ = now;
  while (!held_.empty() && held_.front().until <= now) {
    protocol_.HandleMad(held_.front().mad, now);
    held_.pop_front();
  }
  protocol_.HandleTimeout(now);
  DrainProtocol();
  if (next_resolve_ > now) return;
  next_resolve_ = Time::Never();
  const std::set<uint32_t> waiting = resolving_;
  for (const uint32_t id : waiting) {
    CmIdRecord& record = *ids_.at(id);
    const auto reach = platform_.Resolve(record.local->nic, record.remote_gid);
    if (reach == CmPlatform::Reach::kReachable) {
      FinishResolve(record, 0);
    } else if (record.resolve_until <= now) {
      FinishResolve(record, ETIMEDOUT);
    }
  }
  if (!resolving_.empty()) next_resolve_ = now + transport::Duration::Milliseconds(10);
}

Time CmAgent::State::next_timeout() const {
  const Time held = held_.empty() ? Time::Never() : held_.front().until;
  return std::min({protocol_.next_timeout(), next_resolve_, held});
}

// --- The public face

CmAgent::CmAgent(std::vector<CmNic> nics, CmPlatform& platform)
    : state_(std::make_unique<State>(std::move(nics), platform)) {}
CmAgent::~CmAgent() = default;

CmFileId CmAgent::OpenFile(const CmClient& client) { return state_->OpenFile(client); }
void CmAgent::CloseFile(CmFileId file, Time now) { state_->CloseFile(file, now); }
CmReply CmAgent::Write(CmFileId file, std::span<const std::byte> bytes, Time now) {
  return state_->Write(file, bytes, now);
}
size_t CmAgent::pending_events(CmFileId file) const {
  const auto it = state_->files().find(file);
  return it == state_->files().end() ? 0 : it->second.events.size();
}
void CmAgent::HandleMad(const MadPacket& mad, Time now) { state_->HandleMad(mad, now); }
void CmAgent::RemoveNic(uint32_t nic, Time now) { state_->RemoveNic(nic, now); }
void CmAgent::RestoreNic(uint32_t nic) { state_->RestoreNic(nic); }
void CmAgent::AnnounceAddressChange(uint32_t nic, Time now) {
  state_->AnnounceAddressChange(nic, now);
}
void CmAgent::SetGids(uint32_t nic, std::vector<CmNic::Address> gids) {
  state_->SetGids(nic, std::move(gids));
}
std::optional<uint32_t> CmAgent::NicOf(CmFileId file, std::span<const std::byte> bytes) const {
  return state_->NicOf(file, bytes);
}
void CmAgent::HandleTimeout(Time now) { state_->HandleTimeout(now); }
bool CmAgent::PollMad(MadPacket* mad) { return state_->protocol().PollMad(mad); }
bool CmAgent::PollNotification(CmNotification* notification) {
  return state_->PollNotification(notification);
}
Time CmAgent::next_timeout() const { return state_->next_timeout(); }
size_t CmAgent::file_count() const { return state_->files().size(); }
size_t CmAgent::id_count() const { return state_->ids().size(); }

void CmAgent::ForEachId(const std::function<void(const CmIdInfo&)>& visit) const {
  for (const auto& [id, record] : state_->ids()) {
    if (record->removed) continue;
    CmIdInfo info;
    info.id = id;
    info.file = record->file;
    const CmClient& client = state_->files().at(record->file).client;
    info.pid = client.pid;
    info.uid = client.uid;
    info.port_space = record->port_space;
    info.qp_type = static_cast<uint8_t>(record->qp_type);
    info.state = StateName(record->state);
    info.nic = record->local ? static_cast<int32_t>(record->local->nic) : -1;
    info.local_qpn = record->qpn;
    info.source = record->source.ToString();
    info.destination = record->destination.ToString();
    visit(info);
  }
}

}  // namespace verbena::nic
