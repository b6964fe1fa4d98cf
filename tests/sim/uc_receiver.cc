// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/uc_receiver.h"

#include <algorithm>
#include <tuple>

namespace verbena::sim {

UcReceiver::Outcome UcReceiver::Begin(Wr& wr, uint64_t sequence, uint32_t mtu,
                                      const PlannedReceive* held, const PlannedReceive* next) {
  const uint32_t index = static_cast<uint32_t>(sequence - wr.first);
  const bool is_first = index == 0;
  const bool continues = message_ == &wr && sequence == next_;
  message_ = is_first || continues ? &wr : nullptr;
  next_ = sequence + 1;
  if (is_first) bytes_ = 0;
  payload_ = std::min(mtu, wr.bytes - index * mtu);
  placed_ = 0;
  needs_receive_ = false;
  outcome_ = Decide(wr, sequence, held, next);
  return outcome_;
}

UcReceiver::Outcome UcReceiver::Decide(Wr& wr, uint64_t sequence, const PlannedReceive* held,
                                       const PlannedReceive* next) {
  if (message_ == nullptr) return Outcome::kLost;
  const bool is_first = sequence == wr.first;
  const bool is_last = sequence + 1 == wr.first + wr.packets;
  if (is_first && wr.refused) return Outcome::kRefused;
  if (wr.is_send() ? is_first : wr.has_imm() && is_last) {
    receive_ = held != nullptr ? held : next;
    if (receive_ == nullptr) return Outcome::kNoReceive;
    needs_receive_ = held == nullptr;
    // One that was held was looked at before.
    if (receive_->malformed) return Outcome::kBadReceive;
  }
  if (wr.is_send()) {
    if (bytes_ + payload_ > receive_->bytes) return Outcome::kTooSmall;
    if (payload_ != 0 && receive_->bad_key) return Outcome::kBadReceive;
  }
  return is_last ? Outcome::kDelivered : Outcome::kTaken;
}

std::string UcReceiver::CheckPlacement(const Flow& flow, const MemorySegment& to,
                                       std::span<const std::byte> bytes, MemoryAccess access) {
  if (outcome_ != Outcome::kTaken && outcome_ != Outcome::kDelivered) {
    return "places a packet that has to be dropped";
  }
  const Wr& wr = *message_;
  const uint32_t offset = bytes_ + placed_;
  uint64_t address = wr.remote + offset;
  uint32_t room = payload_ - placed_;
  bool right = access == MemoryAccess::kRemoteWrite && to.key == wr.rkey;
  if (wr.is_send()) {
    std::tie(address, room) = Flow::PlaceOf(receive_->sges, offset);
    room = std::min(room, payload_ - placed_);
    right = access == MemoryAccess::kLocalWrite;
  }
  if (to.address != address || bytes.size() > room || !right) return "places at a wrong address";
  if (!flow.IsContent(wr, offset, bytes)) return "places wrong bytes";
  placed_ += static_cast<uint32_t>(bytes.size());
  return "";
}

std::string UcReceiver::End() {
  if (outcome_ != Outcome::kTaken && outcome_ != Outcome::kDelivered) {
    message_ = nullptr;
    return placed_ == 0 ? "" : "placed a packet that has to be dropped";
  }
  if (placed_ != payload_) return "took a packet without all of its payload";
  bytes_ += payload_;
  if (outcome_ == Outcome::kTaken) return "";
  if (message_->is_write()) written_.push_back(message_);
  message_ = nullptr;
  return "";
}

}  // namespace verbena::sim
