// SPDX-License-Identifier: Apache-2.0
#include "tests/testing/vectors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tools/decode/pcap_reader.h"

namespace verbena::testing {
namespace {

// Under Bazel the runfiles, else the current folder (the top of the tree).
std::filesystem::path Folder() {
  const char* sources = std::getenv("TEST_SRCDIR");
  const char* workspace = std::getenv("TEST_WORKSPACE");
  if (sources == nullptr || workspace == nullptr) return "tests/vectors";
  return std::filesystem::path(sources) / workspace / "tests/vectors";
}

std::vector<std::vector<std::string>> ReadTsv(const std::string& name, bool with_header) {
  std::vector<std::vector<std::string>> rows;
  std::ifstream file(Folder() / name);
  EXPECT_TRUE(file.is_open()) << name;
  std::string line;
  while (std::getline(file, line)) {
    if (line.starts_with('#') && !(with_header && rows.empty())) continue;
    std::vector<std::string> cells;
    std::istringstream stream(line);
    for (std::string cell; std::getline(stream, cell, '\t');) cells.push_back(cell);
    rows.push_back(cells);
  }
  return rows;
}

}  // namespace

std::vector<std::string> CaptureNames() {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(Folder(), error)) {
    if (entry.path().extension() == ".pcap") names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string CapturePath(const std::string& name) { return Folder() / (name + ".pcap"); }

std::vector<std::vector<std::byte>> CaptureFrames(const std::string& name) {
  std::vector<std::vector<std::byte>> frames;
  std::ifstream file(CapturePath(name), std::ios::binary);
  auto reader = tools::CaptureReader::Open(file);
  if (!reader.ok()) {
    ADD_FAILURE() << name << ": " << ToString(reader.error());
    return frames;
  }
  // Ends with the file.
  for (;;) {
    const auto frame = (*reader)->Next();
    if (!frame.ok()) {
      ADD_FAILURE() << name << ": " << ToString(frame.error());
      return frames;
    }
    if (!frame->has_value()) return frames;
    frames.emplace_back((*frame)->bytes.begin(), (*frame)->bytes.end());
  }
}

std::map<FrameKey, std::map<std::string, uint64_t>> TsharkTable() {
  std::map<FrameKey, std::map<std::string, uint64_t>> table;
  const auto rows = ReadTsv("tshark.tsv", true);
  for (size_t i = 1; i < rows.size(); ++i) {
    auto& fields = table[{rows[i].at(0), std::stoul(rows[i].at(1))}];
    for (size_t column = 2; column < rows[i].size(); ++column) {
      if (rows[i][column] == "-") continue;
      fields[rows[0].at(column)] = std::stoull(rows[i][column], nullptr, 0);
    }
  }
  return table;
}

std::multimap<FrameKey, std::string> SpecialFrames() {
  std::multimap<FrameKey, std::string> frames;
  for (const auto& row : ReadTsv("special.tsv", false)) {
    frames.insert({{row.at(0), std::stoul(row.at(1))}, row.at(2)});
  }
  return frames;
}

}  // namespace verbena::testing
