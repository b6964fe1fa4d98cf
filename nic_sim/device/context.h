// SPDX-License-Identifier: Apache-2.0
//
// What the control server handles of the device, without the packet path: an
// opened device (Context) with its commands, and facts about clients and NICs.
//
// Control calls are made while the context's lock is held, by the thread that
// serves the user.
// Errors are positive errno values, 0 is success; what each means is in the man
// page of the verb.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "transport/types.h"

namespace verbena::nic {

// The shard's lock. Engine threads hold it during a pass and let waiting
// control calls go first.
class ShardLock {
 public:
  void lock() {
    waiters_.fetch_add(1);
    mutex_.lock();
    waiters_.fetch_sub(1);
  }
  void unlock() { mutex_.unlock(); }
  // False: it was held all the time, by a copy whose memory's owner does not
  // answer. For those who only want to look.
  bool LockWithin(std::chrono::milliseconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    waiters_.fetch_add(1);
    bool locked = mutex_.try_lock();
    while (!locked && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      locked = mutex_.try_lock();
    }
    waiters_.fetch_sub(1);
    return locked;
  }
  // For engine threads: fails at once if held or if a control call waits.
  bool TryLockForEngine() {
    return waiters_.load(std::memory_order_relaxed) == 0 && mutex_.try_lock();
  }

 private:
  std::mutex mutex_;
  std::atomic<uint32_t> waiters_{0};
};

// A process that opens a device, as the control server knows it.
struct ClientIdentity {
  pid_t pid = 0;
  uid_t uid = 0;
  std::string comm;
  int mem_fd = -1;          // /proc/self/mem of the client or -1; taken over
  int async_write_fd = -1;  // write end of its event pipe; taken over
};

// What the JSON listings show of a NIC.
struct NicInfo {
  std::string device;  // "verbena0"
  uint32_t host = 0;
  std::string mac;                   // "02:…"
  std::string ipv4;                  // dotted
  std::vector<transport::Gid> gids;  // gid_tbl_len entries
  std::vector<uint8_t> prefixes;     // of each: bits of the subnet, an IPv4 /24 is 120
  bool active = true;
  std::string port;         // "af_packet:veth0"; empty: in the daemon only
  uint32_t active_mtu = 0;  // bytes
  uint64_t node_guid = 0;   // host order
  bool present = true;      // false: a fault rule has taken it out
};

// What a fault rule does to a NIC. kAddress: its netdev has another link-layer address;
// kGids: its GID table is another.
enum class NicChange : uint8_t { kRemoved, kReturned, kAddress, kGids };

// Descriptors of new ring segments, to go with the reply; owned by the caller.
using SegmentFds = std::vector<int>;

// Commands. Replies' headers are filled by the caller.
class Context {
 public:
  virtual ~Context() = default;

  virtual pid_t pid() const = 0;
  virtual uint64_t cookie() const = 0;
  // For all that follows. Held up as long as the user's own memory does not
  // answer.
  virtual ShardLock& lock() = 0;
  // A command has been carried out, or not: an errno.
  virtual void TraceCommand(uint32_t /*op*/, int /*error*/) {}
  virtual int wake_page_fd() const = 0;  // owned by the device; no lock needed

