// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/supervisor/options.h"

#include <fmt/format.h>
#include <grp.h>
#include <toml++/toml.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "nic_sim/ctrl/resource_limits.h"
#include "nic_sim/runtime/read_file.h"
#include "nic_sim/runtime/run_folder.h"
#include "nic_sim/runtime/version.h"

namespace verbena::nic {
namespace {

constexpr int64_t kMaxHost = 254;
constexpr size_t kMaxAddresses = kGidTableLen - 1;  // GID 0 is link-local
constexpr uint32_t kMaxIdleSeconds = 30 * 24 * 3600;

// Single values of a NIC. Each gives what is wrong, or nothing.
struct NicReader {
  static std::string Address(std::string_view text, NicOptions* options) {
    const auto address = ParseInterfaceAddress(text);
    if (!address) {
      return fmt::format("'{}' is not an IPv4 or IPv6 address of an interface", text);
    }
    if (options->addresses.size() >= kMaxAddresses) {
      return fmt::format("there are more than {} addresses", kMaxAddresses);
    }
    options->addresses.push_back(*address);
    return {};
  }
  static std::string Gateway(std::string_view text, NicOptions* options) {
    const auto gid = transport::Gid::Parse(text);
    if (!gid || gid->IsMulticast() || gid->IsZero() || IsLoopback(*gid)) {
      return fmt::format("'{}' is not an address of a gateway", text);
    }
    for (const transport::Gid& other : options->gateways) {
      if (other.IsV4Mapped() == gid->IsV4Mapped()) {
        return fmt::format("'{}' is a second gateway of its family", text);
      }
    }
    options->gateways.push_back(*gid);
    return {};
  }
  static std::string Mac(std::string_view text, NicOptions* options) {
    options->mac = transport::MacAddress::Parse(text);
    if (options->mac && !options->mac->IsGroup() && *options->mac != transport::MacAddress()) {
      return {};
    }
    return fmt::format("'{}' is not a MAC address of one interface", text);
  }
  static std::string Port(std::string_view text, NicOptions* options) {
    std::string error;
    options->port = ParsePortSpec(text, &error);
    return error;
  }
};

// Collects the first error of a file.
class ConfigReader {
 public:
  ConfigReader(std::string path, DaemonOptions* options)
      : path_(std::move(path)), options_(options) {}

  void Read(const toml::table& file, bool nics_given) {
    // Numbers first: the tables' names depend on the number of NICs.
    for (const auto& [key, value] : file) {
      if (value.is_table()) continue;
      if (key == "rule") {
        const std::string problem = ReadRuleTables(value, path_, &options_->rules);
        if (error_.empty()) error_ = problem;
      } else if (key == "nics") {
        const uint32_t nics = Number(key.str(), value, 1, kMaxNics);
        if (!nics_given && error_.empty()) options_->nics = nics;
      } else if (key == "host") {
        options_->host = Number(key.str(), value, 0, kMaxHost);
      } else {
        Fail(key.source(), fmt::format("unknown key '{}'; known are nics, host and tables like "
                                       "[verbena0] and [[rule]]",
                                       key.str()));
      }
    }
    options_->nic_options.assign(options_->nics, {});
    for (const auto& [key, value] : file) {
      if (value.is_table()) ReadNic(key, *value.as_table());
    }
  }
  const std::string& error() const { return error_; }

 private:
  void Fail(const toml::source_region& where, const std::string& what) {
    if (error_.empty()) error_ = fmt::format("{}:{}: {}", path_, where.begin.line, what);
  }

  uint32_t Number(std::string_view key, const toml::node& node, int64_t low, int64_t high) {
    const auto value = node.value_exact<int64_t>();
    if (value && *value >= low && *value <= high) return static_cast<uint32_t>(*value);
    Fail(node.source(), fmt::format("{} must be a number from {} to {}", key, low, high));
    return static_cast<uint32_t>(low);
  }

