// SPDX-License-Identifier: Apache-2.0
//
// Reads capture files, classic pcap (either byte order, micro- or nanoseconds)
// and pcapng (section, interface, enhanced and simple packet blocks; others are
// skipped), one frame at a time. The file is untrusted: every length is checked
// before it is used, memory is bounded by kMaxFrameBytes, and what is wrong is a
// typed error. Only Ethernet frames. Not for the packet path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <istream>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "transport/base/result.h"

namespace verbena::tools {

enum class CaptureError : uint8_t {
  kNotACapture,          // neither pcap nor pcapng by its first bytes
  kUnsupportedVersion,   // pcap not 2.x, pcapng not 1.x
  kUnsupportedLinkType,  // not Ethernet
  kTruncated,            // the file ends within a header, record or block
  kBadBlockLength,       // pcapng lengths that contradict each other
  kFrameTooLong,         // a length beyond kMaxFrameBytes
  kUnknownInterface,     // a pcapng packet of an interface not described
  kTooManyInterfaces,
  kReadFailed,  // the stream reports an input error
};
std::string_view ToString(CaptureError error);

// Longest frame, and (with room for options) block, that is accepted.
inline constexpr uint32_t kMaxFrameBytes = 256 * 1024;
inline constexpr size_t kMaxInterfaces = 4096;

enum class Direction : uint8_t { kUnknown, kInbound, kOutbound };

struct CapturedFrame {
  uint64_t time_ns = 0;    // since 1970; 0 when the file has no time
  uint32_t interface = 0;  // pcapng interface in its section
  Direction direction = Direction::kUnknown;
  uint32_t original_bytes = 0;       // length on the wire, >= bytes.size()
  std::span<const std::byte> bytes;  // valid until the next call
};

class CaptureReader {
 public:
  virtual ~CaptureReader() = default;

  // Reads the file header. `stream` outlives the reader.
  static transport::Result<std::unique_ptr<CaptureReader>, CaptureError> Open(std::istream& stream);

  // The next frame, or empty at a clean end of the file. After an error, do not
  // call again.
  virtual transport::Result<std::optional<CapturedFrame>, CaptureError> Next() = 0;
};

}  // namespace verbena::tools
