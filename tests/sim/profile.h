// SPDX-License-Identifier: Apache-2.0
//
// Profiles of the simulation: how hostile network, memory and applications are.
#pragma once

#include <cstdint>
#include <ostream>
#include <span>
#include <string_view>

#include "transport/base/time.h"
#include "transport/wire/opcode.h"

namespace verbena::sim {

using transport::Duration;

// Chances are per packet.
struct NetworkProfile {
  double loss = 0;
  double duplicate = 0;
  double corrupt = 0;  // up to four bits are flipped
  double delayed = 0;  // arrives after up to long_delay, others overtake it
  // Gilbert-Elliott: in a burst each packet is lost with burst_loss.
  double burst_begin = 0;
  double burst_end = 0.2;
  double burst_loss = 0.9;
  Duration delay = Duration::Microseconds(2);
  Duration jitter = Duration::Zero();  // uniform, reorders
  Duration long_delay = Duration::Milliseconds(20);

  bool keeps_order() const { return duplicate == 0 && delayed == 0 && jitter == Duration::Zero(); }
  bool is_perfect() const { return keeps_order() && loss == 0 && corrupt == 0 && burst_begin == 0; }
};

struct Profile {
  const char* name = "";
  uint32_t share = 1;  // of the seeds
  NetworkProfile network;
  // QP pairs: from 1 to max_pairs, few more often than many.
  uint32_t max_pairs = 3;
  uint32_t max_connections = 1;  // that a pair has, one after the other
  uint32_t max_wrs = 10;         // of each end of a connection
  uint32_t max_bytes = 2000;     // of a message
  // Placements become visible up to this long after they were asked for.
  Duration commit_delay = Duration::Microseconds(5);
  double placement_failure = 0;  // per commit
  double fetch_fault = 0;        // per packet with payload
  double bad_wr = 0;             // per WR: it is wrong in some way
  double bad_receive = 0;        // per receive
  double vanishing_key = 0;      // per READ: its key goes away before the answer
  double interference = 0;       // per connection: the application breaks it
  double drain = 0;              // per connection: SQD for a while
  double forged = 0;             // per connection: packets of a hostile peer
  double receives_posted = 0.6;  // chance at each opportunity
  uint8_t rnr_retry = 7;
  double stalls = 0;  // per event: the engine does not run for a while
  // Nothing in the profile keeps any WR from success.
  bool expect_success = false;
  // Few buffers: the engine does not take all packets at once.
  double short_of_buffers = 0.1;
  transport::Service service = transport::Service::kRc;  // kXrc: each half is one of XRC
  double srq = 0;             // per end of a connection: it takes receives from an SRQ
  double small_receives = 0;  // per receive that is not meant for one message
  double keys = 0;            // per WR more than usual: SEND with invalidate, LOCAL_INV, BIND_MW
};

inline void PrintTo(const Profile& profile, std::ostream* out) { *out << profile.name; }

std::span<const Profile> Profiles();
const Profile* FindProfile(std::string_view name);  // nullptr: none
// The profile of a seed in a run over all profiles.
const Profile& ProfileOf(uint64_t seed);

}  // namespace verbena::sim
