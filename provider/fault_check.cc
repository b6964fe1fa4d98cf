// SPDX-License-Identifier: Apache-2.0
#include "provider/fault_check.h"

namespace verbena::provider {

int AskForFault(Context* context, abi::FaultCheckVerb verb, uint32_t handle) {
  if (context->DeviceDead()) return 0;
  abi::CheckFaultRequest request{};
  request.header.op = abi::kCmdCheckFault;
  request.verb = verb;
  request.handle = handle;
  abi::HandleReply reply;
  const int error = context->channel.Execute(&request, &reply);
  return context->DeviceDead() ? 0 : error;
}

}  // namespace verbena::provider
