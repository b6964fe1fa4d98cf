// SPDX-License-Identifier: Apache-2.0
//
// verbena: starts, observes and steers a software RDMA NIC. This file is its command line; what
// the sub-commands do is in the *_commands.cc files.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>

#include "nic_sim/runtime/self_clean.h"
#include "tools/verbena_cli/commands.h"
#include "tools/verbena_cli/lab_options.h"
#include "tools/verbena_cli/text_output.h"

namespace verbena::tools {
namespace {

constexpr int kUsageError = 2;
constexpr int kMaxNics = 64;  // of one daemon

constexpr char kAbout[] =
    "Verbena is a software RDMA NIC: the daemon verbenad plays the hardware, and unmodified\n"
    "verbs programs see its devices verbena0, verbena1, ... as RoCEv2 NICs.\n"
    "\n"
    "  verbena up --nics 2                                start it\n"
    "  verbena run -- ibv_devinfo                         see its devices\n"
    "  verbena run -- ib_write_bw -d verbena0             a server, and in another terminal\n"
    "  verbena run -- ib_write_bw -d verbena1 127.88.0.1  its client\n"
    "  verbena counters                                   what the ports have counted\n"
    "  verbena down                                       end it\n";

constexpr char kFooter[] =
    "Every command explains itself: verbena COMMAND --help. Commands that talk to a daemon find\n"
    "it at $VERBENA_SOCKET, then in your run folder ($XDG_RUNTIME_DIR/verbena, or\n"
    "/tmp/verbena-UID), then in /run/verbena. Exit status: 0 done, 1 not possible (the reason is\n"
    "on stderr), 2 wrong usage; `run` has that of its command.";

constexpr char kFaultRules[] =
    "A rule is an ACTION and any number of key=value; all keys must match. docs/FAULTS.md has\n"
    "all of them, each with an example.\n"
    "  drop         the packet is lost          duplicate  it arrives twice\n"
    "  corrupt      a bit of it is wrong        reorder    by=N later ones overtake it\n"
    "  delay        us=MICROSECONDS later       mark       with ECN congestion experienced\n"
    "  hold         until `fault step`          forge      kind=ack|rnr|nak_...|cnp goes back\n"
    "  down, stall  link or NIC, for us=MICROSECONDS or while the rule exists\n"
    "  set truncate rate slow_dma\n"
    "  complete     status=REM_OP_ERR vendor_err=N    fail  verb=reg_mr errno=ENOMEM\n"
    "  lose_, duplicate_, delay_completion  cq_overrun  qp_error  event  remove  cm_error\n"
    "  addr_change  gid_change\n"
    "Which packets:\n"
    "  dev=verbena0   dir=tx|rx   app=PROCESS   nth_qp=N   qpn=N   opcode=NAME (RC_SEND_ONLY)\n"
    "  or a class: send, write, read, atomic, ack, first, last, any\n"
    "  psn=N          offset from the QP's first PSN     msg=N    of the N-th message\n"
    "  nth=N          only the N-th match        every=N    each N-th match\n"
    "  prob=P seed=S  with probability P         count=N    at most N hits\n"
    "  after=US until=US   microseconds since the rule was added\n"
    "Examples:\n"
    "  verbena fault add 'drop opcode=send nth=3'         one lost packet: watch the retry\n"
    "  verbena fault add 'drop prob=0.02 seed=7'          two per cent loss, the same each time\n"
    "  verbena fault add 'fail verb=reg_mr errno=ENOMEM nth=2 app=server'\n"
    "  verbena fault add 'remove dev=verbena1 us=2000000' two seconds without the device\n"
    "  verbena fault add --file rules.toml                tables [[rule]] with the same names\n"
    "  verbena fault list; verbena fault clear";

// Everything that can be on the command line.
struct Arguments {
  InstanceOptions instance;
  bool json = false;
  UpOptions up;
  RunOptions run;
  std::string what;
  std::string device;
  CaptureOptions capture;
  std::vector<std::string> rule;
  int64_t rule_id = 0;
  int64_t held_count = 1;
  std::string rule_file;
  DecodeOptions decode;
  TraceOptions trace;
  std::string explained;  // a QPN, or "last"
  ScenarioOptions scenario;
  TimelineOptions timeline;
  std::string perfetto;
  CountersOptions counters;
  std::string listen_on;
  LabOptions lab;
  ReportOptions report;
};

// Decimal, or hexadecimal with 0x.
std::optional<uint32_t> ParseQpn(const std::string& text) {
  char* end = nullptr;
  errno = 0;
  const unsigned long long value = std::strtoull(text.c_str(), &end, 0);
  if (text.empty() || text[0] == '-' || *end != '\0' || errno != 0 || value > 0xffffff) return {};
  return static_cast<uint32_t>(value);
}

const CLI::Validator kQpn(
    [](const std::string& text) {
      return ParseQpn(text) ? std::string() : "'" + text + "' is no QP number";
    },
    "QPN");

CLI::App* AddCommand(CLI::App* parent, const char* name, const char* description,
                     const char* footer) {
  CLI::App* command = parent->add_subcommand(name, description);
  command->footer(footer);
  return command;
}

CLI::App* AddInstance(CLI::App* command, InstanceOptions* instance) {
  command->add_option("--name", instance->name,
                      "Instance: which daemon (default: $VERBENA_NAME, else \"default\")");
  command->add_flag("--system", instance->system, "Only the system-wide daemon in /run/verbena");
  return command;
}

CLI::App* AddJson(CLI::App* command, bool* json) {
  command->add_flag("--json", *json, "Print JSON for programs instead of text for people");
  return command;
}

void AddLifecycle(CLI::App* app, Arguments* a) {
  CLI::App* up = AddInstance(
      AddCommand(app, "up", "Start the daemon in the background",
                 "Needs no privilege. Fails with status 1 when that instance already runs.\n"
                 "Examples:\n"
                 "  verbena up\n"
                 "  verbena up --nics 4                     verbena0 ... verbena3, 127.88.0.1-4\n"
                 "  verbena up --name lab                   a second host beside the first\n"
                 "  sudo verbena up --system                one daemon for all users\n"
                 "  sudo verbena up --port verbena0=af_packet:eth1 --address verbena0=10.0.0.7/24\n"
                 "  verbena up --foreground --log-level debug"),
      &a->instance);
  up->add_option("--nics", a->up.nics, "Number of NICs (default 1)")
      ->check(CLI::Range(1, kMaxNics));
  up->add_flag("--strict", a->up.strict,
               "Every payload really becomes packets with an ICRC, loopback included (slower)");
  up->add_flag("--telemetry", a->up.telemetry,
               "Open DPDK's telemetry socket in the run folder, for dpdk-telemetry.py");
  up->add_option("--group", a->up.group,
                 "With --system: members of this group may control it, as root may");
  up->add_option("--config", a->up.config, "Configuration file (verbena.toml)");
  up->add_option("--port", a->up.ports,
                 "Join a NIC to a Linux netdev: DEVICE=af_packet:NETDEV (one that exists) or\n"
                 "DEVICE=tap:NETDEV (to be made). Needs root, or a namespace of your own");
  up->add_option(
      "--address", a->up.addresses,
      "Address of a NIC: DEVICE=10.0.0.1/24 or DEVICE=fd00::1/64; repeatable. None: the\n"
      "netdev's own, shared with the kernel");
  up->add_option("--gateway", a->up.gateways, "DEVICE=ADDRESS: way to what is not on the link");
  up->add_option("--mac", a->up.macs, "DEVICE=02:00:00:00:00:01");
  up->add_flag("--foreground", a->up.foreground, "Stay in this terminal; Ctrl-C ends the daemon");
  up->add_option("--log-level", a->up.log_level, "How much the daemon logs")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}));

  AddInstance(AddCommand(app, "down", "End the daemon",
                         "Waits until it has ended (at most 10 s). Programs that still use its\n"
                         "devices see them fail. When none runs, says so and succeeds, as\n"
                         "`systemctl stop` does. Root ends a system-wide daemon with --system."),
              &a->instance);

  CLI::App* run = AddInstance(
      AddCommand(app, "run", "Run a program that sees the simulated devices",
                 "The program is executed in place of verbena: its exit status and signals are\n"
                 "its own. When no daemon runs, one is started that ends 10 s after its last\n"
                 "client. Exit status 125: Verbena could not start; 126: COMMAND cannot be\n"
                 "executed; 127: COMMAND not found. Setuid and static programs do not see the\n"
                 "devices: no preload can enter them.\n"
                 "Examples:\n"
                 "  verbena run -- ibv_devinfo -v\n"
                 "  verbena run -- ibv_rc_pingpong -d verbena0 -g 1\n"
                 "  verbena run --name lab -- ib_read_lat -d verbena0\n"
                 "  verbena run -- bash                      a shell in which all see them"),
      &a->instance);
  run->add_option("--nics", a->run.nics, "Number of NICs of a daemon that this command starts")
      ->check(CLI::Range(1, kMaxNics));
  // For the help only: CutCommand has taken it.
  run->add_option("COMMAND", a->run.command, "The program and its arguments, after -- or not");

  AddInstance(AddCommand(app, "env", "Print export lines for a shell",
                         "Sets IBV_DRIVERS, LD_PRELOAD (appended to what is there) and\n"
                         "VERBENA_SOCKET. Example:\n"
                         "  eval \"$(verbena env)\" && ibv_devices"),
              &a->instance);
  AddJson(
      AddInstance(AddCommand(app, "version", "Print the versions of verbena and the daemon", ""),
                  &a->instance),
      &a->json);
  AddJson(
      AddInstance(
          AddCommand(app, "doctor", "Say what this machine allows, and what follows from it",
                     "Each line is ok, note (works, with a consequence) or problem. Exit status\n"
                     "1 when there is a problem."),
          &a->instance),
      &a->json);
}

