// SPDX-License-Identifier: Apache-2.0
//
// What `verbena doctor` looks at. Each check gives one finding and what follows from it for
// Verbena; none changes anything. The checks that judge a text or a number are functions of it,
// so that tests can show them other machines.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tools/verbena_cli/instance.h"
#include "tools/verbena_cli/parts.h"

namespace verbena::tools {

struct Finding {
  enum class Level {
    kOk,
    kNote,     // works, with a consequence that the user may want to know
    kProblem,  // something of Verbena does not work until this is changed
  };
  std::string name;
  Level level = Level::kOk;
  std::string finding;
  std::string means;
};

const char* LevelName(Finding::Level level);

// How a process that is not our parent may reach our memory: both DMA backends, tried for real.
struct MemoryAccess {
  int process_vm_errno = 0;  // 0 = works
  int proc_mem_errno = 0;
};
MemoryAccess TryMemoryAccess();

// `text`: content of /proc/sys/kernel/yama/ptrace_scope, empty when there is no such file.
Finding JudgePtraceScope(std::string_view text, bool privileged);
// `text`: /proc/self/status.
Finding JudgeSeccomp(std::string_view text);
// `text`: /proc/self/uid_map; `initial_pid_namespace`: is this the machine's first one.
Finding JudgeNamespaces(std::string_view text, bool initial_pid_namespace);
// Bytes; ~0 = unlimited.
Finding JudgeMemlock(unsigned long bytes);
Finding JudgeCpus(int cpus);
// `text`: /proc/meminfo.
Finding JudgeHugepages(std::string_view text);
// `file`: the library's real file name, empty = not installed; `has_private_abi`: it exports
// verbs_register_driver_34.
Finding JudgeLibibverbs(std::string_view file, bool has_private_abi);
std::vector<Finding> JudgeMemoryAccess(const MemoryAccess& access);
// Names under /sys/class/infiniband.
Finding JudgeRealDevices(const std::vector<std::string>& devices);

// All checks but the daemon's state.
std::vector<Finding> ExamineMachine(const Parts& parts);
// Run folder, the daemon, what dead ones left.
std::vector<Finding> ExamineInstance(const InstanceOptions& options);

}  // namespace verbena::tools
