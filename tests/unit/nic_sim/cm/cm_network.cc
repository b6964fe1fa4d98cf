// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/nic_sim/cm/cm_network.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace verbena::nic {
namespace {

using transport::CmAttribute;
using transport::Duration;
using transport::Gid;
using transport::MadPacket;
using transport::Time;

__kernel_sockaddr_storage Storage(const SocketAddress& address) {
  __kernel_sockaddr_storage storage{};
  address.Store(reinterpret_cast<std::byte*>(&storage));
  return storage;
}

template <typename Param>
void SetData(const std::string& data, Param* param) {
  std::memcpy(param->private_data, data.data(), data.size());
  param->private_data_len = static_cast<uint8_t>(data.size());
}

}  // namespace

SocketAddress At(const std::string& address, uint16_t port) {
  const auto gid = Gid::Parse(address);
  EXPECT_TRUE(gid) << address;
  return SocketAddress::Inet(gid.value_or(Gid()), port);
}

std::string TextOf(const rdma_ucm_conn_param& param) {
  const auto* text = reinterpret_cast<const char*>(param.private_data);
  return std::string(text, strnlen(text, param.private_data_len));
}
std::string TextOf(const rdma_ucm_ud_param& param) {
  const auto* text = reinterpret_cast<const char*>(param.private_data);
  return std::string(text, strnlen(text, param.private_data_len));
}

// --- CmHost

CmHost::CmHost(CmNetwork& network, std::vector<CmNic> nics)
    : network_(network), agent_(std::make_unique<CmAgent>(std::move(nics), *this)) {}
CmHost::~CmHost() = default;

CmPlatform::Reach CmHost::Resolve(uint32_t /*nic*/, const Gid& destination) {
  const auto it = reach.find(destination);
  return it == reach.end() ? Reach::kReachable : it->second;
}
uint32_t CmHost::Random() { return random_ = random_ * 1664525 + 1013904223; }
void CmHost::JoinGroup(uint32_t nic, const Gid& group) { ++groups[{nic, group}]; }
void CmHost::LeaveGroup(uint32_t nic, const Gid& group) { --groups[{nic, group}]; }

// --- CmNetwork

CmHost& CmNetwork::AddHost(const std::vector<std::vector<std::string>>& nics) {
  std::vector<CmNic> list;
  for (const auto& addresses : nics) {
    CmNic nic;
    nic.device = "verbena" + std::to_string(list.size());
    nic.node_guid = 0x0200'0000'0000'0000 + hosts_.size() * 256 + list.size();
    Gid::Bytes link_local{};
    link_local[0] = std::byte{0xfe};
    link_local[1] = std::byte{0x80};
    link_local[15] = static_cast<std::byte>(hosts_.size() * 16 + list.size() + 1);
    nic.gids.push_back({.gid = Gid(link_local), .prefix = 64});
    for (const std::string& text : addresses) {
      const size_t slash = text.find('/');
      const Gid gid = Gid::Parse(text.substr(0, slash)).value_or(Gid());
      const int bits = std::stoi(text.substr(slash + 1));
      nic.gids.push_back(
          {.gid = gid, .prefix = static_cast<uint8_t>(gid.IsV4Mapped() ? 96 + bits : bits)});
    }
    list.push_back(std::move(nic));
  }
  hosts_.push_back(std::make_unique<CmHost>(*this, list));
  CmHost& host = *hosts_.back();
  for (uint32_t nic = 0; nic < list.size(); ++nic) {
    for (const auto& entry : list[nic].gids) owners_[entry.gid] = {&host, nic};
  }
  return host;
}

size_t CmNetwork::CountSent(CmAttribute attribute) const {
  return static_cast<size_t>(std::count_if(
      sent.begin(), sent.end(), [&](const Sent& s) { return s.attribute == attribute; }));
}

void CmNetwork::Drain() {
  for (auto& host : hosts_) {
    MadPacket mad;
    while (host->agent().PollMad(&mad)) {
      const CmAttribute attribute = transport::MadHeader::Load(mad.bytes.data()).attribute;
      const bool lost = loses && loses(sent.size(), attribute);
      sent.push_back({now_, attribute, mad});
      if (!lost) in_flight_.emplace((now_ + Duration::Milliseconds(1)).ns(), mad);
    }
    CmNotification notification;
    while (host->agent().PollNotification(&notification)) {
      host->readable[notification.file] += notification.delta;
    }
  }
}

void CmNetwork::Run(Duration duration) {
  const Time end = now_ + duration;
  for (;;) {
    Drain();
    Time next = Time::Never();
    for (auto& host : hosts_) next = std::min(next, host->agent().next_timeout());
    if (!in_flight_.empty()) {
      next = std::min(next, Time::FromNanoseconds(in_flight_.begin()->first));
    }
    if (next > end) break;
    now_ = std::max(now_, next);
    while (!in_flight_.empty() && in_flight_.begin()->first <= now_.ns()) {
      MadPacket mad = in_flight_.begin()->second;
      in_flight_.erase(in_flight_.begin());
      const auto owner = owners_.find(mad.destination);
      if (owner == owners_.end()) continue;
      mad.nic = owner->second.second;
      mad.sgid_index = 0;
      owner->second.first->agent().HandleMad(mad, now_);
      Drain();
    }
    for (auto& host : hosts_) {
      if (host->agent().next_timeout() <= now_) host->agent().HandleTimeout(now_);
    }
  }
  now_ = end;
}

