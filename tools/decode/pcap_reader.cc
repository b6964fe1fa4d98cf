// SPDX-License-Identifier: Apache-2.0
#include "tools/decode/pcap_reader.h"

#include <algorithm>
#include <array>

#include "transport/base/byteorder.h"

namespace verbena::tools {
namespace {

using transport::LoadBe16;
using transport::LoadBe32;
using transport::LoadLe32;
using transport::Result;
using Bytes = std::span<const std::byte>;

constexpr uint32_t kPcapMicroseconds = 0xa1b2c3d4;
constexpr uint32_t kPcapNanoseconds = 0xa1b23c4d;
constexpr uint32_t kSectionHeaderBlock = 0x0a0d0d0a;
constexpr uint32_t kInterfaceBlock = 1;
constexpr uint32_t kSimplePacketBlock = 3;
constexpr uint32_t kEnhancedPacketBlock = 6;
constexpr uint32_t kByteOrderMagic = 0x1a2b3c4d;
constexpr uint16_t kLinkTypeEthernet = 1;
constexpr uint64_t kNsPerSecond = 1'000'000'000;

// Reads fields in the byte order of the file. The caller checks the bounds.
struct Fields {
  bool big_endian = false;

  uint32_t U32(const std::byte* p) const { return big_endian ? LoadBe32(p) : LoadLe32(p); }
  uint16_t U16(const std::byte* p) const {
    const auto value = LoadBe16(p);
    return big_endian ? value : static_cast<uint16_t>((value << 8) | (value >> 8));
  }
};

enum class ReadOutcome { kFull, kEnd, kPartial, kFailed };

ReadOutcome Read(std::istream& stream, std::span<std::byte> out) {
  stream.read(reinterpret_cast<char*>(out.data()), static_cast<std::streamsize>(out.size()));
  if (stream.bad()) return ReadOutcome::kFailed;
  const auto got = static_cast<size_t>(stream.gcount());
  if (got == out.size()) return ReadOutcome::kFull;
  return got == 0 ? ReadOutcome::kEnd : ReadOutcome::kPartial;
}

// Reading that must succeed: an early end is a truncated file.
Result<void, CaptureError> ReadAll(std::istream& stream, std::span<std::byte> out) {
  switch (out.empty() ? ReadOutcome::kFull : Read(stream, out)) {
    case ReadOutcome::kFull:
      return {};
    case ReadOutcome::kFailed:
      return CaptureError::kReadFailed;
    case ReadOutcome::kEnd:
    case ReadOutcome::kPartial:
      break;
  }
  return CaptureError::kTruncated;
}

class PcapReader : public CaptureReader {
 public:
  PcapReader(std::istream& stream, Fields fields, uint32_t ns_per_unit)
      : stream_(stream), fields_(fields), ns_per_unit_(ns_per_unit) {}

  // Behind the magic number.
  Result<void, CaptureError> ReadHeader() {
    std::array<std::byte, 20> header;
    if (auto read = ReadAll(stream_, header); !read.ok()) return read;
    if (fields_.U16(&header[0]) != 2) return CaptureError::kUnsupportedVersion;
    // The upper half may hold FCS facts.
    if ((fields_.U32(&header[16]) & 0xffff) != kLinkTypeEthernet) {
      return CaptureError::kUnsupportedLinkType;
    }
    return {};
  }

  Result<std::optional<CapturedFrame>, CaptureError> Next() override {
    std::array<std::byte, 16> record;
    switch (Read(stream_, record)) {
      case ReadOutcome::kFull:
        break;
      case ReadOutcome::kEnd:
        return std::optional<CapturedFrame>();
      case ReadOutcome::kPartial:
        return CaptureError::kTruncated;
      case ReadOutcome::kFailed:
        return CaptureError::kReadFailed;
    }
    const uint32_t captured_bytes = fields_.U32(&record[8]);
    if (captured_bytes > kMaxFrameBytes) return CaptureError::kFrameTooLong;
    buffer_.resize(captured_bytes);
    if (auto read = ReadAll(stream_, buffer_); !read.ok()) return read.error();

    CapturedFrame frame;
    frame.time_ns = uint64_t{fields_.U32(&record[0])} * kNsPerSecond +
                    uint64_t{fields_.U32(&record[4])} * ns_per_unit_;
    frame.original_bytes = std::max(fields_.U32(&record[12]), captured_bytes);
    frame.bytes = buffer_;
    return std::optional(frame);
  }

 private:
  std::istream& stream_;
  Fields fields_;
  uint32_t ns_per_unit_;
  std::vector<std::byte> buffer_;
};

struct Interface {
  uint16_t link_type = 0;
  uint32_t snap_bytes = 0;  // 0 = no limit
  uint8_t resolution = 6;   // if_tsresol: 10^-n s, or 2^-n s with the top bit
};

// Units of an interface's resolution to nanoseconds. Resolutions that make no
// sense give 0, "no time".
uint64_t ToNanoseconds(uint64_t units, uint8_t resolution) {
  if ((resolution & 0x80) != 0) {
    const unsigned shift = resolution & 0x7f;
    if (shift > 63) return 0;
    const uint64_t seconds = units >> shift;
    const uint64_t fraction = units - (seconds << shift);
    return seconds * kNsPerSecond +
           static_cast<uint64_t>(static_cast<unsigned __int128>(fraction) * kNsPerSecond >> shift);
  }
  uint64_t factor = 1;
  if (resolution <= 9) {
    for (unsigned i = resolution; i < 9; ++i) factor *= 10;
    return units * factor;
  }
  if (resolution > 18) return 0;
  for (unsigned i = 9; i < resolution; ++i) factor *= 10;
  return units / factor;
}

class PcapngReader : public CaptureReader {
 public:
  explicit PcapngReader(std::istream& stream) : stream_(stream) {}

