// SPDX-License-Identifier: Apache-2.0
//
// events: messages go to and fro, first by polling, then by events, and each end says what it
// cost. With a pause between messages (-i), polling pays for the pause and events do not.
//
//   g++ -std=c++20 events.cc -libverbs -o events
//   events -d verbena0                        the server
//   events -d verbena1 127.88.0.1             the client
#include <sys/resource.h>

#include <chrono>
#include <cstdio>

#include "endpoint.h"

namespace {

constexpr uint64_t kReceive = 1, kSend = 2;

double CpuSeconds() {
  rusage usage;
  if (getrusage(RUSAGE_SELF, &usage) != 0) throw lab::Failed("getrusage");
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Looks and looks, as programs do that want the answer at once.
ibv_wc Spin(const lab::Completions& completions, const lab::Tcp& peer) {
  ibv_wc wc;
  for (unsigned looks = 1; !completions.Poll(&wc); ++looks) {
    if (looks % (1 << 16) == 0 && peer.closed()) {
      throw std::runtime_error("the other end has gone");
    }
  }
  return wc;
}

void Run(const lab::Options& options) {
  const lab::Device device(options.device);
  const lab::Memory memory(device, 2 * size_t{options.size}, IBV_ACCESS_LOCAL_WRITE);
  lab::Completions completions(device);
  lab::Tcp tcp =
      options.is_server() ? lab::Tcp::Listen(options).Accept() : lab::Tcp::Connect(options);
  const lab::Connection peer(device, completions, std::move(tcp), options, memory, 0);
  const ibv_sge in = memory.Piece(0, options.size), out = memory.Piece(options.size, options.size);
  const uint32_t count = options.count == 0 ? 1u << 30 : options.count;

  for (const bool by_events : {false, true}) {
    // Waits for the receive; completions of sends come by the way.
    unsigned sends_open = 0;
    const auto wait_for = [&](uint64_t what) {
      while (true) {
        const ibv_wc wc =
            by_events ? completions.WaitForEvent(peer.tcp()) : Spin(completions, peer.tcp());
        if (wc.wr_id == kSend) --sends_open;
        if (wc.wr_id == what) return;
      }
    };
    const auto send = [&] {
      peer.Post(IBV_WR_SEND, kSend, out);
      ++sends_open;
    };
    peer.PostReceive(kReceive, in);
    peer.tcp().Meet();
    const auto start = std::chrono::steady_clock::now();
    const double cpu = CpuSeconds();
    for (uint32_t i = 0; i < count; ++i) {
      if (!options.is_server()) {
        options.Pause();
        send();
      }
      wait_for(kReceive);
      if (i + 1 < count) peer.PostReceive(kReceive, in);
      if (options.is_server()) send();
    }
    while (sends_open > 0) wait_for(kSend);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("%-8s %8.1f us per round trip, CPU busy %3.0f %%\n",
                by_events ? "events" : "polling", took.count() / count * 1e6,
                100 * (CpuSeconds() - cpu) / took.count());
    peer.tcp().Meet();
  }
}

}  // namespace

int main(int argc, char** argv) { return lab::Main(argc, argv, Run); }
