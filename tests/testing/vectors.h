// SPDX-License-Identifier: Apache-2.0
//
// The captures and tables of tests/vectors as data.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace verbena::testing {

// Names of all captures, without ".pcap", sorted. Empty if the folder is not
// there: tests check that.
std::vector<std::string> CaptureNames();

std::string CapturePath(const std::string& name);

// The frames of one capture; frame n of tshark is element n - 1. Fails the
// running test and gives what was read so far if the file is damaged.
std::vector<std::vector<std::byte>> CaptureFrames(const std::string& name);

// Capture and frame number, from 1.
using FrameKey = std::pair<std::string, size_t>;

// What tshark reads: column name -> number. Columns with "-" are absent.
std::map<FrameKey, std::map<std::string, uint64_t>> TsharkTable();

// The frames that are unusual: "error=bad_tver", "pkey=0x1234", ...
std::multimap<FrameKey, std::string> SpecialFrames();

}  // namespace verbena::testing
