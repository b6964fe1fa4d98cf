// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/sysfs_tree.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "nic_sim/abi/commands.h"
#include "nic_sim/abi/rdma_cm.h"
#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/runtime/version.h"
#include "nic_sim/supervisor/seqpacket.h"
#include "transport/base/byteorder.h"

namespace verbena::nic {
namespace {

namespace fs = std::filesystem;

// Writes below one folder and keeps the first error. Rights do not depend on the umask.
class TreeWriter {
 public:
  TreeWriter(std::string root, bool system) : root_(std::move(root)), system_(system) {
    Folder("");
  }

  void File(const std::string& name, std::string_view line) {
    const std::string path = Below(name);
    UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
    const std::string text = line.empty() ? std::string() : std::string(line) + "\n";
    if (!fd.valid() ||
        write(fd.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()) ||
        fchmod(fd.get(), system_ ? 0644 : 0600) != 0) {
      Fail(path);
    }
  }

  void Link(const std::string& name, const std::string& target) {
    const std::string path = Below(name);
    if (symlink(target.c_str(), path.c_str()) != 0) Fail(path);
  }

  // Stands for a device node: readable and writable (UCX asks), but of a system-wide daemon not a
  // file that anybody could fill.
  void Marker(const std::string& name) {
    if (system_) {
      Link(name, "/dev/null");
    } else {
      File(name, "");
    }
  }

  const std::string& error() const { return error_; }

 private:
  void Fail(const std::string& path) {
    if (error_.empty()) error_ = fmt::format("cannot write {}: {}", path, std::strerror(errno));
  }

  // Makes the folders on the way.
  std::string Below(const std::string& name) {
    for (size_t slash = name.find('/'); slash != std::string::npos;
         slash = name.find('/', slash + 1)) {
      Folder("/" + name.substr(0, slash));
    }
    return root_ + "/" + name;
  }

  void Folder(const std::string& name) {
    const std::string path = root_ + name;
    const mode_t mode = system_ ? 0755 : 0700;
    if (mkdir(path.c_str(), mode) == 0) {
      if (chmod(path.c_str(), mode) != 0) Fail(path);
    } else if (errno != EEXIST || name.empty()) {
      Fail(path);
    }
  }

  std::string root_;
  bool system_;
  std::string error_;
};

std::string GuidText(uint64_t guid) {
  return fmt::format("{:04x}:{:04x}:{:04x}:{:04x}", guid >> 48, guid >> 32 & 0xffff,
                     guid >> 16 & 0xffff, guid & 0xffff);
}

std::string GidText(const transport::Gid& gid) {
  std::string text;
  for (size_t i = 0; i < transport::Gid::kBytes; i += 2) {
    text += fmt::format("{}{:04x}", i == 0 ? "" : ":", transport::LoadBe16(&gid.bytes()[i]));
  }
  return text;
}

// "ff" or "3,ffffffff": words of 32 bits, the highest first.
std::string CpuMask(unsigned cpus) {
  std::string text;
  for (unsigned word = (cpus - 1) / 32 + 1; word-- > 0;) {
    const unsigned bits = std::min(cpus - word * 32, 32u);
    const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << bits) - 1);
    text += text.empty() ? fmt::format("{:x}", mask) : fmt::format(",{:08x}", mask);
  }
  return text;
}

void WriteParent(TreeWriter* tree, const std::string& parent) {
  const unsigned cpus = std::max(1u, static_cast<unsigned>(sysconf(_SC_NPROCESSORS_CONF)));
  tree->File(parent + "/numa_node", "-1");
  tree->File(parent + "/local_cpus", CpuMask(cpus));
  tree->File(parent + "/local_cpulist", cpus == 1 ? "0" : fmt::format("0-{}", cpus - 1));
  tree->File(parent + "/uevent", "DRIVER=verbena");
}

