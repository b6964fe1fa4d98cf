// SPDX-License-Identifier: Apache-2.0
//
// rdma_read: the client takes what is in the server's memory. The server's program changes it now
// and then, and is never asked.
//
//   g++ -std=c++20 rdma_read.cc -libverbs -o rdma_read
//   rdma_read -d verbena0                     the server
//   rdma_read -d verbena1 127.88.0.1          the client
#include <cstdio>

#include "endpoint.h"

namespace {

constexpr int kRights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;

void Server(const lab::Options& options) {
  const lab::Device device(options.device);
  const lab::Memory memory(device, options.size, kRights);
  const lab::Completions completions(device);
  const lab::Connection client(device, completions, lab::Tcp::Listen(options).Accept(), options,
                               memory, kRights);
  client.tcp().Meet();  // ready
  std::snprintf(memory.data(), memory.size(), "the server's secret number is 42");
  client.tcp().Meet();  // it may be read
  client.tcp().Meet();  // done
  std::printf("done; I have posted nothing\n");
}

void Client(const lab::Options& options) {
  const lab::Device device(options.device);
  const lab::Memory memory(device, options.size, IBV_ACCESS_LOCAL_WRITE);
  const lab::Completions completions(device);
  const lab::Connection server(device, completions, lab::Tcp::Connect(options), options, memory, 0);
  server.tcp().Meet();
  server.tcp().Meet();
  uint32_t done = 0;
  for (; options.more(done); ++done) {
    std::memset(memory.data(), 0, memory.size());
    server.Post(IBV_WR_RDMA_READ, done, memory.Piece(0, memory.size()));
    completions.Wait(server.tcp());
    if (done == 0) std::printf("read: \"%.60s\"\n", memory.data());
    options.Pause();
  }
  std::printf("%u reads of %u bytes\n", done, options.size);
  server.tcp().Meet();
}

}  // namespace

int main(int argc, char** argv) {
  return lab::Main(argc, argv, [](const lab::Options& options) {
    options.is_server() ? Server(options) : Client(options);
  });
}
