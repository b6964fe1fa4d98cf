// SPDX-License-Identifier: Apache-2.0
//
// A device for tests of the control server: contexts with plain counters instead of hardware.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "nic_sim/abi/shared_memory.h"
#include "nic_sim/ctrl/hardware.h"
#include "nic_sim/supervisor/seqpacket.h"

namespace verbena::nic {

class FakeContext final : public Context {
 public:
  FakeContext(ClientIdentity client, uint64_t cookie, ShardLock& lock, int wake_page)
      : client_(std::move(client)),
        cookie_(cookie),
        lock_(lock),
        wake_page_(wake_page),
        mem_(client_.mem_fd),
        async_(client_.async_write_fd) {}

  pid_t pid() const override { return client_.pid; }
  uint64_t cookie() const override { return cookie_; }
  ShardLock& lock() override { return lock_; }
  int wake_page_fd() const override { return wake_page_; }
  const ClientIdentity& client() const { return client_; }

  int AllocPd(uint32_t* handle) override {
    *handle = ++last_pd_;
    pds_.insert(*handle);
    return 0;
  }
  int DeallocPd(uint32_t handle) override { return pds_.erase(handle) == 1 ? 0 : EINVAL; }
  int RegMr(const abi::RegMrRequest& request, abi::RegMrReply* reply) override {
    reply->lkey = 0xabcd;  // must not reach the client after an error
    if (request.address == 0) return EFAULT;
    *reply = {{}, 7, 0x700, 0x701, 0};
    return 0;
  }
  int DeregMr(uint32_t handle) override { return handle == 7 ? 0 : EINVAL; }
  int CreateCq(const abi::CreateCqRequest& request, int channel_fd, abi::CreateCqReply* reply,
               SegmentFds* fds) override {
    channels_.emplace_back(channel_fd);
    reply->handle = static_cast<uint32_t>(channels_.size());
    reply->cqe = request.cqe;
    reply->ring.new_segment = 1;
    fds->push_back(memfd_create("segment", MFD_CLOEXEC));
    return 0;
  }
  int DestroyCq(uint32_t handle, abi::DestroyReply* reply) override {
    reply->comp_events = 3;
    return handle <= channels_.size() ? 0 : EINVAL;
  }
  int CreateQp(const abi::CreateQpRequest& request, abi::CreateQpReply* reply,
               SegmentFds* fds) override {
    // Two new segments, but then it fails: they must not leak to the client.
    fds->push_back(memfd_create("segment", MFD_CLOEXEC));
    fds->push_back(memfd_create("segment", MFD_CLOEXEC));
    reply->qpn = 0x123456;
    return request.type == 2 ? 0 : EOPNOTSUPP;
  }
  int ModifyQp(const abi::ModifyQpRequest& request, abi::ModifyQpReply* reply) override {
    reply->state = request.attr.state;
    return 0;
  }
  int QueryQp(uint32_t handle, abi::QueryQpReply* reply) override {
    reply->attr.dest_qpn = handle + 1;
    return 0;
  }
  int DestroyQp(uint32_t, abi::DestroyReply* reply) override {
    reply->async_events = 4;
    return 0;
  }
  int CreateSrq(const abi::CreateSrqRequest& request, abi::CreateSrqReply* reply,
                SegmentFds*) override {
    reply->max_wr = request.max_wr;
    return 0;
  }
  int ModifySrq(const abi::ModifySrqRequest& request, abi::ModifySrqReply* reply,
                SegmentFds*) override {
    reply->max_wr = request.max_wr;
    return 0;
  }
  int FinishSrqResize(const abi::FinishSrqResizeRequest&) override { return 0; }
  int QuerySrq(uint32_t handle, abi::QuerySrqReply* reply) override {
    reply->max_sge = handle;
    return 0;
  }
  int DestroySrq(uint32_t, abi::DestroyReply* reply) override {
    reply->async_events = 2;
    return 0;
  }
  int AttachMcast(const abi::McastRequest& request) override {
    return request.handle == 5 ? 0 : EINVAL;
  }
  int DetachMcast(const abi::McastRequest& request) override {
    return request.handle == 5 ? 0 : EINVAL;
  }
  int OpenXrcd(const abi::OpenXrcdRequest& request, int fd, uint32_t* handle) override {
    *handle = request.flags;
    return fd >= 0 ? 0 : EBADF;
  }
  int CloseXrcd(uint32_t) override { return 0; }
  int OpenQp(const abi::OpenQpRequest& request, abi::OpenQpReply* reply) override {
    reply->handle = request.qpn;
    return 0;
  }
  int CreateAh(const abi::CreateAhRequest& request, uint32_t* handle) override {
    *handle = request.attr.port_num;
    return 0;
  }
  int DestroyAh(uint32_t) override { return 0; }
  int QueryPort(uint32_t port, abi::QueryPortReply* reply) override {
    reply->state = 4;
    return port == 1 ? 0 : EINVAL;
  }
  int GetSegment(uint32_t segment, SegmentFds* fds) override {
    if (segment != 0) return EINVAL;
    fds->push_back(memfd_create("segment", MFD_CLOEXEC));
    return 0;
  }

  int channel(size_t i) const { return channels_.at(i).get(); }

 private:
  ClientIdentity client_;
  uint64_t cookie_;
  ShardLock& lock_;
  int wake_page_;
  UniqueFd mem_;
  UniqueFd async_;
  uint32_t last_pd_ = 0;
  std::set<uint32_t> pds_;
  std::vector<UniqueFd> channels_;
};

class FakeHardware final : public Hardware {
 public:
  FakeHardware() {
    const auto page = [](const char* name, size_t size) {
      UniqueFd fd(memfd_create(name, MFD_CLOEXEC));
      if (ftruncate(fd.get(), static_cast<off_t>(size)) != 0) fd.reset();
      return fd;
    };
    wake_ = page("wake", sizeof(abi::WakePage));
    status_ = page("status", sizeof(abi::StatusPage));
  }