void WritePort(TreeWriter* tree, const std::string& port, const NicInfo& nic,
               const CounterValues& counters) {
  tree->File(port + "/state", nic.active ? "4: ACTIVE" : "1: DOWN");
  tree->File(port + "/phys_state", nic.active ? "5: LinkUp" : "3: Disabled");
  tree->File(port + "/rate", "100 Gb/sec (4X EDR)");
  tree->File(port + "/lid", "0x0");
  tree->File(port + "/lid_mask_count", "0");
  tree->File(port + "/sm_lid", "0x0");
  tree->File(port + "/sm_sl", "0");
  tree->File(port + "/cap_mask", fmt::format("0x{:08x}", MakePortAttributes().port_cap_flags));
  tree->File(port + "/link_layer", "Ethernet");
  for (size_t i = 0; i < kGidTableLen; ++i) {
    const transport::Gid gid = i < nic.gids.size() ? nic.gids[i] : transport::Gid();
    tree->File(fmt::format("{}/gids/{}", port, i), GidText(gid));
    // Of free entries too: one that cannot be read spoils ibv_query_gid_table.
    tree->File(fmt::format("{}/gid_attrs/types/{}", port, i), "RoCE v2");
    if (!gid.IsZero()) tree->File(fmt::format("{}/gid_attrs/ndevs/{}", port, i), nic.device);
  }
  tree->File(port + "/pkeys/0", "0xffff");
  for (const auto& [name, value] : counters) tree->File(port + "/" + name, std::to_string(value));
}

std::string DeviceFolder(size_t index, const std::string& device) {
  return fmt::format("sys/devices/virtual/verbena/nic{}/infiniband/{}", index, device);
}

constexpr unsigned kNetdevMtu = 9000;

// The simulated network interface, as Linux shows an Ethernet port.
void WriteNetdev(TreeWriter* tree, const std::string& parent, size_t index, const NicInfo& nic) {
  const std::string folder = parent + "/net/" + nic.device;
  tree->File(folder + "/address", nic.mac);
  tree->File(folder + "/addr_len", "6");
  tree->File(folder + "/broadcast", "ff:ff:ff:ff:ff:ff");
  tree->File(folder + "/carrier", nic.active ? "1" : "0");
  tree->File(folder + "/dev_id", "0x0");
  tree->File(folder + "/dev_port", "0");
  tree->File(folder + "/duplex", "full");
  tree->File(folder + "/flags", "0x1043");  // UP, BROADCAST, RUNNING, MULTICAST
  tree->File(folder + "/ifindex", std::to_string(abi::NetdevIndex(static_cast<uint32_t>(index))));
  tree->File(folder + "/iflink", std::to_string(abi::NetdevIndex(static_cast<uint32_t>(index))));
  tree->File(folder + "/mtu", std::to_string(kNetdevMtu));
  tree->File(folder + "/operstate", nic.active ? "up" : "down");
  tree->File(folder + "/speed", "100000");
  tree->File(folder + "/type", "1");
  tree->Link(folder + "/device", "../../../" + fmt::format("nic{}", index));
  tree->Link("sys/class/net/" + nic.device,
             fmt::format("../../devices/virtual/verbena/nic{}/net/{}", index, nic.device));
}

// For the preload: every address with the interface that has it.
std::string NetdevLines(size_t index, const NicInfo& nic) {
  std::string lines;
  for (const transport::Gid& gid : nic.gids) {
    if (gid.IsZero()) continue;
    char text[INET6_ADDRSTRLEN] = {};
    unsigned prefix = 64;
    if (gid.IsV4Mapped()) {
      inet_ntop(AF_INET, &gid.bytes()[12], text, sizeof(text));
      prefix = (gid.Ipv4() >> 24) == 127 ? 16 : 24;
    } else {
      inet_ntop(AF_INET6, gid.bytes().data(), text, sizeof(text));
    }
    lines += fmt::format("{}{} {} {} {} {} {}", lines.empty() ? "" : "\n", nic.device,
                         abi::NetdevIndex(static_cast<uint32_t>(index)), nic.mac, kNetdevMtu, text,
                         prefix);
  }
  return lines;
}