void AddObserving(CLI::App* app, Arguments* a) {
  AddJson(AddInstance(AddCommand(app, "status", "Show the daemon, its NICs and addresses",
                                 "Example:\n  verbena status --json | jq -r '.nics[0].ipv4'"),
                      &a->instance),
          &a->json);
  CLI::App* list = AddJson(
      AddInstance(AddCommand(app, "list", "List the verbs objects that programs have created",
                             "Examples:\n"
                             "  verbena list qp           state, PSNs and owner of each QP\n"
                             "  verbena list mr --json"),
                  &a->instance),
      &a->json);
  list->add_option("what", a->what, "context, pd, mr, mw, dm, cq, qp, srq, ah, xrcd, flow or cm_id")
      ->required()
      ->check(CLI::IsMember(
          {"context", "pd", "mr", "mw", "dm", "cq", "qp", "srq", "ah", "xrcd", "flow", "cm_id"}));
  CLI::App* counters = AddJson(
      AddInstance(
          AddCommand(app, "counters", "Show the counters of the ports",
                     "Names and units are those of Linux: port_xmit_data and port_rcv_data\n"
                     "count units of 4 bytes.\nExample:\n"
                     "  verbena counters --dev verbena0 --json\n"
                     "  verbena counters --watch                    what changes, with rates\n"
                     "  verbena counters --qp 0x1a2b3c              of one QP"),
          &a->instance),
      &a->json);
  counters->add_option("--dev", a->device, "Only this device");
  counters
      ->add_option_function<std::string>(
          "--qp", [a](const std::string& text) { a->counters.qpn = ParseQpn(text); },
          "Counters of this QP (verbena list qp)")
      ->check(kQpn);
  counters->add_flag("--watch", a->counters.watch, "Show what changes, until Ctrl-C");
  counters->add_option("--interval", a->counters.interval, "Seconds between two looks (default 1)")
      ->check(CLI::Range(0.05, 86400.0));
  counters->add_option("--rounds", a->counters.rounds, "End --watch after so many intervals");

  AddInstance(AddCommand(app, "metrics", "Print the counters for Prometheus, or serve them",
                         "Without --listen once on stdout, as for a textfile collector. With it a\n"
                         "process that answers GET /metrics until it is ended.\n"
                         "Example:\n"
                         "  verbena metrics --listen 127.0.0.1:9464"),
              &a->instance)
      ->add_option("--listen", a->listen_on, "Loopback address: [IPV4:]PORT; port 0: any free one");
}

