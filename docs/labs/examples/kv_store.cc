// SPDX-License-Identifier: Apache-2.0
//
// kv_store: a key-value store whose gets are RDMA reads. The client computes where a key is and
// reads that slot; the server's CPU only changes values. A version before and one after the value
// tell the reader whether it met the server in the middle of a change.
//
//   g++ -std=c++20 kv_store.cc -libverbs -o kv_store
//   kv_store -d verbena0                      the server
//   kv_store -d verbena1 127.88.0.1           the client
#include <array>
#include <atomic>
#include <cstdio>
#include <string_view>

#include "endpoint.h"

namespace {

constexpr int kRights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
constexpr size_t kSlots = 64;
constexpr std::array kKeys = {"apple", "banana", "cherry", "date", "elder", "fig"};

// RDMA READ promises an order only for single words: hence the two versions.
struct Slot {
  std::atomic<uint64_t> before;  // odd: a change has begun
  char key[16];
  char value[32];
  std::atomic<uint64_t> after;
};
static_assert(sizeof(Slot) == 64 && std::atomic<uint64_t>::is_always_lock_free);

// FNV-1a. Both ends must agree; keys whose slots collide use the next free one.
size_t SlotOf(std::string_view key) {
  uint32_t hash = 2166136261u;
  for (const char c : key) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash % kSlots;
}

void Put(Slot* table, const char* key, const std::string& value) {
  size_t at = SlotOf(key);
  while (table[at].key[0] != '\0' && std::string_view(table[at].key) != key) {
    at = (at + 1) % kSlots;
  }
  Slot& slot = table[at];
  const uint64_t version = slot.before.load(std::memory_order_relaxed) + 1;
  slot.before.store(version, std::memory_order_seq_cst);
  std::snprintf(slot.key, sizeof(slot.key), "%s", key);
  std::snprintf(slot.value, sizeof(slot.value), "%s", value.c_str());
  std::atomic_thread_fence(std::memory_order_seq_cst);
  slot.after.store(version + 1, std::memory_order_seq_cst);
  slot.before.store(version + 1, std::memory_order_seq_cst);
}

void Server(const lab::Options& options) {
  const lab::Device device(options.device);
  const lab::Memory memory(device, kSlots * sizeof(Slot), kRights);
  const lab::Completions completions(device);
  const lab::Connection client(device, completions, lab::Tcp::Listen(options).Accept(), options,
                               memory, kRights);
  auto* table = reinterpret_cast<Slot*>(memory.data());
  for (const char* key : kKeys) Put(table, key, std::string(key) + " costs 10");
  client.tcp().Meet();  // the table is there
  unsigned changes = 0;
  // Prices change until the client leaves.
  while (!client.tcp().readable()) {
    const char* key = kKeys[changes % kKeys.size()];
    Put(table, key, std::string(key) + " costs " + std::to_string(10 + changes % 90));
    ++changes;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  client.tcp().Meet();
  std::printf("%u changes made; no get has reached this program\n", changes);
}

struct Found {
  bool found;
  std::string value;
};

// `retries`: reads that met a change.
Found Get(const lab::Connection& server, const lab::Completions& completions,
          const lab::Memory& memory, std::string_view key, unsigned* retries) {
  const auto* slot = reinterpret_cast<const Slot*>(memory.data());
  for (size_t probe = 0; probe < kSlots;) {
    const size_t at = (SlotOf(key) + probe) % kSlots;
    server.Post(IBV_WR_RDMA_READ, at, memory.Piece(0, sizeof(Slot)), at * sizeof(Slot));
    completions.Wait(server.tcp());
    const uint64_t before = slot->before, after = slot->after;
    if (before != after || before % 2 != 0) {
      ++*retries;
      continue;
    }
    if (slot->key[0] == '\0') break;
    if (std::string_view(slot->key, strnlen(slot->key, sizeof(slot->key))) == key) {
      return {true, std::string(slot->value, strnlen(slot->value, sizeof(slot->value)))};
    }
    ++probe;
  }
  return {false, {}};
}

void Client(const lab::Options& options) {
  const lab::Device device(options.device);
  const lab::Memory memory(device, sizeof(Slot), IBV_ACCESS_LOCAL_WRITE);
  const lab::Completions completions(device);
  const lab::Connection server(device, completions, lab::Tcp::Connect(options), options, memory, 0);
  server.tcp().Meet();
  unsigned retries = 0;
  uint32_t done = 0;
  for (; options.more(done); ++done) {
    const char* key = kKeys[done % kKeys.size()];
    const Found got = Get(server, completions, memory, key, &retries);
    if (!got.found || got.value.find(key) != 0) {
      throw std::runtime_error(std::string("no right value for ") + key);
    }
    if (done < kKeys.size()) std::printf("get %s: %s\n", key, got.value.c_str());
    options.Pause();
  }
  if (Get(server, completions, memory, "grape", &retries).found) {
    throw std::runtime_error("found what nobody put");
  }
  std::printf("%u gets, %u read again because the server was changing the value\n", done, retries);
  server.tcp().Meet();
}

}  // namespace

int main(int argc, char** argv) {
  return lab::Main(argc, argv, [](const lab::Options& options) {
    options.is_server() ? Server(options) : Client(options);
  });
}
