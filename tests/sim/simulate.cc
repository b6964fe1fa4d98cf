// SPDX-License-Identifier: Apache-2.0
//
// simulate: many seeds of the simulation, or one of them again. See tools/simulate.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "tests/sim/world.h"

namespace {

using verbena::sim::FindProfile;
using verbena::sim::Profile;
using verbena::sim::ProfileOf;
using verbena::sim::Profiles;
using verbena::sim::Report;
using verbena::sim::Totals;
using verbena::sim::World;

struct Options {
  const Profile* profile = nullptr;  // nullptr: by seed
  uint64_t first = 1;
  uint64_t seeds = 10'000;
  uint64_t step = 1;
  bool ladder = false;
};

[[noreturn]] void Usage(const char* what) {
  std::fprintf(stderr,
               "%s\nusage: simulate [--profile NAME] [--seed N] [--first N] [--seeds N] [--step N] "
               "[--ladder] [--profiles]\n",
               what);
  std::exit(2);
}

Options Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const auto value = [&]() -> const char* {
      if (++i == argc) Usage((arg + " needs a value").c_str());
      return argv[i];
    };
    if (arg == "--profile") {
      const char* name = value();
      options.profile = FindProfile(name);
      if (options.profile == nullptr) Usage((std::string("no profile ") + name).c_str());
    } else if (arg == "--seed") {
      options.first = std::strtoull(value(), nullptr, 0);
      options.seeds = 1;
    } else if (arg == "--first") {
      options.first = std::strtoull(value(), nullptr, 0);
    } else if (arg == "--seeds") {
      options.seeds = std::strtoull(value(), nullptr, 0);
    } else if (arg == "--step") {
      options.step = std::max<uint64_t>(std::strtoull(value(), nullptr, 0), 1);
    } else if (arg == "--ladder") {
      options.ladder = true;
    } else if (arg == "--profiles") {
      for (const Profile& profile : Profiles()) std::puts(profile.name);
      std::exit(0);
    } else {
      Usage(("unknown argument " + arg).c_str());
    }
  }
  return options;
}

void Print(const char* name, const Totals& totals, double seconds) {
  std::printf("%-18s %8llu seeds %9llu connections %10llu packets %8llu failed WRs %8.1f s\n", name,
              static_cast<unsigned long long>(totals.seeds),
              static_cast<unsigned long long>(totals.connections),
              static_cast<unsigned long long>(totals.packets),
              static_cast<unsigned long long>(totals.errors), seconds);
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = Parse(argc, argv);
  struct Sum {
    Totals totals;
    double seconds = 0;
  };
  std::map<std::string, Sum> by_profile;
  Sum all;
  for (uint64_t seed = options.first; seed < options.first + options.seeds; seed += options.step) {
    const Profile& profile = options.profile != nullptr ? *options.profile : ProfileOf(seed);
    const auto start = std::chrono::steady_clock::now();
    World world(profile, seed, false);
    const std::string failure = world.Run();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!failure.empty() || options.ladder) {
      std::fputs(Report(profile, seed, options.ladder ? SIZE_MAX : 60).c_str(), stdout);
      if (!failure.empty()) return 1;
    }
    for (Sum* sum : {&by_profile[profile.name], &all}) {
      sum->totals.Add(world.totals());
      sum->seconds += seconds;
    }
  }
  for (const auto& [name, sum] : by_profile) Print(name.c_str(), sum.totals, sum.seconds);
  Print("all", all.totals, all.seconds);
  std::puts("no violation");
  return 0;
}
