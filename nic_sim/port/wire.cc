// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/port/wire.h"

#include <cstring>
#include <utility>

#include "nic_sim/fabric/packet.h"
#include "transport/wire/ip_udp.h"

namespace verbena::nic {

using namespace transport;  // NOLINT: the wire's names

Wire::Wire(const IpHost::Config& config, std::unique_ptr<FramePort> port, rte_mempool* pool)
    : host_(config), port_(std::move(port)), pool_(pool), waiting_(NeighbourTable::kCapacity) {
  port_->Refresh();
  host_.Announce();
  Flush(Time());
}

Wire::~Wire() {
  for (; queued_ != 0; --queued_) {
    rte_pktmbuf_free(queue_[first_]);
    first_ = (first_ + 1) % kMaxQueued;
  }
}

bool Wire::CanReach(const Gid& source, const Gid& destination) const {
  return host_.HasAddress(source) && host_.NextHop(destination).has_value();
}

bool Wire::Prepare(const Gid& destination, Time now) {
  const std::optional<Gid> hop = host_.NextHop(destination);
  if (!hop) return false;
  return host_.neighbours().Use(*hop, now).mac != nullptr;
}

void Wire::ReportGroup(const Gid& group, bool join) {
  if (join) {
    host_.JoinGroup(group);
  } else {
    host_.LeaveGroup(group);
  }
}

Wire::Way Wire::FindWay(rte_mbuf* packet, const Gid& source, const Gid& destination, Time now) {
  if (!host_.HasAddress(source)) return Way::kNoRoute;
  if (destination.IsMulticast()) return Way::kReady;  // its MAC follows from it
  const std::optional<Gid> hop = host_.NextHop(destination);
  if (!hop) return Way::kNoRoute;
  const NeighbourTable::Answer answer = host_.neighbours().Use(*hop, now);
  if (answer.mac != nullptr) {
    answer.mac->Store(FrameOf(packet));
    return Way::kReady;
  }
  if (answer.slot == NeighbourTable::kNoSlot) return Way::kFull;
  PacketQueue& queue = waiting_[answer.slot];
  if (queue.size() >= kMaxWaitingPerHop || waiting_count_ >= kMaxWaiting) return Way::kFull;
  queue.Push(packet);
  ++waiting_count_;
  host_.neighbours().SetWaiting(answer.slot, true);
  return Way::kWaits;
}

void Wire::TakeOutcomes() {
  NeighbourTable::Outcome outcome;
  while (host_.neighbours().PollOutcome(&outcome)) {
    PacketQueue& queue = waiting_[outcome.slot];
    waiting_count_ -= queue.size();
    (outcome.resolved ? resolved_ : lost_).Append(&queue);
    host_.neighbours().SetWaiting(outcome.slot, false);
  }
}

void Wire::Lose(rte_mbuf* packet, bool is_roce) {
  ++host_.counters().xmit_failed;
  roce_lost_ += is_roce ? 1 : 0;
  rte_pktmbuf_free(packet);
}

void Wire::Enqueue(rte_mbuf* packet, bool is_roce) {
  if (queued_ == kMaxQueued) {
    Lose(packet, is_roce);
    return;
  }
  const size_t slot = (first_ + queued_++) % kMaxQueued;
  queue_[slot] = packet;
  is_roce_[slot] = is_roce;
}

void Wire::SendControlFrames() {
  ControlFrame frame;
  while (host_.PollTransmit(&frame)) {
    rte_mbuf* packet = rte_pktmbuf_alloc(pool_);
    if (packet == nullptr) {
      ++host_.counters().xmit_failed;
      continue;
    }
    std::memcpy(FrameOf(packet), frame.bytes.data(), frame.size);
    packet->data_len = static_cast<uint16_t>(frame.size);
    packet->pkt_len = static_cast<uint32_t>(frame.size);
    Enqueue(packet, false);
  }
}

size_t Wire::Flush(Time now) {
  SendControlFrames();
  retry_at_ = Time::Never();
  while (queued_ != 0) {
    const size_t count = std::min({queued_, kBurst, kMaxQueued - first_});
    const size_t sent = port_->Send({&queue_[first_], count});
    host_.counters().xmit_frames += sent;
    first_ = (first_ + sent) % kMaxQueued;
    queued_ -= sent;
    if (sent != 0) last_progress_ = now;
    if (sent != count) break;
  }
  if (queued_ == 0) {
    last_progress_ = now;
  } else if (now - last_progress_ < kStuck) {
    retry_at_ = now + kRetry;
  } else {
    for (; queued_ != 0; --queued_) {
      Lose(queue_[first_], is_roce_[first_]);
      first_ = (first_ + 1) % kMaxQueued;
    }
  }
  return std::exchange(roce_lost_, 0);
}

bool Wire::Receive(std::span<rte_mbuf*> out, size_t* count, Time now) {
  std::array<rte_mbuf*, kBurst> burst;
  const size_t received = port_->Receive(burst);
  *count = 0;
  for (size_t i = 0; i < received; ++i) {
    rte_mbuf* packet = burst[i];
    // Longer than anything that is for the NIC.
    if (packet->nb_segs != 1 || packet->data_len > kMaxFrameBytes) {
      ++host_.counters().rcv_frames;
      ++host_.counters().rcv_other;
      rte_pktmbuf_free(packet);
      continue;
    }
    size_t size = packet->data_len;
    const IpHost::Verdict verdict = host_.Handle(FrameOf(packet), &size, now);
    packet->data_len = static_cast<uint16_t>(size);
    packet->pkt_len = static_cast<uint32_t>(size);
    switch (verdict) {
      case IpHost::Verdict::kRoce:
        MetaOf(packet) = {};
        out[(*count)++] = packet;
        break;
      case IpHost::Verdict::kReply:
        Enqueue(packet, false);
        break;
      default:
        if (!takes_all_) {
          rte_pktmbuf_free(packet);
          break;
        }
        MetaOf(packet) = {};
        MetaOf(packet).raw = true;
        out[(*count)++] = packet;
    }
  }
  TakeOutcomes();
  return received == kBurst;
}

void Wire::HandleTimeout(Time now) {
  host_.HandleTimeout(now);
  TakeOutcomes();
}

}  // namespace verbena::nic
