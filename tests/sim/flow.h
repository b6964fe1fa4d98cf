// SPDX-License-Identifier: Apache-2.0
//
// Flow: one direction of one connection: the WRs that one end will post, the
// receives that the other end has for them, and what must be true of packets,
// placements and completions (the model that requester and responder are held
// against). Sequence numbers are PSNs extended to 64 bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "tests/sim/memory.h"
#include "tests/sim/profile.h"
#include "tests/sim/random.h"
#include "tests/sim/receive_queue.h"
#include "transport/psn.h"
#include "transport/transport_event.h"
#include "transport/types.h"
#include "transport/wire/opcode.h"

namespace verbena::sim {

using transport::Psn;
using transport::WcStatus;
using transport::WrOpcode;

inline constexpr uint64_t kNoSequence = UINT64_MAX;

struct Wr {
  WrOpcode opcode = WrOpcode::kSend;
  bool signaled = false;
  bool fence = false;
  bool solicited = false;
  bool is_inline = false;
  bool malformed = false;
  bool huge = false;  // the SGEs are longer than any message may be
  uint32_t bytes = 0;
  uint32_t imm_or_inv = 0;
  uint32_t rkey = 0;
  uint32_t srq = 0;  // XRC: the one that it names
  uint64_t remote = 0;
  uint64_t compare_add = 0;
  uint64_t swap = 0;
  std::vector<MemorySegment> sges;
  // kSuccess: nothing is wrong with it. Otherwise how it has to fail.
  WcStatus expected = WcStatus::kSuccess;
  bool refused = false;  // UC: the responder has to drop it
  // LOCAL_INV: the BIND_MW, by number, that made its key.
  int bound_by = -1;

  // What has become of it.
  uint64_t first = kNoSequence;             // sequence number
  uint32_t packets = 0;                     // that it consists of, or its response
  uint32_t sequences = 0;                   // numbers that it got; UC: less if it was given up
  uint32_t placed = 0;                      // READ, atomic: bytes of the response
  uint32_t received = 0;                    // SEND, WRITE: bytes at the responder
  const PlannedReceive* receive = nullptr;  // that it took
  bool executed = false;                    // atomic, local operation; SEND_INV: its key is invalid
  uint64_t original = 0;                    // atomic
  bool over = false;                        // it has completed

  uint64_t end() const { return first + sequences; }
  bool is_send() const {
    return opcode == WrOpcode::kSend || opcode == WrOpcode::kSendImm ||
           opcode == WrOpcode::kSendInv;
  }
  bool is_write() const {
    return opcode == WrOpcode::kRdmaWrite || opcode == WrOpcode::kRdmaWriteImm;
  }
  bool is_read() const { return opcode == WrOpcode::kRdmaRead; }
  bool is_atomic() const {
    return opcode == WrOpcode::kFetchAdd || opcode == WrOpcode::kCompareSwap;
  }
  bool is_atomic_write() const { return opcode == WrOpcode::kAtomicWrite; }
  bool is_local() const { return opcode == WrOpcode::kLocalInv || opcode == WrOpcode::kBindMw; }
  bool is_flush() const { return opcode == WrOpcode::kFlush; }
  // Its response brings bytes.
  bool is_read_or_atomic() const { return is_read() || is_atomic(); }
  // It has a response of its own.
  bool is_answered() const { return is_read_or_atomic() || is_atomic_write() || is_flush(); }
  bool writes() const { return is_write() || is_atomic_write(); }
  bool has_imm() const { return opcode == WrOpcode::kSendImm || opcode == WrOpcode::kRdmaWriteImm; }
  bool takes_receive() const { return is_send() || opcode == WrOpcode::kRdmaWriteImm; }
};

// The SRQs of each end; XRC: of its domain.
inline constexpr uint32_t kSrqs[] = {7, 8, 0xfedcba};
inline bool IsSrq(uint32_t number) {
  return std::find(std::begin(kSrqs), std::end(kSrqs), number) != std::end(kSrqs);
}

// What a connection allows, the same for both ends.
struct PathOptions {
  transport::Pmtu pmtu = transport::Pmtu::k256;
  uint8_t timeout = 10;
  uint8_t retry_cnt = 7;
  uint8_t rnr_retry = 7;
  uint8_t min_rnr_timer = 1;
  uint8_t max_rd_atomic = 1;
  uint32_t access_flags = 0;
  transport::Service service = transport::Service::kRc;