void AddCapture(CLI::App* app, Arguments* a) {
  CLI::App* capture = AddInstance(
      AddCommand(
          app, "capture", "Write the packets into a pcapng file for Wireshark or tshark",
          "Ends at Ctrl-C (or SIGTERM) or at the limit, with status 0. A packet appears once\n"
          "for each port that it crosses.\n"
          "Examples:\n"
          "  verbena capture trace.pcapng --for 5\n"
          "  verbena capture trace.pcapng --dev verbena0 --count 100\n"
          "  verbena capture - --count 20 | tshark -r -\n"
          "  verbena capture - | wireshark -k -i -     live\n"
          "  verbena capture trace.pcapng --qp 0x1a2b3c\n"
          "  verbena decode trace.pcapng              one line per packet"),
      &a->instance);
  capture->add_option("file", a->capture.file, "Output file; - is stdout")->required();
  capture->add_option("--dev", a->capture.device, "Only this device");
  capture
      ->add_option_function<std::string>(
          "--qp", [a](const std::string& text) { a->capture.qpn = ParseQpn(text); },
          "Only packets from or to this QP")
      ->check(kQpn);
  capture
      ->add_option("--stage", a->capture.stage,
                   "before: as the NIC sent it; after: with the faults (default)")
      ->check(CLI::IsMember({"before", "after"}));
  capture->add_option("--for", a->capture.seconds, "End after this many seconds")
      ->check(CLI::PositiveNumber);
  capture->add_option("--count", a->capture.count, "End after this many packets")
      ->check(CLI::PositiveNumber);

  CLI::App* decode = AddJson(
      AddCommand(app, "decode", "Print a capture, one line per packet",
                 "Works without a daemon, on files of any origin.\n"
                 "Examples:\n"
                 "  verbena decode trace.pcapng\n"
                 "  verbena decode --check trace.pcap         exit status 1 on a difference"),
      &a->json);
  decode->add_option("file", a->decode.file, "pcap or pcapng file")->required();
  decode->add_flag("--check", a->decode.check,
                   "Recompute each ICRC, rebuild each packet from its fields, print differences");
}

