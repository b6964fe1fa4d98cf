// SPDX-License-Identifier: Apache-2.0
//
// `verbena decode FILE [--json] [--check]`: what is in a capture.
// Text: one line per frame. JSON: one object per line and frame,
//   {"frame","opcode","dest_qpn","psn","ack_req","pad","payload_len","icrc_ok","error"}
// with null for what the frame does not have; frames count from 1 as in tshark.
// Check: recomputes each ICRC, rebuilds each packet from its fields and prints
// what differs (with JSON to the error stream). Frames that are not RoCEv2 at
// all never count as different; malformed ones do. A frame that the capture cut
// short is decoded as far as it goes and not checked.
#pragma once

#include <istream>
#include <ostream>
#include <string>

namespace verbena::tools {

inline constexpr int kDecodeOk = 0;
inline constexpr int kDecodeDiffers = 1;    // with --check only
inline constexpr int kDecodeFileError = 2;  // cannot be opened, or damaged

// Returns the exit status.
int RunDecode(const std::string& path, bool json, bool check, std::ostream& out, std::ostream& err);

// The same of an open file; `path` is for messages.
int DecodeStream(std::istream& file, const std::string& path, bool json, bool check,
                 std::ostream& out, std::ostream& err);

}  // namespace verbena::tools
