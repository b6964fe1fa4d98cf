# SPDX-License-Identifier: Apache-2.0
"""perftest over Verbena beside TCP on the same machine: fi_pingpong -p tcp and ucx_perftest on tcp.

Usage: tools/bench [--json FILE] [--rounds N] [--quick] [--idle-qps N] [--only FIGURE]

The contenders run in turns, so that a disturbance of the machine hits all of them; every figure is
the median over the rounds. Ratios are given so that more is better for bandwidth and rate, less is
better for latency. Targets: first version (payload copied by process_vm_readv/writev).

Latency is one way (half a round trip), the average of a run, in microseconds. Bandwidth in GB/s
(10^9). fi_pingpong has one message in flight, perftest and ucx_perftest many.
"""

import argparse
import json
import os
import re
import statistics
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "apps", "lib"))
sys.path.insert(0, HERE)
import connections
import verbena_testing
from verbena_testing import ADDRESS, Daemon, Program, free_port, listening

LIMIT = 60  # Seconds of one program.


class Failed(Exception):
    pass


def run_pair(start_server, start_client, port):
    """The client's output; both programs must end with status 0."""
    server = start_server()
    end = time.monotonic() + 20
    while not listening(port):
        if not server.running() or time.monotonic() > end:
            server.kill()
            server.wait()
            text = server.describe()
            server.close()
            raise Failed(text)
        time.sleep(0.02)
    client = start_client()
    statuses = (client.wait(), server.wait())
    output, text = client.output, client.describe() + server.describe()
    client.close()
    server.close()
    if statuses != (0, 0):
        raise Failed(text)
    return output


def perftest(daemon, tool, size, count):
    port = free_port()
    # perftest prints lines in Gbit/s (10^9) with --report_gbits; latency tools do not take it.
    options = ["-F", "-x", "1", "-p", port, "-s", size, "-n", count]
    if tool.endswith("_bw"):
        options.append("--report_gbits")
    output = run_pair(
        lambda: daemon.program(tool, "-d", "verbena0", *options, limit=LIMIT),
        lambda: daemon.program(tool, "-d", "verbena1", *options, ADDRESS, limit=LIMIT), port)
    numbers = re.findall(r"^ *(\d+)[ \t]+(\d+)[ \t]+([0-9.]+(?:[ \t]+[0-9.]+)*)\s*$", output, re.M)
    if not numbers:
        raise Failed(f"no result line of {tool}\n{output}")
    values = [float(text) for text in numbers[-1][2].split()]
    if tool.endswith("_lat"):  # min, max, typical, average, deviation, 99 %, 99.9 %
        return {"latency": values[3], "median": values[2], "p99": values[5]}
    return {"bandwidth": values[1] / 8, "rate": values[2]}  # peak, average, million per second


def fi_pingpong(size, count):
    port = free_port()
    options = ["-p", "tcp", "-e", "msg", "-I", count, "-S", size]
    environment = verbena_testing.clean_environment()
    output = run_pair(
        lambda: Program(["fi_pingpong", *options, "-B", port], LIMIT, environment=environment),
        lambda: Program(["fi_pingpong", *options, "-P", port, "127.0.0.1"], LIMIT,
                        environment=environment), port)
    line = re.search(r"^\d+\S* +\S+ +\S+ +\S+ +[0-9.]+s +([0-9.]+) +([0-9.]+) +([0-9.]+)", output,
                     re.M)
    if not line:
        raise Failed(f"no result line of fi_pingpong\n{output}")
    return {"bandwidth": float(line[1]) / 1000, "latency": float(line[2]), "rate": float(line[3])}


