// SPDX-License-Identifier: Apache-2.0
//
// Stands for verbenad in tests of the command: same arguments, same start, canned answers.
// $FAKE_VERBENAD_LOG: a line per start. $FAKE_VERBENAD_FAIL: says this instead of "ready" and
// ends with status 3. $FAKE_VERBENAD_LINGER: milliseconds for which the supervisor outlives the
// engine; then it adds a line "end" to the log. Ends by itself after 60 s.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/unit/tools/fake_control_server.h"

namespace verbena::tools {
namespace {

constexpr int kSeconds = 60;

FakeAnswer Say(const nlohmann::json& json) { return {{"L" + json.dump()}}; }

FakeAnswer Answer(const std::string& request, int descriptor) {
  const auto json = nlohmann::json::parse(request, nullptr, false);
  const std::string op = json.value("op", "");
  if (op == "version") return Say({{"version", "fake"}, {"abi", {1, 1}}, {"pid", getppid()}});
  if (op == "status") {
    return Say({{"name", "fake"},
                {"pid", getppid()},
                {"clients", 0},
                {"nics", {{{"device", "verbena0"}, {"ipv4", "127.88.0.1"}, {"state", "ACTIVE"}}}}});
  }
  if (op == "list") {
    // As a hostile process name may be.
    return Say({{"items", {{{"qpn", 17}, {"type", "RC"}, {"comm", "x\033[2J"}}}}});
  }
  if (op == "fault_add") return Say({{"error", "unknown key 'nht' in: " + json.value("rule", "")}});
  if (op == "fault_list") {
    return Say({{"rules", {{{"id", 4}, {"rule", "drop nth=3"}, {"hits", 1}}}}});
  }
  if (op == "fault_clear") return Say({{"removed", json.contains("id") ? 0 : 2}});
  if (op == "capture") {
    [[maybe_unused]] const ssize_t written = write(descriptor, "pcapng", 6);
    close(descriptor);
    FakeAnswer answer = Say({{"ok", true}});
    if (json.contains("count")) answer.messages.emplace_back(R"(L{"done":true,"packets":3})");
    return answer;
  }
  if (op == "capture_stop") return Say({{"done", true}, {"packets", 7}, {"missed", 1}});
  if (op == "shutdown") return {{R"(L{"ok":true})"}, false, true};
  return Say({{"error", "unknown op"}});
}

void Log(const std::string& line) {
  const char* log = std::getenv("FAKE_VERBENAD_LOG");
  if (log == nullptr) return;
  const int fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  dprintf(fd, "%s\n", line.c_str());
  close(fd);
}

// As the real one: what goes on is the engine, a child of the supervisor.
void BecomeEngine() {
  if (fork() != 0) _exit(0);
  setsid();
  const pid_t engine = fork();
  if (engine == 0) return;
  waitpid(engine, nullptr, 0);
  if (const char* linger = std::getenv("FAKE_VERBENAD_LINGER")) {
    usleep(static_cast<useconds_t>(std::atoi(linger)) * 1000);
    Log("end");
  }
  _exit(0);
}

int Main(int argc, char** argv) {
  std::string name = "default";
  int ready_fd = -1;
  std::string all;
  for (int i = 1; i < argc; ++i) {
    all += std::string(argv[i]) + " ";
    if (std::strcmp(argv[i], "--name") == 0 && i + 1 < argc) name = argv[i + 1];
    if (std::strcmp(argv[i], "--ready-fd") == 0 && i + 1 < argc) ready_fd = std::atoi(argv[i + 1]);
  }
  Log("start " + all);
  if (const char* failure = std::getenv("FAKE_VERBENAD_FAIL")) {
    if (*failure != '\0') dprintf(ready_fd, "%s\n", failure);
    std::fprintf(stderr, "on stderr\n");
    return 3;
  }
  usleep(200'000);  // long enough for a second starter to come
  const std::string folder = std::string(std::getenv("XDG_RUNTIME_DIR")) + "/verbena";
  if (ready_fd >= 0) BecomeEngine();
  FakeControlServer server(folder + "/" + name + ".sock");
  if (ready_fd >= 0) {
    [[maybe_unused]] const ssize_t written = write(ready_fd, "ready\n", 6);
    close(ready_fd);
  }
  server.Serve(Answer, kSeconds);
  return 0;
}

}  // namespace
}  // namespace verbena::tools

int main(int argc, char** argv) { return verbena::tools::Main(argc, argv); }
