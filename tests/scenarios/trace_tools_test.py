# SPDX-License-Identifier: Apache-2.0
"""timeline, trace --perfetto, counters --watch and --qp, metrics, over a daemon of the test's own."""

import errno
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "apps", "lib"))
import verbena_testing
from verbena_testing import AppTestCase, Program

BIN = os.path.dirname(os.path.dirname(os.path.realpath(verbena_testing.verbena_command())))
PROBE = next(path for path in (os.path.join(BIN, "tests/scenarios/verbena-probe"),
                               os.path.join(BIN, "lib/verbena-probe")) if os.path.exists(path))


def chrome_trace_problems(trace):
    """What is wrong by the Trace Event Format (the fields that each phase has to have)."""
    found = []
    number = (int, float)
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    asynchronous, flows = {}, {}
    for i, event in enumerate(events):
        def bad(what):
            found.append(f"event {i}: {what}: {event}")

        phase = event.get("ph")
        if not isinstance(event.get("pid"), int) or not isinstance(event.get("tid"), int):
            bad("pid and tid are numbers")
        if not isinstance(event.get("name"), str):
            bad("no name")
        if phase == "M":
            if event["name"] not in ("process_name", "thread_name"):
                bad("unknown metadata")
            if not isinstance(event.get("args", {}).get("name"), str):
                bad("metadata without args.name")
            continue
        if not isinstance(event.get("ts"), number) or event["ts"] < 0:
            bad("ts is missing")
        if not isinstance(event.get("cat"), str):
            bad("cat is missing")
        if phase == "X":
            if not isinstance(event.get("dur"), number) or event["dur"] < 0:
                bad("a complete event has a duration")
        elif phase == "i":
            if event.get("s") not in ("g", "p", "t"):
                bad("an instant has a scope")
        elif phase in "be":
            key = (event.get("cat"), event.get("id"))
            if event.get("id") is None:
                bad("no id")
            if phase == "b":
                asynchronous[key] = event
            elif key not in asynchronous:
                bad("ends what has not begun")
            elif event["ts"] < asynchronous.pop(key)["ts"]:
                bad("ends before it began")
        elif phase in "sf":
            if event.get("id") is None:
                bad("no id")
            if phase == "s":
                flows[event.get("id")] = event
            elif event.get("id") not in flows:
                bad("a flow without a start")
            else:
                flows.pop(event["id"])
            if phase == "f" and event.get("bp") != "e":
                bad("binds to the next slice")
        else:
            bad(f"phase {phase}")
    found += [f"never ends: {event}" for event in asynchronous.values()]
    found += [f"a flow without an end: {event}" for event in flows.values()]
    return found