  ShardLock& lock() { return lock_; }  // of all contexts
  size_t nic_count() const override { return 2; }
  CmService* cm() override { return connection_manager; }
  abi::EngineMode mode() const override { return abi::kEngineThreadPerCpu; }
  uint32_t thread_count() const override { return 2; }
  int status_page_fd() const override { return status_.get(); }
  int status_page_readonly_fd() const override { return status_.get(); }
  NicInfo nic_info(size_t nic) const override {
    NicInfo info;
    info.device = "verbena" + std::to_string(nic);
    info.mac = "02:00:00:00:00:01";
    info.ipv4 = "127.88.0.1";
    info.gids.resize(16);
    info.gids[1] = transport::Gid::FromIpv4(0x7f580001);
    return info;
  }

  int OpenContext(const abi::Hello&, ClientIdentity client, abi::HelloReply* reply, int* context_fd,
                  Context** context, std::string* why) override {
    const std::lock_guard guard(lock_);
    if (open_error != 0) {
      UniqueFd mem(client.mem_fd);
      UniqueFd async(client.async_write_fd);
      *why = "the test wants it";
      return open_error;
    }
    reply->cookie = ++last_cookie_;
    *context_fd = memfd_create("context", MFD_CLOEXEC);
    auto made = std::make_unique<FakeContext>(std::move(client), reply->cookie, lock_, wake_.get());
    *context = made.get();
    contexts_[made.get()] = std::move(made);
    return 0;
  }
  void CloseContext(Context* context) override {
    const std::lock_guard guard(lock_);
    contexts_.erase(context);
  }

  nlohmann::json List(std::string_view what, std::optional<uid_t> user) const override {
    listed_user = user;
    if (what != "qp") return nullptr;
    nlohmann::json items = nlohmann::json::array();
    for (size_t i = 0; i < list_items; ++i) items.push_back({{"qpn", i}, {"comm", "a\xff"}});
    for (nlohmann::json& item : items) {
      if (whole_items) {
        item.update({{"device", "verbena0"},
                     {"type", "RC"},
                     {"state", "RTS"},
                     {"dest_qpn", 9},
                     {"pid", 42}});
      }
    }
    return {{"items", items}};
  }
  nlohmann::json Counters(std::string_view device) const override {
    if (!device.empty() && device != "verbena0") return nullptr;
    return {{"devices",
             {{"verbena0",
               {{"counters", {{"port_xmit_packets", xmit_packets.load()}}},
                {"hw_counters", {{"duplicate_request", 6}}}}}}}};
  }
  nlohmann::json Dump() const override { return {{"engine", "fake"}}; }
  nlohmann::json Trace(std::optional<uint32_t>, int64_t, size_t) const override {
    return {{"events", nlohmann::json::array()}};
  }

  uint32_t AddRule(std::string_view text, std::string* error, std::string* field) override {
    if (text.starts_with("drop")) {
      rules_.emplace_back(text);
      return static_cast<uint32_t>(rules_.size());
    }
    *error = "unknown action 'explode'";
    *field = "action";
    return 0;
  }
  nlohmann::json ListRules() const override {
    nlohmann::json rules = nlohmann::json::array();
    for (size_t i = 0; i < rules_.size(); ++i) {
      rules.push_back({{"id", i + 1}, {"rule", rules_[i]}, {"hits", 0}});
    }
    return rules;
  }
  uint32_t ClearRules(uint32_t id) override {
    const size_t removed = id == 0 ? rules_.size() : id <= rules_.size() ? 1 : 0;
    rules_.clear();
    return static_cast<uint32_t>(removed);
  }

  uint32_t StartCapture(int fd, std::string_view device, bool, uint64_t count, uint32_t,
                        std::string* error) override {
    UniqueFd file(fd);
    const std::lock_guard guard(lock_);
    if (device == "verbena7") {
      *error = "there is no device 'verbena7'";
      return 0;
    }
    captures_[++last_capture_] = {std::move(file), count};
    return last_capture_;
  }
  bool CaptureDone(uint32_t id) const override {
    const std::lock_guard guard(lock_);
    return captures_.at(id).count > 0;
  }
  std::function<CaptureCounts()> DetachCapture(uint32_t id) override {
    const std::lock_guard guard(lock_);
    const auto file = std::make_shared<UniqueFd>(std::move(captures_.at(id).fd));
    const uint64_t count = captures_.at(id).count;
    captures_.erase(id);
    return [file, count]() -> CaptureCounts {
      const bool written = write(file->get(), "end", 3) == 3;
      return {count, 1, written ? 0 : errno};
    };
  }

  // For tests; with the lock.
  size_t context_count() const { return contexts_.size(); }
  size_t capture_count() const { return captures_.size(); }
  FakeContext& only_context() { return *contexts_.begin()->second; }

  int open_error = 0;
  size_t list_items = 1;
  mutable std::optional<uid_t> listed_user;
  bool whole_items = false;  // with more than a few fields
  std::atomic<uint64_t> xmit_packets{5};
  CmService* connection_manager = nullptr;

 private:
  struct Capture {
    UniqueFd fd;
    uint64_t count = 0;
  };
  mutable ShardLock lock_;
  UniqueFd wake_;
  UniqueFd status_;
  uint64_t last_cookie_ = 0;
  uint32_t last_capture_ = 0;
  std::map<Context*, std::unique_ptr<FakeContext>> contexts_;
  std::map<uint32_t, Capture> captures_;
  std::vector<std::string> rules_;
};

}  // namespace verbena::nic