// --- CmApp

CmApp::CmApp(CmHost& host, CmNetwork& network, CmClient client)
    : host_(host), network_(network), file_(host.agent().OpenFile(client)) {
  EXPECT_NE(file_, 0u);
}

CmApp::~CmApp() { Close(); }

void CmApp::Close() {
  if (file_ != 0) host_.agent().CloseFile(file_, network_.now());
  file_ = 0;
  network_.Drain();
}

int CmApp::CallBytes(uint32_t number, std::span<const std::byte> command, void* response,
                     size_t response_bytes, std::span<const std::byte> extra) {
  const rdma_ucm_cmd_hdr header{.cmd = number,
                                .in = static_cast<uint16_t>(command.size()),
                                .out = static_cast<uint16_t>(response_bytes)};
  std::vector<std::byte> bytes(sizeof(header));
  std::memcpy(bytes.data(), &header, sizeof(header));
  bytes.insert(bytes.end(), command.begin(), command.end());
  bytes.insert(bytes.end(), extra.begin(), extra.end());
  const CmReply reply = host_.agent().Write(file_, bytes, network_.now());
  EXPECT_LE(reply.response.size(), response_bytes);
  if (reply.error != 0) {
    EXPECT_TRUE(reply.response.empty());
  } else if (response != nullptr && !reply.response.empty()) {
    std::memcpy(response, reply.response.data(), reply.response.size());
  }
  network_.Drain();
  return reply.error;
}

uint32_t CmApp::Create(uint16_t port_space, uint8_t qp_type) {
  rdma_ucm_create_id command{};
  command.uid = 0xabc0;
  command.ps = port_space;
  command.qp_type = qp_type;
  rdma_ucm_create_id_resp response{};
  EXPECT_EQ(Call(RDMA_USER_CM_CMD_CREATE_ID, command, &response, sizeof(response)), 0);
  EXPECT_NE(response.id, 0u);
  return response.id;
}

int CmApp::Bind(uint32_t id, const SocketAddress& address) {
  rdma_ucm_bind command{};
  command.id = id;
  command.addr_size = address.size();
  command.addr = Storage(address);
  return Call(RDMA_USER_CM_CMD_BIND, command);
}

int CmApp::ResolveAddr(uint32_t id, const SocketAddress& destination, const SocketAddress* source,
                       uint32_t timeout_ms) {
  rdma_ucm_resolve_addr command{};
  command.id = id;
  command.timeout_ms = timeout_ms;
  command.dst_size = destination.size();
  command.dst_addr = Storage(destination);
  if (source != nullptr) {
    command.src_size = source->size();
    command.src_addr = Storage(*source);
  }
  return Call(RDMA_USER_CM_CMD_RESOLVE_ADDR, command);
}

int CmApp::ResolveRoute(uint32_t id) {
  return Call(RDMA_USER_CM_CMD_RESOLVE_ROUTE, rdma_ucm_resolve_route{.id = id, .timeout_ms = 2000});
}

int CmApp::Listen(uint32_t id, uint32_t backlog) {
  return Call(RDMA_USER_CM_CMD_LISTEN, rdma_ucm_listen{.id = id, .backlog = backlog});
}

int CmApp::Connect(uint32_t id, uint32_t qpn, const std::string& data) {
  rdma_ucm_connect command{};
  command.id = id;
  command.conn_param.qp_num = qpn;
  command.conn_param.valid = 1;
  command.conn_param.responder_resources = 4;
  command.conn_param.initiator_depth = 6;
  command.conn_param.retry_count = 7;
  command.conn_param.rnr_retry_count = 5;
  SetData(data, &command.conn_param);
  return Call(RDMA_USER_CM_CMD_CONNECT, command);
}

int CmApp::Accept(uint32_t id, uint32_t qpn, uint64_t uid, const std::string& data) {
  rdma_ucm_accept command{};
  command.id = id;
  command.uid = uid;
  command.conn_param.qp_num = qpn;
  command.conn_param.valid = 1;
  command.conn_param.responder_resources = 6;
  command.conn_param.initiator_depth = 4;
  command.conn_param.rnr_retry_count = 3;
  SetData(data, &command.conn_param);
  return Call(RDMA_USER_CM_CMD_ACCEPT, command);
}

int CmApp::Establish(uint32_t id) {
  rdma_ucm_accept command{};
  command.id = id;
  return Call(RDMA_USER_CM_CMD_ACCEPT, command);
}

int CmApp::Reject(uint32_t id, const std::string& data, uint8_t reason) {
  rdma_ucm_reject command{};
  command.id = id;
  command.reason = reason;
  SetData(data, &command);
  return Call(RDMA_USER_CM_CMD_REJECT, command);
}

