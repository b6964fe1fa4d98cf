// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/device_hardware.h"

#include <fmt/format.h>
#include <unistd.h>

#include <exception>
#include <mutex>

#include "nic_sim/ctrl/cm_host.h"
#include "nic_sim/ctrl/qp1_port.h"
#include "nic_sim/device/device.h"
#include "nic_sim/fabric/capture.h"
#include "nic_sim/supervisor/seqpacket.h"

namespace verbena::nic {
namespace {

std::vector<CmNic::Address> AddressesOf(const NicInfo& info) {
  std::vector<CmNic::Address> addresses;
  for (size_t gid = 0; gid < info.gids.size(); ++gid) {
    addresses.push_back({info.gids[gid], info.prefixes[gid]});
  }
  return addresses;
}

std::vector<CmNic> MakeCmNics(const Device& device) {
  std::vector<CmNic> nics;
  for (size_t i = 0; i < device.nic_count(); ++i) {
    const NicInfo info = device.nic_info(i);
    CmNic nic;
    nic.device = info.device;
    nic.node_guid = info.node_guid;
    nic.ack_delay = static_cast<uint8_t>(device.attributes(i).local_ca_ack_delay);
    nic.mtu = transport::PmtuFromBytes(info.active_mtu).value_or(nic.mtu);
    nic.gids = AddressesOf(info);
    nics.push_back(std::move(nic));
  }
  return nics;
}

class DeviceHardware final : public Hardware {
 public:
  explicit DeviceHardware(Device* device)
      : device_(*device), qp1_(*device), cm_(MakeCmNics(*device), &qp1_, &device->faults()) {}

  ~DeviceHardware() override { device_.WatchNics({}); }

  CmService* cm() override { return &cm_; }

  size_t nic_count() const override { return device_.nic_count(); }
  abi::EngineMode mode() const override { return device_.mode(); }
  uint32_t thread_count() const override { return device_.thread_count(); }
  int status_page_fd() const override { return device_.status_page_fd(); }
  int status_page_readonly_fd() const override { return device_.status_page_readonly_fd(); }
  NicInfo nic_info(size_t nic) const override { return device_.nic_info(nic); }

  int OpenContext(const abi::Hello& hello, ClientIdentity client, abi::HelloReply* reply,
                  int* context_fd, Context** context, std::string* why) override {
    return device_.OpenContext(hello, std::move(client), reply, context_fd, context, why);
  }
  void CloseContext(Context* context) override { device_.CloseContext(context); }

  nlohmann::json List(std::string_view what, std::optional<uid_t> user) const override {
    return what == "cm_id" ? ListCmIds(user) : device_.List(what, user);
  }
  nlohmann::json Counters(std::string_view device) const override {
    return device_.Counters(device);
  }
  nlohmann::json Dump() const override { return device_.Dump(); }
  nlohmann::json Trace(std::optional<uint32_t> qpn, int64_t after_ns, size_t limit) const override {
    return device_.Trace(qpn, after_ns, limit);
  }
  std::vector<TraceEvent> TraceEvents() const override { return device_.TraceEvents(); }

  uint32_t AddRule(std::string_view text, std::string* error, std::string* field) override {
    const uint32_t id = device_.AddRule(text, error, field);
    device_.Kick();  // a rule may have a time
    return id;
  }
  nlohmann::json ListRules() const override { return device_.ListRules(); }
  uint32_t ClearRules(uint32_t id) override { return device_.ClearRules(id); }
  void WatchNics(std::function<void(uint32_t nic, NicChange change)> watcher) override {
    device_.WatchNics([this, watcher = std::move(watcher)](uint32_t nic, NicChange change) {
      {
        CmService& cm = cm_;
        const std::lock_guard guard(cm.mutex());
        switch (change) {
          case NicChange::kRemoved:
            cm.RemoveNic(nic);
            break;
          case NicChange::kReturned:
            cm.RestoreNic(nic);
            break;
          case NicChange::kAddress:
            cm.AnnounceAddressChange(nic);
            break;
          case NicChange::kGids:
            cm.SetGids(nic, AddressesOf(device_.nic_info(nic)));
            break;
        }
      }
      if (watcher) watcher(nic, change);
    });
  }

  size_t ReleaseHeld(uint32_t id, size_t count) override {
    const size_t released = device_.fabric().ReleaseHeld(id, count);
    device_.Kick();
    return released;
  }
  nlohmann::json ListHeld() const override { return device_.fabric().ListHeld(); }

  uint32_t StartCapture(int fd, std::string_view device, bool before_faults, uint64_t count,
                        uint32_t qpn, std::string* error) override {
    UniqueFd file(fd);
    Fabric& fabric = device_.fabric();
    PortId port = Fabric::kAllPorts;
    for (PortId i = 0; i < fabric.port_count() && !device.empty(); ++i) {
      if (fabric.config(i).device == device) port = i;
    }
    if (!device.empty() && port == Fabric::kAllPorts) {
      *error = fmt::format("there is no device '{}'", device.substr(0, 64));
      return 0;
    }
    const CaptureStage stage = before_faults ? CaptureStage::kBefore : CaptureStage::kAfter;
    try {
      return fabric.StartCapture(file.release(), port, stage, count, qpn);
    } catch (const std::exception& problem) {  // no thread, no memory
      *error = fmt::format("cannot start a capture: {}", problem.what());
      return 0;
    }
  }
  bool CaptureDone(uint32_t id) const override { return device_.fabric().CaptureDone(id); }
  std::function<CaptureCounts()> DetachCapture(uint32_t id) override {
    const std::shared_ptr<CaptureFile> file = device_.fabric().DetachCapture(id);
    return [file]() -> CaptureCounts {
      if (file == nullptr) return {};
      const CaptureResult result = file->Finish();
      return {result.packets, result.missed, result.error};
    };
  }

 private:
  nlohmann::json ListCmIds(std::optional<uid_t> user) const {
    nlohmann::json items = nlohmann::json::array();
    const std::lock_guard guard(cm_.mutex());
    cm_.agent().ForEachId([&](const CmIdInfo& id) {
      if (user.has_value() && *user != id.uid) return;
      const bool bound = id.nic >= 0 && static_cast<size_t>(id.nic) < device_.nic_count();
      items.push_back(
          {{"id", id.id},
           {"device", bound ? device_.nic_info(static_cast<size_t>(id.nic)).device : ""},
           {"pid", id.pid},
           {"port_space", id.port_space},
           {"qp_type", id.qp_type},
           {"qpn", id.local_qpn},
           {"state", id.state},
           {"source", id.source},
           {"destination", id.destination}});
    });
    return {{"items", std::move(items)}};
  }

  Device& device_;
  Qp1Port qp1_;
  CmHost cm_;
};

}  // namespace

std::unique_ptr<Hardware> MakeDeviceHardware(Device* device) {
  return std::make_unique<DeviceHardware>(device);
}

}  // namespace verbena::nic
