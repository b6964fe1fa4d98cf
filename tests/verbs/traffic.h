// SPDX-License-Identifier: Apache-2.0
//
// Random RC traffic with every byte and every completion checked. Two roles on one connection: the
// requester posts rounds of random operations, the responder receives, and after each round checks
// what WRITEs and atomics left in its memory and answers with an empty SEND. Both derive the same
// operations from (seed, round), so that they may be threads or processes.
#pragma once

#include <cstdint>
#include <string>

#include "tests/verbs/verbs_support.h"

namespace verbena::testing {

struct TrafficOptions {
  uint64_t seed = 1;
  int rounds = 20;
  uint32_t max_message = 65536;
  uint32_t max_inline = 0;  // what the QP was created with
  int max_sge = 8;
};

inline constexpr int kOpsPerRound = 24;
// QPs for traffic need these.
EndOptions TrafficEnd(const std::string& device, int gid_index = 1, uint32_t max_inline = 256);

// Memory of the responder that the requester addresses.
struct RemoteMemory {
  uint64_t address = 0;
  uint32_t rkey = 0;
  std::string Text() const;
  static RemoteMemory Parse(const std::string& text);
};

class TrafficResponder {
 public:
  TrafficResponder(RcEnd& end, const TrafficOptions& options);
  RemoteMemory remote() const { return {memory_.address(), memory_.rkey()}; }
  // Posts the receives of the first round and clears the memory; call before the first packet can
  // come.
  void Prepare();
  // All rounds. Throws with a description at the first difference.
  void Run();

 private:
  void PostRound(int round);
  void CheckRound(int round);

  RcEnd& end_;
  TrafficOptions options_;
  Memory memory_;    // WRITE slots, READ source, atomic words
  Memory receives_;  // one slot per operation of two rounds
  uint64_t words_[4] = {};
};

class TrafficRequester {
 public:
  TrafficRequester(RcEnd& end, const RemoteMemory& remote, const TrafficOptions& options);
  void Run();

 private:
  void RunRound(int round);

  RcEnd& end_;
  RemoteMemory remote_;
  TrafficOptions options_;
  Memory memory_;  // one slot per operation
  uint64_t words_[4] = {};
};

// Both roles in two threads over a connected pair; a description of what went wrong or "".
std::string RunTraffic(RcEnd& requester, RcEnd& responder, const TrafficOptions& options);

}  // namespace verbena::testing