void AddFault(CLI::App* app, Arguments* a) {
  CLI::App* fault = AddCommand(app, "fault", "Lose, delay, spoil packets on purpose", kFaultRules);
  fault->require_subcommand(1);
  CLI::App* add =
      AddInstance(AddCommand(fault, "add", "Add a rule; prints its id", kFaultRules), &a->instance);
  CLI::Option* rule = add->add_option("rule", a->rule, "'ACTION [key=value ...]'");
  add->add_option("--file", a->rule_file, "TOML file with tables [[rule]]; all of them or none")
      ->excludes(rule);
  AddJson(AddInstance(AddCommand(fault, "list", "List the rules and how often each hit", ""),
                      &a->instance),
          &a->json);
  CLI::App* clear =
      AddInstance(AddCommand(fault, "clear", "Remove one rule, or all", ""), &a->instance);
  clear->add_option("id", a->rule_id, "The rule's id; none = all rules");
  AddJson(AddInstance(AddCommand(fault, "held", "List the packets that rules `hold` have", ""),
                      &a->instance),
          &a->json);
  CLI::App* step = AddInstance(
      AddCommand(fault, "step", "Let the packets go that rules `hold` have had longest", ""),
      &a->instance);
  step->add_option("count", a->held_count, "How many (default 1)")
      ->check(CLI::Range(int64_t{1}, int64_t{UINT32_MAX}));
  step->add_option("--rule", a->rule_id, "Only those of the rule with this id");
  CLI::App* release =
      AddInstance(AddCommand(fault, "release", "Let all packets go that rules `hold` have",
                             "The rules go on holding what comes then."),
                  &a->instance);
  release->add_option("--rule", a->rule_id, "Only those of the rule with this id");
}

