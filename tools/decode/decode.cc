// SPDX-License-Identifier: Apache-2.0
#include "tools/decode/decode.h"

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <optional>
#include <vector>

#include "tools/decode/pcap_reader.h"
#include "transport/wire/describe.h"
#include "transport/wire/packet_builder.h"
#include "transport/wire/packet_view.h"

namespace verbena::tools {
namespace {

using transport::Bth;
using transport::PacketView;
using transport::ParseError;
using transport::Result;

// One frame of the file, parsed.
struct Frame {
  uint64_t number = 0;
  CapturedFrame captured;
  Result<PacketView, ParseError> packet = ParseError::kNotIp;
  std::optional<Bth> bth;       // also of some packets with a parse error
  std::optional<bool> icrc_ok;  // empty when it cannot be computed

  bool is_whole() const { return captured.bytes.size() == captured.original_bytes; }
};

Frame ParseFrame(uint64_t number, const CapturedFrame& captured) {
  Frame frame;
  frame.number = number;
  frame.captured = captured;
  frame.packet = PacketView::ParseHead(captured.bytes, captured.original_bytes);
  if (frame.packet.ok()) {
    frame.bth = frame.packet->bth();
    if (frame.packet->has_contiguous_payload()) frame.icrc_ok = frame.packet->VerifyIcrc();
  } else {
    frame.bth = transport::PeekBth(captured.bytes);
  }
  return frame;
}

bool IsForeign(ParseError error) {
  return error == ParseError::kNotIp || error == ParseError::kNotUdp ||
         error == ParseError::kNotRoce;
}

std::string TextLine(const Frame& frame, uint64_t first_time_ns) {
  const uint64_t time_us =
      frame.captured.time_ns > first_time_ns ? (frame.captured.time_ns - first_time_ns) / 1000 : 0;
  char prefix[64];
  std::snprintf(prefix, sizeof(prefix), "%6" PRIu64 " %6" PRIu64 ".%06" PRIu64 " ", frame.number,
                time_us / 1'000'000, time_us % 1'000'000);
  std::string line = prefix;
  line += frame.packet.ok() ? Describe(*frame.packet) : Describe(frame.packet.error());
  if (frame.icrc_ok == false) line += " BAD_ICRC";
  if (!frame.is_whole()) line += " (cut short by the capture)";
  return line;
}

// Every string in here is a name of ours: nothing to escape.
std::string JsonLine(const Frame& frame) {
  const auto number = [](bool present, uint64_t value) {
    return present ? std::to_string(value) : std::string("null");
  };
  const auto boolean = [](std::optional<bool> value) {
    return !value ? "null" : *value ? "true" : "false";
  };
  const auto quoted = [](std::string_view name) { return '"' + std::string(name) + '"'; };

  const bool has_bth = frame.bth.has_value();
  const bool parsed = frame.packet.ok();
  const Bth bth = frame.bth.value_or(Bth{});
  std::string line = "{\"frame\":" + std::to_string(frame.number);
  line += ",\"opcode\":" + (has_bth ? quoted(OpcodeName(bth.opcode)) : "null");
  line += ",\"dest_qpn\":" + number(has_bth, bth.dest_qpn.value());
  line += ",\"psn\":" + number(has_bth, bth.psn.value());
  line += ",\"ack_req\":";
  line += boolean(has_bth ? std::optional(bth.ack_req) : std::nullopt);
  line += ",\"pad\":" + number(has_bth, bth.pad);
  line += ",\"payload_len\":" + number(parsed, parsed ? frame.packet->payload_bytes() : 0);
  line += ",\"icrc_ok\":";
  line += boolean(frame.icrc_ok);
  line += ",\"error\":" + (parsed ? "null" : quoted(ParseErrorName(frame.packet.error())));
  return line + "}";
}

// The packet again, from its fields and its payload alone.
std::vector<std::byte> Rebuild(const PacketView& packet) {
  std::vector<std::byte> frame(transport::kMaxOverheadBytes + packet.payload_bytes(),
                               std::byte{0xa5});
  const size_t header_bytes =
      WriteHeaders(AddressOf(packet), HeadersOf(packet), packet.payload_bytes(), frame.data());
  const auto payload = packet.payload();
  if (!payload.empty()) std::memcpy(frame.data() + header_bytes, payload.data(), payload.size());
  frame.resize(transport::FinishFrame(frame.data(), packet.l3_offset(), packet.is_ipv6(),
                                      header_bytes, payload.size()));
  return frame;
}

// What is wrong with a frame; empty if nothing.
std::string Difference(const Frame& frame) {
  if (!frame.packet.ok()) {
    return IsForeign(frame.packet.error()) ? "" : Describe(frame.packet.error());
  }
  if (!frame.packet->has_contiguous_payload()) return "";
  char text[96];
  if (frame.icrc_ok == false) {
    std::snprintf(text, sizeof(text), "ICRC is %08x, computed %08x", frame.packet->icrc(),
                  frame.packet->ComputeIcrc());
    return text;
  }
  const std::vector<std::byte> rebuilt = Rebuild(*frame.packet);
  if (rebuilt.size() != frame.packet->frame_bytes()) {
    std::snprintf(text, sizeof(text), "%zu bytes, rebuilt %zu", frame.packet->frame_bytes(),
                  rebuilt.size());
    return text;
  }
  for (size_t i = 0; i < rebuilt.size(); ++i) {
    if (rebuilt[i] == frame.captured.bytes[i]) continue;
    std::snprintf(text, sizeof(text), "byte %zu is %02x, rebuilt %02x", i,
                  std::to_integer<unsigned>(frame.captured.bytes[i]),
                  std::to_integer<unsigned>(rebuilt[i]));
    return text;
  }
  return "";
}

class Decoder {
 public:
  Decoder(bool json, bool check, std::ostream& out, std::ostream& err)
      : json_(json), check_(check), out_(out), err_(err) {}