  // Behind the block type of the first section header.
  Result<void, CaptureError> ReadFirstSection() { return ReadSection(); }

  Result<std::optional<CapturedFrame>, CaptureError> Next() override {
    // Ends with the file: each round reads a block.
    for (;;) {
      std::array<std::byte, 4> type_bytes;
      switch (Read(stream_, type_bytes)) {
        case ReadOutcome::kFull:
          break;
        case ReadOutcome::kEnd:
          return std::optional<CapturedFrame>();
        case ReadOutcome::kPartial:
          return CaptureError::kTruncated;
        case ReadOutcome::kFailed:
          return CaptureError::kReadFailed;
      }
      auto frame = ReadBlock(fields_.U32(type_bytes.data()));
      if (!frame.ok() || frame->has_value()) return frame;
    }
  }

 private:
  static constexpr uint32_t kFrameOfBlock = 12;  // type and both lengths
  static constexpr uint32_t kMaxBlockBytes = kMaxFrameBytes + 64 * 1024;

  // A new section may change the byte order and forgets the interfaces. Its
  // block type reads the same in both orders.
  Result<void, CaptureError> ReadSection() {
    std::array<std::byte, 8> start;  // length, byte-order magic
    if (auto read = ReadAll(stream_, start); !read.ok()) return read;
    if (LoadBe32(&start[4]) == kByteOrderMagic) {
      fields_.big_endian = true;
    } else if (LoadLe32(&start[4]) == kByteOrderMagic) {
      fields_.big_endian = false;
    } else {
      return CaptureError::kNotACapture;
    }
    const uint32_t length = fields_.U32(&start[0]);
    if (length < 28) return CaptureError::kBadBlockLength;
    if (auto read = ReadBody(length, 12); !read.ok()) return read;
    if (fields_.U16(&body_[0]) != 1) return CaptureError::kUnsupportedVersion;
    interfaces_.clear();
    return {};
  }

  // Reads the rest of a block of `length` bytes, of which `done` are read, into
  // body_, without its trailing length, which has to agree.
  Result<void, CaptureError> ReadBody(uint32_t length, uint32_t done) {
    if (length % 4 != 0 || length < done + 4) return CaptureError::kBadBlockLength;
    if (length > kMaxBlockBytes) return CaptureError::kFrameTooLong;
    body_.resize(length - done);
    if (auto read = ReadAll(stream_, body_); !read.ok()) return read;
    if (fields_.U32(&body_[body_.size() - 4]) != length) return CaptureError::kBadBlockLength;
    body_.resize(body_.size() - 4);
    return {};
  }

  // Empty when the block is no packet.
  Result<std::optional<CapturedFrame>, CaptureError> ReadBlock(uint32_t type) {
    if (type == kSectionHeaderBlock) {
      if (auto read = ReadSection(); !read.ok()) return read.error();
      return std::optional<CapturedFrame>();
    }
    std::array<std::byte, 4> length_bytes;
    if (auto read = ReadAll(stream_, length_bytes); !read.ok()) return read.error();
    if (auto read = ReadBody(fields_.U32(length_bytes.data()), 8); !read.ok()) {
      return read.error();
    }
    switch (type) {
      case kInterfaceBlock:
        if (auto added = AddInterface(); !added.ok()) return added.error();
        break;
      case kEnhancedPacketBlock:
        return EnhancedPacket();
      case kSimplePacketBlock:
        return SimplePacket();
      default:
        break;
    }
    return std::optional<CapturedFrame>();
  }

  Result<void, CaptureError> AddInterface() {
    if (body_.size() < 8) return CaptureError::kBadBlockLength;
    if (interfaces_.size() == kMaxInterfaces) return CaptureError::kTooManyInterfaces;
    Interface interface;
    interface.link_type = fields_.U16(&body_[0]);
    interface.snap_bytes = fields_.U32(&body_[4]);
    constexpr uint16_t kTimeResolution = 9;
    if (const Bytes option = FindOption(8, kTimeResolution); option.size() == 1) {
      interface.resolution = transport::LoadBe8(option.data());
    }
    interfaces_.push_back(interface);
    return {};
  }

