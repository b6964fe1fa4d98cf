// SPDX-License-Identifier: Apache-2.0
//
// CmAgent: what Linux' rdma_ucm, rdma_cm and ib_cm are to librdmacm, for one
// host: ids, port spaces, address and route resolution, connections and UD
// look-ups, multicast, events. The commands are those that an application
// write()s to /dev/infiniband/rdma_cm (<rdma/rdma_user_cm.h>, ABI 4); the wire
// protocol is transport/cm. No I/O, clock or thread of its own.
//
// Thread: one at a time (the owner's lock). Call order: after every call that
// takes `now`, drain PollMad and PollNotification, then read next_timeout().
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/base/time.h"
#include "transport/cm/mad_packet.h"
#include "transport/types.h"

namespace verbena::nic {

// A NIC as the agent sees it. Its port number is 1.
struct CmNic {
  // One entry of the GID table; an all-zero gid is an empty entry.
  struct Address {
    transport::Gid gid;
    uint8_t prefix = 128;  // bits of the subnet, counted in the IPv6 form (IPv4 /16 is 112)
  };
  std::string device;                 // "verbena0"
  uint64_t node_guid = 0;             // host order
  uint32_t ibdev_index = 0xffffffff;  // as NETLINK_RDMA reports it; all ones: not known
  transport::Pmtu mtu = transport::Pmtu::k4096;
  uint8_t ack_delay = 15;     // local_ca_ack_delay
  std::vector<Address> gids;  // by GID index; index 0 is link-local
  bool removed = false;       // unplugged for the time being: RemoveNic
};

// What the agent needs of its surroundings.
class CmPlatform {
 public:
  virtual ~CmPlatform() = default;

  // True if `address` (IPv6, or v4-mapped) is one of this machine's own. The
  // first NIC stands for all of them; 127.0.0.0/8 and ::1 are not asked for.
  virtual bool IsHostAddress(const transport::Gid& address) = 0;

  // Whether packets of `nic` can reach `destination`, which is no address of
  // this host's NICs. kPending is asked again until the caller's time is over.
  enum class Reach { kReachable, kPending, kUnreachable };
  virtual Reach Resolve(uint32_t nic, const transport::Gid& destination) = 0;

  // A fault rule wants a step of this file's application, on `nic` if that is known, to end with
  // `event` (enum rdma_cm_event_type: ADDR_ERROR, ROUTE_ERROR, CONNECT_ERROR, UNREACHABLE or
  // REJECTED): the event's status, or nothing.
  virtual std::optional<int32_t> InjectedStatus(uint32_t /*file*/, uint8_t /*event*/,
                                                std::optional<uint32_t> /*nic*/) {
    return std::nullopt;
  }

  // 32 unpredictable bits: ids, PSNs, ephemeral ports.
  virtual uint32_t Random() = 0;

  // The host becomes or ceases to be a member of `group` on that NIC: what
  // IGMP and MLD would tell the network. Counted: each Join has its Leave.
  virtual void JoinGroup(uint32_t nic, const transport::Gid& group) = 0;
  virtual void LeaveGroup(uint32_t nic, const transport::Gid& group) = 0;
};

// Names an open file; never reused, never 0.
using CmFileId = uint32_t;

struct CmClient {
  pid_t pid = 0;
  uid_t uid = 0;
  bool may_bind_low_ports = false;  // CAP_NET_BIND_SERVICE: ports below 1024
};

// What one write() gives: errno (0: success; the write returns its full
// length) and the bytes to copy to the command's `response` address before it
// returns (empty: nothing to copy). On errors nothing is copied.
struct CmReply {
  int error = 0;
  std::vector<std::byte> response;
};

// Events of `file` that can be read: +n were queued, -n were dropped unread
// (their id was destroyed or migrated away). Events handed out by GET_EVENT are
// not reported.
struct CmNotification {
  CmFileId file = 0;
  int32_t delta = 0;
};

// An id for listings (`rdma resource show cm_id`).
struct CmIdInfo {
  uint32_t id = 0;
  CmFileId file = 0;
  pid_t pid = 0;
  uid_t uid = 0;
  uint16_t port_space = 0;
  uint8_t qp_type = 0;     // enum ibv_qp_type
  const char* state = "";  // "idle", "listen", "connect", ...
  int32_t nic = -1;        // -1: no device
  uint32_t local_qpn = 0;  // 0: none
  std::string source;      // "127.88.0.1:7174", "[fe80::1]:7174"; empty: none
  std::string destination;
};

class CmAgent {
 public:
  // `platform` must outlive the agent. NICs are numbered in the order given.
  CmAgent(std::vector<CmNic> nics, CmPlatform& platform);
  ~CmAgent();
  CmAgent(const CmAgent&) = delete;
  CmAgent& operator=(const CmAgent&) = delete;

  // open() of the character device. 0: too many files.
  CmFileId OpenFile(const CmClient& client);
  // Last close(), or the process is gone: destroys all ids of the file (sends
  // REJ or DREQ where a peer waits).
  void CloseFile(CmFileId file, transport::Time now);

  // One write(). `bytes` is what the application wrote, with two changes that
  // the process at the other side must make, since the agent sees neither its
  // memory nor its descriptors:
  // - SET_OPTION: the optlen bytes at optval follow behind the command;
  // - MIGRATE_ID: `fd` is the CmFileId of the file that the descriptor names
  //   (0: the descriptor is no rdma_cm file; gives EINVAL).
  // GET_EVENT never waits: EAGAIN if there is no event.
  CmReply Write(CmFileId file, std::span<const std::byte> bytes, transport::Time now);

  // The NIC that such a write is about: what its id is bound to, or will be by it. Empty: none
  // yet, or there is no such id.
  std::optional<uint32_t> NicOf(CmFileId file, std::span<const std::byte> bytes) const;

  // Events queued in `file`.
  size_t pending_events(CmFileId file) const;

  // A MAD of class CM or not (others are ignored) that QP1 of `mad.nic`
  // received; ICRC, Q_Key and P_Key already checked.
  void HandleMad(const transport::MadPacket& mad, transport::Time now);
  // next_timeout() has passed.
  void HandleTimeout(transport::Time now);

  // The NIC is gone, as when a driver lets go of its device. Each id bound to it
  // gets DEVICE_REMOVAL and is closed as if destroyed (peers get REJ or DREQ, as
  // far as packets still leave): whatever is asked of it then is answered with
  // ENXIO, but DESTROY_ID works and counts its events. Wildcard listeners stay.
  // Until RestoreNic what leads to the NIC ends with ENODEV. Both do nothing
  // when it is so already. `nic`: by the order of the constructor.
  void RemoveNic(uint32_t nic, transport::Time now);
  void RestoreNic(uint32_t nic);
  // The netdev of the NIC has another link-layer address (on Linux: its bond
  // failed over): ADDR_CHANGE for each id bound to it. Ids stay as they are.
  void AnnounceAddressChange(uint32_t nic, transport::Time now);

  // Its GID table is another, of the same size. Ids keep the address that they have.
  void SetGids(uint32_t nic, std::vector<CmNic::Address> gids);

  // Outputs.
  bool PollMad(transport::MadPacket* mad);
  bool PollNotification(CmNotification* notification);
  transport::Time next_timeout() const;

  // Observers.
  size_t file_count() const;
  size_t id_count() const;
  void ForEachId(const std::function<void(const CmIdInfo&)>& visit) const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace verbena::nic