  void Take(const CapturedFrame& captured) {
    if (frames_ == 0) first_time_ns_ = captured.time_ns;
    const Frame frame = ParseFrame(++frames_, captured);
    if (frame.packet.ok()) ++packets_;
    if (json_) {
      out_ << JsonLine(frame) << '\n';
    } else if (!check_) {
      out_ << TextLine(frame, first_time_ns_) << '\n';
    }
    if (check_) Check(frame);
  }

  int Finish() {
    if (check_) {
      (json_ ? err_ : out_) << frames_ << " frames, " << packets_ << " RoCEv2 packets, "
                            << unchecked_ << " cut short, " << different_ << " differ\n";
    }
    return different_ == 0 ? kDecodeOk : kDecodeDiffers;
  }

 private:
  void Check(const Frame& frame) {
    if (frame.packet.ok() && !frame.packet->has_contiguous_payload()) ++unchecked_;
    const std::string difference = Difference(frame);
    if (difference.empty()) return;
    ++different_;
    (json_ ? err_ : out_) << "frame " << frame.number << ": " << difference << '\n';
  }

  bool json_;
  bool check_;
  std::ostream& out_;
  std::ostream& err_;
  uint64_t first_time_ns_ = 0;
  uint64_t frames_ = 0;
  uint64_t packets_ = 0;
  uint64_t unchecked_ = 0;
  uint64_t different_ = 0;
};

}  // namespace

int RunDecode(const std::string& path, bool json, bool check, std::ostream& out,
              std::ostream& err) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    err << "verbena decode: " << path << ": " << std::strerror(errno) << '\n';
    return kDecodeFileError;
  }
  return DecodeStream(file, path, json, check, out, err);
}

int DecodeStream(std::istream& file, const std::string& path, bool json, bool check,
                 std::ostream& out, std::ostream& err) {
  auto reader = CaptureReader::Open(file);
  if (!reader.ok()) {
    err << "verbena decode: " << path << ": " << ToString(reader.error()) << '\n';
    return kDecodeFileError;
  }
  Decoder decoder(json, check, out, err);
  // Ends with the file.
  for (;;) {
    const auto frame = (*reader)->Next();
    if (!frame.ok()) {
      const int status = decoder.Finish();
      err << "verbena decode: " << path << ": " << ToString(frame.error()) << '\n';
      return status == kDecodeOk ? kDecodeFileError : status;
    }
    if (!frame->has_value()) return decoder.Finish();
    decoder.Take(**frame);
  }
}

}  // namespace verbena::tools
