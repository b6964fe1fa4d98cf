// SPDX-License-Identifier: Apache-2.0
//
// Hosts with a CmAgent each on a network in virtual time, and applications that
// speak to them as librdmacm does: with the bytes of the kernel's ABI.
#pragma once

#include <rdma/rdma_user_cm.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "nic_sim/cm/cm_agent.h"
#include "nic_sim/cm/socket_address.h"
#include "transport/cm/messages.h"

namespace verbena::nic {

class CmNetwork;

// enum rdma_cm_event_type.
enum CmTestEvent : uint32_t {
  kAddrResolved = 0,
  kAddrError = 1,
  kRouteResolved = 2,
  kConnectRequest = 4,
  kConnectResponse = 5,
  kUnreachable = 7,
  kRejected = 8,
  kEstablished = 9,
  kDisconnected = 10,
  kDeviceRemoval = 11,
  kMulticastJoin = 12,
  kAddrChange = 14,
  kTimewaitExit = 15,
};

// "10.0.0.1", "fd00::1", "::1" with a port.
SocketAddress At(const std::string& address, uint16_t port = 0);

class CmHost : public CmPlatform {
 public:
  CmHost(CmNetwork& network, std::vector<CmNic> nics);
  ~CmHost() override;

  CmAgent& agent() { return *agent_; }

  // CmPlatform. `own` and `unreachable` are what a test sets.
  bool IsHostAddress(const transport::Gid& address) override { return own.contains(address); }
  Reach Resolve(uint32_t nic, const transport::Gid& destination) override;
  uint32_t Random() override;
  void JoinGroup(uint32_t nic, const transport::Gid& group) override;
  void LeaveGroup(uint32_t nic, const transport::Gid& group) override;
  std::set<transport::Gid> own;
  std::map<transport::Gid, Reach> reach;
  std::map<std::pair<uint32_t, transport::Gid>, int> groups;

  // Events that can be read, by notifications alone.
  std::map<CmFileId, int64_t> readable;

 private:
  friend class CmNetwork;
  CmNetwork& network_;
  std::unique_ptr<CmAgent> agent_;
  uint32_t random_ = 1;
};

// One open file of /dev/infiniband/rdma_cm.
class CmApp {
 public:
  explicit CmApp(CmHost& host, CmNetwork& network, CmClient client = {});
  ~CmApp();
  CmHost& host() { return host_; }
  CmFileId file() const { return file_; }
  void Close();

  // One write(): errno, and what would be copied to the response address.
  template <typename Command>
  int Call(uint32_t number, const Command& command, void* response = nullptr,
           size_t response_bytes = 0, std::span<const std::byte> extra = {}) {
    const auto* p = reinterpret_cast<const std::byte*>(&command);
    return CallBytes(number, {p, sizeof(command)}, response, response_bytes, extra);
  }
  int CallBytes(uint32_t number, std::span<const std::byte> command, void* response,
                size_t response_bytes, std::span<const std::byte> extra);

  uint32_t Create(uint16_t port_space = RDMA_PS_TCP, uint8_t qp_type = 0);
  int Bind(uint32_t id, const SocketAddress& address);
  int ResolveAddr(uint32_t id, const SocketAddress& destination,
                  const SocketAddress* source = nullptr, uint32_t timeout_ms = 2000);
  int ResolveRoute(uint32_t id);
  int Listen(uint32_t id, uint32_t backlog = 0);
  int Connect(uint32_t id, uint32_t qpn, const std::string& data = "");
  int Accept(uint32_t id, uint32_t qpn, uint64_t uid, const std::string& data = "");
  int Establish(uint32_t id);  // accept of the active side
  int Reject(uint32_t id, const std::string& data = "", uint8_t reason = 0);
  int Disconnect(uint32_t id);
  // errno; *events_reported: of the answer.
  int Destroy(uint32_t id, uint32_t* events_reported = nullptr);
  int SetOption(uint32_t id, uint32_t level, uint32_t name, std::span<const std::byte> value);
  int SetIntOption(uint32_t id, uint32_t name, int32_t value);
  int SetByteOption(uint32_t id, uint32_t name, uint8_t value);
  int QpAttr(uint32_t id, uint32_t state, ib_uverbs_qp_attr* attr);
  rdma_ucm_query_addr_resp QueryAddr(uint32_t id);
  rdma_ucm_query_addr_resp QueryGid(uint32_t id);
  SocketAddress Source(uint32_t id);
  SocketAddress Destination(uint32_t id);

  // The next event; empty: none.
  std::optional<rdma_ucm_event_resp> GetEvent();
  // The next event, which must be `type` with `status`.
  rdma_ucm_event_resp Expect(uint32_t type, int32_t status = 0);
  void ExpectNoEvent();

  // Address and route, events taken. Fails the test if that fails.
  uint32_t Resolved(const SocketAddress& destination, uint16_t port_space = RDMA_PS_TCP,
                    const SocketAddress* source = nullptr, uint8_t qp_type = 0);
  uint32_t Listening(const SocketAddress& address, uint16_t port_space = RDMA_PS_TCP,
                     uint32_t backlog = 0, uint8_t qp_type = 0);

 private:
  CmHost& host_;
  CmNetwork& network_;
  CmFileId file_;
};

class CmNetwork {
 public:
  // A host with one NIC per list of addresses ("10.0.0.1/24").
  CmHost& AddHost(const std::vector<std::vector<std::string>>& nics);

  transport::Time now() const { return now_; }
  // Runs until `duration` later.
  void Run(transport::Duration duration = transport::Duration::Milliseconds(100));
  void Drain();

  // True: the message with this number (from 0) is lost.
  std::function<bool(size_t number, transport::CmAttribute)> loses;
  struct Sent {
    transport::Time when;
    transport::CmAttribute attribute;
    transport::MadPacket mad;
  };
  std::vector<Sent> sent;
  size_t CountSent(transport::CmAttribute attribute) const;

 private:
  std::vector<std::unique_ptr<CmHost>> hosts_;
  std::map<transport::Gid, std::pair<CmHost*, uint32_t>> owners_;  // of addresses
  std::multimap<int64_t, transport::MadPacket> in_flight_;
  transport::Time now_;
};

// The user data of an event up to its first zero byte.
std::string TextOf(const rdma_ucm_conn_param& param);
std::string TextOf(const rdma_ucm_ud_param& param);

}  // namespace verbena::nic
