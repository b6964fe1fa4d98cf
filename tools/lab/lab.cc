// SPDX-License-Identifier: Apache-2.0
//
// verbena-lab: `verbena lab` and `verbena report`. A program of its own, so that the verbena
// command itself needs no web server.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <thread>

#include "nic_sim/runtime/read_file.h"
#include "tools/lab/assets.h"
#include "tools/lab/feed.h"
#include "tools/lab/server.h"
#include "tools/lab/transfers.h"
#include "tools/verbena_cli/commands.h"
#include "tools/verbena_cli/lab_options.h"
#include "tools/verbena_cli/text_output.h"

namespace verbena::tools {
namespace {

int Fail(const std::string& sentence) {
  PrintError(sentence);
  return 1;
}

std::string ExamplesFolder(const Parts& parts) {
  const std::string base = parts.program.substr(0, parts.program.rfind('/'));
  std::string folder;
  for (const char* relative : {"../docs/labs/examples", "../lib/verbena/labs"}) {
    folder = fmt::format("{}/{}", base, relative);
    if (access(folder.c_str(), X_OK) == 0) break;
  }
  return folder;
}

void OpenBrowser(const std::string& url) {
  const char* x11 = std::getenv("DISPLAY");
  const char* wayland = std::getenv("WAYLAND_DISPLAY");
  if ((x11 == nullptr || *x11 == '\0') && (wayland == nullptr || *wayland == '\0')) return;
  std::string program = "xdg-open", argument = url;
  char* argv[] = {program.data(), argument.data(), nullptr};
  // Signals that this process waits for are not blocked in the browser.
  posix_spawnattr_t attributes;
  if (posix_spawnattr_init(&attributes) != 0) return;
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  pid_t pid;
  posix_spawnp(&pid, program.c_str(), nullptr, &attributes, argv, environ);
  posix_spawnattr_destroy(&attributes);
}

// Ends the daemon that the lab itself has started.
class OwnDaemon {
 public:
  explicit OwnDaemon(std::string socket) : socket_(std::move(socket)) {}
  ~OwnDaemon() {
    ControlClient client;
    if (socket_.empty() || !client.Connect(socket_).empty()) return;
    client.ShutDown();
  }
  OwnDaemon(const OwnDaemon&) = delete;
  OwnDaemon& operator=(const OwnDaemon&) = delete;

 private:
  std::string socket_;
};

int Lab(const LabOptions& options) {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // before any thread
  signal(SIGPIPE, SIG_IGN);
  signal(SIGCHLD, SIG_DFL);

  std::string socket;
  bool started = false;
  if (const std::string problem = EnsureDaemon(options.instance, 2, &socket, &started);
      !problem.empty()) {
    return Fail(problem);
  }
  const OwnDaemon own(started ? socket : std::string());
  const Parts parts = FindParts();
  Transfers transfers(parts, socket, ExamplesFolder(parts));
  Feed feed(socket, [&](Json* state) { (*state)["transfer"] = transfers.Describe(); });
  LabServer server(socket, &feed, &transfers);
  if (const std::string problem = server.Listen(options.port); !problem.empty()) {
    return Fail(problem);
  }
  if (options.demo) {
    std::vector<TransferRequest> tour;
    for (const char* kind : {"send", "write", "read", "atomic"}) {
      tour.push_back({.kind = kind, .size = 64, .count = 6, .pause_ms = 700});
    }
    if (const std::string problem = transfers.Start(std::move(tour), /*repeat=*/true);
        !problem.empty()) {
      return Fail(problem);
    }
  }
  Print(stdout, "The lab page: {}\nOnly who knows this address can use it. Ctrl-C ends it{}.\n",
        server.url(), started ? ", and the daemon that was started for it" : "");
  std::fflush(stdout);
  std::thread serving([&server] { server.Serve(); });
  if (options.open) OpenBrowser(server.url());
  int signal = 0;
  sigwait(&signals, &signal);
  feed.End();
  server.Stop();
  serving.join();
  return 0;
}

// Events from `verbena trace --json`. False: `*error` says why.
bool ReadTrace(const std::string& path, Json* events, std::string* error) {
  const std::optional<std::string> text = nic::ReadFile(path);
  if (!text) {
    *error = fmt::format("cannot read {}: {}", path, std::strerror(errno));
    return false;
  }
  *events = Json::parse(*text, nullptr, /*allow_exceptions=*/false);
  const bool right = events->is_array() && std::ranges::all_of(*events, [](const Json& event) {
                       return event.is_object() && event.contains("time_ns") &&
                              event["time_ns"].is_number() && event.contains("event") &&
                              event["event"].is_string();
                     });
  if (!right) *error = fmt::format("{} is no output of `verbena trace --json`", path);
  return right;
}

int Report(const ReportOptions& options) {
  Json run = {{"version", 1}, {"states", Json::array()}, {"events", Json::array()}};
  if (!options.trace.empty()) {
    std::string error;
    if (!ReadTrace(options.trace, &run["events"], &error)) return Fail(error);
  } else {
    const Reply trace = Ask(options.instance, {{"op", "trace"}, {"limit", options.last}});
    if (!trace.ok()) return 1;
    run["events"] = ArrayField(trace.json, "events");
    ControlClient client;
    if (!ConnectTo(Resolve(options.instance), &client)) return 1;
    const Reply status = client.Request({{"op", "status"}});
    if (status.ok()) run["states"].push_back(LookAt(&client, status.json));
  }
  if (run["events"].empty()) return Fail("the trace is empty: nothing has happened yet");
  for (Json& event : run["events"]) event = ForPage(event);

  // Inside of a script element: no "<" may be text of the page.
  std::string data;
  for (const char c : Dump(run)) {
    if (c == '<') {
      data += "\\u003c";
    } else {
      data += c;
    }
  }
  std::string page(kStandalonePage);
  page.replace(page.find(kRunMark), kRunMark.size(), data);
  std::FILE* out = options.file == "-" ? stdout : std::fopen(options.file.c_str(), "we");
  if (out == nullptr) {
    return Fail(fmt::format("cannot write {}: {}", options.file, std::strerror(errno)));
  }
  bool written = std::fwrite(page.data(), 1, page.size(), out) == page.size();
  written = std::fflush(out) == 0 && written;
  if (out != stdout) written = std::fclose(out) == 0 && written;
  if (!written) return Fail(fmt::format("cannot write {}", options.file));
  if (out != stdout) {
    Print(stdout, "{}: {} events; open it in a browser\n", options.file, run["events"].size());
  }
  return 0;
}

int Main(int argc, char** argv) {
  CLI::App app("The lab page of Verbena", "verbena");
  LabOptions lab;
  ReportOptions report;
  AddLabCommands(&app, &lab, &report);
  app.require_subcommand(1);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return app.got_subcommand("lab") ? Lab(lab) : Report(report);
}

}  // namespace
}  // namespace verbena::tools

int main(int argc, char** argv) {
  try {
    return verbena::tools::Main(argc, argv);
  } catch (const std::exception& error) {
    verbena::tools::PrintError(error.what());
    return 1;
  }
}
