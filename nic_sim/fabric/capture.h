// SPDX-License-Identifier: Apache-2.0
//
// Writes packets to a pcapng file: one interface per port, nanosecond time
// stamps, direction of each packet. The engine only copies into a bounded
// buffer; a thread of the capture's own writes it. Nothing is lost while the
// file takes the bytes: if the buffer is full, the engine waits for it, at most
// one second until the writer moves again; what finds no room then is counted.
//
// The capture ends when its count is reached and when a write fails (full disk,
// closed pipe); done() tells it.
//
// Threads: Add under the shard's lock; the constructor, done() and Finish() in
// any thread, Finish without the shard's lock.
#pragma once

#include <rte_mbuf.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "nic_sim/fabric/packet_queue.h"
#include "transport/base/time.h"

namespace verbena::nic {

struct CaptureResult {
  uint64_t packets = 0;  // wholly written
  uint64_t missed = 0;   // passed during the capture but not written
  int error = 0;         // errno of the write that ended it, or 0
};

class CaptureFile {
 public:
  static constexpr size_t kDefaultBufferBytes = 4 << 20;  // twice of it

  // Owns `fd`. Writes `interfaces` (device names) to the file's header; Add
  // refers to them by index. `count` 0: no limit. Throws std::system_error if
  // there is no thread for it (`fd` is closed then).
  CaptureFile(int fd, std::vector<std::string> interfaces, uint64_t count,
              size_t buffer_bytes = kDefaultBufferBytes);
  ~CaptureFile();  // as Finish()
  CaptureFile(const CaptureFile&) = delete;
  CaptureFile& operator=(const CaptureFile&) = delete;

  // Copies the packet with its ICRC and a comment (QP, wr_id, fault rule). The first packet pins
  // `now` to the wall clock.
  void Add(uint32_t interface, Direction direction, rte_mbuf* packet, transport::Time now);
  bool done() const { return done_.load(std::memory_order_relaxed); }

  // Ends it: waits until the buffer is written, as long as the file takes at
  // least something every two seconds, and closes it. Further calls give the
  // same.
  CaptureResult Finish();

 private:
  struct Buffer {
    std::unique_ptr<std::byte[]> bytes;
    size_t size = 0;
  };

  void WriteHeader(const std::vector<std::string>& interfaces);
  bool MakeRoom(std::unique_lock<std::mutex>* lock, size_t bytes);
  void Run();
  bool WriteAll(std::span<const std::byte> bytes, size_t* written);
  bool WaitWritable();
  static uint64_t WholePackets(std::span<const std::byte> blocks);

  const size_t capacity_;
  const uint64_t count_;
  int fd_;
  bool is_file_ = false;  // else a pipe, socket or terminal: may block
  std::vector<std::byte> header_;

  std::mutex mutex_;
  std::condition_variable wake_;   // for the writer
  std::condition_variable space_;  // for Add
  Buffer filling_;
  Buffer writing_;  // of the writer, without the lock
  uint64_t accepted_ = 0;
  uint64_t missed_ = 0;
  bool full_ = false;     // Add waits
  bool stalled_ = false;  // Add waited in vain; do not again until it moves
  bool has_clock_offset_ = false;
  int64_t clock_offset_ns_ = 0;
  std::atomic<bool> finishing_{false};
  std::atomic<bool> done_{false};

  // Of the writer until it has ended.
  uint64_t written_ = 0;
  int error_ = 0;
  bool finished_ = false;
  std::thread writer_;
};

}  // namespace verbena::nic
