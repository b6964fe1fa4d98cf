// SPDX-License-Identifier: Apache-2.0
#include "tests/verbs/traffic.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace verbena::testing {
namespace {

enum class Kind { kSend, kSendImm, kWrite, kWriteImm, kRead, kCompareSwap, kFetchAdd };

struct Op {
  Kind kind = Kind::kSend;
  uint32_t length = 0;
  uint32_t offset = 0;  // within the slots on both sides, for odd alignments
  uint32_t imm = 0;
  uint64_t id = 0;  // of the pattern
  bool is_inline = false, fence = false, solicited = false, signaled = false;
  int word = 0;  // atomics
  uint64_t compare = 0, swap_or_add = 0;

  bool TakesReceive() const {
    return kind == Kind::kSend || kind == Kind::kSendImm || kind == Kind::kWriteImm;
  }
};

constexpr uint32_t kSlack = 256;  // guard bytes and alignment in each slot
constexpr uint8_t kGuard = 0xa5;

uint32_t SlotBytes(const TrafficOptions& options) { return options.max_message + kSlack; }

// READ source: one pattern over the whole area.
uint64_t ReadPattern(const TrafficOptions& options) { return options.seed ^ 0x7ead; }

// Layout of the responder's memory.
size_t WriteOffset(const TrafficOptions& options, int index) {
  return static_cast<size_t>(index) * SlotBytes(options);
}
size_t ReadOffset(const TrafficOptions& options) { return WriteOffset(options, kOpsPerRound); }
size_t WordsOffset(const TrafficOptions& options) {
  return (ReadOffset(options) + SlotBytes(options) + 63) / 64 * 64;
}
size_t RemoteBytes(const TrafficOptions& options) { return WordsOffset(options) + 64; }

uint32_t RandomLength(Random& random, uint32_t max) {
  switch (random.Below(6)) {
    case 0:
      return static_cast<uint32_t>(random.Below(4));  // 0 .. 3
    case 1:
      return static_cast<uint32_t>(random.Below(64));
    case 2: {  // Around a multiple of a path MTU.
      const uint64_t mtu = 256ull << random.Below(5);
      const uint64_t near = mtu * (1 + random.Below(4)) + random.Below(3) - 1;
      return static_cast<uint32_t>(std::min<uint64_t>(near, max));
    }
    case 3:
      return static_cast<uint32_t>(random.Below(std::min<uint32_t>(4096, max) + 1));
    default:
      return static_cast<uint32_t>(random.Below(max + 1ull));
  }
}

std::vector<Op> MakeRound(const TrafficOptions& options, int round) {
  Random random(options.seed * 1000003 + static_cast<uint64_t>(round));
  std::vector<Op> ops(kOpsPerRound);
  for (int i = 0; i < kOpsPerRound; ++i) {
    Op& op = ops[static_cast<size_t>(i)];
    op.kind = static_cast<Kind>(random.Below(7));
    op.length = RandomLength(random, options.max_message);
    op.offset = 16 + static_cast<uint32_t>(random.Below(64));
    op.imm = static_cast<uint32_t>(random.Next());
    op.id = options.seed + static_cast<uint64_t>(round) * kOpsPerRound + static_cast<uint64_t>(i);
    op.fence = random.OneIn(5);
    op.solicited = random.OneIn(3);
    op.signaled = random.OneIn(2);
    op.word = static_cast<int>(random.Below(4));
    op.compare = random.Next();  // replaced below for half of them
    op.swap_or_add = random.Next();
    op.is_inline = random.OneIn(2) && op.length <= options.max_inline;
    if (i == kOpsPerRound - 1) {  // Ends the round: everything before it is complete then.
      op.kind = Kind::kSendImm;
      op.signaled = true;
    }
    if (op.kind == Kind::kRead || op.kind == Kind::kCompareSwap || op.kind == Kind::kFetchAdd) {
      op.is_inline = false;
    }
  }
  return ops;
}

// Applies an atomic to the model; the original value is the result.
uint64_t ApplyAtomic(const Op& op, uint64_t words[4], bool compare_hits) {
  uint64_t& word = words[op.word];
  const uint64_t original = word;
  if (op.kind == Kind::kFetchAdd) {
    word += op.swap_or_add;
  } else if (compare_hits) {
    word = op.swap_or_add;
  }
  return original;
}

bool CompareHits(const Op& op) { return op.compare % 2 == 0; }

std::vector<ibv_sge> Split(const Memory& memory, size_t offset, uint32_t length, int max_sge,
                           Random& random) {
  std::vector<ibv_sge> result;
  uint32_t done = 0;
  const int count = 1 + static_cast<int>(random.Below(static_cast<uint64_t>(max_sge)));
  for (int i = 0; i < count; ++i) {
    const uint32_t left = length - done;
    const uint32_t part = i == count - 1 ? left : static_cast<uint32_t>(random.Below(left + 1ull));
    // Zero-length elements are legal, but some real devices take 0 for 2^31.
    if (part == 0) continue;
    result.push_back(memory.sge(offset + done, part));
    done += part;
  }
  return result;
}

[[noreturn]] void Fail(const TrafficOptions& options, int round, int index,
                       const std::string& what) {
  throw std::runtime_error("traffic seed " + std::to_string(options.seed) + " round " +
                           std::to_string(round) + " op " + std::to_string(index) + ": " + what);
}

void CheckBytes(const TrafficOptions& options, int round, int index, std::span<const uint8_t> slot,
                size_t offset, uint32_t length, uint64_t pattern, uint64_t pattern_offset,
                const char* what) {
  const auto bad = PatternMismatch(slot.subspan(offset, length), pattern, pattern_offset);
  if (bad) {
    Fail(options, round, index,
         std::string(what) + ": wrong byte at " + std::to_string(*bad) + " of " +
             std::to_string(length));
  }
  for (size_t i = 0; i < slot.size(); ++i) {
    if (i >= offset && i < offset + length) {
      i = offset + length - 1;
      continue;
    }
    if (slot[i] != kGuard) {
      Fail(options, round, index,
           std::string(what) + ": byte outside the message written, at " +
               std::to_string(static_cast<int64_t>(i) - static_cast<int64_t>(offset)));
    }
  }
}

}  // namespace

