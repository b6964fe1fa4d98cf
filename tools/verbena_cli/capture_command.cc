// SPDX-License-Identifier: Apache-2.0
//
// capture: opens the output file with the caller's rights, passes it to the daemon, and ends the
// capture at a signal or limit.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>

#include "tools/verbena_cli/commands.h"
#include "tools/verbena_cli/text_output.h"

namespace verbena::tools {
namespace {

constexpr double kLongestSeconds = 365.0 * 24 * 3600;

// SIGINT and SIGTERM become readable here instead of ending the process.
int OpenStopSignals() {
  // A shell without job control starts background commands with SIGINT ignored; here it means
  // the end all the same.
  signal(SIGINT, SIG_DFL);
  signal(SIGTERM, SIG_DFL);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  return signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
}

int OpenOutput(const std::string& file, std::string* error) {
  if (file == "-") {
    if (isatty(STDOUT_FILENO) != 0) {
      *error = "a capture is binary; send it into a file or pipe: verbena capture - | tshark -r -";
      return -1;
    }
    return fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
  }
  const int fd = open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOCTTY, 0666);
  if (fd < 0) *error = fmt::format("cannot write {}: {}", file, std::strerror(errno));
  return fd;
}

Json CaptureRequest(const CaptureOptions& options) {
  Json request = {{"op", "capture"}, {"stage", options.stage}};
  if (!options.device.empty()) request["dev"] = options.device;
  if (options.qpn) request["qpn"] = *options.qpn;
  if (options.count > 0) request["count"] = options.count;
  return request;
}

// From the start of the capture to the daemon's last word.
Reply WaitForEnd(ControlClient* client, double seconds, int stop_fd) {
  const auto limit = seconds > 0 ? ControlClient::Milliseconds(std::llround(seconds * 1000))
                                 : ControlClient::Milliseconds(-1);
  Reply end = client->Receive(limit, stop_fd);
  if (end.kind != Reply::Kind::kCancelled && end.kind != Reply::Kind::kTimeout) return end;
  Reply stop = client->Send({{"op", "capture_stop"}});
  if (!stop.ok()) return stop;
  return client->Receive(ControlClient::kTimeout);
}

}  // namespace

int Capture(const CaptureOptions& options) {
  if (options.seconds < 0 || options.seconds > kLongestSeconds) {
    PrintError("--for takes seconds between 0 and a year");
    return 1;
  }
  ControlClient client;
  if (!ConnectTo(Resolve(options.instance), &client)) return 1;
  const int stop_fd = OpenStopSignals();
  std::string error;
  const int output = OpenOutput(options.file, &error);
  if (output < 0) {
    PrintError(error);
    return 1;
  }
  const Reply started = client.Request(CaptureRequest(options), output);
  close(output);
  if (!started.ok()) {
    PrintError(started.error);
    return 1;
  }
  Print(stderr, "capturing {} {} the fault stage into {}; Ctrl-C ends it\n",
        options.device.empty() ? "all devices" : options.device, options.stage, options.file);
  const Reply end = WaitForEnd(&client, options.seconds, stop_fd);
  if (!end.ok()) {
    PrintError("the capture did not end as it should: " + end.error);
    return 1;
  }
  Print(stderr, "{} packets captured\n", TextField(end.json, "packets", "?"));
  if (IntegerField(end.json, "missed") > 0) {
    Print(stderr, "{} packets missed: the output was too slow\n", TextField(end.json, "missed"));
  }
  return 0;
}

}  // namespace verbena::tools
