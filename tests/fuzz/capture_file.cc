// SPDX-License-Identifier: Apache-2.0
//
// A capture file for `verbena decode`, with each of its options, as text and as
// JSON. Every output is whole lines, every status is one that is documented.
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/fuzz/fuzz_target.h"
#include "tools/decode/decode.h"

namespace {

std::string Decode(std::string_view file, bool json, bool check) {
  std::istringstream in{std::string(file)};
  std::ostringstream out;
  std::ostringstream err;
  const int status = verbena::tools::DecodeStream(in, "file", json, check, out, err);
  FUZZ_CHECK(status >= verbena::tools::kDecodeOk && status <= verbena::tools::kDecodeFileError);
  FUZZ_CHECK(status != verbena::tools::kDecodeFileError || !err.str().empty());
  FUZZ_CHECK(status != verbena::tools::kDecodeDiffers || check);
  return out.str();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  Decode(file, false, false);
  Decode(file, false, true);
  std::istringstream lines(Decode(file, true, true));
  std::string line;
  uint64_t number = 0;
  while (std::getline(lines, line)) {
    const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    FUZZ_CHECK(object.is_object() && object["frame"] == ++number);
  }
  return 0;
}