EndOptions TrafficEnd(const std::string& device, int gid_index, uint32_t max_inline) {
  EndOptions options;
  options.device = device;
  options.gid_index = gid_index;
  options.send_wr = 2 * kOpsPerRound;
  options.recv_wr = 2 * kOpsPerRound;
  options.sge = 8;
  options.max_inline = max_inline;
  options.cqe = 4 * kOpsPerRound;
  return options;
}

std::string RemoteMemory::Text() const {
  return std::to_string(address) + ":" + std::to_string(rkey);
}

RemoteMemory RemoteMemory::Parse(const std::string& text) {
  RemoteMemory result;
  unsigned long long address = 0;
  if (sscanf(text.c_str(), "%llu:%u", &address, &result.rkey) != 2) {
    throw std::runtime_error("bad remote memory " + text);
  }
  result.address = address;
  return result;
}

TrafficResponder::TrafficResponder(RcEnd& end, const TrafficOptions& options)
    : end_(end),
      options_(options),
      memory_(end.pd(), RemoteBytes(options)),
      receives_(end.pd(), static_cast<size_t>(kOpsPerRound) * SlotBytes(options)) {
  FillPattern(memory_.bytes().subspan(ReadOffset(options), SlotBytes(options)),
              ReadPattern(options));
}

void TrafficResponder::Prepare() { PostRound(0); }

void TrafficResponder::PostRound(int round) {
  memset(receives_.data(), kGuard, receives_.size());
  memset(memory_.data(), kGuard, ReadOffset(options_));
  Random random(options_.seed * 31 + static_cast<uint64_t>(round));
  const std::vector<Op> ops = MakeRound(options_, round);
  for (int i = 0; i < kOpsPerRound; ++i) {
    const Op& op = ops[static_cast<size_t>(i)];
    if (!op.TakesReceive()) continue;
    std::vector<ibv_sge> sges;
    if (op.kind != Kind::kWriteImm) {
      // Sometimes the receive is larger than the message.
      const uint32_t room = op.length + static_cast<uint32_t>(random.Below(3) * random.Below(50));
      sges = Split(receives_, WriteOffset(options_, i) + op.offset, room, options_.max_sge, random);
    }
    errno = end_.PostRecv(static_cast<uint64_t>(round * kOpsPerRound + i), sges);
    Require(errno == 0, "ibv_post_recv");
  }
}

void TrafficResponder::CheckRound(int round) {
  const std::vector<Op> ops = MakeRound(options_, round);
  for (int i = 0; i < kOpsPerRound; ++i) {
    const Op& op = ops[static_cast<size_t>(i)];
    const size_t slot = WriteOffset(options_, i);
    const std::span<const uint8_t> received = receives_.bytes().subspan(slot, SlotBytes(options_));
    const std::span<const uint8_t> written = memory_.bytes().subspan(slot, SlotBytes(options_));
    const bool sent = op.kind == Kind::kSend || op.kind == Kind::kSendImm;
    const bool wrote = op.kind == Kind::kWrite || op.kind == Kind::kWriteImm;
    CheckBytes(options_, round, i, received, op.offset, sent ? op.length : 0, op.id, 0, "SEND");
    CheckBytes(options_, round, i, written, op.offset, wrote ? op.length : 0, op.id, 0, "WRITE");
    if (op.kind == Kind::kCompareSwap || op.kind == Kind::kFetchAdd) {
      ApplyAtomic(op, words_, CompareHits(op));
    }
  }
  if (memcmp(memory_.data() + WordsOffset(options_), words_, sizeof(words_)) != 0) {
    Fail(options_, round, kOpsPerRound, "atomic words differ from the model");
  }
}