int CmApp::Disconnect(uint32_t id) {
  return Call(RDMA_USER_CM_CMD_DISCONNECT, rdma_ucm_disconnect{.id = id});
}

int CmApp::Destroy(uint32_t id, uint32_t* events_reported) {
  rdma_ucm_destroy_id command{};
  command.id = id;
  rdma_ucm_destroy_id_resp response{};
  const int error = Call(RDMA_USER_CM_CMD_DESTROY_ID, command, &response, sizeof(response));
  if (events_reported != nullptr) *events_reported = response.events_reported;
  return error;
}

int CmApp::SetOption(uint32_t id, uint32_t level, uint32_t name, std::span<const std::byte> value) {
  rdma_ucm_set_option command{};
  command.id = id;
  command.level = level;
  command.optname = name;
  command.optlen = static_cast<uint32_t>(value.size());
  return Call(RDMA_USER_CM_CMD_SET_OPTION, command, nullptr, 0, value);
}

int CmApp::SetIntOption(uint32_t id, uint32_t name, int32_t value) {
  return SetOption(id, RDMA_OPTION_ID, name, std::as_bytes(std::span(&value, 1)));
}
int CmApp::SetByteOption(uint32_t id, uint32_t name, uint8_t value) {
  return SetOption(id, RDMA_OPTION_ID, name, std::as_bytes(std::span(&value, 1)));
}

int CmApp::QpAttr(uint32_t id, uint32_t state, ib_uverbs_qp_attr* attr) {
  rdma_ucm_init_qp_attr command{};
  command.id = id;
  command.qp_state = state;
  return Call(RDMA_USER_CM_CMD_INIT_QP_ATTR, command, attr, sizeof(*attr));
}

rdma_ucm_query_addr_resp CmApp::QueryAddr(uint32_t id) {
  rdma_ucm_query command{};
  command.id = id;
  command.option = RDMA_USER_CM_QUERY_ADDR;
  rdma_ucm_query_addr_resp response{};
  EXPECT_EQ(Call(RDMA_USER_CM_CMD_QUERY, command, &response, sizeof(response)), 0);
  return response;
}

rdma_ucm_query_addr_resp CmApp::QueryGid(uint32_t id) {
  rdma_ucm_query command{};
  command.id = id;
  command.option = RDMA_USER_CM_QUERY_GID;
  rdma_ucm_query_addr_resp response{};
  EXPECT_EQ(Call(RDMA_USER_CM_CMD_QUERY, command, &response, sizeof(response)), 0);
  return response;
}

SocketAddress CmApp::Source(uint32_t id) {
  const auto response = QueryAddr(id);
  return SocketAddress::Load(std::as_bytes(std::span(&response.src_addr, 1)))
      .value_or(SocketAddress());
}
SocketAddress CmApp::Destination(uint32_t id) {
  const auto response = QueryAddr(id);
  return SocketAddress::Load(std::as_bytes(std::span(&response.dst_addr, 1)))
      .value_or(SocketAddress());
}

std::optional<rdma_ucm_event_resp> CmApp::GetEvent() {
  // As the preload does: one readable event is taken, then asked for.
  EXPECT_EQ(host_.readable[file_], static_cast<int64_t>(host_.agent().pending_events(file_)));
  rdma_ucm_event_resp response{};
  const int error =
      Call(RDMA_USER_CM_CMD_GET_EVENT, rdma_ucm_get_event{}, &response, sizeof(response));
  if (error != 0) {
    EXPECT_EQ(error, EAGAIN);
    return std::nullopt;
  }
  --host_.readable[file_];
  return response;
}

rdma_ucm_event_resp CmApp::Expect(uint32_t type, int32_t status) {
  const auto event = GetEvent();
  EXPECT_TRUE(event) << "no event instead of " << type;
  if (!event) return {};
  EXPECT_EQ(event->event, type);
  EXPECT_EQ(static_cast<int32_t>(event->status), status);
  return *event;
}

void CmApp::ExpectNoEvent() {
  const auto event = GetEvent();
  EXPECT_FALSE(event) << event->event;
}

uint32_t CmApp::Resolved(const SocketAddress& destination, uint16_t port_space,
                         const SocketAddress* source, uint8_t qp_type) {
  const uint32_t id = Create(port_space, qp_type);
  EXPECT_EQ(ResolveAddr(id, destination, source), 0);
  EXPECT_EQ(Expect(kAddrResolved).id, id);
  EXPECT_EQ(ResolveRoute(id), 0);
  EXPECT_EQ(Expect(kRouteResolved).id, id);
  return id;
}

uint32_t CmApp::Listening(const SocketAddress& address, uint16_t port_space, uint32_t backlog,
                          uint8_t qp_type) {
  const uint32_t id = Create(port_space, qp_type);
  EXPECT_EQ(Bind(id, address), 0);
  EXPECT_EQ(Listen(id, backlog), 0);
  return id;
}

}  // namespace verbena::nic
