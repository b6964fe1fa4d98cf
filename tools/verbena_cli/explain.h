// SPDX-License-Identifier: Apache-2.0
//
// The daemon explains failures in its log by the same words.
#pragma once

#include "nic_sim/trace/explain.h"

namespace verbena::tools {

using nic::EventLine;
using nic::EventText;
using nic::Explain;
using nic::Explanation;
using nic::ExplanationText;

}  // namespace verbena::tools
