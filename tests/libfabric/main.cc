// SPDX-License-Identifier: Apache-2.0
//
// Brings up a private daemon with two NICs and runs itself again in the
// environment that `verbena env` prints; inside, with VERBENA_TEST_INSIDE=1, the
// tests run in the environment as it is.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdio>
#include <exception>

#include "tests/testing/daemon_fixture.h"

// librdmacm's rdma_getaddrinfo gives memory that libfabric 1.17 does not give back.
extern "C" const char* __lsan_default_suppressions() { return "leak:rdma_getaddrinfo"; }

namespace {

int RunInside(int argc, char** argv) {
  using namespace verbena::testing;
  PrivateDaemon daemon(2);
  ProcessOptions options;
  options.argv = {"/bin/sh", "-c", "eval \"$(\"$0\" env)\" && exec \"$@\"", VerbenaCommand()};
  options.argv.insert(options.argv.end(), argv, argv + argc);
  options.environment = daemon.Environment();
  options.environment["VERBENA_TEST_INSIDE"] = "1";
  options.environment["TERM"] = "dumb";
#ifdef __SANITIZE_THREAD__
  // libfabric's hook of madvise() is called by threads that end, when the
  // sanitizer has forgotten them.
  options.environment["FI_MR_CACHE_MONITOR"] = "disabled";
#endif
  options.limit = std::chrono::seconds(240);
  Process tests(options);
  const int status = tests.Wait();
  fputs(tests.Output().c_str(), stdout);
  if (status != 0) printf("\nState of the daemon:\n%s", daemon.Dump().c_str());
  return status == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (getenv("VERBENA_TEST_INSIDE") == nullptr) return RunInside(argc, argv);
  } catch (const std::exception& error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