std::string AllNetdevLines(const std::vector<NicInfo>& nics) {
  std::string all;
  for (size_t i = 0; i < nics.size(); ++i) {
    const std::string lines = NetdevLines(i, nics[i]);
    if (!lines.empty()) all += (all.empty() ? "" : "\n") + lines;
  }
  return all;
}

// Readers find the old text or the new one, whole.
void ReplaceFile(const std::string& path, const std::string& text, bool system) {
  const std::string fresh = path + ".new";
  unlink(fresh.c_str());
  const UniqueFd fd(
      open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid() ||
      write(fd.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()) ||
      fchmod(fd.get(), system ? 0644 : 0600) != 0 || rename(fresh.c_str(), path.c_str()) != 0) {
    unlink(fresh.c_str());
  }
}

void WriteNic(TreeWriter* tree, size_t index, const NicInfo& nic, const CounterValues& counters) {
  const std::string parent = fmt::format("sys/devices/virtual/verbena/nic{}", index);
  const std::string device = DeviceFolder(index, nic.device);
  WriteParent(tree, parent);
  tree->File(device + "/node_type", "1: CA");
  tree->File(device + "/node_guid", GuidText(nic.node_guid));
  tree->File(device + "/sys_image_guid", GuidText(nic.node_guid));
  tree->File(device + "/fw_ver", kVersion);
  tree->File(device + "/hw_rev", "0x1");
  tree->File(device + "/hca_type", "VERBENA");
  tree->File(device + "/board_id", "VERBENA");
  tree->File(device + "/node_desc", "Verbena software RoCEv2 NIC " + nic.device);
  tree->Link(device + "/device", "../../../" + fmt::format("nic{}", index));
  WritePort(tree, device + "/ports/1", nic, counters);

  WriteNetdev(tree, parent, index, nic);

  const std::string name = fmt::format("uverbs{}", index);
  const std::string uverbs = parent + "/infiniband_verbs/" + name;
  tree->File(uverbs + "/ibdev", nic.device);
  tree->File(uverbs + "/dev",
             fmt::format("{}:{}", abi::kUverbsMajor, abi::kUverbsFirstMinor + index));
  tree->File(uverbs + "/abi_version", "1");
  tree->Link(uverbs + "/device", "../../../" + fmt::format("nic{}", index));

  // No device node comes with it: ibstat and others that only look need none.
  const std::string umad_name = fmt::format("umad{}", index);
  const std::string umad = parent + "/infiniband_mad/" + umad_name;
  tree->File(umad + "/ibdev", nic.device);
  tree->File(umad + "/port", "1");
  tree->File(umad + "/dev", fmt::format("{}:{}", abi::kUverbsMajor, index));
  tree->Link(umad + "/device", "../../../" + fmt::format("nic{}", index));

  const std::string from_class = fmt::format("../../devices/virtual/verbena/nic{}", index);
  tree->Link("sys/class/infiniband/" + nic.device, from_class + "/infiniband/" + nic.device);
  tree->Link("sys/class/infiniband_verbs/" + name, from_class + "/infiniband_verbs/" + name);
  tree->Link("sys/class/infiniband_mad/" + umad_name, from_class + "/infiniband_mad/" + umad_name);
  tree->Marker("dev/infiniband/" + name);
}

void WriteRdmaCm(TreeWriter* tree) {
  tree->File("sys/class/misc/rdma_cm/abi_version", "4");
  tree->File("sys/class/misc/rdma_cm/dev",
             fmt::format("{}:{}", abi::kMiscMajor, abi::kRdmaCmMinor));
  tree->Marker("dev/infiniband/rdma_cm");
}

}  // namespace

