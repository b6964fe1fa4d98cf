// SPDX-License-Identifier: Apache-2.0
//
// engine_bench [BATCHES]: what the engine computes per message, from the doorbell to the last
// completion: two NICs in one process, no threads of the engine, 8 bytes, batches of 32. SENDs
// with a completion at both ends, and WRITEs with one for the batch, as ib_write_bw posts them.
// Prints nanoseconds per message of both: the first decile of the batches, which is what they take
// when nobody disturbs them. Copies go by system calls, as they do between processes.
// `tools/bench --only cost` runs builds of it in turns; not a test.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "nic_sim/device/device.h"
#include "tests/unit/nic_sim/device/raw_client.h"
#include "transport/base/time.h"
#include "transport/verbs_types.h"

namespace verbena::testing {
namespace {

using transport::Duration;
using transport::Time;

constexpr uint32_t kBatch = 32;
constexpr uint32_t kBytes = 8;
constexpr int kWarmUp = 500;

// How many completions are there; takes them.
uint32_t Drain(RawClient& client, RawClient::Cq& cq) {
  uint32_t count = 0;
  while (client.Poll(cq, 0).has_value()) ++count;
  return count;
}

int Run(nic::Device& device, transport::WrOpcode opcode, int batches) {
  RawClient a(device, 0);
  RawClient b(device, 1);
  RawClient::Cq a_cq = a.CreateCq(4 * kBatch);
  RawClient::Cq b_cq = b.CreateCq(4 * kBatch);
  RawClient::Qp a_qp = a.CreateQp(a_cq, a_cq);
  RawClient::Qp b_qp = b.CreateQp(b_cq, b_cq);
  if (a.Connect(a_qp, b_qp.qpn, b.gid()) != 0 || b.Connect(b_qp, a_qp.qpn, a.gid()) != 0) {
    fprintf(stderr, "no connection\n");
    return 1;
  }
  std::vector<uint8_t> from(kBytes), to(kBytes * kBatch);
  const uint32_t from_key = a.RegMr(from.data(), from.size(), 1);
  const uint32_t to_key = b.RegMr(to.data(), to.size(), 3);  // local and remote write
  const bool is_send = opcode == transport::WrOpcode::kSend;

  std::vector<double> per_message;
  Time now = Time::FromNanoseconds(1'000'000'000);
  for (int batch = 0; batch < kWarmUp + batches; ++batch) {
    abi::SendWqe wqe{};
    wqe.opcode = static_cast<uint8_t>(opcode);
    wqe.rkey = to_key;
    for (uint32_t i = 0; i < kBatch; ++i) {
      wqe.wr_id = i;
      wqe.remote_address = reinterpret_cast<uint64_t>(&to[i * kBytes]);
      wqe.flags = is_send || i + 1 == kBatch ? abi::kWqeSignaled : 0;
      if (is_send) {
        b.WriteRecv(b_qp, i, {{reinterpret_cast<uint64_t>(&to[i * kBytes]), kBytes, to_key}});
      }
      a.WriteSend(a_qp, wqe, {{reinterpret_cast<uint64_t>(from.data()), kBytes, from_key}});
    }
    b.Ring(b_qp);
    a.Ring(a_qp);
    const auto start = std::chrono::steady_clock::now();
    // Until nothing moves any more; the virtual clock stands, so nothing is sent twice.
    for (int pass = 0; pass < 1000 && device.RunPass(now); ++pass) {
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    if (Drain(a, a_cq) != (is_send ? kBatch : 1) || Drain(b, b_cq) != (is_send ? kBatch : 0)) {
      fprintf(stderr, "batch %d: completions are missing\n", batch);
      return 1;
    }
    if (batch >= kWarmUp) per_message.push_back(took.count() / kBatch);
    now += Duration::Microseconds(100);
  }
  const auto decile = per_message.begin() + static_cast<std::ptrdiff_t>(per_message.size() / 10);
  std::nth_element(per_message.begin(), decile, per_message.end());
  printf("%.1f\n", *decile);
  return 0;
}

int RunAll(int batches) {
  nic::DeviceOptions options;
  options.instance = "engine-bench-" + std::to_string(getpid());
  options.run_folder = "/tmp";
  options.nics = 2;
  options.mode = nic::DeviceOptions::Mode::kManual;
  std::string error;
  const std::unique_ptr<nic::Device> device = nic::Device::Start(options, &error);
  if (device == nullptr) {
    fprintf(stderr, "%s\n", error.c_str());
    return 1;
  }
  const int status = Run(*device, transport::WrOpcode::kSend, batches);
  return status != 0 ? status : Run(*device, transport::WrOpcode::kRdmaWrite, batches);
}

}  // namespace
}  // namespace verbena::testing

int main(int argc, char** argv) {
  const int batches = argc > 1 ? std::atoi(argv[1]) : 20'000;
  if (batches < 1) {
    fprintf(stderr, "usage: engine_bench [BATCHES]\n");
    return 2;
  }
  return verbena::testing::RunAll(batches);
}
