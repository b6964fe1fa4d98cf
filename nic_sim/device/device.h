// SPDX-License-Identifier: Apache-2.0
//
// Device: all simulated hardware of one daemon: NICs with their ports, QP and
// key tables, the fabric, and the engine threads that run them. Context: one
// opened device of one application, with its objects.
//
// Control calls (everything here but Start/Stop) are made by the control thread
// while it holds Device::lock(). Errors are positive errno values, 0 is
// success; what each means is in the man page of the verb.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "nic_sim/fabric/fabric.h"

namespace verbena::nic {

class Context;
class Engine;
class Nic;

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
  // For engine threads: fails at once if held or if a control call waits.
  bool TryLockForEngine() {
    return waiters_.load(std::memory_order_relaxed) == 0 && mutex_.try_lock();
  }
  bool control_waits() const {
    return waiters_.load(std::memory_order_relaxed) != 0;
  }

 private:
  std::mutex mutex_;
  std::atomic<uint32_t> waiters_{0};
};

struct DeviceOptions {
  std::string instance = "default";
  std::string run_folder;
  uint32_t nics = 1;
  uint32_t host = 0;
  bool strict = false;
  bool hugepages = false;
  bool pci = false;
  // 0: choose by the CPUs that this process may use.
  uint32_t engine_threads = 0;
  enum class Mode { kAuto, kThreadPerCpu, kSpinning } mode = Mode::kAuto;
};

// A process that opens a device, as the control server knows it.
struct ClientIdentity {
  pid_t pid = 0;
  uid_t uid = 0;
  std::string comm;
  int mem_fd = -1;           // /proc/self/mem of the client or -1; taken over
  int async_write_fd = -1;   // write end of its event pipe; taken over
};

// What the JSON listings show of a NIC.
struct NicInfo {
  std::string device;  // "verbena0"
  uint32_t host = 0;
  std::string mac;   // "02:…"
  std::string ipv4;  // dotted
  std::vector<transport::Gid> gids;  // gid_tbl_len entries
  bool active = true;
  uint64_t node_guid = 0;  // host order
};

class Device {
 public:
  // Starts EAL and the engine threads. nullptr with a sentence in *error.
  static std::unique_ptr<Device> Start(const DeviceOptions& options,
                                       std::string* error);
  ~Device();  // stops the threads; contexts must be closed

  ShardLock& lock();

  size_t nic_count() const;
  NicInfo nic_info(size_t index) const;
  const abi::DeviceAttributes& attributes(size_t nic) const;
  abi::QueryPortReply query_port(size_t nic) const;  // header not filled
  abi::EngineMode mode() const;
  uint32_t thread_count() const;

  // memfds that every client gets; owned by the device.
  int wake_page_fd() const;
  int status_page_fd() const;           // read-write, for the supervisor
  int status_page_readonly_fd() const;  // for clients

  // Opens device `hello.device_index` for a client whose Hello is already
  // checked for magic, version and sizes. Fills cookie and attributes of
  // *reply and gives the context memfd (owned by the caller). On error nothing
  // is kept but *why has a sentence.
  int OpenContext(const abi::Hello& hello, ClientIdentity client,
                  abi::HelloReply* reply, int* context_fd, Context** context,
                  std::string* why);
  // Frees the context with all its objects. QPs vanish without a word, as with
  // a host that lost power.
  void CloseContext(Context* context);
  size_t context_count() const;

  Fabric& fabric();

  // {"items": […]} of `what`: context, pd, mr, cq, qp. Unknown: null.
  nlohmann::json List(std::string_view what) const;
  // {"devices": {…}}; `device` empty: all. Unknown device: null.
  nlohmann::json Counters(std::string_view device) const;
  nlohmann::json Dump() const;

 private:
  Device();
  std::unique_ptr<Engine> engine_;
};

// Descriptors of new ring segments, to go with the reply; owned by the caller.
using SegmentFds = std::vector<int>;

// Commands. Replies' headers are filled by the caller.
class Context {
 public:
  virtual ~Context() = default;

  virtual pid_t pid() const = 0;
  virtual uint64_t cookie() const = 0;

  virtual int AllocPd(uint32_t* handle) = 0;
  virtual int DeallocPd(uint32_t handle) = 0;
  virtual int RegMr(const abi::RegMrRequest& request,
                    abi::RegMrReply* reply) = 0;
  virtual int DeregMr(uint32_t handle) = 0;
  // `channel_fd`: write end of the completion channel or -1; taken over.
  virtual int CreateCq(const abi::CreateCqRequest& request, int channel_fd,
                       abi::CreateCqReply* reply, SegmentFds* fds) = 0;
  virtual int DestroyCq(uint32_t handle, abi::DestroyReply* reply) = 0;
  virtual int CreateQp(const abi::CreateQpRequest& request,
                       abi::CreateQpReply* reply, SegmentFds* fds) = 0;
  virtual int ModifyQp(const abi::ModifyQpRequest& request,
                       abi::ModifyQpReply* reply) = 0;
  virtual int QueryQp(uint32_t handle, abi::QueryQpReply* reply) = 0;
  virtual int DestroyQp(uint32_t handle, abi::DestroyReply* reply) = 0;
  virtual int CreateAh(const abi::CreateAhRequest& request,
                       uint32_t* handle) = 0;
  virtual int DestroyAh(uint32_t handle) = 0;
  virtual int QueryPort(uint32_t port, abi::QueryPortReply* reply) = 0;
};

}  // namespace verbena::nic