def ucx_perftest(test, size, count):
    port = free_port()
    environment = verbena_testing.clean_environment()
    environment.update(UCX_TLS="tcp", UCX_NET_DEVICES="lo", UCX_WARN_UNUSED_ENV_VARS="n")
    output = run_pair(
        lambda: Program(["ucx_perftest", "-p", port], LIMIT, environment=environment),
        lambda: Program(["ucx_perftest", "127.0.0.1", "-p", port, "-t", test, "-s", size, "-n",
                         count, "-w", max(10, count // 20), "-f", "-v"], LIMIT,
                        environment=environment), port)
    line = re.findall(r"^ *(\d+(?:,[0-9.]+)+) *$", output, re.M)
    if not line:
        raise Failed(f"no result line of ucx_perftest\n{output}")
    values = [float(text) for text in line[-1].split(",")]
    # iterations, median, average, overall latency, 2 x MiB/s, 2 x messages per second
    return {"latency": values[3], "median": values[1], "bandwidth": values[5] * 2**20 / 1e9,
            "rate": values[7] / 1e6}


# name, what is compared, unit, Verbena, libfabric, UCX (run by scale 1 or less), target of the
# first version as text and as test of (value, ratio to the best TCP).
def figures():
    def many(count, scale):
        return max(20, int(count * scale))

    return [
        ("send_lat_64", "latency", "us",
         lambda daemon, scale: perftest(daemon, "ib_send_lat", 64, many(10000, scale)),
         lambda scale: fi_pingpong(64, many(10000, scale)),
         lambda scale: ucx_perftest("tag_lat", 64, many(10000, scale)),
         "<= 1.1 x TCP", lambda value, ratio: ratio is None or ratio <= 1.1),
        ("write_lat_64", "latency", "us",
         lambda daemon, scale: perftest(daemon, "ib_write_lat", 64, many(10000, scale)),
         lambda scale: fi_pingpong(64, many(10000, scale)),
         lambda scale: ucx_perftest("ucp_put_lat", 64, many(10000, scale)),
         "<= 1.1 x TCP", lambda value, ratio: ratio is None or ratio <= 1.1),
        ("write_bw_64k", "bandwidth", "GB/s",
         lambda daemon, scale: perftest(daemon, "ib_write_bw", 65536, many(20000, scale)),
         lambda scale: fi_pingpong(65536, many(5000, scale)),
         lambda scale: ucx_perftest("ucp_put_bw", 65536, many(10000, scale)),
         ">= 1.5 x TCP", lambda value, ratio: ratio is None or ratio >= 1.5),
        ("write_bw_1m", "bandwidth", "GB/s",
         lambda daemon, scale: perftest(daemon, "ib_write_bw", 1 << 20, many(2000, scale)),
         lambda scale: fi_pingpong(1 << 20, many(500, scale)),
         lambda scale: ucx_perftest("ucp_put_bw", 1 << 20, many(1000, scale)),
         ">= 1.5 x TCP", lambda value, ratio: ratio is None or ratio >= 1.5),
        ("read_bw_64k", "bandwidth", "GB/s",
         lambda daemon, scale: perftest(daemon, "ib_read_bw", 65536, many(20000, scale)),
         None,
         lambda scale: ucx_perftest("ucp_get", 65536, many(1000, scale)),
         "", lambda value, ratio: True),
        ("write_rate_8", "rate", "Mmsg/s",
         lambda daemon, scale: perftest(daemon, "ib_write_bw", 8, many(1000000, scale)),
         None,
         lambda scale: ucx_perftest("ucp_put_bw", 8, many(500000, scale)),
         ">= 1.5", lambda value, ratio: value >= 1.5),
    ]


def idle_percent(daemon, seconds):
    """CPU time of all processes of an idle daemon, in percent of one core."""
    def ticks():
        total = 0
        for pid in processes:
            with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
                fields = stat.read().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total

    processes = daemon.processes()
    time.sleep(0.5)
    before, start = ticks(), time.monotonic()
    time.sleep(seconds)
    return 100 * (ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - start)


def idle_qps_cost(daemon, count, rounds, scale):
    """Message rate beside `count` idle connected QPs: (with, without), medians."""
    helper = os.environ.get("VERBENA_IDLE_QPS")
    if not helper:
        raise Failed("--idle-qps needs the program //tests/bench:idle_qps in $VERBENA_IDLE_QPS")
    with_idle, without = [], []
    for _ in range(rounds):
        without.append(perftest(daemon, "ib_write_bw", 8, max(1000, int(500000 * scale)))["rate"])
        holder = daemon.program(helper, count, limit=150)
        try:
            if not holder.wait_for("ready", 120):
                raise Failed(holder.describe())
            with_idle.append(
                perftest(daemon, "ib_write_bw", 8, max(1000, int(500000 * scale)))["rate"])
        finally:
            holder.close()
    return statistics.median(with_idle), statistics.median(without)


def progress(text):
    if sys.stderr.isatty():
        print(f"\r{text:<60}\r", end="", file=sys.stderr, flush=True)


def measure(daemon, options, scale):
    results, problems = [], []
    chosen = [f for f in figures() if not options.only or f[0] in options.only]
    samples = {figure[0]: ([], [], []) for figure in chosen}
    for number in range(options.rounds):
        for name, key, _, verbena, libfabric, ucx, _, _ in chosen:
            progress(f"round {number + 1} of {options.rounds}: {name}")
            for place, contender in enumerate((verbena, libfabric, ucx)):
                if contender is None:
                    continue
                try:
                    value = contender(daemon, scale) if place == 0 else contender(scale)
                    samples[name][place].append(value[key])
                except (Failed, OSError) as error:
                    problems.append(f"{name}: {str(error)[-1500:]}")
    progress("")
    for name, key, unit, _, _, _, target, good in chosen:
        medians = [statistics.median(values) if values else None for values in samples[name]]
        others = [value for value in medians[1:] if value]
        best = (min(others) if key == "latency" else max(others)) if others else None
        ratio = medians[0] / best if medians[0] and best else None
        results.append({
            "figure": name, "unit": unit, "verbena": medians[0], "libfabric_tcp": medians[1],
            "ucx_tcp": medians[2],
            "ratio_libfabric": medians[0] / medians[1] if medians[0] and medians[1] else None,
            "ratio_ucx": medians[0] / medians[2] if medians[0] and medians[2] else None,
            "ratio_best_tcp": ratio, "target": target,
            "met": None if medians[0] is None or not target else good(medians[0], ratio),
            "samples": {"verbena": samples[name][0], "libfabric_tcp": samples[name][1],
                        "ucx_tcp": samples[name][2]}})
    return results, problems


def table(results):
    def text(value, digits=3):
        return "-" if value is None else f"{value:.{digits}g}"

    lines = [f"{'figure':<14} {'unit':<7} {'verbena':>9} {'fi tcp':>9} {'ucx tcp':>9}"
             f" {'/fi':>7} {'/ucx':>7}  {'target':<13} met"]
    for row in results:
        met = {True: "yes", False: "NO", None: "-"}[row["met"]]
        lines.append(
            f"{row['figure']:<14} {row['unit']:<7} {text(row['verbena']):>9}"
            f" {text(row['libfabric_tcp']):>9} {text(row['ucx_tcp']):>9}"
            f" {text(row['ratio_libfabric']):>7} {text(row['ratio_ucx']):>7}"
            f"  {row['target']:<13} {met}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        prog="tools/bench", description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON, - for stdout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round (a check of the tool)")
    parser.add_argument("--idle-qps", type=int, metavar="N",
                        help="also the cost of N idle QPs beside one active")
    parser.add_argument("--only", action="append", metavar="FIGURE",
                        choices=[figure[0] for figure in figures()] + ["connections"])
    options = parser.parse_args()
    scale = 0.02 if options.quick else 1
    if options.quick:
        options.rounds = 1
    start = time.monotonic()
    connection_rows, connection_steps, connection_text = [], {}, ""
    with Daemon(2) as daemon:
        if not options.only or "connections" in options.only:
            try:
                connection_rows, connection_steps, connection_text = connections.compare(
                    daemon, options.rounds, options.quick)
            except connections.Failed as error:
                connection_text = f"connections: {error}"
        results, problems = measure(daemon, options, scale)
        if connection_text and not connection_rows:
            problems.append(connection_text)
        idle = idle_percent(daemon, 1 if options.quick else 5)
        results.append({"figure": "idle_cpu", "unit": "%", "verbena": idle, "libfabric_tcp": None,
                        "ucx_tcp": None, "ratio_libfabric": None, "ratio_ucx": None,
                        "ratio_best_tcp": None, "target": "< 1", "met": idle < 1, "samples": {}})
        if options.idle_qps:
            try:
                busy, alone = idle_qps_cost(daemon, options.idle_qps, options.rounds, scale)
                cost = alone / busy
                results.append({
                    "figure": "idle_qps", "unit": "x cost", "verbena": cost,
                    "libfabric_tcp": None, "ucx_tcp": None, "ratio_libfabric": None,
                    "ratio_ucx": None, "ratio_best_tcp": None, "target": "<= 1.05",
                    "met": cost <= 1.05, "samples": {"with": busy, "without": alone}})
            except Failed as error:
                problems.append(f"idle_qps: {error}")
        mode = daemon.json("status").get("mode")
    report = {"cpus": len(os.sched_getaffinity(0)), "mode": mode, "rounds": options.rounds,
              "seconds": time.monotonic() - start, "results": results, "problems": problems,
              "connections": {"results": connection_rows, "steps_us": connection_steps}}
    if options.json == "-":
        print(json.dumps(report, indent=1))
    else:
        print(f"{report['cpus']} CPUs, engine {mode}, median of {options.rounds} rounds\n")
        print(table(results))
        if connection_rows:
            print("\n" + connection_text)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(report, file, indent=1)
    for problem in problems:
        print(f"\nproblem: {problem}", file=sys.stderr)
    # A missed target is a result, a program that failed is not.
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
