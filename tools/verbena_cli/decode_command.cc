// SPDX-License-Identifier: Apache-2.0
#include <iostream>

#include "tools/decode/decode.h"
#include "tools/verbena_cli/commands.h"

namespace verbena::tools {

int Decode(const DecodeOptions& options) {
  const int status = RunDecode(options.file, options.json, options.check, std::cout, std::cerr);
  std::cout.flush();
  return status;
}

}  // namespace verbena::tools