void AddTrace(CLI::App* app, Arguments* a) {
  CLI::App* trace = AddJson(
      AddInstance(
          AddCommand(app, "trace", "Show what the engine did last, event by event",
                     "WQEs, packets (-> sent, <- received, x- refused, !! hit by a fault rule),\n"
                     "timers, completions, states and events of the last moments; times in\n"
                     "seconds from the first line on.\n"
                     "Examples:\n"
                     "  verbena trace --qp 0x1a2b3c\n"
                     "  verbena trace --follow --dev verbena0\n"
                     "  verbena trace --json --last 100"),
          &a->instance),
      &a->json);
  trace
      ->add_option_function<std::string>(
          "--qp", [a](const std::string& text) { a->trace.qpn = ParseQpn(text); },
          "Only this QP (verbena list qp), and what hit its packets")
      ->check(kQpn);
  trace->add_option("--dev", a->trace.device, "Only this device");
  trace->add_option("--last", a->trace.last, "At most so many events of the past (default 1000)")
      ->check(CLI::Range(1, 100000));
  trace->add_option("--perfetto", a->perfetto,
                    "Write all as a Chrome trace for ui.perfetto.dev into this file (- is stdout)");
  trace->add_flag("--follow", a->trace.follow, "Go on with what happens, until Ctrl-C");

  CLI::App* timeline = AddJson(
      AddInstance(
          AddCommand(app, "timeline",
                     "Show the life of a work request: posted, packets, completion",
                     "A ladder with the requester on the left. Without --wr it is the one that\n"
                     "failed or was sent again, else the last.\n"
                     "Examples:\n"
                     "  verbena timeline last\n"
                     "  verbena timeline 0x1a2b3c --wr 7"),
          &a->instance),
      &a->json);
  timeline
      ->add_option_function<std::string>(
          "qp", [a](const std::string& text) { a->timeline.qpn = ParseQpn(text); },
          "QP number, or last: the QP that failed or posted last (default)")
      ->check(CLI::IsMember({"last"}) | kQpn);
  timeline->add_option_function<uint64_t>(
      "--wr", [a](const uint64_t& wr_id) { a->timeline.wr_id = wr_id; }, "This wr_id");

  AddJson(AddInstance(AddCommand(app, "explain", "Say why a completion failed",
                                 "Reads the trace: status, reasons, the packets that led to it.\n"
                                 "Examples:\n"
                                 "  verbena explain last\n"
                                 "  verbena explain 0x1a2b3c"),
                      &a->instance),
          &a->json)
      ->add_option("qp", a->explained, "QP number, or last: the QP that failed last")
      ->required()
      ->check(CLI::IsMember({"last"}) | kQpn);
}

void AddScenario(CLI::App* app, Arguments* a) {
  CLI::App* scenario =
      AddCommand(app, "scenario", "Run programs under scripted faults, check what comes of it",
                 "docs/SCENARIOS.md describes the files.");
  scenario->require_subcommand(1);
  CLI::App* run = AddCommand(
      scenario, "run", "Run scenarios, each over a private instance",
      "Exit status: 0 all as expected, 1 something was not, 2 a file is wrong or could not\n"
      "be run.\n"
      "Examples:\n"
      "  verbena scenario run lost_ack               one of the library\n"
      "  verbena scenario run my.toml --verbose      outputs, explanation and trace as well\n"
      "  verbena scenario run FOLDER --junit out.xml for CI\n"
      "  verbena scenario run rnr_storm --repeat 20");
  run->add_option("file", a->scenario.files, "Files, folders, or names of the library")->required();
  run->add_option("--junit", a->scenario.junit, "Write the results as JUnit XML");
  run->add_flag("--verbose", a->scenario.verbose, "Show outputs and trace of all, not of failures");
  run->add_option("--repeat", a->scenario.repeat, "So many times")->check(CLI::Range(1, 100000));
  AddJson(AddCommand(scenario, "list", "List the library", ""), &a->json);
}