  Result<std::optional<CapturedFrame>, CaptureError> EnhancedPacket() {
    constexpr size_t kFixed = 20;
    if (body_.size() < kFixed) return CaptureError::kBadBlockLength;
    const uint32_t index = fields_.U32(&body_[0]);
    const uint64_t time = (uint64_t{fields_.U32(&body_[4])} << 32) | fields_.U32(&body_[8]);
    const uint32_t captured_bytes = fields_.U32(&body_[12]);
    if (captured_bytes > body_.size() - kFixed) return CaptureError::kBadBlockLength;
    if (captured_bytes > kMaxFrameBytes) return CaptureError::kFrameTooLong;

    CapturedFrame frame;
    frame.interface = index;
    frame.original_bytes = std::max(fields_.U32(&body_[16]), captured_bytes);
    frame.bytes = Bytes(body_).subspan(kFixed, captured_bytes);
    if (auto interface = CheckInterface(index); !interface.ok()) return interface.error();
    frame.time_ns = ToNanoseconds(time, interfaces_[index].resolution);
    constexpr uint16_t kFlags = 2;
    const Bytes flags = FindOption(kFixed + (captured_bytes + 3u) / 4u * 4u, kFlags);
    if (flags.size() == 4) {
      const uint32_t direction = fields_.U32(flags.data()) & 3;
      if (direction == 1) frame.direction = Direction::kInbound;
      if (direction == 2) frame.direction = Direction::kOutbound;
    }
    return std::optional(frame);
  }

  // A packet of interface 0, without time.
  Result<std::optional<CapturedFrame>, CaptureError> SimplePacket() {
    if (body_.size() < 4) return CaptureError::kBadBlockLength;
    if (auto interface = CheckInterface(0); !interface.ok()) return interface.error();
    CapturedFrame frame;
    frame.original_bytes = fields_.U32(&body_[0]);
    uint32_t captured_bytes = frame.original_bytes;
    const uint32_t snap_bytes = interfaces_[0].snap_bytes;
    if (snap_bytes != 0) captured_bytes = std::min(captured_bytes, snap_bytes);
    if (captured_bytes > body_.size() - 4) return CaptureError::kBadBlockLength;
    frame.bytes = Bytes(body_).subspan(4, captured_bytes);
    return std::optional(frame);
  }

  Result<void, CaptureError> CheckInterface(uint32_t index) const {
    if (index >= interfaces_.size()) return CaptureError::kUnknownInterface;
    if (interfaces_[index].link_type != kLinkTypeEthernet) {
      return CaptureError::kUnsupportedLinkType;
    }
    return {};
  }

  // The value of the first option `code` in the options that begin at `offset`
  // of the body; empty if there is none. Options that overrun end the search.
  Bytes FindOption(size_t offset, uint16_t code) const {
    while (offset <= body_.size() && body_.size() - offset >= 4) {
      const uint16_t found = fields_.U16(&body_[offset]);
      const size_t length = fields_.U16(&body_[offset + 2]);
      offset += 4;
      if (found == 0 || length > body_.size() - offset) break;
      if (found == code) return Bytes(body_).subspan(offset, length);
      offset += (length + 3) / 4 * 4;
    }
    return {};
  }

  std::istream& stream_;
  Fields fields_;
  std::vector<Interface> interfaces_;
  std::vector<std::byte> body_;
};

template <typename Reader>
Result<std::unique_ptr<CaptureReader>, CaptureError> Started(std::unique_ptr<Reader> reader,
                                                             Result<void, CaptureError> header) {
  if (!header.ok()) return header.error();
  return std::unique_ptr<CaptureReader>(std::move(reader));
}

}  // namespace

Result<std::unique_ptr<CaptureReader>, CaptureError> CaptureReader::Open(std::istream& stream) {
  std::array<std::byte, 4> magic;
  if (auto read = ReadAll(stream, magic); !read.ok()) return read.error();
  if (LoadBe32(magic.data()) == kSectionHeaderBlock) {
    auto reader = std::make_unique<PcapngReader>(stream);
    auto header = reader->ReadFirstSection();
    return Started(std::move(reader), header);
  }
  for (const bool big_endian : {false, true}) {
    const Fields fields{big_endian};
    const uint32_t value = fields.U32(magic.data());
    if (value != kPcapMicroseconds && value != kPcapNanoseconds) continue;
    auto reader =
        std::make_unique<PcapReader>(stream, fields, value == kPcapMicroseconds ? 1000u : 1u);
    auto header = reader->ReadHeader();
    return Started(std::move(reader), header);
  }
  return CaptureError::kNotACapture;
}

std::string_view ToString(CaptureError error) {
  switch (error) {
    case CaptureError::kNotACapture:
      return "neither pcap nor pcapng";
    case CaptureError::kUnsupportedVersion:
      return "a file version that is not known";
    case CaptureError::kUnsupportedLinkType:
      return "not a capture of Ethernet frames";
    case CaptureError::kTruncated:
      return "the file ends too early";
    case CaptureError::kBadBlockLength:
      return "a pcapng block with a wrong length";
    case CaptureError::kFrameTooLong:
      return "a frame or block that is too long";
    case CaptureError::kUnknownInterface:
      return "a packet of an interface that the file does not describe";
    case CaptureError::kTooManyInterfaces:
      return "too many interfaces";
    case CaptureError::kReadFailed:
      return "reading failed";
  }
  return "unknown error";
}

}  // namespace verbena::tools
