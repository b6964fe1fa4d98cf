// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/port/dpdk_port.h"

#include <linux/if_packet.h>
#include <rte_dev.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "nic_sim/port/netdev.h"

namespace verbena::nic {
namespace {

constexpr uint16_t kQueueEntries = 256;

class DpdkPort final : public FramePort {
 public:
  DpdkPort(PortSpec spec, std::string device)
      : spec_(std::move(spec)), device_(std::move(device)) {}
  ~DpdkPort() override {
    if (started_) rte_eth_dev_stop(id_);
    if (probed_) rte_eal_hotplug_remove("vdev", device_.c_str());
    for (const int fd : silent_) close(fd);
  }

  bool Open(rte_mempool* pool, std::string* error);

  size_t Receive(std::span<rte_mbuf*> out) override {
    return rte_eth_rx_burst(id_, 0, out.data(), static_cast<uint16_t>(out.size()));
  }

  size_t Send(std::span<rte_mbuf*> frames) override {
    return rte_eth_tx_burst(id_, 0, frames.data(), static_cast<uint16_t>(frames.size()));
  }

  uint32_t mtu() const override { return link_.mtu; }
  bool up() const override { return link_.up; }
  void Refresh() override {
    link_ = ReadLink(spec_.interface);
    if (spec_.driver == PortDriver::kTap) link_.mtu = std::min(link_.mtu, kTapMtu);
  }
  int wake_fd() const override { return wake_fd_; }

 private:
  bool Probe(std::string* error);
  bool Fail(const char* what, int code, std::string* error) const {
    *error = "port " + ToString(spec_) + ": " + what + ": " + rte_strerror(code < 0 ? -code : code);
    return false;
  }

  PortSpec spec_;
  std::string device_;  // DPDK's name
  uint16_t id_ = 0;
  bool probed_ = false;
  bool started_ = false;
  int wake_fd_ = -1;
  std::vector<int> silent_;
  LinkInfo link_;
};

// Drivers only log why they cannot; the usual reason is found here.
bool MayUsePackets(const PortSpec& spec, std::string* error) {
  const int fd = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
  if (fd >= 0) {
    close(fd);
    return true;
  }
  *error = "port " + ToString(spec) + ": " + std::strerror(errno) +
           " (it needs CAP_NET_RAW: run the daemon as root, or in a user and network namespace of "
           "its own)";
  return false;
}

bool DpdkPort::Probe(std::string* error) {
  std::string arguments = "iface=" + spec_.interface;
  int interface_index = 0;
  if (spec_.driver == PortDriver::kAfPacket) {
    const auto netdev = ReadNetdev(spec_.interface, error);
    if (!netdev) return false;
    interface_index = netdev->index;
    if (!MayUsePackets(spec_, error)) return false;
    arguments += ",framesz=" + std::to_string(kPortFrameBytes) + ",blocksz=65536,framecnt=1024";
  } else if (std::string ignored; ReadNetdev(spec_.interface, &ignored)) {
    *error = "port " + ToString(spec_) +
             ": a netdev of that name exists; af_packet:NETDEV uses one that exists";
    return false;
  }
  if (const int code = rte_eal_hotplug_add("vdev", device_.c_str(), arguments.c_str()); code != 0) {
    Fail("DPDK's driver does not start", code, error);
    if (spec_.driver == PortDriver::kTap) *error += " (it needs /dev/net/tun and CAP_NET_ADMIN)";
    return false;
  }
  probed_ = true;
  if (const int code = rte_eth_dev_get_port_by_name(device_.c_str(), &id_); code != 0) {
    return Fail("DPDK's driver made no port", code, error);
  }
  wake_fd_ = spec_.driver == PortDriver::kAfPacket ? FindPacketSocket(interface_index)
                                                   : FindTapQueue(spec_.interface);
  return true;
}

bool DpdkPort::Open(rte_mempool* pool, std::string* error) {
  if (!Probe(error)) return false;
  const rte_eth_conf configuration{};
  int code = rte_eth_dev_configure(id_, 1, 1, &configuration);
  const int socket = static_cast<int>(SOCKET_ID_ANY);
  if (code == 0) {
    code =
        rte_eth_rx_queue_setup(id_, 0, kQueueEntries, static_cast<unsigned>(socket), nullptr, pool);
  }
  if (code == 0) {
    code = rte_eth_tx_queue_setup(id_, 0, kQueueEntries, static_cast<unsigned>(socket), nullptr);
  }
  if (code == 0) code = rte_eth_dev_start(id_);
  if (code != 0) return Fail("DPDK's port does not start", code, error);
  started_ = true;
  // The NIC's MAC address is mostly not the netdev's.
  rte_eth_promiscuous_enable(id_);
  if (wake_fd_ < 0 && spec_.driver == PortDriver::kTap) wake_fd_ = FindTapQueue(spec_.interface);
  if (wake_fd_ < 0) return Fail("no descriptor to wait at", ENOENT, error);
  if (spec_.driver == PortDriver::kAfPacket) silent_ = SilenceRoceUdpPort(spec_.interface);
  Refresh();
  return true;
}

}  // namespace

std::unique_ptr<FramePort> OpenDpdkPort(const PortSpec& spec, uint32_t number, rte_mempool* pool,
                                        std::string* error) {
  const char* driver = spec.driver == PortDriver::kTap ? "net_tap" : "net_af_packet";
  auto port = std::make_unique<DpdkPort>(spec, driver + std::to_string(number));
  if (!port->Open(pool, error)) return nullptr;
  return port;
}

}  // namespace verbena::nic
