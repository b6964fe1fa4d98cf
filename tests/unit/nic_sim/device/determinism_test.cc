// SPDX-License-Identifier: Apache-2.0
//
// Simulated applications, the virtual clock and fault rules of all kinds that draw lots: two
// runs, each a process of its own, give the same trace to the byte.
#include <gtest/gtest.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "nic_sim/device/device.h"
#include "tests/unit/nic_sim/device/raw_client.h"
#include "transport/base/time.h"
#include "transport/verbs_types.h"

namespace verbena::testing {
namespace {

// At the same addresses in each run: where each sanitizer leaves room.
#if defined(__SANITIZE_THREAD__)
constexpr uintptr_t kBuffers = 0x4000000000;
#else
constexpr uintptr_t kBuffers = 0x200000000000;
#endif

using transport::Duration;
using transport::Time;
using transport::WrOpcode;

constexpr uint64_t kMessages = 300;
constexpr uint32_t kBytes = 5000;
constexpr const char* kRules[] = {
    "drop prob=0.03 seed=1",
    "delay us=5 jitter=200 dist=exponential prob=0.2 seed=2",
    "duplicate every=17",
    "reorder by=2 prob=0.1 seed=3",
    "corrupt prob=0.02 seed=4",
    "drop prob=0.005 burst=4 seed=5",
    "forge kind=nak_sequence prob=0.01 seed=6 opcode=write",
    "stall dev=verbena1 us=300 period=5000",
    "slow_dma dev=verbena0 mbps=10000",
    "delay_completion us=50 prob=0.1 seed=7",
    "duplicate_completion prob=0.01 seed=8",
};

// kBytes of zeros at this address.
uint8_t* BufferAt(uintptr_t address) {
  void* const memory = mmap(reinterpret_cast<void*>(address), kBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (memory == MAP_FAILED) abort();
  return static_cast<uint8_t*>(memory);
}

// Prints the trace of one run.
int RunOnce() {
  nic::DeviceOptions options;
  options.instance = "determinism-" + std::to_string(getpid());
  options.run_folder = "/tmp";
  options.nics = 2;
  options.mode = nic::DeviceOptions::Mode::kManual;
  options.seed = 20;
  std::string error;
  const std::unique_ptr<nic::Device> device = nic::Device::Start(options, &error);
  if (device == nullptr) {
    fprintf(stderr, "%s\n", error.c_str());
    return 1;
  }
  {
    RawClient a(*device, 0);
    RawClient b(*device, 1);
    RawClient::Cq a_cq = a.CreateCq(1024);
    RawClient::Cq b_cq = b.CreateCq(1024);
    RawClient::Qp a_qp = a.CreateQp(a_cq, a_cq);
    RawClient::Qp b_qp = b.CreateQp(b_cq, b_cq);
    if (a.Connect(a_qp, b_qp.qpn, b.gid()) != 0 || b.Connect(b_qp, a_qp.qpn, a.gid()) != 0) {
      return 1;
    }
    // The trace tells addresses, so they have to be the same.
    uint8_t* const from = BufferAt(kBuffers);
    uint8_t* const to = BufferAt(kBuffers + 0x100000);
    const uint32_t from_key = a.RegMr(from, kBytes, 1);
    const uint32_t to_key = b.RegMr(to, kBytes, 15);
    for (const char* rule : kRules) {
      if (device->AddRule(rule, &error) == 0) {
        fprintf(stderr, "%s: %s\n", rule, error.c_str());
        return 1;
      }
    }
    Time now = Time::FromNanoseconds(1'000'000'000);
    uint64_t posted = 0;
    // Ten virtual seconds at most.
    for (int step = 0; step < 1'000'000 && posted < kMessages; ++step) {
      while (a.Poll(a_cq, 0).has_value()) {
      }
      if (posted < kMessages && step % 20 == 0) {
        abi::SendWqe wqe{};
        wqe.wr_id = ++posted;
        wqe.opcode =
            static_cast<uint8_t>(posted % 5 == 0 ? WrOpcode::kRdmaRead : WrOpcode::kRdmaWrite);
        wqe.flags = abi::kWqeSignaled;
        wqe.remote_address = reinterpret_cast<uint64_t>(to);
        wqe.rkey = to_key;
        a.WriteSend(a_qp, wqe, {{reinterpret_cast<uint64_t>(from), kBytes, from_key}});
        a.Ring(a_qp);
      }
      for (int pass = 0; pass < 50 && device->RunPass(now); ++pass) {
      }
      now += Duration::Microseconds(10);
    }
    const std::string trace = device->Trace({}, 0, 100'000).dump(1);
    fwrite(trace.data(), 1, trace.size(), stdout);
  }
  return 0;
}

std::string TraceOfAProcess() {
  char self[4096] = {};
  if (readlink("/proc/self/exe", self, sizeof self - 1) <= 0) return {};
  FILE* child = popen((std::string("VERBENA_ONE_RUN=1 '") + self + "'").c_str(), "r");
  std::string text;
  char buffer[65536];
  while (const size_t got = fread(buffer, 1, sizeof buffer, child)) text.append(buffer, got);
  return pclose(child) == 0 ? text : std::string();
}

TEST(Determinism, TwoRunsGiveTheSameTraceToTheByte) {
  const std::string first = TraceOfAProcess();
  ASSERT_FALSE(first.empty());
  // It is a trace of a network in trouble.
  for (const char* word :
       {"\"retransmission\"", "\"fault\"", "\"device_fault\"", "\"refused\"", "\"completion\""}) {
    EXPECT_NE(first.find(word), std::string::npos) << word;
  }
  const std::string second = TraceOfAProcess();
  EXPECT_EQ(std::hash<std::string>()(first), std::hash<std::string>()(second));
  EXPECT_TRUE(first == second);
}

}  // namespace
}  // namespace verbena::testing

int main(int argc, char** argv) {
  if (getenv("VERBENA_ONE_RUN") != nullptr) return verbena::testing::RunOnce();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