  void ReadNic(const toml::key& name, const toml::table& table) {
    for (uint32_t nic = 0; nic < options_->nics; ++nic) {
      if (name.str() != fmt::format("verbena{}", nic)) continue;
      NicOptions& options = options_->nic_options[nic];
      for (const auto& [key, value] : table) {
        if (key == "addresses") {
          ReadAddresses(value, &options.addresses);
        } else if (key == "gateways") {
          ReadList(key, value, 2, &NicReader::Gateway, &options);
        } else if (key == "mac") {
          ReadText(key, value, &NicReader::Mac, &options);
        } else if (key == "port") {
          ReadText(key, value, &NicReader::Port, &options);
        } else {
          Fail(key.source(), fmt::format("unknown key '{}' of {}; known are addresses, gateways, "
                                         "mac and port",
                                         key.str(), name.str()));
        }
      }
      return;
    }
    Fail(name.source(), fmt::format("there is no device '{}'; with nics = {} the last one is "
                                    "verbena{}",
                                    name.str(), options_->nics, options_->nics - 1));
  }

  using Setter = std::string (*)(std::string_view, NicOptions*);

  void ReadText(const toml::key& key, const toml::node& node, Setter set, NicOptions* options) {
    const auto text = node.value_exact<std::string>();
    const std::string problem =
        text ? set(*text, options) : fmt::format("{} must be a text", key.str());
    if (!problem.empty()) Fail(node.source(), problem);
  }

  void ReadList(const toml::key& key, const toml::node& node, size_t most, Setter set,
                NicOptions* options) {
    const toml::array* list = node.as_array();
    if (list == nullptr || list->size() > most) {
      Fail(node.source(), fmt::format("{} must be a list of at most {} texts", key.str(), most));
      return;
    }
    for (const toml::node& item : *list) ReadText(key, item, set, options);
  }

  void ReadAddresses(const toml::node& node, std::vector<InterfaceAddress>* addresses) {
    const toml::array* list = node.as_array();
    if (list == nullptr || list->size() > kMaxAddresses) {
      Fail(node.source(),
           fmt::format("addresses must be a list of at most {} texts", kMaxAddresses));
      return;
    }
    for (const toml::node& item : *list) {
      const auto text = item.value_exact<std::string>();
      const auto address = text ? ParseInterfaceAddress(*text) : std::nullopt;
      if (!address) {
        Fail(item.source(), fmt::format("{} is not an IPv4 or IPv6 address of an interface",
                                        text ? "'" + *text + "'" : std::string("this")));
        return;
      }
      if (!seen_.insert(address->gid).second) {
        Fail(item.source(), fmt::format("the address {} stands here twice", *text));
        return;
      }
      addresses->push_back(*address);
    }
  }

