// SPDX-License-Identifier: Apache-2.0
//
// Names and values are those that a Linux kernel shows of a RoCE device.
#include "nic_sim/ctrl/sysfs_tree.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>

namespace verbena::nic {
namespace {

namespace fs = std::filesystem;

class SysfsTree : public ::testing::Test {
 protected:
  SysfsTree() {
    const char* base = getenv("TEST_TMPDIR");
    folder_ = std::string(base != nullptr ? base : "/tmp") + "/tree.XXXXXX";
    if (mkdtemp(folder_.data()) == nullptr) ADD_FAILURE() << "mkdtemp";
    path_ = folder_ + "/x.tree";
  }
  ~SysfsTree() override { fs::remove_all(folder_); }

  static NicInfo Nic(int index) {
    NicInfo nic;
    nic.device = "verbena" + std::to_string(index);
    nic.node_guid = 0x0200'00ff'fe00'0001 + static_cast<uint64_t>(index);
    nic.gids.resize(16);
    nic.gids[0] = *transport::Gid::Parse("fe80::ff:fe00:1");
    nic.gids[1] = *transport::Gid::Parse("127.88.0.1");
    return nic;
  }

  std::string Read(const std::string& name) const {
    std::ifstream file(path_ + "/" + name);
    if (!file) return "(missing)";
    return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  }

  // Files and links below the tree; folders are implied.
  std::set<std::string> Listing() const {
    std::set<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(path_)) {
      if (!entry.is_directory() || entry.is_symlink()) {
        names.insert(entry.path().string().substr(path_.size() + 1));
      }
    }
    return names;
  }