class TraceTools(AppTestCase):

    def probe(self, *arguments, rules=(), keep_rules=False):
        for rule in rules:
            status, output = self.daemon.command("fault", "add", rule)
            self.assertEqual(status, 0, output)
        status, output = self.daemon.run(PROBE, *arguments)
        if not keep_rules:
            self.daemon.command("fault", "clear")
        return status, output, [int(qpn, 16) for qpn in re.findall(r"[AB] (0x[0-9a-f]+)", output)]

    def test_a_ladder_tells_the_life_of_a_work_request(self):
        status, output, (a, b) = self.probe("write", "--count", 3, "--size", 3000, "--timeout", 12,
                                            rules=["drop opcode=RC_RDMA_WRITE_LAST nth=2"])
        self.assertEqual(status, 0, output)
        life = self.daemon.json("timeline", hex(a), "--wr", "1")
        self.assertEqual((life["qpn"], life["peer_qpn"], life["wr_id"]), (a, b, "1"))
        self.assertEqual((life["opcode"], life["bytes"], life["status"]),
                         ("RDMA_WRITE", 3000, "SUCCESS"))
        self.assertEqual((life["last_psn"] - life["first_psn"]) & 0xffffff, 2)
        kinds = [event["event"] for event in life["events"]]
        self.assertEqual(kinds[0], "posted")
        self.assertEqual(kinds[-1], "completion")
        self.assertEqual(kinds.count("fault"), 1)
        self.assertGreaterEqual(life["retransmissions"], 1)
        self.assertGreaterEqual(kinds.count("sent"), 4)
        # A work request that lost nothing.
        first = self.daemon.json("timeline", hex(a), "--wr", "0")
        self.assertEqual(first["retransmissions"], 0)
        self.assertEqual([event["event"] for event in first["events"]].count("fault"), 0)
        # Without --wr: the one that had trouble.
        status, text = self.daemon.command("timeline", hex(a))
        self.assertEqual(status, 0, text)
        self.assertIn("wr_id 1: RDMA_WRITE, 3000 bytes, PSN 3 to 5", text)
        self.assertRegex(text, r"\|--- rule \d+ hits RDMA_WRITE_LAST psn 5 -*X +\|")
        self.assertRegex(text, r"\|--- RDMA_WRITE_LAST psn 5, again -+>\|")
        # Of this request, or of the one behind it, which acknowledges both.
        self.assertRegex(text, r"\|<--- ACK psn [58] -+\|")
        self.assertRegex(text, r"\| arrives: ACK psn [58] +\|")

    def test_a_read_has_its_responses_in_the_ladder(self):
        status, output, (a, _) = self.probe("read", "--count", 2, "--size", 4096)
        self.assertEqual(status, 0, output)
        for wr_id in ("0", "1"):
            life = self.daemon.json("timeline", hex(a), "--wr", wr_id)
            opcodes = [event["opcode"] for event in life["events"]
                       if event["event"] == "received" and event["qpn"] == a]
            self.assertEqual(opcodes, ["RC_RDMA_READ_RESPONSE_FIRST",
                                       "RC_RDMA_READ_RESPONSE_MIDDLE",
                                       "RC_RDMA_READ_RESPONSE_MIDDLE",
                                       "RC_RDMA_READ_RESPONSE_LAST"])

    def test_an_unknown_work_request_is_an_error(self):
        self.probe("write")
        status, output = self.daemon.command("timeline", "last", "--wr", "123456789")
        self.assertEqual(status, 1)
        self.assertIn("no wr_id 123456789", output)

    def test_the_export_is_a_valid_chrome_trace(self):
        status, output, (a, b) = self.probe(
            "send", "--count", 20, "--size", 3000, "--timeout", 10,
            rules=["drop opcode=send nth=7", "duplicate opcode=ack nth=2"])
        self.assertEqual(status, 0, output)
        path = os.path.join(self.daemon.folder, "trace.json")
        status, output = self.daemon.command("trace", "--perfetto", path)
        self.assertEqual(status, 0, output)
        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
        self.assertEqual(chrome_trace_problems(trace), [])
        events = trace["traceEvents"]
        names = {event["args"]["name"] for event in events if event["ph"] == "M"}
        for name in ("verbena0", "verbena1", "port 1", f"QP {a:#08x}", f"QP {b:#08x}"):
            self.assertIn(name, names)
        requests = [event for event in events if event["ph"] == "b" and event["tid"] == a]
        self.assertEqual(len(requests), 20)
        self.assertTrue(all(event["args"]["status"] == "SUCCESS" for event in requests))
        self.assertGreater(sum(event["ph"] == "f" for event in events), 60)
        self.assertTrue(any(event.get("cat") == "loss" for event in events))

    def long_pair(self):
        """ib_write_bw for a while: server, client, the client's QPN."""
        port = verbena_testing.free_port()
        common = ["ib_write_bw", "-F", "-x", 1, "-D", 8, "-s", 4096, "-p", port]
        server, client = self.start_pair([*common, "-d", "verbena0"],
                                         [*common, "-d", "verbena1", verbena_testing.ADDRESS], port)
        self.addCleanup(server.close)
        self.addCleanup(client.close)
        self.assertTrue(client.wait_for("remote address"), client.describe())
        return server, client, int(re.search(r"local address.*QPN (0x\w+)", client.output)[1], 16)

    def test_counters_of_a_qp_and_of_time(self):
        _, client, qpn = self.long_pair()
        before = self.daemon.json("counters", "--qp", hex(qpn))
        status, output = self.daemon.command("counters", "--watch", "--interval", "0.3", "--rounds",
                                             "2", "--json")
        self.assertEqual(status, 0, output)
        lines = [json.loads(line) for line in output.splitlines()]
        self.assertEqual(len(lines), 2)
        for line in lines:
            self.assertGreater(line["verbena1 port_xmit_packets"]["delta"], 0)
            self.assertGreater(line["verbena0 port_rcv_data"]["delta"], 0)
        after = self.daemon.json("counters", "--qp", hex(qpn))
        self.assertGreater(after["rdma_sends"], before["rdma_sends"])
        # The same numbers by iproute2, under the QP's own number.
        status, output = self.daemon.run("rdma", "-j", "statistic", "qp", "show")
        self.assertEqual(status, 0, output)
        shown = {entry["cntn"]: entry for entry in json.loads(output)}
        self.assertIn(qpn, shown, output)
        self.assertEqual(shown[qpn]["ifname"], "verbena1")
        self.assertEqual(shown[qpn]["lqpn"], [qpn])
        self.assertGreaterEqual(shown[qpn]["rdma_sends"], after["rdma_sends"])
        self.assertEqual(self.daemon.command("counters", "--qp", "1")[0], 1)

    def test_metrics_are_served_on_loopback_only(self):
        text = re.compile(r'verbena_port_xmit_packets_total\{device="verbena0",port="1"\} \d+')
        status, output = self.daemon.command("metrics")
        self.assertEqual(status, 0, output)
        self.assertRegex(output, text)
        for line in output.splitlines():
            self.assertRegex(line, r"^(# TYPE \w+ (counter|gauge)|\w+\{(\w+=\"[^\"]*\",?)+\} \d+)$")
        names = [line.split()[2] for line in output.splitlines() if line.startswith("#")]
        self.assertEqual(len(names), len(set(names)))
        status, output = self.daemon.command("metrics", "--listen", "0.0.0.0:0")
        self.assertEqual(status, 1)
        self.assertIn("not a loopback address", output)
        server = Program([self.daemon.verbena, "metrics", "--listen", "127.0.0.1:0"], limit=60,
                         environment=self.daemon.environment)
        self.addCleanup(server.close)
        self.assertTrue(server.wait_for("http://127.0.0.1:"), server.describe())
        url = re.search(r"http://\S+", server.output)[0]
        with urllib.request.urlopen(url, timeout=10) as answer:
            self.assertIn("text/plain; version=0.0.4", answer.headers["Content-Type"])
            self.assertRegex(answer.read().decode(), text)
        with self.assertRaises(urllib.error.HTTPError):
            urllib.request.urlopen(url + "x", timeout=10)
        server.signal(15)
        self.assertEqual(server.wait(), 0)

    def test_a_capture_carries_qp_work_request_and_rule(self):
        path = os.path.join(self.daemon.folder, "one.pcapng")
        everything = os.path.join(self.daemon.folder, "all.pcapng")
        capture = Program([self.daemon.verbena, "capture", everything, "--stage", "after"],
                          limit=60, environment=self.daemon.environment)
        self.assertTrue(capture.wait_for("capturing"), capture.describe())
        status, output, (a, _) = self.probe("write", "--count", 3, "--size", 3000, "--timeout", 12,
                                            rules=["delay us=10 opcode=RC_RDMA_WRITE_LAST nth=2",
                                                   "drop opcode=RC_RDMA_WRITE_LAST nth=3"])
        self.assertEqual(status, 0, output)
        capture.signal(2)
        self.assertEqual(capture.wait(), 0, capture.describe())
        capture.close()
        comments = self.comments(everything)
        self.assertTrue(any(re.fullmatch(f"QP {a:#08x}, wr_id 1", c) for c in comments), comments)
        self.assertTrue(any(re.search(r"wr_id 1, fault rule \d+", c) for c in comments), comments)
        self.assertTrue(any("sent again" in c for c in comments), comments)
        # Of one QP, through a pipe, while it runs. As many as the pipe holds: tshark may take longer to
        # start than a capture that has come to its count waits for its reader (two seconds).
        _, client, qpn = self.long_pair()
        capture = Program(["/bin/sh", "-c", f"'{self.daemon.verbena}' capture - --qp {qpn} --count "
                           f"12 --dev verbena1 2>/dev/null | tshark -n -r - -T fields "
                           f"-e infiniband.bth.destqp -e frame.comment"],
                          limit=60, environment=self.daemon.environment)
        self.addCleanup(capture.close)
        self.assertEqual(capture.wait(), 0, capture.describe())
        lines = [line.split("\t") for line in capture.output.splitlines() if line.startswith("0x")]
        self.assertEqual(len(lines), 12, capture.output)
        for destination, comment in lines:
            self.assertTrue(int(destination, 16) == qpn or f"QP {qpn:#08x}" in comment,
                            (destination, comment))

    def test_a_marked_packet_arrives_with_congestion_experienced(self):
        path = os.path.join(self.daemon.folder, "marked.pcapng")
        capture = Program([self.daemon.verbena, "capture", path, "--stage", "after"], limit=60,
                          environment=self.daemon.environment)
        self.assertTrue(capture.wait_for("capturing"), capture.describe())
        status, output, (_, b) = self.probe("write", "--count", 4, "--size", 64, "--timeout", 12,
                                            rules=["mark opcode=RC_RDMA_WRITE_ONLY nth=2"])
        self.assertEqual(status, 0, output)
        capture.signal(2)
        self.assertEqual(capture.wait(), 0, capture.describe())
        capture.close()
        status, output = verbena_testing.run(
            ["tshark", "-n", "-r", path, "-Y", "infiniband.bth.opcode == 10", "-T", "fields", "-e",
             "infiniband.bth.psn", "-e", "ip.dsfield.ecn", "-e", "infiniband.bth.destqp"], limit=60)
        self.assertEqual(status, 0, output)
        marks = {}  # by PSN: at the sending and at the receiving port
        for psn, ecn, destination in (line.split("\t") for line in output.splitlines()
                                      if "\t" in line):
            self.assertEqual(int(destination, 16), b)
            marks.setdefault(psn, []).append(int(ecn, 0))
        first, second, *others = marks.values()
        self.assertEqual(second, [3, 3], marks)
        self.assertFalse(any(3 in seen for seen in [first, *others]), marks)
        self.assertTrue(any(event["event"] == "fault" for event in self.daemon.json("trace")))

    def comments(self, path):
        status, output = verbena_testing.run(
            ["tshark", "-n", "-r", path, "-T", "fields", "-e", "frame.comment"], limit=60)
        self.assertEqual(status, 0, output)
        return output.splitlines()

    def test_the_trace_has_commands_doorbells_and_copies(self):
        status, output, (a, _) = self.probe("write", "--count", 1)
        self.assertEqual(status, 0, output)
        events = self.daemon.json("trace")
        commands = [event["command"] for event in events if event["event"] == "command"]
        for name in ("alloc_pd", "reg_mr", "create_cq", "create_qp", "modify_qp"):
            self.assertIn(name, commands)
        self.assertTrue(any(event["event"] == "doorbell" and event["qpn"] == a for event in events))
        copied = {event["to"]: event["bytes"] for event in events if event["event"] == "dma"}
        self.assertGreaterEqual(copied["packets"], 4096)
        self.assertGreaterEqual(copied["memory"], 4096)

    def test_the_trace_has_calls_that_a_rule_fails_and_events_of_ports(self):
        status, output, _ = self.probe("write", "--count", 1,
                                       rules=["fail verb=reg_mr errno=ENOMEM nth=1"])
        self.assertNotEqual(status, 0, output)
        self.assertIn((errno.ENOMEM, "reg_mr"),
                      [(event["errno"], event["command"]) for event in self.daemon.json("trace")
                       if event["event"] == "command"])
        watcher = self.daemon.program("ibv_asyncwatch", "-d", "verbena0", limit=60)
        self.addCleanup(watcher.close)
        self.assertTrue(watcher.wait_for("async event FD", 20), watcher.describe())
        self.daemon.command("fault", "add", "down dev=verbena0")
        self.assertTrue(watcher.wait_for("PORT_ERR", 20), watcher.describe())
        self.daemon.command("fault", "clear")
        self.assertTrue(watcher.wait_for("PORT_ACTIVE", 20), watcher.describe())
        seen = [event["type"] for event in self.daemon.json("trace")
                if event["event"] == "async_event" and event["device"] == "verbena0"]
        self.assertEqual([name for name in seen if name.startswith("PORT_")],
                         ["PORT_ERR", "PORT_ACTIVE"])

    def test_the_daemon_explains_a_failure_by_itself(self):
        self.daemon.command("fault", "add", "drop opcode=write psn=0")
        self.addCleanup(self.daemon.command, "fault", "clear")
        status, output, (a, _) = self.probe("write", "--count", 1, "--timeout", 8, "--retry", 2,
                                            keep_rules=True)
        self.assertEqual(status, 1, output)
        end = time.monotonic() + 20
        text = ""
        while f"QP {a:#08x}" not in text:
            self.assertLess(time.monotonic(), end, text)
            time.sleep(0.05)
            for folder, _, files in os.walk(self.daemon.folder):
                for name in files:
                    if name == "t.failures":
                        with open(os.path.join(folder, name), encoding="utf-8") as file:
                            text = file.read()
        self.assertIn(f"QP {a:#08x} ({a}): RETRY_EXC_ERR", text)
        self.assertIn("never acknowledged", text)
        self.assertIn("drop opcode=write psn=0", text)
        self.assertLess(len(text), 64 * 1024 + 1)

    def test_the_checker_finds_mistakes(self):
        base = {"name": "n", "cat": "c", "pid": 1, "tid": 1, "ts": 1.0}
        for event in ({**base, "ph": "X"}, {**base, "ph": "i"}, {**base, "ph": "b", "id": 1},
                      {**base, "ph": "e", "id": 1}, {**base, "ph": "f", "id": 3, "bp": "e"},
                      {**base, "ph": "Q"}, {"ph": "X", "dur": 1}):
            self.assertTrue(chrome_trace_problems([event]), event)


if __name__ == "__main__":
    verbena_testing.main()