  std::string path_;
  DaemonOptions* options_;
  std::set<transport::Gid> seen_;
  std::string error_;
};

// Found before everything is parsed: whoever waits at that pipe is to hear what is wrong.
int FindReadyFd(int argc, const char* const* argv) {
  constexpr std::string_view kOption = "--ready-fd";
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const char* value = nullptr;
    if (argument == kOption) value = argv[i + 1];  // argv ends with a null pointer
    if (argument.starts_with("--ready-fd=")) value = argv[i] + kOption.size() + 1;
    const int fd = value == nullptr ? -1 : std::atoi(value);
    if (fd > STDERR_FILENO) return fd;
  }
  return -1;
}

// A name or a number; -1: there is no such group.
int FindGroup(const std::string& text) {
  int number = -1;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  if (parsed.ec == std::errc() && parsed.ptr == end && number >= 0) return number;
  const group* found = getgrnam(text.c_str());
  return found == nullptr ? -1 : static_cast<int>(found->gr_gid);
}

// "verbena0=VALUE" of --port and its like.
std::string ApplyNicArgument(const std::string& option, const std::string& text,
                             DaemonOptions* options, std::set<size_t>* with_addresses) {
  const size_t equals = text.find('=');
  size_t nic = 0;
  while (nic < options->nics && text.substr(0, equals) != fmt::format("verbena{}", nic)) ++nic;
  if (equals == std::string::npos || nic == options->nics) {
    return fmt::format("{} needs DEVICE=VALUE with a device from verbena0 to verbena{}, not '{}'",
                       option, options->nics - 1, text);
  }
  NicOptions& of_nic = options->nic_options[nic];
  const std::string value = text.substr(equals + 1);
  std::string problem;
  if (option == "--address") {
    // The command line's addresses take the place of the file's.
    if (with_addresses->insert(nic).second) of_nic.addresses.clear();
    problem = NicReader::Address(value, &of_nic);
  } else if (option == "--gateway") {
    problem = NicReader::Gateway(value, &of_nic);
  } else if (option == "--mac") {
    problem = NicReader::Mac(value, &of_nic);
  } else {
    problem = NicReader::Port(value, &of_nic);
  }
  return problem.empty() ? "" : fmt::format("{} {}: {}", option, text, problem);
}

// Two NICs cannot be on one netdev, and an address has one owner.
std::string CheckNics(const DaemonOptions& options) {
  std::set<std::string> netdevs;
  std::set<transport::Gid> addresses;
  for (const NicOptions& nic : options.nic_options) {
    if (nic.port && !netdevs.insert(nic.port->interface).second) {
      return fmt::format("two NICs are to be joined to {}", nic.port->interface);
    }
    for (const InterfaceAddress& address : nic.addresses) {
      if (!addresses.insert(address.gid).second) {
        return fmt::format("the address {} is given twice", address.gid.ToString());
      }
    }
    for (const transport::Gid& gateway : nic.gateways) {
      const bool on_link =
          std::any_of(nic.addresses.begin(), nic.addresses.end(),
                      [&gateway](const InterfaceAddress& a) { return IsOnLink(a, gateway); });
      if (!on_link && !gateway.IsLinkLocal()) {
        return fmt::format("no address of the NIC is on the link of the gateway {}",
                           gateway.ToString());
      }
    }
  }
  return {};
}

std::string ReadConfigFile(DaemonOptions* options, bool nics_given) {
  char* real = realpath(options->config.c_str(), nullptr);
  if (real == nullptr) {
    return fmt::format("cannot read {}: {}", options->config, std::strerror(errno));
  }
  options->config = real;  // the daemon leaves the working folder
  free(real);
  const std::optional<std::string> text = ReadFile(options->config);
  if (!text) return fmt::format("cannot read {}: {}", options->config, std::strerror(errno));
  return ParseConfig(*text, options->config, nics_given, options);
}

}  // namespace

std::string ParseConfig(std::string_view text, const std::string& path, bool nics_given,
                        DaemonOptions* options) {
  ConfigReader reader(path, options);
  try {
    reader.Read(toml::parse(text, path), nics_given);
  } catch (const toml::parse_error& error) {
    return fmt::format("{}:{}: {}", path, error.source().begin.line, error.description());
  }
  return reader.error();
}

