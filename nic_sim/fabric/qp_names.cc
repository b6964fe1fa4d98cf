// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/fabric/qp_names.h"

#include <iterator>

namespace verbena::nic {

void QpNames::Begin(PortId port, uint32_t qpn, uint32_t psn_offset) {
  Messages& messages = messages_[KeyOf(port, qpn)];
  // A retransmission begins nothing new.
  if (messages.by_psn.contains(psn_offset)) return;
  // PSNs have come round: those before are of the last round.
  if (!messages.by_psn.empty() && psn_offset < messages.by_psn.rbegin()->first) {
    const uint32_t highest = messages.by_psn.rbegin()->first;
    if (highest - psn_offset < 0x800000) return;
    messages.by_psn.clear();
  }
  messages.by_psn.emplace(psn_offset, ++messages.count);
  if (messages.by_psn.size() > kMaxMessages) messages.by_psn.erase(messages.by_psn.begin());
}

uint32_t QpNames::MessageOf(PortId port, uint32_t qpn, uint32_t psn_offset) const {
  const auto found = messages_.find(KeyOf(port, qpn));
  if (found == messages_.end()) return 0;
  const auto after = found->second.by_psn.upper_bound(psn_offset);
  return after == found->second.by_psn.begin() ? 0 : std::prev(after)->second;
}

}  // namespace verbena::nic
