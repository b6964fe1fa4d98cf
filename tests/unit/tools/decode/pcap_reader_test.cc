// SPDX-License-Identifier: Apache-2.0
//
// Files are built here from the format descriptions (pcap, and pcapng of
// draft-ietf-opsawg-pcapng), in both byte orders.
#include "tools/decode/pcap_reader.h"

#include <gtest/gtest.h>

#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace verbena::tools {
namespace {

// Appends numbers in the byte order of a file.
class FileBytes {
 public:
  explicit FileBytes(bool big_endian) : big_endian_(big_endian) {}

  FileBytes& U16(uint16_t v) { return Number(v, 2); }
  FileBytes& U32(uint32_t v) { return Number(v, 4); }
  FileBytes& Raw(const std::string& bytes) {
    text_ += bytes;
    return *this;
  }
  // pcapng: a body framed by type and lengths, filled up to four bytes.
  FileBytes& Block(uint32_t type, const FileBytes& body) {
    std::string padded = body.text_;
    padded.resize((padded.size() + 3) / 4 * 4, '\0');
    const auto length = static_cast<uint32_t>(padded.size() + 12);
    return U32(type).U32(length).Raw(padded).U32(length);
  }
  const std::string& text() const { return text_; }
  bool big_endian() const { return big_endian_; }

 private:
  FileBytes& Number(uint32_t v, int bytes) {
    for (int i = 0; i < bytes; ++i) {
      const int shift = 8 * (big_endian_ ? bytes - 1 - i : i);
      text_ += static_cast<char>(v >> shift & 0xff);
    }
    return *this;
  }
  bool big_endian_;
  std::string text_;
};

struct Frame {
  uint64_t time_ns;
  std::string bytes;
  uint32_t original_bytes;
  uint32_t interface;
  Direction direction;

