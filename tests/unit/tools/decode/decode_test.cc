// SPDX-License-Identifier: Apache-2.0
#include "tools/decode/decode.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/vectors.h"
#include "transport/base/byteorder.h"
#include "transport/wire/icrc.h"

namespace verbena::tools {
namespace {

using nlohmann::json;
using verbena::testing::CapturePath;

struct Output {
  int status = 0;
  std::string out;
  std::string err;

  std::vector<std::string> Lines() const {
    std::vector<std::string> lines;
    std::istringstream stream(out);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
  }
};

Output Decode(const std::string& path, bool as_json, bool check) {
  std::ostringstream out;
  std::ostringstream err;
  Output run;
  run.status = RunDecode(path, as_json, check, out, err);
  run.out = out.str();
  run.err = err.str();
  return run;
}

// A file that this test may spoil; removed at the end.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& bytes) {
    const char* folder = std::getenv("TEST_TMPDIR");
    path_ = std::string(folder != nullptr ? folder : "/tmp") + "/decode_test_XXXXXX";
    const int fd = mkstemp(path_.data());
    EXPECT_GE(fd, 0);
    if (fd >= 0) close(fd);
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  ~TemporaryFile() { unlink(path_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string FileBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

TEST(Decode, PrintsALinePerFrameWithTimeSinceTheFirst) {
  const Output run = Decode(CapturePath("rc_atomics"), false, false);
  EXPECT_EQ(run.status, kDecodeOk);
  EXPECT_EQ(run.err, "");
  ASSERT_EQ(run.Lines().size(), 8u);
  EXPECT_EQ(run.Lines()[1],
            "     2      0.001431 192.168.77.2:50688 > 192.168.77.1 RC_ATOMIC_ACKNOWLEDGE "
            "qp=0x000030 psn=0x111111 ACK credits=none msn=1 original=0x0");
}

TEST(Decode, MarksFramesThatAreNotWhatTheyShouldBe) {
  const Output bad_icrc = Decode(CapturePath("bad_icrc"), false, false);
  EXPECT_EQ(bad_icrc.status, kDecodeOk);
  EXPECT_TRUE(bad_icrc.Lines().at(0).ends_with(" BAD_ICRC")) << bad_icrc.out;
  EXPECT_EQ(bad_icrc.Lines().at(1).find("BAD_ICRC"), std::string::npos);
  const Output foreign = Decode(CapturePath("cm_mckey_v4"), false, false);
  EXPECT_TRUE(foreign.Lines().at(2).ends_with("not_ip: neither IPv4 nor IPv6")) << foreign.out;
}

TEST(DecodeJson, GivesTheNamedFieldsOfEachFrame) {
  const Output run = Decode(CapturePath("rc_send_mtu256"), true, false);
  EXPECT_EQ(run.status, kDecodeOk);
  ASSERT_EQ(run.Lines().size(), 20u);
  // From the sender's log: SEND of one byte, PSN 0x111111, to QP 0x11.
  EXPECT_EQ(json::parse(run.Lines()[0]),
            json::parse(R"({"frame":1,"opcode":"RC_SEND_ONLY","dest_qpn":17,"psn":1118481,
                            "ack_req":true,"pad":3,"payload_len":1,"icrc_ok":true,
                            "error":null})"));
}

TEST(DecodeJson, AgreesWithTsharkOnEveryFrame) {
  const auto tshark = verbena::testing::TsharkTable();
  for (const std::string& name : verbena::testing::CaptureNames()) {
    const auto lines = Decode(CapturePath(name), true, false).Lines();
    EXPECT_EQ(lines.size(), verbena::testing::CaptureFrames(name).size());
    for (size_t i = 0; i < lines.size(); ++i) {
      const json frame = json::parse(lines[i]);
      EXPECT_EQ(frame["frame"], i + 1);
      const auto row = tshark.find({name, i + 1});
      if (row == tshark.end()) {
        EXPECT_TRUE(frame["psn"].is_null());
        EXPECT_TRUE(frame["error"].is_string());
        continue;
      }
      EXPECT_EQ(frame["psn"], row->second.at("psn")) << name << ' ' << i + 1;
      EXPECT_EQ(frame["dest_qpn"], row->second.at("dest_qpn"));
      EXPECT_EQ(frame["ack_req"].get<bool>(), row->second.at("ack_req") != 0);
      EXPECT_EQ(frame["pad"], row->second.at("pad"));
    }
  }
}

TEST(DecodeJson, NamesParseErrors) {
  const auto lines = Decode(CapturePath("tap_python_peer_probes"), true, false).Lines();
  ASSERT_EQ(lines.size(), 72u);
  EXPECT_EQ(json::parse(lines[19])["error"], "bad_tver");
  EXPECT_EQ(json::parse(lines[66])["error"], "reserved_opcode");
  EXPECT_EQ(json::parse(lines[66])["opcode"], "RESERVED");
  EXPECT_TRUE(json::parse(lines[66])["icrc_ok"].is_null());
  EXPECT_EQ(json::parse(lines[27])["icrc_ok"], false);
}

TEST(DecodeCheck, FindsNothingInGoodCaptures) {
  for (const char* name : {"rc_write_many_packets", "ipv6_rc_mix", "vlan_rc", "cm_mckey_v4"}) {
    const Output run = Decode(CapturePath(name), false, true);
    EXPECT_EQ(run.status, kDecodeOk) << run.out;
    EXPECT_EQ(run.Lines().size(), 1u);
    EXPECT_TRUE(run.out.ends_with(" 0 differ\n")) << run.out;
  }
}

TEST(DecodeCheck, FailsForEverySpoiledCapture) {
  const Output bad_icrc = Decode(CapturePath("bad_icrc"), false, true);
  EXPECT_EQ(bad_icrc.status, kDecodeDiffers);
  EXPECT_TRUE(bad_icrc.out.starts_with("frame 1: ICRC is ")) << bad_icrc.out;
  const Output probes = Decode(CapturePath("tap_python_peer_probes"), false, true);
  EXPECT_EQ(probes.status, kDecodeDiffers);
  EXPECT_EQ(probes.Lines().size(), 4u) << probes.out;
}

TEST(DecodeCheck, WithJsonKeepsTheOutputJson) {
  const Output run = Decode(CapturePath("bad_icrc"), true, true);
  EXPECT_EQ(run.status, kDecodeDiffers);
  ASSERT_EQ(run.Lines().size(), 3u);
  for (const std::string& line : run.Lines()) EXPECT_TRUE(json::accept(line)) << line;
  EXPECT_TRUE(run.err.starts_with("frame 1: ICRC is ")) << run.err;
}

TEST(DecodeCheck, NoticesAByteThatNoFieldKeeps) {
  // A pad byte that is not zero, with the right ICRC: legal to receive, never
  // what we build. Frame 1: pcap header 24, record 16, Ethernet 14, IPv4 20, UDP
  // 8, BTH 12, one byte of payload, three of pad, ICRC.
  std::string file = FileBytes(CapturePath("rc_send_mtu256"));
  constexpr size_t kL3 = 24 + 16 + 14;
  constexpr size_t kIcrc = kL3 + 20 + 8 + 12 + 4;
  file.at(kIcrc - 3) = 1;
  std::byte* bytes = reinterpret_cast<std::byte*>(file.data());
  transport::StoreLe32(bytes + kIcrc, transport::Icrc({bytes + kL3, kIcrc - kL3}, false));
  const TemporaryFile spoiled(file);
  const Output run = Decode(spoiled.path(), false, true);
  EXPECT_EQ(run.status, kDecodeDiffers);
  EXPECT_TRUE(run.out.starts_with("frame 1: byte 55 is 01, rebuilt 00\n")) << run.out;
}

TEST(Decode, ReportsFilesThatCannotBeRead) {
  const Output missing = Decode("/nonexistent/x.pcap", false, false);
  EXPECT_EQ(missing.status, kDecodeFileError);
  EXPECT_EQ(missing.err, "verbena decode: /nonexistent/x.pcap: No such file or directory\n");
  const TemporaryFile text("hello, world");
  const Output foreign = Decode(text.path(), false, false);
  EXPECT_EQ(foreign.status, kDecodeFileError);
  EXPECT_NE(foreign.err.find("neither pcap nor pcapng"), std::string::npos);
}

TEST(Decode, AFileCutAtAnyByteIsReportedAndItsWholeFramesAreShown) {
  const std::string whole = FileBytes(CapturePath("rc_atomics"));
  ASSERT_GT(whole.size(), 24u);
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    const TemporaryFile cut(whole.substr(0, bytes));
    const Output run = Decode(cut.path(), false, false);
    EXPECT_LT(run.Lines().size(), 8u);
    EXPECT_EQ(run.status == kDecodeOk, run.err.empty());
    EXPECT_TRUE(run.status == kDecodeOk || run.status == kDecodeFileError);
  }
}

TEST(Decode, ShowsTheHeadersOfAPacketThatTheCaptureCutShort) {
  // As a snapshot length does it: the record keeps the original length.
  std::string file = FileBytes(CapturePath("rc_write_mtu4096"));
  // Only the first frame, of which 100 bytes are kept.
  file.resize(24 + 16 + 100);
  file[24 + 8] = 100;
  file[24 + 9] = 0;
  const TemporaryFile cut(file);
  const Output run = Decode(cut.path(), true, true);
  EXPECT_EQ(run.status, kDecodeOk) << run.err;
  const json frame = json::parse(run.Lines().at(0));
  EXPECT_EQ(frame["payload_len"], 4096);
  EXPECT_TRUE(frame["icrc_ok"].is_null());
  EXPECT_TRUE(frame["error"].is_null());
}

}  // namespace
}  // namespace verbena::tools
