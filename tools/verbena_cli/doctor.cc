// SPDX-License-Identifier: Apache-2.0
#include "tools/verbena_cli/doctor.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <link.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstdlib>
#include <cstring>

#include "nic_sim/runtime/run_folder.h"

namespace verbena::tools {
namespace {

using Level = Finding::Level;

// Enough CPUs that one may spin for the engine.
constexpr int kCpusForSpinning = 4;
// Inode of the machine's first pid namespace (PROC_PID_INIT_INO).
constexpr ino_t kInitialPidNamespace = 0xEFFFFFFC;
constexpr int kOldestLibibverbs = 36;
constexpr int kNewestLibibverbs = 56;

std::string ReadFile(const char* path) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  std::string text;
  char buffer[4096];
  ssize_t length;
  while (text.size() < (1U << 20) && (length = read(fd, buffer, sizeof(buffer))) > 0) {
    text.append(buffer, static_cast<size_t>(length));
  }
  close(fd);
  return text;
}

std::vector<std::string> ListFolder(const std::string& path) {
  std::vector<std::string> names;
  DIR* folder = opendir(path.c_str());
  if (folder == nullptr) return names;
  while (const dirent* entry = readdir(folder)) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  closedir(folder);
  std::sort(names.begin(), names.end());
  return names;
}

// The number after `key` in a file of "Key:  number" lines, or -1.
long Number(std::string_view text, std::string_view key) {
  const size_t at = text.starts_with(key) ? 0 : text.find(fmt::format("\n{}", key));
  if (at == std::string_view::npos) return -1;
  const size_t digit = text.find_first_of("0123456789", at + key.size());
  if (digit == std::string_view::npos) return -1;
  long value = -1;
  std::from_chars(text.data() + digit, text.data() + text.size(), value);
  return value;
}

// What the child of TryMemoryAccess reports.
struct ChildResult {
  int process_vm_errno;
  int proc_mem_errno;
};

// In the child: reads the parent's word, which has `expected` only in the parent.
ChildResult ReadParent(pid_t parent, int mem_fd, const volatile uint64_t* word, uint64_t expected) {
  const auto address = reinterpret_cast<uintptr_t>(word);
  uint64_t copy = 0;
  iovec local = {&copy, sizeof(copy)};
  iovec remote = {reinterpret_cast<void*>(address), sizeof(copy)};
  ChildResult result = {EIO, EIO};
  ssize_t length = process_vm_readv(parent, &local, 1, &remote, 1, 0);
  result.process_vm_errno = length < 0 ? errno : copy == expected ? 0 : EIO;
  copy = 0;
  length = pread(mem_fd, &copy, sizeof(copy), static_cast<off_t>(address));
  result.proc_mem_errno = length < 0 ? errno : copy == expected ? 0 : EIO;
  return result;
}

Finding ExamineKernel() {
  utsname name = {};
  uname(&name);
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
  if (fd >= 0) close(fd);
  const std::string release = fmt::format("Linux {} on {}", name.release, name.machine);
  if (fd >= 0) return {"kernel", Level::kOk, release, "it can tell the end of a process (pidfd)"};
  return {"kernel", Level::kProblem, release + ", pidfd_open is refused",
          "the daemon cannot see that a program has died; needs Linux 5.3 and a seccomp profile "
          "that allows pidfd_open"};
}

Finding ExamineProcmap() {
  // struct procmap_query of Linux 6.11, which Debian 12's headers do not have: size first, then
  // query_flags, query_addr; 104 bytes in all.
  constexpr unsigned long kProcmapQuery = 0xc0686611;
  uint64_t query[13] = {sizeof(query), 0, reinterpret_cast<uintptr_t>(&kInitialPidNamespace)};
  const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  const bool works = fd >= 0 && ioctl(fd, kProcmapQuery, query) == 0;
  if (fd >= 0) close(fd);
  if (works) return {"procmap_query", Level::kOk, "available", "registering memory is quick"};
  return {"procmap_query", Level::kNote, "not available (Linux 6.11 has it)",
          "registering memory reads /proc/self/maps, slower in programs with many mappings"};
}

Finding ExamineLibibverbs() {
  void* library = dlopen("libibverbs.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return JudgeLibibverbs("", false);
  std::string file;
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr) {
    if (char* real = realpath(map->l_name, nullptr)) {
      file = real;
      free(real);
    }
  }
  const bool private_abi =
      dlvsym(library, "verbs_register_driver_34", "IBVERBS_PRIVATE_34") != nullptr;
  dlclose(library);
  return JudgeLibibverbs(file.empty() ? "libibverbs.so.1" : file, private_abi);
}

std::vector<Finding> ExamineParts(const Parts& parts) {
  const auto part = [](const char* name, const std::string& path, const std::string& missing) {
    if (!path.empty()) return Finding{name, Level::kOk, path, ""};
    return Finding{name, Level::kProblem, "missing", missing};
  };
  return {part("verbenad", parts.daemon, parts.missing_daemon),
          part("provider", parts.provider, parts.missing_libraries),
          part("preload", parts.preload, parts.missing_libraries)};
}

Finding ExamineRuntimeFolder() {
  const char* runtime = getenv("XDG_RUNTIME_DIR");
  const std::string folder = nic::RunFolder(/*system=*/false);
  bool missing = false;
  std::string problem =
      nic::CheckRunFolder(folder, /*system=*/false, static_cast<unsigned>(geteuid()), &missing);
  if (!problem.empty() && !missing) return {"run folder", Level::kProblem, folder, problem};
  const std::string state = missing ? folder + " (made by the first daemon)" : folder;
  if (runtime != nullptr && *runtime != '\0' && !folder.starts_with("/tmp/verbena-")) {
    return {"run folder", Level::kOk, state, ""};
  }
  if (runtime == nullptr || *runtime == '\0') {
    return {"run folder", Level::kNote, state,
            "XDG_RUNTIME_DIR is not set. The same user with it set, as in a login session, has "
            "other daemons"};
  }
  return {"run folder", Level::kNote, state,
          fmt::format("XDG_RUNTIME_DIR is {}, which is no folder of user {}: ignored", runtime,
                      geteuid())};
}

// Sockets and trees in the folder whose daemon is gone.
std::vector<std::string> Leftovers(const std::string& folder) {
  std::vector<std::string> leftovers;
  for (const std::string& entry : ListFolder(folder)) {
    if (!entry.ends_with(".sock") && !entry.ends_with(".tree")) continue;
    const std::string name = entry.substr(0, entry.rfind('.'));
    if (!SomebodyListens(folder + "/" + name + ".sock")) leftovers.push_back(entry);
  }
  return leftovers;
}

Finding ExamineDaemon(const InstanceOptions& options) {
  const Instance instance = Resolve(options);
  if (!instance.error.empty()) return {"daemon", Level::kProblem, instance.error, ""};
  const std::string socket = FindRunning(instance);
  if (socket.empty()) {
    return {"daemon", Level::kOk, fmt::format("none named {} is running", instance.name),
            "`verbena up` starts one, `verbena run` too"};
  }
  ControlClient client;
  std::string problem = client.Connect(socket);
  const Reply status = client.Request({{"op", "status"}});
  if (problem.empty() && !status.ok()) problem = status.error;
  if (!problem.empty()) {
    const bool silent = status.kind == Reply::Kind::kTimeout;
    return {"daemon", silent ? Level::kProblem : Level::kNote, "listens at " + socket, problem};
  }
  return {"daemon", Level::kOk,
          fmt::format("{} runs at {} (pid {}, {}, clients: {})", instance.name, socket,
                      TextField(status.json, "pid", "?"), TextField(status.json, "mode", "?"),
                      TextField(status.json, "clients", "?")),
          ""};
}

}  // namespace

