// SPDX-License-Identifier: Apache-2.0
//
// rdma_write: the client puts messages into the server's memory. The server's program does
// nothing meanwhile: it sleeps until the client says, over TCP, that it is done.
//
//   g++ -std=c++20 rdma_write.cc -libverbs -o rdma_write
//   rdma_write -d verbena0                    the server
//   rdma_write -d verbena1 127.88.0.1         the client
#include <cstdio>

#include "endpoint.h"

namespace {

constexpr int kRights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

void Server(const lab::Options& options) {
  const lab::Device device(options.device);
  const lab::Memory memory(device, options.size, kRights);
  const lab::Completions completions(device);
  const lab::Connection client(device, completions, lab::Tcp::Listen(options).Accept(), options,
                               memory, kRights);
  client.tcp().Meet();  // ready
  client.tcp().Meet();  // done
  std::printf("my memory holds \"%.60s\"; no call of mine has put it there\n", memory.data());
}

void Client(const lab::Options& options) {
  const lab::Device device(options.device);
  const lab::Memory memory(device, options.size, IBV_ACCESS_LOCAL_WRITE);
  const lab::Completions completions(device);
  const lab::Connection server(device, completions, lab::Tcp::Connect(options), options, memory, 0);
  server.tcp().Meet();
  uint32_t done = 0;
  for (; options.more(done); ++done) {
    std::snprintf(memory.data(), memory.size(), "write %u by the client", done);
    server.Post(IBV_WR_RDMA_WRITE, done, memory.Piece(0, memory.size()));
    completions.Wait(server.tcp());
    options.Pause();
  }
  std::printf("%u messages of %u bytes written\n", done, options.size);
  server.tcp().Meet();
}

}  // namespace

int main(int argc, char** argv) {
  return lab::Main(argc, argv, [](const lab::Options& options) {
    options.is_server() ? Server(options) : Client(options);
  });
}
