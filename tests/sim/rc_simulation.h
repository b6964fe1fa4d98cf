// SPDX-License-Identifier: Apache-2.0
//
// One seeded run of two RC QPs over a hostile network and late or failing
// memory, both directions at once, with its invariants checked at every event:
//   - completions: every WR exactly once, in order, none invented or lost;
//   - data: right at the moment when a completion reports it;
//   - no byte outside the target of a request changes, guards are intact;
//   - no ACK, NAK or response before what it acknowledges is visible;
//   - atomics are executed exactly once;
//   - it terminates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "tests/testing/network_simulator.h"
#include "tests/testing/rc_pair.h"

namespace verbena::testing {

struct SimulationProfile {
  const char* name = "";
  NetworkProfile network;
  // Placements become visible up to this long after they were asked for.
  transport::Duration commit_delay = transport::Duration::Zero();
  double placement_failure = 0;  // per commit
  double fetch_failure = 0;      // per WR: its key is not valid
  bool expect_success = true;    // every WR must succeed
  uint8_t rnr_retry = 7;
  double receives_posted = 0.6;  // chance at each opportunity
  uint32_t wrs = 24;             // of each side
  uint32_t max_bytes = 3000;
};

inline void PrintTo(const SimulationProfile& profile, std::ostream* out) { *out << profile.name; }

class RcSimulation {
 public:
  RcSimulation(const SimulationProfile& profile, uint64_t seed, bool keep_ladder);
  ~RcSimulation();

  // Empty, or what went wrong.
  std::string Run();
  // One line per packet and event.
  const std::vector<std::string>& ladder() const { return ladder_; }
  uint64_t packets() const { return packets_; }
  uint64_t errors() const { return errors_; }  // completions with an error

 private:
  struct Side;
  struct PlannedWr;

  void Plan(Side& side, Side& peer);
  void PlanAtomic(PlannedWr& wr, Side& side, Side& peer);
  void FillRandom(FakeMemory& memory, uint32_t key);
  std::vector<transport::MemorySegment> AllocateSges(Side& side, uint32_t bytes, bool target);
  uint64_t AllocateRemote(Side& peer, uint32_t bytes, bool target);
  void PostSome(Side& side);
  void TransmitFrom(Side& side);
  void DeliverTo(Side& side, NetworkSimulator& network);
  void CommitDue(Side& side);
  void OnTransmit(Side& side, const transport::TxPacket& packet, bool is_response);
  void OnCompletion(Side& side, const transport::Completion& completion);
  void CheckSendCompletion(Side& side, const transport::Completion& completion);
  void CheckRecvCompletion(Side& side, const transport::Completion& completion);
  void CheckData(Side& side, const PlannedWr& wr);
  void CheckEnd(Side& side, Side& peer);
  void CheckUntouched(Side& side, uint32_t key, const std::vector<std::byte>& before,
                      const std::vector<bool>& target);
  std::vector<std::byte> Gather(FakeMemory& memory,
                                const std::vector<transport::MemorySegment>& sges);
  transport::Time NextEvent() const;
  void Note(const std::string& line);
  void Fail(const std::string& what);

  SimulationProfile profile_;
  Random random_;
  transport::Time now_ = transport::Time::FromNanoseconds(1'000'000);
  NetworkSimulator a_to_b_;
  NetworkSimulator b_to_a_;
  std::unique_ptr<Side> a_;
  std::unique_ptr<Side> b_;
  bool keep_ladder_;
  std::string failure_;
  std::vector<std::string> ladder_;
  uint64_t packets_ = 0;
  uint64_t errors_ = 0;
};

}  // namespace verbena::testing
