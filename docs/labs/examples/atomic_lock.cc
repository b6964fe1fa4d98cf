// SPDX-License-Identifier: Apache-2.0
//
// atomic_lock: clients share a counter in the server's memory. Each takes a lock with
// COMPARE_SWAP, adds one with a READ and a WRITE, and gives the lock back; a second counter is
// simply a FETCH_ADD. Both must be right at the end.
//
//   g++ -std=c++20 atomic_lock.cc -libverbs -o atomic_lock
//   atomic_lock -d verbena0 -c 2              a server for two clients
//   atomic_lock -d verbena1 127.88.0.1        a client, started twice
#include <cstddef>
#include <cstdio>
#include <memory>
#include <vector>

#include "endpoint.h"

namespace {

constexpr int kRights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |
                        IBV_ACCESS_REMOTE_ATOMIC;
constexpr uint64_t kFree = 0;

// The server's memory.
struct Shared {
  uint64_t lock;     // kFree, or the number of the client that has it
  uint64_t guarded;  // only who has the lock may change it
  uint64_t added;    // changed by FETCH_ADD only
};

void Server(const lab::Options& options) {
  const lab::Device device(options.device);
  const lab::Memory memory(device, sizeof(Shared), kRights);
  const lab::Completions completions(device);
  const lab::Tcp listener = lab::Tcp::Listen(options);
  std::vector<std::unique_ptr<lab::Connection>> clients;
  for (uint64_t number = 1; number <= options.clients; ++number) {
    clients.push_back(std::make_unique<lab::Connection>(device, completions, listener.Accept(),
                                                        options, memory, kRights));
    clients.back()->tcp().Send(&number, sizeof(number));
  }
  for (const auto& client : clients) client->tcp().Meet();  // ready
  for (const auto& client : clients) client->tcp().Meet();  // done
  const auto* shared = reinterpret_cast<const volatile Shared*>(memory.data());
  const unsigned long long guarded = shared->guarded, added = shared->added;
  std::printf("under the lock: %llu, by fetch-and-add: %llu\n", guarded, added);
  if (guarded != added || shared->lock != kFree) throw std::runtime_error("the lock has failed");
}

void Client(const lab::Options& options) {
  const lab::Device device(options.device);
  const lab::Memory memory(device, 2 * sizeof(uint64_t), IBV_ACCESS_LOCAL_WRITE);
  const lab::Completions completions(device);
  const lab::Connection server(device, completions, lab::Tcp::Connect(options), options, memory, 0);
  uint64_t me = 0;
  server.tcp().Receive(&me, sizeof(me));
  server.tcp().Meet();

  auto* words = reinterpret_cast<volatile uint64_t*>(memory.data());
  const ibv_sge was = memory.Piece(0, sizeof(uint64_t));  // what an atomic brings back
  const ibv_sge value = memory.Piece(sizeof(uint64_t), sizeof(uint64_t));
  uint64_t id = 0;
  unsigned waited = 0;
  const auto compare_swap = [&](uint64_t expected, uint64_t wanted) {
    server.PostAtomic(IBV_WR_ATOMIC_CMP_AND_SWP, id++, was, offsetof(Shared, lock), expected,
                      wanted);
    completions.Wait(server.tcp());
    return words[0] == expected;
  };
  uint32_t done = 0;
  for (; options.more(done); ++done) {
    while (!compare_swap(kFree, me)) {
      ++waited;  // somebody else has it
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    server.Post(IBV_WR_RDMA_READ, id++, value, offsetof(Shared, guarded));
    completions.Wait(server.tcp());
    words[1] = words[1] + 1;
    server.Post(IBV_WR_RDMA_WRITE, id++, value, offsetof(Shared, guarded));
    completions.Wait(server.tcp());
    if (!compare_swap(me, kFree)) throw std::runtime_error("somebody took my lock");

    server.PostAtomic(IBV_WR_ATOMIC_FETCH_AND_ADD, id++, was, offsetof(Shared, added), 1);
    completions.Wait(server.tcp());
    options.Pause();
  }
  std::printf("client %llu: took the lock %u times, found it taken %u times\n",
              static_cast<unsigned long long>(me), done, waited);
  server.tcp().Meet();
}

}  // namespace

int main(int argc, char** argv) {
  return lab::Main(argc, argv, [](const lab::Options& options) {
    options.is_server() ? Server(options) : Client(options);
  });
}
