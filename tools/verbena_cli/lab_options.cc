// SPDX-License-Identifier: Apache-2.0
#include "tools/verbena_cli/lab_options.h"

namespace verbena::tools {
namespace {

void AddInstance(CLI::App* command, InstanceOptions* instance) {
  command->add_option("--name", instance->name,
                      "Instance: which daemon (default: $VERBENA_NAME, else \"default\")");
  command->add_flag("--system", instance->system, "Only the system-wide daemon in /run/verbena");
}

}  // namespace

void AddLabCommands(CLI::App* app, LabOptions* lab, ReportOptions* report) {
  CLI::App* page = app->add_subcommand("lab", "Serve a page on which RDMA can be seen");
  page->footer(
      "Queues, registered memory, packets, states, faults of the daemon's programs, live.\n"
      "When no daemon runs, one with two NICs is started and ended with the page. Served\n"
      "at 127.0.0.1 only, at an address that nobody can guess; needs no network.\n"
      "Examples:\n"
      "  verbena lab                              start a transfer with a click, or any program\n"
      "  verbena lab --demo                       with transfers going on\n"
      "  verbena lab --port 8088 --no-open        then: ssh -L 8088:127.0.0.1:8088 HOST");
  AddInstance(page, &lab->instance);
  page->add_option("--port", lab->port, "TCP port (default: one that is free)")
      ->check(CLI::Range(0, 65535));
  page->add_flag("--demo", lab->demo, "Start transfers that go on until the page ends");
  page->add_flag_callback(
      "--no-open", [lab] { lab->open = false; }, "Do not open a browser");

  CLI::App* file = app->add_subcommand("report", "Write what happened as one HTML file");
  file->footer(
      "The lab page with a recorded run that replays, in one file without any other.\n"
      "Examples:\n"
      "  verbena report run.html                  what the daemon's programs did last\n"
      "  verbena trace --json --last 5000 > t.json; verbena report run.html --trace t.json");
  AddInstance(file, &report->instance);
  file->add_option("file", report->file, "Output file; - is stdout")->required();
  file->add_option("--trace", report->trace, "Of this output of `verbena trace --json`");
  file->add_option("--last", report->last, "At most so many events (default 20000)")
      ->check(CLI::Range(1, 100000));
}

}  // namespace verbena::tools
