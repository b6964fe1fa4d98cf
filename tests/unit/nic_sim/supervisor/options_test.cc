// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/supervisor/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

namespace verbena::nic {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

OptionsResult Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "verbenad");
  return ParseOptions(static_cast<int>(arguments.size()), arguments.data());
}

std::string Config(const char* text, DaemonOptions* options, bool nics_given = false) {
  return ParseConfig(text, "v.toml", nics_given, options);
}

TEST(Options, DefaultsAndEnvironment) {
  unsetenv("VERBENA_NAME");
  const OptionsResult result = Parse({});
  EXPECT_FALSE(result.failed) << result.text;
  EXPECT_EQ(result.options.name, "default");
  EXPECT_EQ(result.options.nics, 1u);
  EXPECT_EQ(result.options.nic_options.size(), 1u);
  EXPECT_EQ(result.options.ready_fd, -1);
  setenv("VERBENA_NAME", "fromenv", 1);
  EXPECT_EQ(Parse({}).options.name, "fromenv");
  EXPECT_EQ(Parse({"--name", "typed"}).options.name, "typed");
  unsetenv("VERBENA_NAME");
}

TEST(Options, WrongOnesAreErrorsThatNameThem) {
  EXPECT_THAT(Parse({"--nics", "0"}).text, HasSubstr("--nics"));
  EXPECT_THAT(Parse({"--nics", "65"}).text, HasSubstr("--nics"));
  EXPECT_THAT(Parse({"--name", "../x"}).text, HasSubstr("../x"));
  EXPECT_THAT(Parse({"--fast"}).text, HasSubstr("--fast"));
  EXPECT_THAT(Parse({"--mode", "quick"}).text, HasSubstr("--mode"));
  EXPECT_THAT(Parse({"--system", "--group", "no such group"}).text, HasSubstr("no such group"));
  EXPECT_THAT(Parse({"--group", "root"}).text, HasSubstr("--system"));
  EXPECT_THAT(Parse({"--config", "/nowhere/v.toml"}).text, HasSubstr("/nowhere/v.toml"));
  for (const auto& result : {Parse({"--nics", "0"}), Parse({"--fast"})}) {
    EXPECT_TRUE(result.failed);
    EXPECT_FALSE(result.done);
  }
  EXPECT_TRUE(Parse({"--help"}).done);
  EXPECT_THAT(Parse({"--version"}).text, HasSubstr("verbenad 0."));
}

TEST(Options, TheEngineProcessGetsTheSameOptions) {
  const OptionsResult result =
      Parse({"--name", "lab", "--nics", "3", "--strict", "--pci", "--hugepages", "--telemetry",
             "--mode", "spinning", "--log-level", "debug", "--exit-idle", "7", "--foreground",
             "--system", "--group", "root"});
  ASSERT_FALSE(result.failed) << result.text;
  const std::vector<std::string> again = EngineArguments(result.options, 9);
  std::vector<const char*> arguments;
  for (const std::string& argument : again) arguments.push_back(argument.c_str());
  const OptionsResult engine = Parse(arguments);
  ASSERT_FALSE(engine.failed) << engine.text;
  EXPECT_EQ(engine.options.engine_link_fd, 9);
  EXPECT_EQ(engine.options.name, "lab");
  EXPECT_EQ(engine.options.nics, 3u);
  EXPECT_TRUE(engine.options.strict && engine.options.pci && engine.options.hugepages);
  EXPECT_TRUE(engine.options.telemetry);
  EXPECT_EQ(engine.options.mode, "spinning");
  EXPECT_EQ(engine.options.log_level, "debug");
  EXPECT_EQ(engine.options.exit_idle_s, 7u);
  EXPECT_EQ(engine.options.control_group, 0);
}

TEST(Options, AFolderIsNoConfigurationFile) {
  const OptionsResult result = Parse({"--config", "/"});
  EXPECT_TRUE(result.failed);
  EXPECT_THAT(result.text, HasSubstr("cannot read /: Is a directory"));
}

TEST(Options, AConfigurationFileGivesAddresses) {
  DaemonOptions options;
  EXPECT_EQ(Config("nics = 2\nhost = 3\n"
                   "[verbena1]\naddresses = [\"10.0.0.1\", \"fd00::1\"]\n",
                   &options),
            "");
  EXPECT_EQ(options.nics, 2u);
  EXPECT_EQ(options.host, 3u);
  ASSERT_EQ(options.nic_options.size(), 2u);
  EXPECT_TRUE(options.nic_options[0].addresses.empty());
  const auto& addresses = options.nic_options[1].addresses;
  ASSERT_EQ(addresses.size(), 2u);
  EXPECT_EQ(addresses[0].gid, transport::Gid::FromIpv4(0x0a000001));
  EXPECT_EQ(addresses[1].gid.ToString(), "fd00::1");
}

TEST(Options, TheCommandLineWinsOverTheFile) {
  DaemonOptions options;
  options.nics = 4;
  EXPECT_EQ(Config("nics = 2\n[verbena3]\naddresses = [\"10.0.0.4\"]\n", &options, true), "");
  EXPECT_EQ(options.nics, 4u);
  EXPECT_EQ(options.nic_options[3].addresses.size(), 1u);
}

TEST(Options, ErrorsOfTheFileNameFileAndLine) {
  DaemonOptions options;
  EXPECT_THAT(Config("nics = 2\nhost = \n", &options), StartsWith("v.toml:2: "));
  EXPECT_THAT(Config("\n\nnics = \"two\"\n", &options), StartsWith("v.toml:3: nics"));
  EXPECT_THAT(Config("nics = 1000\n", &options), StartsWith("v.toml:1: nics"));
  EXPECT_THAT(Config("nic = 2\n", &options), StartsWith("v.toml:1: unknown key 'nic'"));
  EXPECT_THAT(Config("nics = 1\n[verbena1]\naddresses = []\n", &options),
              StartsWith("v.toml:2: there is no device 'verbena1'"));
  EXPECT_THAT(Config("[verbena0]\nspeed = 1\n", &options),
              StartsWith("v.toml:2: unknown key 'speed'"));
  for (const char* bad : {"\"10.0.0.256\"", "\"host.example\"", "\"224.0.0.1\"", "\"::\"",
                          "\"0.0.0.0\"", "7", "\"ff02::1\""}) {
    EXPECT_THAT(
        Config((std::string("[verbena0]\naddresses = [\n\"10.0.0.1\",\n") + bad + "]\n").c_str(),
               &options),
        StartsWith("v.toml:4: "))
        << bad;
  }
  EXPECT_THAT(Config("nics = 2\n[verbena0]\naddresses = [\"10.0.0.1\"]\n[verbena1]\n"
                     "addresses = [\"10.0.0.1\"]\n",
                     &options),
              StartsWith("v.toml:5: "));
}

}  // namespace
}  // namespace verbena::nic
