// SPDX-License-Identifier: Apache-2.0
//
// What rules know of QPs beyond their numbers: whose they are, and which messages their
// packets belong to. Thread: under the fabric's lock.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>

#include "nic_sim/fabric/packet.h"

namespace verbena::nic {

class QpNames {
 public:
  struct Owner {
    std::string app;
    uint32_t nth = 0;  // QP of the application, from 1
  };

  void Name(PortId port, uint32_t qpn, std::string_view app, uint32_t nth) {
    owners_[KeyOf(port, qpn)] = {std::string(app), nth};
  }
  void Forget(PortId port, uint32_t qpn) {
    owners_.erase(KeyOf(port, qpn));
    messages_.erase(KeyOf(port, qpn));
  }
  // nullptr: not known (outside, QP1).
  const Owner* Find(PortId port, uint32_t qpn) const {
    const auto found = owners_.find(KeyOf(port, qpn));
    return found == owners_.end() ? nullptr : &found->second;
  }

  // A packet at `psn_offset` that begins a message of this requester is sent.
  void Begin(PortId port, uint32_t qpn, uint32_t psn_offset);
  // Number of the message of this requester that a PSN belongs to, from 1; 0: not known.
  uint32_t MessageOf(PortId port, uint32_t qpn, uint32_t psn_offset) const;
  void ForgetMessages() { messages_.clear(); }

 private:
  // Messages of one QP that are remembered: more than are outstanding.
  static constexpr size_t kMaxMessages = 4096;

  static uint64_t KeyOf(PortId port, uint32_t qpn) { return uint64_t{port} << 32 | qpn; }

  struct Messages {
    std::map<uint32_t, uint32_t> by_psn;  // where each begins → its number
    uint32_t count = 0;
  };
  std::unordered_map<uint64_t, Owner> owners_;
  std::unordered_map<uint64_t, Messages> messages_;
};

}  // namespace verbena::nic