  bool operator==(const Frame&) const = default;
};

struct Contents {
  std::vector<Frame> frames;
  std::optional<CaptureError> error;
};

Contents ReadFile(const std::string& text) {
  Contents contents;
  std::istringstream stream(text);
  auto reader = CaptureReader::Open(stream);
  if (!reader.ok()) {
    contents.error = reader.error();
    return contents;
  }
  // A frame takes at least a byte of the file.
  for (size_t i = 0; i <= text.size(); ++i) {
    const auto frame = (*reader)->Next();
    if (!frame.ok()) {
      contents.error = frame.error();
      return contents;
    }
    if (!frame->has_value()) return contents;
    const CapturedFrame& got = **frame;
    contents.frames.push_back(
        {got.time_ns,
         std::string(reinterpret_cast<const char*>(got.bytes.data()), got.bytes.size()),
         got.original_bytes, got.interface, got.direction});
  }
  ADD_FAILURE() << "more frames than bytes";
  return contents;
}

FileBytes PcapHeader(bool big_endian, uint32_t magic, uint32_t link_type = 1,
                     uint16_t version = 2) {
  FileBytes file(big_endian);
  file.U32(magic).U16(version).U16(4).U32(0).U32(0).U32(262144).U32(link_type);
  return file;
}

FileBytes PcapFile(bool big_endian, uint32_t magic) {
  FileBytes file = PcapHeader(big_endian, magic);
  file.U32(1700000000).U32(999999).U32(5).U32(5).Raw("first");
  file.U32(1700000001).U32(1).U32(3).U32(1500).Raw("cut");
  return file;
}

FileBytes SectionBody(bool big_endian) {
  FileBytes body(big_endian);
  body.U32(0x1a2b3c4d).U16(1).U16(0).U32(0xffffffff).U32(0xffffffff);
  return body;
}

// A nanosecond interface 0, a microsecond interface 1, an unknown block, an
// enhanced packet with direction flags, one without options, a simple packet.
FileBytes PcapngFile(bool big_endian) {
  FileBytes file(big_endian);
  const auto body = [&] { return FileBytes(big_endian); };
  file.Block(0x0a0d0d0a, SectionBody(big_endian));
  file.Block(1, body()
                    .U16(1)
                    .U16(0)
                    .U32(0)
                    .U16(2)
                    .U16(3)
                    .Raw(std::string("eth\0", 4))
                    .U16(9)
                    .U16(1)
                    .Raw(std::string("\x09\0\0\0", 4))
                    .U16(0)
                    .U16(0));
  file.Block(1, body().U16(1).U16(0).U32(4));
  file.Block(0x0bad, body().Raw("skipped!"));
  const uint64_t ns = 1700000000'123456789;
  file.Block(6, body()
                    .U32(0)
                    .U32(static_cast<uint32_t>(ns >> 32))
                    .U32(static_cast<uint32_t>(ns))
                    .U32(5)
                    .U32(5)
                    .Raw(std::string("first\0\0\0", 8))
                    .U16(2)
                    .U16(4)
                    .U32(2)
                    .U32(0));
  const uint64_t us = 1700000000'123456;
  file.Block(6, body()
                    .U32(1)
                    .U32(static_cast<uint32_t>(us >> 32))
                    .U32(static_cast<uint32_t>(us))
                    .U32(3)
                    .U32(1500)
                    .Raw("cut"));
  file.Block(3, body().U32(6).Raw("simple"));
  return file;
}

TEST(PcapReader, ReadsBothByteOrdersAndResolutions) {
  for (const bool big_endian : {false, true}) {
    for (const bool nanoseconds : {false, true}) {
      const auto contents =
          ReadFile(PcapFile(big_endian, nanoseconds ? 0xa1b23c4d : 0xa1b2c3d4).text());
      EXPECT_EQ(contents.error, std::nullopt);
      const uint64_t unit = nanoseconds ? 1 : 1000;
      const std::vector<Frame> expected = {
          {1700000000'000000000 + 999999 * unit, "first", 5, 0, Direction::kUnknown},
          {1700000001'000000000 + unit, "cut", 1500, 0, Direction::kUnknown}};
      EXPECT_TRUE(contents.frames == expected);
    }
  }
}

TEST(PcapReader, RefusesWhatItDoesNotKnow) {
  EXPECT_EQ(ReadFile("").error, CaptureError::kTruncated);
  EXPECT_EQ(ReadFile("abcdefgh").error, CaptureError::kNotACapture);
  EXPECT_EQ(ReadFile(PcapHeader(false, 0xa1b2c3d4, 113).text()).error,
            CaptureError::kUnsupportedLinkType);
  EXPECT_EQ(ReadFile(PcapHeader(true, 0xa1b2c3d4, 1, 3).text()).error,
            CaptureError::kUnsupportedVersion);
}

TEST(PcapReader, RefusesALengthBeyondTheLimitWithoutAllocatingIt) {
  for (const uint32_t length : {kMaxFrameBytes + 1, 0xffffffffu}) {
    FileBytes file = PcapHeader(false, 0xa1b2c3d4);
    file.U32(0).U32(0).U32(length).U32(length);
    EXPECT_EQ(ReadFile(file.text()).error, CaptureError::kFrameTooLong);
  }
}

TEST(PcapngReader, ReadsBlocksInBothByteOrders) {
  for (const bool big_endian : {false, true}) {
    const auto contents = ReadFile(PcapngFile(big_endian).text());
    EXPECT_EQ(contents.error, std::nullopt);
    const std::vector<Frame> expected = {
        {1700000000'123456789, "first", 5, 0, Direction::kOutbound},
        {1700000000'123456000, "cut", 1500, 1, Direction::kUnknown},
        {0, "simple", 6, 0, Direction::kUnknown}};
    EXPECT_TRUE(contents.frames == expected);
  }
}

TEST(PcapngReader, ANewSectionChangesTheByteOrderAndForgetsInterfaces) {
  const auto both = ReadFile(PcapngFile(false).text() + PcapngFile(true).text());
  EXPECT_EQ(both.error, std::nullopt);
  EXPECT_EQ(both.frames.size(), 6u);

  FileBytes section(true);
  section.Block(0x0a0d0d0a, SectionBody(true));
  section.Block(3, FileBytes(true).U32(4).Raw("lost"));
  const auto contents = ReadFile(PcapngFile(false).text() + section.text());
  EXPECT_EQ(contents.frames.size(), 3u);
  EXPECT_EQ(contents.error, CaptureError::kUnknownInterface);
}

TEST(PcapngReader, RefusesBadBlocks) {
  const auto after_section = [](const FileBytes& rest) {
    FileBytes file(false);
    file.Block(0x0a0d0d0a, SectionBody(false));
    file.Block(1, FileBytes(false).U16(1).U16(0).U32(0));
    return ReadFile(file.text() + rest.text()).error;
  };
  const auto bytes = [] { return FileBytes(false); };
  // Lengths: no multiple of four, too short, trailing one differs, enormous.
  EXPECT_EQ(after_section(bytes().U32(7).U32(13).Raw("xxxxx")), CaptureError::kBadBlockLength);
  EXPECT_EQ(after_section(bytes().U32(7).U32(8)), CaptureError::kBadBlockLength);
  EXPECT_EQ(after_section(bytes().U32(7).U32(0)), CaptureError::kBadBlockLength);
  EXPECT_EQ(after_section(bytes().U32(7).U32(12).U32(16)), CaptureError::kBadBlockLength);
  EXPECT_EQ(after_section(bytes().U32(7).U32(0xfffffffc)), CaptureError::kFrameTooLong);
  // Packets: body too short, captured length beyond the block, wrong interface.
  EXPECT_EQ(after_section(bytes().Block(6, bytes().U32(0).U32(0).U32(0).U32(0))),
            CaptureError::kBadBlockLength);
  EXPECT_EQ(after_section(bytes().Block(6, bytes().U32(0).U32(0).U32(0).U32(5).U32(5).U32(0))),
            CaptureError::kBadBlockLength);
  EXPECT_EQ(after_section(bytes().Block(6, bytes().U32(1).U32(0).U32(0).U32(0).U32(0))),
            CaptureError::kUnknownInterface);
  EXPECT_EQ(after_section(bytes().Block(3, bytes().U32(5).U32(0))), CaptureError::kBadBlockLength);
  EXPECT_EQ(after_section(bytes().Block(1, bytes().U32(1))), CaptureError::kBadBlockLength);
  // An interface that is not Ethernet is known, its packets are refused.
  EXPECT_EQ(after_section(bytes()
                              .Block(1, bytes().U16(113).U16(0).U32(0))
                              .Block(6, bytes().U32(1).U32(0).U32(0).U32(0).U32(0))),
            CaptureError::kUnsupportedLinkType);
}

TEST(PcapngReader, BoundsTheNumberOfInterfaces) {
  FileBytes file(false);
  file.Block(0x0a0d0d0a, SectionBody(false));
  const FileBytes interface = FileBytes(false).U16(1).U16(0).U32(0);
  for (size_t i = 0; i < kMaxInterfaces; ++i) file.Block(1, interface);
  EXPECT_EQ(ReadFile(file.text()).error, std::nullopt);
  file.Block(1, interface);
  EXPECT_EQ(ReadFile(file.text()).error, CaptureError::kTooManyInterfaces);
}

// Cut at every byte: the whole frames before the cut, then an error unless the
// cut is between two of them.
TEST(CaptureReaders, AFileCutAtAnyByteGivesItsWholeFramesAndAnError) {
  for (const std::string& whole :
       {PcapFile(false, 0xa1b2c3d4).text(), PcapFile(true, 0xa1b23c4d).text(),
        PcapngFile(false).text(), PcapngFile(true).text()}) {
    const Contents all = ReadFile(whole);
    ASSERT_EQ(all.error, std::nullopt);
    size_t clean_ends = 0;
    for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
      const Contents cut = ReadFile(whole.substr(0, bytes));
      ASSERT_LT(cut.frames.size(), all.frames.size());
      EXPECT_TRUE(std::equal(cut.frames.begin(), cut.frames.end(), all.frames.begin()));
      if (cut.error.has_value()) {
        EXPECT_EQ(cut.error, CaptureError::kTruncated) << bytes;
      } else {
        ++clean_ends;
      }
    }
    // pcap: behind the header and the first frame; pcapng: behind each block.
    EXPECT_EQ(clean_ends, all.frames.size() == 2 ? 2u : 6u);
  }
}

TEST(CaptureReaders, DamagedFilesNeverCrash) {
  std::mt19937_64 random(1);
  const std::string files[] = {PcapFile(false, 0xa1b2c3d4).text(), PcapngFile(false).text(),
                               PcapngFile(true).text()};
  for (int round = 0; round < 20'000; ++round) {
    std::string file = files[random() % std::size(files)];
    for (uint64_t i = random() % 6; i > 0; --i) {
      file[random() % file.size()] = static_cast<char>(random());
    }
    ReadFile(file);
    if (HasFailure()) FAIL() << "in round " << round;
  }
}

TEST(CaptureErrors, HaveASentenceEach) {
  for (int i = 0; i <= static_cast<int>(CaptureError::kReadFailed); ++i) {
    EXPECT_NE(ToString(static_cast<CaptureError>(i)), "unknown error") << i;
  }
}

}  // namespace
}  // namespace verbena::tools