const char* LevelName(Level level) {
  switch (level) {
    case Level::kOk:
      return "ok";
    case Level::kNote:
      return "note";
    case Level::kProblem:
      return "problem";
  }
  return "?";
}

MemoryAccess TryMemoryAccess() {
  MemoryAccess access = {EIO, EIO};
  constexpr uint64_t kExpected = 0x7665726265'6e61;
  static volatile uint64_t word;
  word = 0;
  const pid_t self = getpid();
  const int mem_fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
  const int mem_errno = errno;
  int go[2];
  int result[2];
  if (pipe2(go, O_CLOEXEC) != 0) return access;
  if (pipe2(result, O_CLOEXEC) != 0) {
    close(go[0]);
    close(go[1]);
    return access;
  }
  // The child plays the daemon. Yama lets a parent read its child: only this direction tells.
  const pid_t child = fork();
  if (child == 0) {
    char byte;
    if (read(go[0], &byte, 1) != 1) _exit(1);
    const ChildResult found = ReadParent(self, mem_fd, &word, kExpected);
    _exit(write(result[1], &found, sizeof(found)) == ssize_t{sizeof(found)} ? 0 : 1);
  }
  close(go[0]);
  close(result[1]);
  if (child > 0) {
    word = kExpected;  // after the fork: the child's own copy does not have it
    ChildResult found = {EIO, EIO};
    const bool asked = write(go[1], "x", 1) == 1;
    pollfd answer = {result[0], POLLIN, 0};
    if (asked && poll(&answer, 1, 5000) == 1 &&
        read(result[0], &found, sizeof(found)) == ssize_t{sizeof(found)}) {
      access = {found.process_vm_errno, mem_fd < 0 ? mem_errno : found.proc_mem_errno};
    } else {
      kill(child, SIGKILL);
    }
    waitpid(child, nullptr, 0);
  }
  close(go[1]);
  close(result[0]);
  if (mem_fd >= 0) close(mem_fd);
  return access;
}