std::string WriteSysfsTree(const std::string& path, const std::vector<NicInfo>& nics,
                           const TreeOptions& options) {
  // Leftovers of a dead daemon: the caller holds the instance's lock.
  const std::string fresh = path + ".new";
  const std::string old = path + ".old";
  std::error_code ignored;
  fs::remove_all(fresh, ignored);
  fs::remove_all(old, ignored);
  TreeWriter tree(fresh, options.system);
  tree.File("sys/class/infiniband_verbs/abi_version", "6");
  tree.File("sys/class/infiniband_mad/abi_version", "5");
  for (size_t i = 0; i < nics.size(); ++i) {
    WriteNic(&tree, i, nics[i],
             i < options.counters.size() ? options.counters[i] : CounterValues());
  }
  tree.File("verbena/netdevs", AllNetdevLines(nics));
  if (options.rdma_cm) WriteRdmaCm(&tree);
  std::string error = tree.error();
  if (error.empty()) {
    rename(path.c_str(), old.c_str());
    if (rename(fresh.c_str(), path.c_str()) != 0) {
      error = fmt::format("cannot rename {}: {}", fresh, std::strerror(errno));
    }
    fs::remove_all(old, ignored);
  }
  if (!error.empty()) fs::remove_all(fresh, ignored);
  return error;
}

void ShowNic(const std::string& path, size_t index, const std::string& device, bool system,
             bool shown) {
  const std::string from_class = fmt::format("../../devices/virtual/verbena/nic{}", index);
  const std::string names[][2] = {{"infiniband", device},
                                  {"infiniband_verbs", fmt::format("uverbs{}", index)},
                                  {"infiniband_mad", fmt::format("umad{}", index)}};
  // Those who look meanwhile find all of it or can do nothing with the rest: the node is last
  // to come and first to go.
  const std::string node = fmt::format("{}/dev/infiniband/uverbs{}", path, index);
  if (!shown) unlink(node.c_str());
  for (const auto& [folder, name] : names) {
    const std::string link = fmt::format("{}/sys/class/{}/{}", path, folder, name);
    if (!shown) {
      unlink(link.c_str());
    } else {
      const std::string target = fmt::format("{}/{}/{}", from_class, folder, name);
      [[maybe_unused]] const int ignored = symlink(target.c_str(), link.c_str());
    }
  }
  if (!shown) return;
  if (system) {
    [[maybe_unused]] const int ignored = symlink("/dev/null", node.c_str());
  } else {
    const UniqueFd marker(open(node.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  }
}

void UpdateGids(const std::string& path, size_t index, const std::vector<NicInfo>& nics,
                bool system) {
  const NicInfo& nic = nics[index];
  const std::string port = path + "/" + DeviceFolder(index, nic.device) + "/ports/1/";
  for (size_t i = 0; i < nic.gids.size(); ++i) {
    const std::string netdev = fmt::format("{}gid_attrs/ndevs/{}", port, i);
    // With the GID there is a netdev: who finds the one finds the other.
    if (!nic.gids[i].IsZero()) ReplaceFile(netdev, nic.device + "\n", system);
    ReplaceFile(fmt::format("{}gids/{}", port, i), GidText(nic.gids[i]) + "\n", system);
    if (nic.gids[i].IsZero()) unlink(netdev.c_str());
  }
  ReplaceFile(path + "/verbena/netdevs", AllNetdevLines(nics) + "\n", system);
}

void UpdateCounters(const std::string& path, size_t nic, const std::string& device,
                    const CounterValues& values) {
  const std::string port = path + "/" + DeviceFolder(nic, device) + "/ports/1/";
  for (const auto& [name, value] : values) {
    const UniqueFd fd(open((port + name).c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW));
    if (!fd.valid()) continue;
    // Whoever reads meanwhile sees no empty file: numbers do not become shorter.
    const std::string text = std::to_string(value) + "\n";
    if (pwrite(fd.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
      continue;
    [[maybe_unused]] const int ignored = ftruncate(fd.get(), static_cast<off_t>(text.size()));
  }
}

}  // namespace verbena::nic