int Dispatch(const CLI::App& app, Arguments* a) {
  const auto got = [&app](const char* name) { return app.got_subcommand(name); };
  if (got("up")) {
    a->up.instance = a->instance;
    return Up(a->up);
  }
  if (got("run")) {
    a->run.instance = a->instance;
    return Run(a->run);
  }
  if (got("capture")) {
    a->capture.instance = a->instance;
    return Capture(a->capture);
  }
  if (got("decode")) {
    a->decode.json = a->json;
    return Decode(a->decode);
  }
  if (got("timeline")) {
    a->timeline.instance = a->instance;
    a->timeline.json = a->json;
    return Timeline(a->timeline);
  }
  if (got("trace") && !a->perfetto.empty()) return TraceToPerfetto(a->instance, a->perfetto);
  if (got("trace")) {
    a->trace.instance = a->instance;
    a->trace.json = a->json;
    return Trace(a->trace);
  }
  if (got("explain")) return Explain(a->instance, ParseQpn(a->explained), a->json);
  if (got("down")) return Down(a->instance);
  if (got("env")) return Env(a->instance);
  if (got("version")) return Version(a->instance, a->json);
  if (got("doctor")) return Doctor(a->instance, a->json);
  if (got("status")) return Status(a->instance, a->json);
  if (got("list")) return List(a->instance, a->what, a->json);
  if (got("counters")) {
    a->counters.instance = a->instance;
    a->counters.device = a->device;
    a->counters.json = a->json;
    return Counters(a->counters);
  }
  if (got("metrics")) return Metrics(a->instance, a->listen_on);
  if (got("scenario")) {
    return app.get_subcommand("scenario")->got_subcommand("list") ? ScenarioList(a->json)
                                                                  : ScenarioRun(a->scenario);
  }
  const CLI::App& fault = *app.get_subcommand("fault");
  if (fault.got_subcommand("add")) {
    return a->rule_file.empty() ? FaultAdd(a->instance, a->rule)
                                : FaultAddFile(a->instance, a->rule_file);
  }
  if (fault.got_subcommand("list")) return FaultList(a->instance, a->json);
  if (fault.got_subcommand("held")) return FaultHeld(a->instance, a->json);
  for (const char* name : {"step", "release"}) {
    if (!fault.got_subcommand(name)) continue;
    std::optional<int64_t> count, id;
    if (std::string_view(name) == "step") count = a->held_count;
    if (fault.get_subcommand(name)->count("--rule") > 0) id = a->rule_id;
    return FaultRelease(a->instance, count, id);
  }
  const bool one = fault.get_subcommand("clear")->count("id") > 0;
  return FaultClear(a->instance, one ? std::optional<int64_t>(a->rule_id) : std::nullopt);
}

// `run`: everything from the first word that is no option of ours belongs to COMMAND and is cut
// off here, before CLI11 looks at it.
std::vector<std::string> CutCommand(std::vector<std::string>* words) {
  if (words->empty() || words->front() != "run") return {};
  size_t i = 1;
  while (i < words->size() && words->at(i).starts_with('-') && words->at(i) != "--") {
    const bool takes_value = words->at(i) == "--name" || words->at(i) == "--nics";
    i += takes_value ? 2 : 1;
  }
  i = std::min(i, words->size());
  const auto first = words->begin() + static_cast<ptrdiff_t>(i);
  std::vector<std::string> command(first, words->end());
  words->erase(first, words->end());
  if (!command.empty() && command.front() == "--") command.erase(command.begin());
  return command;
}

int Main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app(kAbout, "verbena");
  app.footer(kFooter);
  app.require_subcommand(1);
  AddLifecycle(&app, &arguments);
  AddObserving(&app, &arguments);
  AddCapture(&app, &arguments);
  AddFault(&app, &arguments);
  AddTrace(&app, &arguments);
  AddScenario(&app, &arguments);
  AddLabCommands(&app, &arguments.lab, &arguments.report);

  std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  if (words.empty()) words.emplace_back("--help");
  if (words.front() == "--version") words.front() = "version";
  const bool is_run = words.front() == "run";
  const std::vector<std::string> said = words;
  arguments.run.command = CutCommand(&words);
  std::reverse(words.begin(), words.end());  // CLI11 takes them from the back
  try {
    app.parse(std::move(words));
  } catch (const CLI::ParseError& error) {
    const int status = app.exit(error);
    if (status == 0) return 0;  // --help
    return is_run ? kExitRunFailed : kUsageError;
  }
  // Understood here, for usage errors and help; done there.
  if (app.got_subcommand("lab") || app.got_subcommand("report")) return RunLabProgram(said);
  return Dispatch(app, &arguments);
}

}  // namespace
}  // namespace verbena::tools

int main(int argc, char** argv) {
  verbena::nic::CleanSelf(argv);
  int status = 1;
  try {
    status = verbena::tools::Main(argc, argv);
  } catch (const std::exception& error) {
    verbena::tools::PrintError(error.what());
  }
  // A full disk or a closed pipe must not look like success.
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    verbena::tools::PrintError("cannot write the output");
    return status == 0 ? 1 : status;
  }
  return status;
}