void TrafficResponder::Run() {
  for (int round = 0; round < options_.rounds; ++round) {
    const std::vector<Op> ops = MakeRound(options_, round);
    for (int i = 0; i < kOpsPerRound; ++i) {
      const Op& op = ops[static_cast<size_t>(i)];
      if (!op.TakesReceive()) continue;
      const ibv_wc wc = PollOne(end_.recv_cq(), Milliseconds(60000));
      const uint64_t expected = static_cast<uint64_t>(round * kOpsPerRound + i);
      const bool has_imm = op.kind != Kind::kSend;
      const ibv_wc_opcode opcode =
          op.kind == Kind::kWriteImm ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
      if (wc.wr_id != expected || wc.status != IBV_WC_SUCCESS || wc.opcode != opcode ||
          wc.byte_len != op.length || wc.qp_num != end_.qp()->qp_num ||
          ((wc.wc_flags & IBV_WC_WITH_IMM) != 0) != has_imm || (has_imm && wc.imm_data != op.imm)) {
        Fail(options_, round, i, "receive completion: " + Describe(wc));
      }
    }
    CheckRound(round);
    if (round + 1 < options_.rounds) PostRound(round + 1);
    errno = end_.PostSend(SendWr(static_cast<uint64_t>(round)));
    Require(errno == 0, "ibv_post_send of the answer");
    const ibv_wc wc = PollOne(end_.send_cq(), Milliseconds(60000));
    if (wc.status != IBV_WC_SUCCESS || wc.wr_id != static_cast<uint64_t>(round)) {
      Fail(options_, round, -1, "answer: " + Describe(wc));
    }
  }
  if (!StaysEmpty(end_.recv_cq(), Milliseconds(10))) {
    Fail(options_, options_.rounds, -1, "a receive completion too many");
  }
}

TrafficRequester::TrafficRequester(RcEnd& end, const RemoteMemory& remote,
                                   const TrafficOptions& options)
    : end_(end),
      remote_(remote),
      options_(options),
      memory_(end.pd(), static_cast<size_t>(kOpsPerRound) * SlotBytes(options)) {}