  std::string folder_;
  std::string path_;
};

TEST_F(SysfsTree, HasExactlyTheFilesOfOneDevice) {
  ASSERT_EQ(WriteSysfsTree(path_, {Nic(0)}, {}), "");
  std::set<std::string> expected = {
      "dev/infiniband/uverbs0",
      "sys/class/infiniband/verbena0",
      "sys/class/infiniband_verbs/abi_version",
      "sys/class/infiniband_verbs/uverbs0",
      "sys/class/infiniband_mad/abi_version",
      "sys/class/infiniband_mad/umad0",
      "sys/class/net/verbena0",
      "verbena/netdevs",
  };
  const std::string nic = "sys/devices/virtual/verbena/nic0/";
  for (const char* name : {"numa_node", "local_cpus", "local_cpulist", "uevent"}) {
    expected.insert(nic + name);
  }
  for (const char* name : {"ibdev", "dev", "abi_version", "device"}) {
    expected.insert(nic + "infiniband_verbs/uverbs0/" + name);
  }
  for (const char* name : {"ibdev", "port", "dev", "device"}) {
    expected.insert(nic + "infiniband_mad/umad0/" + name);
  }
  for (const char* name :
       {"address", "addr_len", "broadcast", "carrier", "dev_id", "dev_port", "device", "duplex",
        "flags", "ifindex", "iflink", "mtu", "operstate", "speed", "type"}) {
    expected.insert(nic + "net/verbena0/" + name);
  }
  const std::string device = nic + "infiniband/verbena0/";
  for (const char* name : {"node_type", "node_guid", "sys_image_guid", "fw_ver", "hw_rev",
                           "hca_type", "board_id", "node_desc", "device"}) {
    expected.insert(device + name);
  }
  for (const char* name : {"state", "phys_state", "rate", "lid", "lid_mask_count", "sm_lid",
                           "sm_sl", "cap_mask", "link_layer", "pkeys/0"}) {
    expected.insert(device + "ports/1/" + name);
  }
  for (int i = 0; i < 16; ++i) {
    expected.insert(device + "ports/1/gids/" + std::to_string(i));
    expected.insert(device + "ports/1/gid_attrs/types/" + std::to_string(i));
  }
  expected.insert(device + "ports/1/gid_attrs/ndevs/0");
  expected.insert(device + "ports/1/gid_attrs/ndevs/1");
  EXPECT_EQ(Listing(), expected);
  EXPECT_EQ(fs::file_size(path_ + "/dev/infiniband/uverbs0"), 0u);
}

TEST_F(SysfsTree, ValuesAreThoseOfLinux) {
  ASSERT_EQ(WriteSysfsTree(path_, {Nic(0), Nic(1)}, {}), "");
  const std::string device = "sys/class/infiniband/verbena1/";
  EXPECT_EQ(Read(device + "node_type"), "1: CA\n");
  EXPECT_EQ(Read(device + "node_guid"), "0200:00ff:fe00:0002\n");
  EXPECT_EQ(Read(device + "sys_image_guid"), "0200:00ff:fe00:0002\n");
  const std::string port = device + "ports/1/";
  EXPECT_EQ(Read(port + "state"), "4: ACTIVE\n");
  EXPECT_EQ(Read(port + "phys_state"), "5: LinkUp\n");
  EXPECT_EQ(Read(port + "rate"), "100 Gb/sec (4X EDR)\n");
  EXPECT_EQ(Read(port + "lid"), "0x0\n");
  EXPECT_EQ(Read(port + "lid_mask_count"), "0\n");
  EXPECT_EQ(Read(port + "sm_lid"), "0x0\n");
  EXPECT_EQ(Read(port + "sm_sl"), "0\n");
  EXPECT_EQ(Read(port + "cap_mask"), "0x04010000\n");
  EXPECT_EQ(Read(port + "link_layer"), "Ethernet\n");
  EXPECT_EQ(Read(port + "pkeys/0"), "0xffff\n");
  EXPECT_EQ(Read(port + "gids/0"), "fe80:0000:0000:0000:0000:00ff:fe00:0001\n");
  EXPECT_EQ(Read(port + "gids/1"), "0000:0000:0000:0000:0000:ffff:7f58:0001\n");
  EXPECT_EQ(Read(port + "gids/15"), "0000:0000:0000:0000:0000:0000:0000:0000\n");
  EXPECT_EQ(Read(port + "gid_attrs/types/0"), "RoCE v2\n");
  EXPECT_EQ(Read(port + "gid_attrs/types/15"), "RoCE v2\n");
  EXPECT_EQ(Read(port + "gid_attrs/ndevs/1"), "verbena1\n");
  EXPECT_EQ(Read("sys/class/infiniband_mad/abi_version"), "5\n");
  EXPECT_EQ(Read("sys/class/infiniband_mad/umad1/ibdev"), "verbena1\n");
  EXPECT_EQ(Read("sys/class/infiniband_mad/umad1/port"), "1\n");
  EXPECT_EQ(Read("sys/class/net/verbena1/mtu"), "9000\n");
  EXPECT_EQ(Read("sys/class/net/verbena1/operstate"), "up\n");
  EXPECT_EQ(Read("sys/class/net/verbena1/ifindex"), std::to_string(abi::NetdevIndex(1)) + "\n");
  EXPECT_EQ(Read("sys/class/infiniband_verbs/abi_version"), "6\n");
  EXPECT_EQ(Read("sys/class/infiniband_verbs/uverbs1/ibdev"), "verbena1\n");
  EXPECT_EQ(Read("sys/class/infiniband_verbs/uverbs1/dev"), "231:193\n");
  EXPECT_EQ(Read("sys/class/infiniband_verbs/uverbs1/abi_version"), "1\n");
}

TEST_F(SysfsTree, LinksLeadWhereTheyDoOnLinux) {
  ASSERT_EQ(WriteSysfsTree(path_, {Nic(0), Nic(1)}, {}), "");
  const std::string root = fs::canonical(path_).string();
  EXPECT_EQ(fs::canonical(path_ + "/sys/class/infiniband/verbena1").string(),
            root + "/sys/devices/virtual/verbena/nic1/infiniband/verbena1");
  for (const char* link : {"infiniband/verbena1/device", "infiniband_verbs/uverbs1/device"}) {
    EXPECT_EQ(fs::canonical(path_ + "/sys/class/" + link).string(),
              root + "/sys/devices/virtual/verbena/nic1");
  }
  EXPECT_EQ(Read("sys/class/infiniband/verbena1/device/numa_node"), "-1\n");
}

TEST_F(SysfsTree, ReplacesAnOlderTreeAndLeavesNothingElse) {
  ASSERT_EQ(WriteSysfsTree(path_, {Nic(0), Nic(1), Nic(2)}, {}), "");
  ASSERT_EQ(WriteSysfsTree(path_, {Nic(0)}, {}), "");
  EXPECT_FALSE(fs::exists(path_ + "/sys/class/infiniband/verbena1"));
  EXPECT_TRUE(fs::exists(path_ + "/sys/class/infiniband/verbena0"));
  size_t entries = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(folder_)) ++entries;
  EXPECT_EQ(entries, 1u);
}

