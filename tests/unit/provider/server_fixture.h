// SPDX-License-Identifier: Apache-2.0
//
// The real control server and tree of files in front of a fake device, and
// programs that run under the preload and print "good …" or "BAD …" lines.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "nic_sim/ctrl/control_requests.h"
#include "nic_sim/ctrl/server.h"
#include "nic_sim/ctrl/sysfs_tree.h"
#include "tests/unit/nic_sim/ctrl/fake_cm.h"
#include "tests/unit/nic_sim/ctrl/fake_hardware.h"

namespace verbena::nic {

class ServerFixture : public ::testing::Test {
 protected:
  ServerFixture() {
    std::string folder = "/tmp/vsrv.XXXXXX";
    if (mkdtemp(folder.data()) == nullptr) ADD_FAILURE() << "mkdtemp";
    folder_ = folder;
    hardware_.connection_manager = &cm_;
    const std::vector<NicInfo> nics = {hardware_.nic_info(0), hardware_.nic_info(1)};
    TreeOptions tree;
    tree.rdma_cm = true;
    tree.counters = {ReadCounters(&hardware_, "verbena0")};
    EXPECT_EQ(WriteSysfsTree(folder_ + "/t.tree", nics, tree), "");
    ServerOptions options;
    options.daemon = {"t", folder_ + "/t.sock", false, getpid()};
    options.tree = folder_ + "/t.tree";
    server_ = std::make_unique<Server>(&hardware_, nullptr, options);
    EXPECT_EQ(server_->Listen(folder_ + "/t.sock", -1), "");
    thread_ = std::thread([this] { server_->Run(); });
  }
  ~ServerFixture() override {
    Stop();
    std::filesystem::remove_all(folder_);
  }

  void Stop() {
    if (!thread_.joinable()) return;
    server_->Stop();
    thread_.join();
  }

  // A shell command under the preload, with a time limit.
  FILE* StartCommand(const std::string& command) {
    const std::string line = "timeout 60 env VERBENA_SOCKET=" + folder_ +
                             "/t.sock LD_PRELOAD=" + Built("TEST_LIBRARY_FOLDER", "provider") +
                             "/libverbena-preload.so " + command + " 2>&1";
    return popen(line.c_str(), "r");
  }
  FILE* StartProbe(const std::string& probe, const std::string& scenario) {
    return StartCommand(Built("TEST_PROBE_FOLDER", "tests/unit/provider") + "/" + probe + " " +
                        scenario);
  }
  static std::string ReadAll(FILE* pipe) {
    std::string text;
    std::array<char, 4096> part;
    while (const size_t got = fread(part.data(), 1, part.size(), pipe)) {
      text.append(part.data(), got);
    }
    const int status = pclose(pipe);
    return status == 0 ? text : text + "status " + std::to_string(status) + "\n";
  }
  static void ExpectGood(const std::string& text) {
    EXPECT_EQ(text.find("BAD"), std::string::npos) << text;
    EXPECT_NE(text.find("good"), std::string::npos) << text;
    EXPECT_NE(text.find("end\n"), std::string::npos) << text;
    EXPECT_EQ(text.find("status"), std::string::npos) << text;
  }

  std::string folder_;
  FakeCm cm_;
  FakeHardware hardware_;
  std::unique_ptr<Server> server_;
  std::thread thread_;

 private:
  // Bazel runs tests in the root of the runfiles tree.
  static std::string Built(const char* variable, const std::string& folder) {
    const char* other = getenv(variable);
    return std::filesystem::absolute(other == nullptr ? folder : other);
  }
};

}  // namespace verbena::nic
