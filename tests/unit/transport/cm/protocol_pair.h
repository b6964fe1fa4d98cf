// SPDX-License-Identifier: Apache-2.0
//
// Two CmProtocols with small applications on a network in virtual time that
// drops, repeats or delays chosen messages.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <ostream>
#include <utility>
#include <vector>

#include "transport/cm/protocol.h"

namespace verbena::transport {

inline constexpr uint64_t kTestServiceId = CmServiceId(0x0106, 7174);

inline void PrintTo(CmEventType type, std::ostream* os) { *os << CmEventTypeName(type); }
inline void PrintTo(CmState state, std::ostream* os) { *os << CmStateName(state); }

// What the network does to one message.
struct Fate {
  bool drop = false;
  bool duplicate = false;
  Duration delay{};
};

struct SeenMad {
  Time sent;
  size_t side;
  CmAttribute attribute;
  MadPacket mad;
};

class ProtocolPair {
 public:
  // One end: the protocol and what its application does by itself.
  struct Side {
    Side(uint64_t ca_guid, const Gid& address, uint32_t seed)
        : protocol({{.ca_guid = ca_guid, .ack_delay = 15, .gids = {Gid(), address}}}, seed) {}
    CmProtocol protocol;
    CmId id = 0;
    std::vector<CmEventType> events;
    std::map<CmEventType, Time> when;
    CmRej rej;
    bool accepts = true;   // REQ → REP; false: waits
    bool rejects = false;  // REQ → REJ
    bool answers = true;   // REP → RTU
    bool obeys = true;     // DREQ → DREP

    CmState state() const {
      const CmConnection* connection = protocol.Find(id);
      return connection == nullptr ? CmState::kIdle : connection->state;
    }
  };

  static constexpr size_t kActive = 0;
  static constexpr size_t kPassive = 1;
  static constexpr Duration kLatency = Duration::Milliseconds(1);

  ProtocolPair();

  static Gid Address(size_t side) {
    return Gid::FromIpv4(0x0a000001 + static_cast<uint32_t>(side));
  }
  static CmPath Path(size_t side);
  // A request with usual values from the active side.
  static CmReqParameters Request(uint32_t qpn = 0x100);

  Side& active() { return sides_[kActive]; }
  Side& passive() { return sides_[kPassive]; }
  Side& side(size_t index) { return sides_[index]; }
  Time now() const { return now_; }

  // Called for each message that is sent, with its number from 0.
  std::function<Fate(size_t number, const SeenMad&)> fate;
  const std::vector<SeenMad>& seen() const { return seen_; }
  size_t CountSeen(CmAttribute attribute) const;

  void Connect(uint32_t qpn = 0x100);
  // Moves messages and time until `end`.
  void RunUntil(Time end);
  void RunFor(Duration duration) { RunUntil(now_ + duration); }
  // Lets a message arrive at `side`.
  void Inject(size_t side, const MadPacket& mad);

 private:
  void Drain();
  void HandleEvent(Side& side, const CmEvent& event);

  std::array<Side, 2> sides_;
  std::multimap<int64_t, std::pair<size_t, MadPacket>> in_flight_;  // arrival → receiver
  std::vector<SeenMad> seen_;
  Time now_;
};

}  // namespace verbena::transport
