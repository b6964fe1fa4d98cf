// SPDX-License-Identifier: Apache-2.0
//
// beside_tcp: the same messages over TCP and over RDMA, to and fro, with what each costs: time,
// CPU, and how often the program entered the kernel to move data.
//
//   g++ -std=c++20 beside_tcp.cc -libverbs -o beside_tcp
//   beside_tcp -d verbena0 -n 1000            the server
//   beside_tcp -d verbena1 -n 1000 127.88.0.1 the client
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "endpoint.h"

namespace {

struct Cost {
  double user = 0, system = 0;
};

Cost Now() {
  rusage usage;
  if (getrusage(RUSAGE_SELF, &usage) != 0) throw lab::Failed("getrusage");
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return {seconds(usage.ru_utime), seconds(usage.ru_stime)};
}

// One side of `count` round trips.
void Measure(const char* name, const lab::Options& options, const std::function<void()>& send,
             const std::function<void()>& receive, const char* data_calls) {
  const Cost before = Now();
  const auto start = std::chrono::steady_clock::now();
  for (uint32_t i = 0; i < options.count; ++i) {
    if (options.is_server()) {
      receive();
      send();
    } else {
      send();
      receive();
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  const Cost after = Now();
  const double each = 1e6 / options.count;
  std::printf(
      "%-5s %8.1f us per round trip; CPU of this program: %6.1f us user, %6.1f us kernel; "
      "calls that move data: %s\n",
      name, took.count() * each, (after.user - before.user) * each,
      (after.system - before.system) * each, data_calls);
}

void Run(const lab::Options& options) {
  if (options.count == 0) throw std::runtime_error("-n 0: this program must end");
  const lab::Device device(options.device);
  const lab::Memory memory(device, 2 * size_t{options.size}, IBV_ACCESS_LOCAL_WRITE);
  const lab::Completions completions(device);
  lab::Tcp tcp =
      options.is_server() ? lab::Tcp::Listen(options).Accept() : lab::Tcp::Connect(options);
  tcp.SetNoDelay();
  const lab::Connection peer(device, completions, std::move(tcp), options, memory, 0);
  const ibv_sge in = memory.Piece(0, options.size), out = memory.Piece(options.size, options.size);

  std::vector<char> buffer(options.size);
  peer.tcp().Meet();
  Measure(
      "TCP", options, [&] { peer.tcp().Send(buffer.data(), buffer.size()); },
      [&] { peer.tcp().Receive(buffer.data(), buffer.size()); }, "2 (send, recv)");

  unsigned arrived = 0;
  const auto wait_for = [&](ibv_wc_opcode what) {
    ibv_wc wc;
    do {
      while (!completions.Poll(&wc)) {
      }
      if (wc.opcode == IBV_WC_RECV) ++arrived;
    } while (wc.opcode != what && !(what == IBV_WC_RECV && arrived > 0));
  };
  peer.PostReceive(0, in);
  peer.tcp().Meet();
  uint32_t received = 0;
  Measure(
      "RDMA", options,
      [&] {
        peer.Post(IBV_WR_SEND, 1, out);
        wait_for(IBV_WC_SEND);
      },
      [&] {
        if (arrived == 0) wait_for(IBV_WC_RECV);
        --arrived;
        if (++received < options.count) peer.PostReceive(0, in);
      },
      "0 (the NIC does it)");
  peer.tcp().Meet();
}

}  // namespace

int main(int argc, char** argv) { return lab::Main(argc, argv, Run); }