Finding JudgePtraceScope(std::string_view text, bool privileged) {
  if (text.empty()) return {"yama", Level::kOk, "not active", ""};
  const char scope = text.front();
  const std::string finding = fmt::format("ptrace_scope is {}", scope);
  if (scope == '0') return {"yama", Level::kOk, finding, ""};
  if (privileged && scope != '3') {
    return {"yama", Level::kOk, finding, "root's daemon is exempt"};
  }
  return {"yama", Level::kNote, finding,
          "the daemon may not use process_vm_readv on programs: it copies through their "
          "/proc/self/mem, slower. sysctl kernel.yama.ptrace_scope=0 allows it"};
}

Finding JudgeSeccomp(std::string_view text) {
  const long mode = Number(text, "Seccomp:");
  if (mode <= 0) return {"seccomp", Level::kOk, "no filter", ""};
  return {"seccomp", Level::kNote, "a system call filter is active (a container's?)",
          "system calls that it refuses are named by the checks of memory access and kernel"};
}

Finding JudgeNamespaces(std::string_view text, bool initial_pid_namespace) {
  // The initial user namespace maps all 2^32 - 1 ids.
  const bool initial_user = text.find("4294967295") != std::string_view::npos;
  if (initial_user && initial_pid_namespace) {
    return {"namespaces", Level::kOk, "none (pid and user are the machine's own)", ""};
  }
  return {"namespaces", Level::kNote,
          fmt::format("in a {} namespace (a container?)", initial_user            ? "pid"
                                                          : initial_pid_namespace ? "user"
                                                                                  : "pid and user"),
          "programs of the same namespace work as usual; those of another one reach a daemon "
          "through /proc/self/mem if its socket is visible to them"};
}

Finding JudgeMemlock(unsigned long bytes) {
  const std::string limit =
      bytes == ~0UL ? std::string("unlimited") : fmt::format("{} KiB", bytes / 1024);
  return {"memlock", Level::kOk, limit, "Verbena pins no pages: any limit will do"};
}

Finding JudgeCpus(int cpus) {
  const std::string finding = fmt::format("{} CPU{} for this process", cpus, cpus == 1 ? "" : "s");
  if (cpus >= kCpusForSpinning) {
    return {"cpus", Level::kOk, finding, "one engine thread spins when programs are active"};
  }
  return {"cpus", Level::kNote, finding,
          fmt::format("scarce: an engine thread per CPU and hand-over between programs and engine; "
                      "latencies are those of thread switches. {} CPUs or more are better",
                      kCpusForSpinning)};
}

Finding JudgeHugepages(std::string_view text) {
  const long total = Number(text, "HugePages_Total:");
  if (total > 0) return {"hugepages", Level::kOk, fmt::format("{} pages", total), ""};
  return {"hugepages", Level::kOk, "none", "the engine works without"};
}