  virtual int AllocPd(uint32_t* handle) = 0;
  virtual int DeallocPd(uint32_t handle) = 0;
  virtual int RegMr(const abi::RegMrRequest& request, abi::RegMrReply* reply) = 0;
  virtual int DeregMr(uint32_t handle) = 0;
  virtual int ReregMr(const abi::ReregMrRequest&) { return EOPNOTSUPP; }
  virtual int AllocNullMr(uint32_t /*pd*/, abi::RegMrReply*) { return EOPNOTSUPP; }
  virtual int QueryMr(uint32_t /*lkey*/, abi::QueryMrReply*) { return EOPNOTSUPP; }
  virtual int AllocMw(const abi::AllocMwRequest&, uint32_t* /*rkey*/) { return EOPNOTSUPP; }
  virtual int DeallocMw(uint32_t /*handle*/) { return EOPNOTSUPP; }
  // `fd` is taken over.
  virtual int AllocDm(const abi::AllocDmRequest&, int fd, uint32_t* /*handle*/) {
    close(fd);
    return EOPNOTSUPP;
  }
  virtual int FreeDm(uint32_t /*handle*/) { return EOPNOTSUPP; }
  // Of another context of this user and NIC.
  virtual int ImportPd(const abi::ImportRequest&) { return EOPNOTSUPP; }
  virtual int ImportMr(const abi::ImportRequest&, abi::QueryMrReply*) { return EOPNOTSUPP; }
  // *fd is the caller's.
  virtual int ImportDm(const abi::ImportRequest&, uint64_t* /*length*/, int* /*fd*/) {
    return EOPNOTSUPP;
  }
  // `channel_fd`: write end of the completion channel or -1; taken over.
  virtual int CreateCq(const abi::CreateCqRequest& request, int channel_fd,
                       abi::CreateCqReply* reply, SegmentFds* fds) = 0;
  virtual int DestroyCq(uint32_t handle, abi::DestroyReply* reply) = 0;
  virtual int ResizeCq(const abi::ResizeCqRequest&, abi::CreateCqReply*, SegmentFds*) {
    return EOPNOTSUPP;
  }
  virtual int FinishCqResize(uint32_t /*handle*/) { return EOPNOTSUPP; }
  virtual int ModifyCq(const abi::ModifyCqRequest&) { return EOPNOTSUPP; }
  virtual int CreateQp(const abi::CreateQpRequest& request, abi::CreateQpReply* reply,
                       SegmentFds* fds) = 0;
  virtual int ModifyQp(const abi::ModifyQpRequest& request, abi::ModifyQpReply* reply) = 0;
  virtual int QueryQp(uint32_t handle, abi::QueryQpReply* reply) = 0;
  virtual int DestroyQp(uint32_t handle, abi::DestroyReply* reply) = 0;
  virtual int CreateSrq(const abi::CreateSrqRequest& request, abi::CreateSrqReply* reply,
                        SegmentFds* fds) = 0;
  virtual int ModifySrq(const abi::ModifySrqRequest& request, abi::ModifySrqReply* reply,
                        SegmentFds* fds) = 0;
  virtual int FinishSrqResize(const abi::FinishSrqResizeRequest& request) = 0;
  virtual int QuerySrq(uint32_t handle, abi::QuerySrqReply* reply) = 0;
  virtual int DestroySrq(uint32_t handle, abi::DestroyReply* reply) = 0;
  virtual int AttachMcast(const abi::McastRequest& request) = 0;
  virtual int DetachMcast(const abi::McastRequest& request) = 0;
  virtual int CreateFlow(const abi::CreateFlowRequest&, uint32_t* /*handle*/) { return EOPNOTSUPP; }
  virtual int DestroyFlow(uint32_t /*handle*/) { return EOPNOTSUPP; }
  virtual int CreateCounters(uint32_t* /*handle*/) { return EOPNOTSUPP; }
  virtual int DestroyCounters(uint32_t /*handle*/) { return EOPNOTSUPP; }
  virtual int ReadCounters(uint32_t /*handle*/, abi::ReadCountersReply*) { return EOPNOTSUPP; }
  virtual int CreateRss(const abi::CreateRssRequest&, uint32_t* /*handle*/) { return EOPNOTSUPP; }
  virtual int DestroyRss(uint32_t /*handle*/) { return EOPNOTSUPP; }
  virtual int LimitQpRate(const abi::LimitQpRateRequest&) { return EOPNOTSUPP; }
  // `fd`: the file of the domain or -1; stays the caller's.
  virtual int OpenXrcd(const abi::OpenXrcdRequest& request, int fd, uint32_t* handle) = 0;
  virtual int CloseXrcd(uint32_t handle) = 0;
  virtual int OpenQp(const abi::OpenQpRequest& request, abi::OpenQpReply* reply) = 0;
  virtual int CreateAh(const abi::CreateAhRequest& request, uint32_t* handle) = 0;
  virtual int DestroyAh(uint32_t handle) = 0;
  virtual int QueryPort(uint32_t port, abi::QueryPortReply* reply) = 0;
  virtual int GetSegment(uint32_t segment, SegmentFds* fds) = 0;

  // The errno with which a rule makes the command `op` fail; 0: none does.
  virtual int InjectedError(uint16_t /*op*/) { return 0; }
  // See abi::CheckFaultRequest.
  virtual int CheckFault(const abi::CheckFaultRequest&) { return 0; }
  // Its device was taken out: it is to be closed. Any thread, no lock needed.
  virtual bool removed() const { return false; }
};

}  // namespace verbena::nic