TEST_F(SysfsTree, OthersMayReadItOnlyOfASystemWideDaemon) {
  const auto mode = [&](const char* name) {
    struct stat info = {};
    EXPECT_EQ(stat((path_ + name).c_str(), &info), 0) << name;
    return info.st_mode & 0777;
  };
  const mode_t before = umask(0077);
  ASSERT_EQ(WriteSysfsTree(path_, {Nic(0)}, {.system = true}), "");
  EXPECT_EQ(mode(""), 0755u);
  EXPECT_EQ(mode("/sys/class/infiniband/verbena0/node_guid"), 0644u);
  umask(0);
  ASSERT_EQ(WriteSysfsTree(path_, {Nic(0)}, {}), "");
  umask(before);
  EXPECT_EQ(mode(""), 0700u);
  EXPECT_EQ(mode("/sys/class/infiniband/verbena0/node_guid"), 0600u);
  EXPECT_EQ(mode("/dev/infiniband/uverbs0"), 0600u);
}

TEST_F(SysfsTree, CountersAreFilesThatCanBeBroughtUpToDate) {
  TreeOptions options;
  options.counters = {{{"counters/port_xmit_packets", 7}, {"hw_counters/duplicate_request", 0}}};
  ASSERT_EQ(WriteSysfsTree(path_, {Nic(0)}, options), "");
  const std::string port = "sys/class/infiniband/verbena0/ports/1/";
  EXPECT_EQ(Read(port + "counters/port_xmit_packets"), "7\n");
  EXPECT_EQ(Read(port + "hw_counters/duplicate_request"), "0\n");
  const std::string device = path_ + "/sys/class/infiniband/verbena0";
  const auto identity = fs::last_write_time(device);
  UpdateCounters(path_, 0, "verbena0",
                 {{"counters/port_xmit_packets", 12345}, {"counters/unknown", 1}});
  EXPECT_EQ(Read(port + "counters/port_xmit_packets"), "12345\n");
  EXPECT_EQ(Read(port + "hw_counters/duplicate_request"), "0\n");
  EXPECT_FALSE(fs::exists(path_ + "/" + port + "counters/unknown"));
  EXPECT_EQ(fs::last_write_time(device), identity);
}

TEST_F(SysfsTree, ListsTheAddressesOfTheInterfaces) {
  NicInfo nic = Nic(0);
  nic.mac = "02:56:7f:58:00:01";
  nic.gids[2] = *transport::Gid::Parse("192.0.2.7");
  nic.gids[3] = *transport::Gid::Parse("2001:db8::7");
  ASSERT_EQ(WriteSysfsTree(path_, {nic}, {}), "");
  const std::string head =
      "verbena0 " + std::to_string(abi::NetdevIndex(0)) + " 02:56:7f:58:00:01 9000 ";
  EXPECT_EQ(Read("verbena/netdevs"), head + "fe80::ff:fe00:1 64\n" + head + "127.88.0.1 16\n" +
                                         head + "192.0.2.7 24\n" + head + "2001:db8::7 64\n");
}

TEST_F(SysfsTree, HasRdmaCmOnlyIfThereIsAConnectionManager) {
  ASSERT_EQ(WriteSysfsTree(path_, {Nic(0)}, {.rdma_cm = true}), "");
  EXPECT_EQ(Read("sys/class/misc/rdma_cm/abi_version"), "4\n");
  EXPECT_EQ(Read("sys/class/misc/rdma_cm/dev"), "10:122\n");
  EXPECT_EQ(Read("dev/infiniband/rdma_cm"), "");
  ASSERT_EQ(WriteSysfsTree(path_, {Nic(0)}, {}), "");
  EXPECT_FALSE(fs::exists(path_ + "/dev/infiniband/rdma_cm"));
  EXPECT_FALSE(fs::exists(path_ + "/sys/class/misc/rdma_cm"));
}

TEST_F(SysfsTree, ErrorsNameTheFile) {
  const std::string error = WriteSysfsTree(folder_ + "/none/x.tree", {Nic(0)}, {});
  EXPECT_NE(error.find("/none/x.tree"), std::string::npos) << error;
}

}  // namespace
}  // namespace verbena::nic