void TrafficRequester::RunRound(int round) {
  Random random(options_.seed * 77 + static_cast<uint64_t>(round));
  std::vector<Op> ops = MakeRound(options_, round);
  uint64_t results[kOpsPerRound] = {};
  memset(memory_.data(), kGuard, memory_.size());

  errno = end_.PostRecv(static_cast<uint64_t>(round));  // For the answer.
  Require(errno == 0, "ibv_post_recv for the answer");
  for (int i = 0; i < kOpsPerRound; ++i) {
    Op& op = ops[static_cast<size_t>(i)];
    const size_t local = WriteOffset(options_, i) + op.offset;
    ibv_send_wr wr = {};
    wr.wr_id = static_cast<uint64_t>(round * kOpsPerRound + i);
    if (op.signaled) wr.send_flags |= IBV_SEND_SIGNALED;
    if (op.fence) wr.send_flags |= IBV_SEND_FENCE;
    if (op.solicited) wr.send_flags |= IBV_SEND_SOLICITED;
    if (op.is_inline) wr.send_flags |= IBV_SEND_INLINE;
    uint32_t length = op.length;
    const auto address = [&](size_t offset) { return remote_.address + offset; };
    switch (op.kind) {
      case Kind::kSend:
        wr.opcode = IBV_WR_SEND;
        break;
      case Kind::kSendImm:
        wr.opcode = IBV_WR_SEND_WITH_IMM;
        wr.imm_data = op.imm;
        break;
      case Kind::kWrite:
      case Kind::kWriteImm:
        wr.opcode = op.kind == Kind::kWrite ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_WRITE_WITH_IMM;
        wr.imm_data = op.imm;
        wr.wr.rdma.remote_addr = address(WriteOffset(options_, i) + op.offset);
        wr.wr.rdma.rkey = remote_.rkey;
        break;
      case Kind::kRead:
        wr.opcode = IBV_WR_RDMA_READ;
        wr.wr.rdma.remote_addr = address(ReadOffset(options_) + op.offset);
        wr.wr.rdma.rkey = remote_.rkey;
        break;
      case Kind::kCompareSwap:
      case Kind::kFetchAdd: {
        length = 8;
        wr.opcode =
            op.kind == Kind::kFetchAdd ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP;
        wr.wr.atomic.remote_addr =
            address(WordsOffset(options_) + static_cast<size_t>(op.word) * 8);
        wr.wr.atomic.rkey = remote_.rkey;
        const uint64_t now = words_[op.word];
        wr.wr.atomic.compare_add = op.kind == Kind::kFetchAdd ? op.swap_or_add
                                   : CompareHits(op)          ? now
                                                              : ~now;
        wr.wr.atomic.swap = op.swap_or_add;
        results[i] = ApplyAtomic(op, words_, CompareHits(op));
        break;
      }
    }
    const bool gathers = op.kind != Kind::kRead && length == op.length &&
                         op.kind != Kind::kCompareSwap && op.kind != Kind::kFetchAdd;
    const std::span<uint8_t> payload = memory_.bytes().subspan(local, length);
    if (gathers) FillPattern(payload, op.id);
    const bool atomic = op.kind == Kind::kCompareSwap || op.kind == Kind::kFetchAdd;
    errno = end_.PostSend(wr, Split(memory_, local, length, atomic ? 1 : options_.max_sge, random));
    Require(errno == 0, "ibv_post_send");
    // Inline data belongs to the device when post returns.
    if (op.is_inline) memset(payload.data(), 0xee, payload.size());
  }

  for (int i = 0; i < kOpsPerRound; ++i) {
    const Op& op = ops[static_cast<size_t>(i)];
    if (!op.signaled) continue;
    const ibv_wc wc = PollOne(end_.send_cq(), Milliseconds(60000));
    static constexpr ibv_wc_opcode kOpcodes[] = {
        IBV_WC_SEND,      IBV_WC_SEND,      IBV_WC_RDMA_WRITE, IBV_WC_RDMA_WRITE,
        IBV_WC_RDMA_READ, IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD};
    if (wc.wr_id != static_cast<uint64_t>(round * kOpsPerRound + i) ||
        wc.status != IBV_WC_SUCCESS || wc.opcode != kOpcodes[static_cast<int>(op.kind)] ||
        wc.qp_num != end_.qp()->qp_num) {
      Fail(options_, round, i, "send completion: " + Describe(wc));
    }
  }
  for (int i = 0; i < kOpsPerRound; ++i) {
    const Op& op = ops[static_cast<size_t>(i)];
    const std::span<const uint8_t> slot =
        memory_.bytes().subspan(WriteOffset(options_, i), SlotBytes(options_));
    if (op.kind == Kind::kRead) {
      CheckBytes(options_, round, i, slot, op.offset, op.length, ReadPattern(options_), op.offset,
                 "READ");
    } else if (op.kind == Kind::kCompareSwap || op.kind == Kind::kFetchAdd) {
      uint64_t original;
      memcpy(&original, slot.data() + op.offset, 8);
      if (original != results[i]) Fail(options_, round, i, "original value of the atomic");
    }
  }
  const ibv_wc answer = PollOne(end_.recv_cq(), Milliseconds(60000));
  if (answer.status != IBV_WC_SUCCESS || answer.byte_len != 0) {
    Fail(options_, round, -1, "answer: " + Describe(answer));
  }
}

void TrafficRequester::Run() {
  for (int round = 0; round < options_.rounds; ++round) RunRound(round);
  if (!StaysEmpty(end_.send_cq(), Milliseconds(10))) {
    Fail(options_, options_.rounds, -1, "a send completion too many");
  }
}

std::string RunTraffic(RcEnd& requester, RcEnd& responder, const TrafficOptions& options) {
  TrafficResponder answers(responder, options);
  TrafficRequester asks(requester, answers.remote(), options);
  answers.Prepare();
  std::string problem;
  std::thread thread([&] {
    try {
      answers.Run();
    } catch (const std::exception& error) {
      problem = std::string("responder: ") + error.what() + "\n";
      // The requester must not wait for an answer that does not come.
      responder.ToState(IBV_QPS_ERR);
      requester.ToState(IBV_QPS_ERR);
    }
  });
  std::string own;
  try {
    asks.Run();
  } catch (const std::exception& error) {
    own = std::string("requester: ") + error.what();
    responder.ToState(IBV_QPS_ERR);
    requester.ToState(IBV_QPS_ERR);
  }
  thread.join();
  return problem + own;
}

}  // namespace verbena::testing
