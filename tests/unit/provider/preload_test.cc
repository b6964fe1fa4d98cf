// SPDX-License-Identifier: Apache-2.0
//
// The preload in a program of its own, and what both loadable libraries need
// and export.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>
#include <string>

#include "tests/unit/provider/fake_device.h"

namespace verbena::provider {
namespace {

// Bazel runs tests in the root of the runfiles tree.
std::string Built(const std::string& name) {
  const char* folder = getenv("TEST_LIBRARY_FOLDER");
  return std::filesystem::absolute((folder == nullptr ? "provider" : folder) + ("/" + name));
}

std::string RunCommand(const std::string& command) {
  std::string text;
  FILE* pipe = popen(("timeout 60 " + command).c_str(), "r");
  if (pipe == nullptr) return "popen";
  std::array<char, 4096> part;
  while (const size_t got = fread(part.data(), 1, part.size(), pipe)) text.append(part.data(), got);
  const int status = pclose(pipe);
  if (status != 0) text += "status " + std::to_string(status) + "\n";
  return text;
}

std::string Probe(const std::string& scenario, const std::string& environment = "") {
  const char* folder = getenv("TEST_PROBE_FOLDER");
  const std::string probe =
      std::filesystem::absolute(folder == nullptr ? "tests/unit/provider" : folder).string() +
      "/preload_probe";
  return RunCommand("env " + environment + " LD_PRELOAD=" + Built("libverbena-preload.so") + " " +
                    probe + " " + scenario + " 2>&1");
}

class PreloadScenario : public ::testing::TestWithParam<const char*> {};

TEST_P(PreloadScenario, SeesTheTreeOfTheDaemon) {
  const std::string tree = FakeDevice::Get().tree();
  std::error_code ignored;
  std::filesystem::remove(tree + "/sys/class/infiniband/absolute", ignored);
  std::filesystem::create_directory_symlink(tree + "/sys/class/infiniband/verbena0",
                                            tree + "/sys/class/infiniband/absolute");
  const std::string text = Probe(GetParam());
  EXPECT_EQ(text.find("BAD"), std::string::npos) << text;
  EXPECT_NE(text.find("end\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("status"), std::string::npos) << text;
}

INSTANTIATE_TEST_SUITE_P(All, PreloadScenario,
                         ::testing::Values("opens", "folders", "stats", "links", "ioctls",
                                           "stdin"));

class WithoutDaemon : public ::testing::Test {
 protected:
  WithoutDaemon() {
    char folder[] = "/tmp/no-daemon-XXXXXX";
    folder_ = mkdtemp(folder);
    environment_ = "-u VERBENA_SOCKET XDG_RUNTIME_DIR=" + folder_ + " VERBENA_NAME=nobody ";
  }
  ~WithoutDaemon() override { std::filesystem::remove_all(folder_); }
  std::string folder_;
  std::string environment_;
};

TEST_F(WithoutDaemon, ShowsAnEmptyListOfDevices) {
  const std::string text = Probe("without", environment_);
  EXPECT_EQ(text.find("BAD"), std::string::npos) << text;
  EXPECT_NE(text.find("end\n"), std::string::npos) << text;
  const auto rights = std::filesystem::status(folder_ + "/verbena").permissions();
  EXPECT_EQ(rights, std::filesystem::perms::owner_all);
}

TEST_F(WithoutDaemon, WarnsOnceIfAsked) {
  EXPECT_EQ(Probe("without", environment_).find("verbena:"), std::string::npos);
  const std::string text = Probe("without", environment_ + "IBV_SHOW_WARNINGS=1 ");
  EXPECT_NE(text.find("verbena: no daemon is running"), std::string::npos) << text;
  EXPECT_EQ(text.find("verbena:"), text.rfind("verbena:")) << text;
}

TEST_F(WithoutDaemon, StockProgramSaysThatThereIsNoDevice) {
  const std::string text =
      RunCommand("env " + environment_ + "LD_PRELOAD=" + Built("libverbena-preload.so") +
                 " IBV_DRIVERS=" + Built("libverbena") + " ibv_devinfo 2>&1");
  EXPECT_NE(text.find("No IB devices found"), std::string::npos) << text;
}

// The structures of releases before 36 differ.
TEST(Provider, RefusesALibraryThatIsTooOld) {
  Dl_info info;
  ASSERT_NE(dladdr(reinterpret_cast<void*>(&ibv_get_device_list), &info), 0);
  char folder[] = "/tmp/old-verbs-XXXXXX";
  const std::filesystem::path path = mkdtemp(folder);
  std::filesystem::copy_file(info.dli_fname, path / "libibverbs.so.1.14.35.0");
  std::filesystem::create_symlink("libibverbs.so.1.14.35.0", path / "libibverbs.so.1");
  FakeDevice::Get();
  const std::string text = RunCommand("env LD_LIBRARY_PATH=" + path.string() +
                                      " LD_PRELOAD=" + Built("libverbena-preload.so") +
                                      " IBV_DRIVERS=" + Built("libverbena") + " ibv_devices 2>&1");
  EXPECT_NE(text.find("verbena: libibverbs of rdma-core 35 is too old, 36"), std::string::npos)
      << text;
  EXPECT_EQ(text.find("verbena0 "), std::string::npos) << text;
  std::filesystem::remove_all(path);
}

TEST(Provider, IsLoadedByAStockProgram) {
  FakeDevice::Get();
  const std::string text =
      RunCommand("env LD_PRELOAD=" + Built("libverbena-preload.so") +
                 " IBV_DRIVERS=" + Built("libverbena") + " ibv_devinfo -d verbena0 2>&1");
  EXPECT_NE(text.find("9.8.7"), std::string::npos) << text;
  EXPECT_NE(text.find("PORT_ACTIVE"), std::string::npos) << text;
  EXPECT_EQ(text.find("status"), std::string::npos) << text;
}

std::set<std::string> Needed(const std::string& library) {
  std::istringstream lines(RunCommand("readelf -dW " + Built(library)));
  std::set<std::string> needed;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("(NEEDED)") == std::string::npos) continue;
    const size_t start = line.find('[') + 1;
    needed.insert(line.substr(start, line.find(']') - start));
  }
  return needed;
}

std::set<std::string> Exported(const std::string& library) {
  std::istringstream words(RunCommand("nm -D --defined-only -f just-symbols " + Built(library)));
  std::set<std::string> names;
  for (std::string word; words >> word;) names.insert(word);
  return names;
}

TEST(LoadableLibraries, NeedNoCppRuntime) {
  EXPECT_EQ(Needed("libverbena-rdmav34.so"),
            (std::set<std::string>{"libibverbs.so.1", "libc.so.6"}));
  EXPECT_EQ(Needed("libverbena-preload.so"), std::set<std::string>{"libc.so.6"});
}

TEST(LoadableLibraries, ExportOnlyWhatIsInterposed) {
  EXPECT_EQ(Exported("libverbena-rdmav34.so"), std::set<std::string>{});
  const std::set<std::string> expected = {"__fxstat",
                                          "chdir",
                                          "getxattr",
                                          "lgetxattr",
                                          "listxattr",
                                          "llistxattr",
                                          "statfs",
                                          "statfs64",
                                          "statvfs",
                                          "statvfs64",
                                          "__fxstat64",
                                          "__fxstatat",
                                          "__fxstatat64",
                                          "__lxstat",
                                          "__lxstat64",
                                          "__open64_2",
                                          "__open_2",
                                          "__openat64_2",
                                          "__openat_2",
                                          "__readlink_chk",
                                          "__readlinkat_chk",
                                          "__xstat",
                                          "__xstat64",
                                          "__realpath_chk",
                                          "access",
                                          "creat",
                                          "canonicalize_file_name",
                                          "creat64",
                                          "eaccess",
                                          "euidaccess",
                                          "faccessat",
                                          "fopen",
                                          "fopen64",
                                          "freopen",
                                          "freopen64",
                                          "fstat",
                                          "fstat64",
                                          "fstatat",
                                          "fstatat64",
                                          "ftw",
                                          "ftw64",
                                          "glob",
                                          "glob64",
                                          "ioctl",
                                          "lstat",
                                          "lstat64",
                                          "nftw",
                                          "nftw64",
                                          "open",
                                          "open64",
                                          "openat",
                                          "openat64",
                                          "opendir",
                                          "readlink",
                                          "readlinkat",
                                          "realpath",
                                          "scandir",
                                          "scandir64",
                                          "scandirat",
                                          "scandirat64",
                                          "socket",
                                          "stat",
                                          "stat64",
                                          "statx",
                                          "write",
                                          "bind",
                                          "getsockname",
                                          "recvfrom",
                                          "recvmsg",
                                          "sendmsg",
                                          "sendto",
                                          "setsockopt",
                                          "getifaddrs",
                                          "freeifaddrs",
                                          "getaddrinfo",
                                          "if_nametoindex",
                                          "if_indextoname",
                                          "if_nameindex",
                                          "closedir",
                                          "readdir",
                                          "readdir64",
                                          "recv",
                                          "rewinddir",
                                          "send"};
  EXPECT_EQ(Exported("libverbena-preload.so"), expected);
}

}  // namespace
}  // namespace verbena::provider
