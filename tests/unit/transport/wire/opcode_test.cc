// SPDX-License-Identifier: Apache-2.0
//
// The opcode table against the rules that the specification gives for groups of
// opcodes.
#include "transport/wire/opcode.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

namespace verbena::transport {
namespace {

constexpr Opcode Code(unsigned code) { return static_cast<Opcode>(code); }

bool IsDefined(unsigned code) { return !TraitsOf(Code(code)).is_reserved(); }

TEST(OpcodeTable, DefinesExactlyTheCodesOfTheSpecification) {
  std::set<unsigned> defined;
  // RC and XRC have no 0x15; RC has the optional FLUSH and ATOMIC_WRITE.
  for (unsigned operation = 0; operation <= 0x17; ++operation) {
    if (operation == 0x15) continue;
    defined.insert(operation);
    defined.insert(0xa0 + operation);
  }
  defined.insert({0x1c, 0x1d});
  for (unsigned operation = 0; operation <= 0x0b; ++operation) defined.insert(0x20 + operation);
  defined.insert({0x64, 0x65, 0x81});
  for (unsigned code = 0; code < 256; ++code) {
    EXPECT_EQ(IsDefined(code), defined.count(code) == 1) << code;
  }
}

TEST(OpcodeTable, GivesTheServiceOfTheTopBits) {
  for (unsigned code = 0; code < 256; ++code) {
    if (!IsDefined(code)) continue;
    const Service service = TraitsOf(Code(code)).service;
    switch (code >> 5) {
      case 0:
        EXPECT_EQ(service, Service::kRc);
        break;
      case 1:
        EXPECT_EQ(service, Service::kUc);
        break;
      case 3:
        EXPECT_EQ(service, Service::kUd);
        break;
      case 4:
        EXPECT_EQ(service, Service::kCnp);
        break;
      case 5:
        EXPECT_EQ(service, Service::kXrc);
        break;
      default:
        ADD_FAILURE() << code << " is of no service that we know";
    }
  }
}

// Header lengths as in tables of the specification and in tshark.
TEST(OpcodeTable, ComputesHeaderLengths) {
  const std::map<Opcode, unsigned> expected = {{Opcode::kRcSendFirst, 12},
                                               {Opcode::kRcSendLastImm, 16},
                                               {Opcode::kRcSendOnlyInv, 16},
                                               {Opcode::kRcWriteFirst, 28},
                                               {Opcode::kRcWriteMiddle, 12},
                                               {Opcode::kRcWriteLastImm, 16},
                                               {Opcode::kRcWriteOnlyImm, 32},
                                               {Opcode::kRcReadRequest, 28},
                                               {Opcode::kRcReadResponseFirst, 16},
                                               {Opcode::kRcReadResponseMiddle, 12},
                                               {Opcode::kRcReadResponseLast, 16},
                                               {Opcode::kRcReadResponseOnly, 16},
                                               {Opcode::kRcAcknowledge, 16},
                                               {Opcode::kRcAtomicAcknowledge, 24},
                                               {Opcode::kRcCompareSwap, 40},
                                               {Opcode::kRcFetchAdd, 40},
                                               {Opcode::kRcFlush, 32},
                                               {Opcode::kRcAtomicWrite, 28},
                                               {Opcode::kUcWriteOnlyImm, 32},
                                               {Opcode::kUdSendOnly, 20},
                                               {Opcode::kUdSendOnlyImm, 24},
                                               {Opcode::kCnp, 28},
                                               {Opcode::kXrcSendMiddle, 16},
                                               {Opcode::kXrcWriteOnlyImm, 36},
                                               {Opcode::kXrcFetchAdd, 44},
                                               {Opcode::kXrcAcknowledge, 16},
                                               {Opcode::kXrcReadResponseFirst, 16}};
  for (const auto& [opcode, bytes] : expected) {
    EXPECT_EQ(TraitsOf(opcode).header_bytes, bytes) << OpcodeName(opcode);
  }
}

TEST(OpcodeTable, HeadersFollowEachOtherWithoutGaps) {
  for (unsigned code = 0; code < 256; ++code) {
    const OpcodeTraits& traits = TraitsOf(Code(code));
    std::map<size_t, size_t> extents;  // offset -> length
    for (size_t i = 0; i < kExtHeaderCount; ++i) {
      const auto header = static_cast<ExtHeader>(i);
      if (traits.Has(header)) extents[traits.OffsetOf(header)] = ExtHeaderBytes(header);
    }
    size_t end = kBthBytes;
    for (const auto& [offset, bytes] : extents) {
      EXPECT_EQ(offset, end) << OpcodeName(Code(code));
      end = offset + bytes;
    }
    EXPECT_EQ(end, traits.header_bytes) << OpcodeName(Code(code));
  }
}

TEST(OpcodeTable, ImmediateStandsBehindRethAndXrcEthFirst) {
  EXPECT_EQ(TraitsOf(Opcode::kRcWriteOnlyImm).OffsetOf(ExtHeader::kReth), 12);
  EXPECT_EQ(TraitsOf(Opcode::kRcWriteOnlyImm).OffsetOf(ExtHeader::kImmDt), 28);
  EXPECT_EQ(TraitsOf(Opcode::kXrcWriteOnlyImm).OffsetOf(ExtHeader::kXrcEth), 12);
  EXPECT_EQ(TraitsOf(Opcode::kXrcWriteOnlyImm).OffsetOf(ExtHeader::kReth), 16);
  EXPECT_EQ(TraitsOf(Opcode::kXrcWriteOnlyImm).OffsetOf(ExtHeader::kImmDt), 32);
  EXPECT_EQ(TraitsOf(Opcode::kUdSendOnlyImm).OffsetOf(ExtHeader::kDeth), 12);
  EXPECT_EQ(TraitsOf(Opcode::kUdSendOnlyImm).OffsetOf(ExtHeader::kImmDt), 20);
  EXPECT_EQ(TraitsOf(Opcode::kRcAtomicAcknowledge).OffsetOf(ExtHeader::kAeth), 12);
  EXPECT_EQ(TraitsOf(Opcode::kRcAtomicAcknowledge).OffsetOf(ExtHeader::kAtomicAckEth), 16);
}

TEST(OpcodeTable, XrcIsRcWithXrcEthInEveryRequest) {
  for (unsigned operation = 0; operation <= 0x17; ++operation) {
    if (operation == 0x15) continue;
    const OpcodeTraits& rc = TraitsOf(Code(operation));
    const OpcodeTraits& xrc = TraitsOf(Code(0xa0 + operation));
    EXPECT_EQ(xrc.kind, rc.kind) << operation;
    EXPECT_EQ(xrc.position, rc.position) << operation;
    EXPECT_EQ(xrc.carries_payload, rc.carries_payload) << operation;
    EXPECT_EQ(xrc.has_xrceth(), rc.is_request()) << operation;
    EXPECT_EQ(xrc.header_bytes, rc.header_bytes + (rc.is_request() ? 4 : 0)) << operation;
  }
}

TEST(OpcodeTable, UcIsRcForSendAndWrite) {
  for (unsigned operation = 0; operation <= 0x0b; ++operation) {
    const OpcodeTraits& rc = TraitsOf(Code(operation));
    const OpcodeTraits& uc = TraitsOf(Code(0x20 + operation));
    EXPECT_EQ(uc.kind, rc.kind) << operation;
    EXPECT_EQ(uc.position, rc.position) << operation;
    EXPECT_EQ(uc.offsets, rc.offsets) << operation;
  }
}

TEST(OpcodeTable, EveryPacketIsARequestAResponseOrACnp) {
  for (unsigned code = 0; code < 256; ++code) {
    const OpcodeTraits& traits = TraitsOf(Code(code));
    const unsigned operation = code & 0x1f;
    const bool connected = traits.service == Service::kRc || traits.service == Service::kXrc;
    const bool response = connected && operation >= 0x0d && operation <= 0x12;
    EXPECT_EQ(traits.is_response(), response) << OpcodeName(Code(code));
    EXPECT_EQ(traits.is_request(), IsDefined(code) && !response && code != 0x81)
        << OpcodeName(Code(code));
  }
}

TEST(OpcodeTable, FirstMiddleLastOnlyFollowTheName) {
  for (unsigned code = 0; code < 256; ++code) {
    if (!IsDefined(code)) continue;
    const std::string name(OpcodeName(Code(code)));
    const OpcodeTraits& traits = TraitsOf(Code(code));
    const auto has = [&](const char* word) { return name.find(word) != std::string::npos; };
    EXPECT_EQ(traits.is_first(), has("_FIRST")) << name;
    EXPECT_EQ(traits.is_middle(), has("_MIDDLE")) << name;
    EXPECT_EQ(traits.is_last(), has("_LAST")) << name;
    EXPECT_EQ(traits.begins_message(), !has("_MIDDLE") && !has("_LAST")) << name;
    EXPECT_EQ(traits.ends_message(), !has("_FIRST") && !has("_MIDDLE")) << name;
    EXPECT_EQ(traits.is_send(), has("_SEND_")) << name;
    EXPECT_EQ(traits.is_write(), has("_RDMA_WRITE_")) << name;
    EXPECT_EQ(traits.has_imm(), has("_IMM")) << name;
    EXPECT_EQ(traits.has_ieth(), has("_INV")) << name;
    EXPECT_EQ(traits.is_atomic(), has("_CMP_SWAP") || has("_FETCH_ADD")) << name;
  }
}

TEST(OpcodeNames, AreUniqueAndReadBack) {
  std::set<std::string> names;
  for (unsigned code = 0; code < 256; ++code) {
    if (!IsDefined(code)) {
      EXPECT_EQ(OpcodeName(Code(code)), "RESERVED");
      continue;
    }
    const std::string name(OpcodeName(Code(code)));
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(ParseOpcodeName(name), Code(code));
  }
}

TEST(OpcodeNames, AreReadInAnyCaseAndWithAnySeparator) {
  EXPECT_EQ(ParseOpcodeName("rc_send_first"), Opcode::kRcSendFirst);
  EXPECT_EQ(ParseOpcodeName("RC RDMA WRITE Only"), Opcode::kRcWriteOnly);
  EXPECT_EQ(ParseOpcodeName("ud-send-only-imm"), Opcode::kUdSendOnlyImm);
  for (const char* text : {"", "RESERVED", "SEND", "RC_SEND", "RC_SEND_FIRST_", "rc__send_first"}) {
    EXPECT_EQ(ParseOpcodeName(text), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace verbena::transport
