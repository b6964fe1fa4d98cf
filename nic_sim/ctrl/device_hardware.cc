// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/device_hardware.h"

#include <fmt/format.h>

#include <exception>

#include "nic_sim/device/device.h"
#include "nic_sim/fabric/capture.h"
#include "nic_sim/supervisor/seqpacket.h"

namespace verbena::nic {
namespace {

class DeviceHardware final : public Hardware {
 public:
  explicit DeviceHardware(Device* device) : device_(*device) {}

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
    return device_.List(what, user);
  }
  nlohmann::json Counters(std::string_view device) const override {
    return device_.Counters(device);
  }
  nlohmann::json Dump() const override { return device_.Dump(); }

  uint32_t AddRule(std::string_view text, std::string* error) override {
    return device_.fabric().AddRule(text, error);
  }
  nlohmann::json ListRules() const override { return device_.fabric().ListRules(); }
  uint32_t ClearRules(uint32_t id) override {
    const uint32_t removed = device_.fabric().ClearRules(id);
    device_.Kick();  // packets that were held back are on their way
    return removed;
  }

  uint32_t StartCapture(int fd, std::string_view device, bool before_faults, uint64_t count,
                        std::string* error) override {
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
      return fabric.StartCapture(file.release(), port, stage, count);
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
  Device& device_;
};

}  // namespace

std::unique_ptr<Hardware> MakeDeviceHardware(Device* device) {
  return std::make_unique<DeviceHardware>(device);
}

}  // namespace verbena::nic