OptionsResult ParseOptions(int argc, const char* const* argv) {
  OptionsResult result;
  DaemonOptions& o = result.options;
  CLI::App app(
      "verbenad plays a software RDMA NIC. `verbena up` starts it; by itself it goes into the "
      "background and returns when its devices are ready.",
      "verbenad");
  std::string name;
  app.set_version_flag("--version", std::string("verbenad ") + kVersion);
  app.add_option("--name", name, "instance name (default: $VERBENA_NAME, else 'default')");
  CLI::Option* nics = app.add_option("--nics", o.nics, "number of NICs: verbena0, verbena1, ...")
                          ->check(CLI::Range(1u, kMaxNics));
  app.add_flag("--system", o.system, "for all users, in /run/verbena (needs root)");
  std::string control_group;
  app.add_option("--group", control_group,
                 "with --system: members may control it (faults, captures, all objects)");
  app.add_flag("--strict", o.strict, "compute and check every ICRC, also inside the daemon");
  app.add_option("--config", o.config, "TOML file: nics, host, addresses of each NIC");
  std::map<std::string, std::vector<std::string>> of_nics;
  app.add_option("--port", of_nics["--port"],
                 "DEVICE=af_packet:NETDEV or DEVICE=tap:NETDEV: join a NIC to a netdev");
  app.add_option("--address", of_nics["--address"], "DEVICE=ADDRESS/PREFIX, repeatable");
  app.add_option("--gateway", of_nics["--gateway"], "DEVICE=ADDRESS");
  app.add_option("--mac", of_nics["--mac"], "DEVICE=MAC");
  app.add_flag("--foreground", o.foreground, "stay, and log to stderr");
  app.add_option("--log-level", o.log_level, "trace, debug, info, warn, error or off")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}));
  app.add_option("--ready-fd", o.ready_fd, "write 'ready' or an error line to this descriptor")
      ->check(CLI::Range(3, 65535));
  app.add_option("--exit-idle", o.exit_idle_s, "end this many seconds after the last client")
      ->check(CLI::Range(1u, kMaxIdleSeconds));
  app.add_flag("--hugepages", o.hugepages, "use hugepages");
  app.add_flag("--pci", o.pci, "let DPDK look for PCI devices");
  app.add_flag(
      "--telemetry", o.telemetry,
      "open DPDK's telemetry socket: dpdk/verbena-NAME/dpdk_telemetry.v2 in the run folder");
  app.add_option("--mode", o.mode, "how the engine uses CPUs: auto, thread-per-cpu or spinning")
      ->check(CLI::IsMember({"auto", "thread-per-cpu", "spinning"}));
  app.add_option("--engine-link", o.engine_link_fd)->group("");  // of our own re-execution
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    o.ready_fd = FindReadyFd(argc, argv);
    std::ostringstream out;
    std::ostringstream err;
    result.failed = app.exit(error, out, err) != 0;
    result.done = !result.failed;
    result.text = result.failed ? error.what() : out.str();
    return result;
  }
  const PathResult valid_name = InstanceName(name);
  o.name = valid_name.value;
  result.text = valid_name.error;
  if (result.text.empty() && !o.config.empty()) {
    result.text = ReadConfigFile(&o, nics->count() > 0);
  }
  if (result.text.empty() && !control_group.empty()) {
    o.control_group = FindGroup(control_group);
    if (!o.system) result.text = "--group is for --system daemons";
    if (o.control_group < 0) result.text = fmt::format("there is no group '{}'", control_group);
  }
  o.nic_options.resize(o.nics);
  std::set<size_t> with_addresses;
  for (const auto& [option, values] : of_nics) {
    for (const std::string& value : values) {
      if (!result.text.empty()) break;
      result.text = ApplyNicArgument(option, value, &o, &with_addresses);
      o.nic_arguments.insert(o.nic_arguments.end(), {option, value});
    }
  }
  if (result.text.empty()) result.text = CheckNics(o);
  result.failed = !result.text.empty();
  return result;
}

std::vector<std::string> EngineArguments(const DaemonOptions& o, int link_fd) {
  std::vector<std::string> arguments = {
      "--name", o.name,        "--nics",    fmt::to_string(o.nics), "--mode",
      o.mode,   "--log-level", o.log_level, "--engine-link",        fmt::to_string(link_fd)};
  if (o.system) arguments.emplace_back("--system");
  if (o.control_group >= 0) {
    arguments.insert(arguments.end(), {"--group", fmt::to_string(o.control_group)});
  }
  if (o.strict) arguments.emplace_back("--strict");
  if (o.hugepages) arguments.emplace_back("--hugepages");
  if (o.pci) arguments.emplace_back("--pci");
  if (o.telemetry) arguments.emplace_back("--telemetry");
  if (!o.config.empty()) arguments.insert(arguments.end(), {"--config", o.config});
  arguments.insert(arguments.end(), o.nic_arguments.begin(), o.nic_arguments.end());
  if (o.exit_idle_s > 0) {
    arguments.insert(arguments.end(), {"--exit-idle", fmt::to_string(o.exit_idle_s)});
  }
  return arguments;
}

}  // namespace verbena::nic