Finding JudgeLibibverbs(std::string_view file, bool has_private_abi) {
  if (file.empty()) {
    return {"libibverbs", Level::kProblem, "libibverbs.so.1 is not installed",
            "no verbs program can run: apt-get install libibverbs1 ibverbs-utils"};
  }
  if (!has_private_abi) {
    return {"libibverbs", Level::kProblem, std::string(file),
            "it has another private interface than 34 (rdma-core 36 to 56): our provider cannot "
            "be loaded by it"};
  }
  // libibverbs.so.1.14.RELEASE.0
  constexpr std::string_view kStem = "libibverbs.so.1.";
  int release = 0;
  if (const size_t stem = file.find(kStem); stem != std::string_view::npos) {
    const size_t dot = file.find('.', stem + kStem.size());
    if (dot != std::string_view::npos) {
      std::from_chars(file.data() + dot + 1, file.data() + file.size(), release);
    }
  }
  const std::string finding =
      release > 0 ? fmt::format("release {} ({})", release, file) : std::string(file);
  if (release == 0 || (release >= kOldestLibibverbs && release <= kNewestLibibverbs)) {
    return {"libibverbs", Level::kOk, finding, ""};
  }
  return {
      "libibverbs", Level::kNote, finding,
      fmt::format("Verbena is made for releases {} to {}", kOldestLibibverbs, kNewestLibibverbs)};
}

std::vector<Finding> JudgeMemoryAccess(const MemoryAccess& access) {
  const auto failed = [](int error) { return fmt::format("refused: {}", std::strerror(error)); };
  const bool vm = access.process_vm_errno == 0;
  const bool mem = access.proc_mem_errno == 0;
  const char* kNone = "the daemon cannot reach the memory of programs: no data can move";
  return {{"process_vm_readv",
           vm    ? Level::kOk
           : mem ? Level::kNote
                 : Level::kProblem,
           vm ? "works between processes" : failed(access.process_vm_errno),
           vm    ? ""
           : mem ? "the daemon copies through /proc/self/mem, slower"
                 : kNone},
          {"/proc/self/mem",
           mem  ? Level::kOk
           : vm ? Level::kNote
                : Level::kProblem,
           mem ? "works between processes" : failed(access.proc_mem_errno),
           mem  ? ""
           : vm ? "programs in other namespaces cannot use this daemon"
                : kNone}};
}

Finding JudgeRealDevices(const std::vector<std::string>& devices) {
  if (devices.empty()) return {"real devices", Level::kOk, "this machine has no RDMA device", ""};
  return {"real devices", Level::kNote, fmt::format("{}", fmt::join(devices, ", ")),
          "programs under `verbena run` see the simulated devices instead of these"};
}

std::vector<Finding> ExamineMachine(const Parts& parts) {
  std::vector<Finding> findings = ExamineParts(parts);
  findings.push_back(ExamineLibibverbs());
  findings.push_back(ExamineKernel());
  for (Finding& finding : JudgeMemoryAccess(TryMemoryAccess())) {
    findings.push_back(std::move(finding));
  }
  findings.push_back(
      JudgePtraceScope(ReadFile("/proc/sys/kernel/yama/ptrace_scope"), geteuid() == 0));
  findings.push_back(JudgeSeccomp(ReadFile("/proc/self/status")));
  struct stat pid_namespace = {};
  const bool initial = stat("/proc/self/ns/pid", &pid_namespace) != 0 ||
                       pid_namespace.st_ino == kInitialPidNamespace;
  findings.push_back(JudgeNamespaces(ReadFile("/proc/self/uid_map"), initial));
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  if (sched_getaffinity(0, sizeof(cpus), &cpus) != 0) CPU_SET(0, &cpus);
  findings.push_back(JudgeCpus(CPU_COUNT(&cpus)));
  rlimit memlock = {};
  getrlimit(RLIMIT_MEMLOCK, &memlock);
  findings.push_back(JudgeMemlock(memlock.rlim_cur));
  findings.push_back(JudgeHugepages(ReadFile("/proc/meminfo")));
  findings.push_back(ExamineProcmap());
  findings.push_back(JudgeRealDevices(ListFolder("/sys/class/infiniband")));
  return findings;
}

std::vector<Finding> ExamineInstance(const InstanceOptions& options) {
  std::vector<Finding> findings = {ExamineRuntimeFolder(), ExamineDaemon(options)};
  const std::string folder = nic::RunFolder(/*system=*/false);
  const std::vector<std::string> leftovers = Leftovers(folder);
  if (leftovers.empty()) {
    findings.push_back({"leftovers", Level::kOk, "none", ""});
  } else {
    findings.push_back(
        {"leftovers", Level::kNote,
         fmt::format("left in {} by a daemon that is gone: {}", folder, fmt::join(leftovers, ", ")),
         "it was killed; the next `verbena up` of that name cleans up"});
  }
  return findings;
}

}  // namespace verbena::tools