  uint32_t mtu() const { return transport::PmtuBytes(pmtu); }
  bool is_xrc() const { return service == transport::Service::kXrc; }  // each request names an SRQ
  bool is_uc() const { return service == transport::Service::kUc; }
};

class Flow {
 public:
  // `sender` and `receiver`: the memories of the two hosts. `connection`: its
  // number. `srq`: what the responder takes receives from, 0: its own queue.
  void Plan(const Profile& profile, const PathOptions& path, HostMemory& sender,
            HostMemory& receiver, std::span<const uint64_t> counters, uint32_t connection,
            uint32_t srq, Random& random);
  // Gives the first PSN; `total_packets` follow at most.
  void Start(Psn first);
  uint32_t total_packets() const { return total_packets_; }
  Psn first_psn() const { return Psn(static_cast<uint32_t>(first_)); }

  uint64_t ToSequence(Psn psn, uint64_t near) const {
    return near +
           static_cast<uint64_t>(int64_t{Psn::Distance(Psn(static_cast<uint32_t>(near)), psn)});
  }
  // The WR that `sequence` belongs to, or nullptr.
  Wr* Find(uint64_t sequence);
  // Messages that end at or before `sequence`, modulo 2^24.
  transport::Msn MessagesUpTo(uint64_t sequence) const;

  // Each returns what is wrong, or "".
  // A request packet leaves; `payload` is what was fetched, nullptr if that
  // failed.
  std::string CheckRequest(const transport::TxPacket& packet,
                           const std::span<const std::byte>* payload, uint64_t una);
  // A response packet leaves; everything up to it must be `visible`.
  // `memory_failed`: a NAK may have that reason.
  std::string CheckResponse(const transport::TxPacket& packet, std::span<const std::byte> payload,
                            const Port& port, bool memory_failed);
  // The responder places bytes of the request with `sequence`.
  std::string CheckRequestPlacement(uint64_t sequence, const MemorySegment& to,
                                    std::span<const std::byte> bytes, MemoryAccess access);
  // The requester places bytes of a response.
  std::string CheckResponsePlacement(const MemorySegment& to, std::span<const std::byte> bytes);
  // The responder has moved its expected PSN over the packet `sequence`.
  std::string CheckExecuted(uint64_t sequence, uint64_t expected_after);
  // The WR completed with success: is its data where it belongs?
  std::string CheckData(const Wr& wr, const HostMemory& sender, const HostMemory& receiver) const;
  // Do the bytes of the SEND stand in `receive`?
  std::string CheckReceived(const Wr& wr, const PlannedReceive& receive,
                            const HostMemory& receiver) const;
  // The message takes `receive`, and with it what is wrong with that.
  static void TakeReceive(Wr& wr, const PlannedReceive& receive);
  // How the WR has to end, as far as it is known now.
  WcStatus ExpectedOf(const Wr& wr) const;
  // UC: the message that is being sent does not go on.
  void GiveUp();
  // Are the bytes of the message from `offset` on these?
  bool IsContent(const Wr& wr, uint32_t offset, std::span<const std::byte> bytes) const;
  // Where byte `offset` of a message goes in `sges`, and how many bytes of
  // there on are in one piece; {0, 0} beyond the end.
  static std::pair<uint64_t, uint32_t> PlaceOf(std::span<const MemorySegment> sges,
                                               uint32_t offset);
  // READs and atomics begun whose response has not come, with `una` the oldest
  // sequence number not acknowledged.
  uint32_t OutstandingReads(uint64_t una) const;

  std::vector<Wr> wrs;
  ReceiveQueue receives;  // of the responder alone
  uint32_t srq = 0;       // that it takes from instead; XRC: it takes from all of them
  uint64_t next = 0;      // the next new sequence number that the requester uses
  uint64_t expected = 0;  // the next that the responder executes
  // Packets were forged, or limits do not fit: only what holds against a liar is
  // checked.
  bool tainted = false;

 private:
  void PlanWr(Wr& wr, const Profile& profile, HostMemory& sender, HostMemory& receiver,
              std::span<const uint64_t> counters, Random& random);
  void SpoilWr(Wr& wr, HostMemory& receiver, Random& random);
  void SpoilUcWr(Wr& wr, Random& random);
  void PlanReceive(const Wr& wr, const Profile& profile, HostMemory& receiver, Random& random);
  std::vector<MemorySegment> Split(uint64_t address, uint32_t bytes, Random& random) const;
  Wr* BeginNext();
  std::string CheckFields(const Wr& wr, const transport::TxPacket& packet, uint64_t sequence) const;
  std::string CheckReadResponse(const transport::TxPacket& packet,
                                std::span<const std::byte> payload, uint64_t sequence);

  PathOptions path_;
  int last_bound_ = -1;  // BIND_MW planned last whose key no LOCAL_INV takes
  uint64_t first_ = 0;
  uint32_t total_packets_ = 0;
  size_t begun_wrs_ = 0;         // WRs looked at by BeginNext
  std::vector<uint32_t> begun_;  // those with sequence numbers, in order
};

}  // namespace verbena::sim
