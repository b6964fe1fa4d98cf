// SPDX-License-Identifier: Apache-2.0
//
// main() of the verbs conformance programs. Started as a test it brings up a private daemon and
// runs itself again in the environment that `verbena env` prints (LD_PRELOAD counts at exec only).
// With VERBENA_TEST_INSIDE=1 it runs the tests in the environment as it is, for example against
// another device: VERBENA_TEST_INSIDE=1 VERBENA_TEST_DEVICES=rxe0,rxe1 program (deviations.h).
// With `--role NAME ...` it is another process of a test.
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string>

#include "tests/testing/daemon_fixture.h"
#include "tests/verbs/deviations.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

bool NamespacesWork() {
  ProcessOptions options;
  options.argv = {"unshare",      "--user", "--map-root-user", "--pid", "--fork",
                  "--mount-proc", "true"};
  return RunProcess(options).status == 0;
}

int RunInside(int argc, char** argv) {
  if (getenv("VERBENA_TEST_PID_NAMESPACE") != nullptr && !NamespacesWork()) {
    printf("skipped: this machine does not allow user namespaces\n");
    return 0;
  }
  PrivateDaemon daemon(2);
  ProcessOptions options;
  // With the provider in this program none is loaded, so that a sanitizer sees what it does.
  const bool linked = getenv("VERBENA_TEST_PROVIDER_LINKED") != nullptr;
  options.argv = {"/bin/sh", "-c",
                  std::string("eval \"$(\"$0\" env)\" && ") +
                      (linked ? "unset IBV_DRIVERS && " : "") + "exec \"$@\"",
                  VerbenaCommand()};
  options.argv.insert(options.argv.end(), argv, argv + argc);
  options.environment = daemon.Environment();
  options.environment["VERBENA_TEST_INSIDE"] = "1";
  options.environment["TERM"] = "dumb";  // No colours, although it is a terminal.
  const char* limit = getenv("TEST_TIMEOUT");
  options.limit = std::chrono::seconds(limit != nullptr ? std::max(20, atoi(limit) - 15) : 600);
  Process tests(options);
  const int status = tests.Wait();
  fputs(tests.Output().c_str(), stdout);
  if (status != 0) {
    printf("\nThe tests ended with status %d. State of the daemon:\n%s", status,
           daemon.Dump().c_str());
  }
  return status == 0 ? 0 : 1;
}

void LeaveOutDeviations() {
  const std::string device = DeviceUnderTest("verbena0");
  std::string left_out;
  for (const Deviation& deviation : kDeviations) {
    if (!Concerns(deviation, device)) continue;
    printf("%s: not run: %.*s: %.*s\n", device.c_str(), static_cast<int>(deviation.tests.size()),
           deviation.tests.data(), static_cast<int>(deviation.reason.size()),
           deviation.reason.data());
    left_out += ":" + std::string(deviation.tests);
  }
  if (left_out.empty()) return;
  std::string& filter = ::testing::GTEST_FLAG(filter);
  // Negative patterns come behind one '-'.
  filter += (filter.find('-') == std::string::npos ? "-" : ":") + left_out.substr(1);
}

}  // namespace
}  // namespace verbena::testing

// Some tests leave objects behind on purpose, and a dead device takes none back.
extern "C" const char* __lsan_default_options();
extern "C" const char* __lsan_default_options() { return "detect_leaks=0"; }

int main(int argc, char** argv) {
  using verbena::testing::RunInside;
  signal(SIGPIPE, SIG_IGN);
  try {
    if (const auto status = verbena::testing::RunRole(argc, argv)) return *status;
    if (getenv("VERBENA_TEST_INSIDE") == nullptr) return RunInside(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  ::testing::InitGoogleTest(&argc, argv);
  verbena::testing::LeaveOutDeviations();
  return RUN_ALL_TESTS();
}
