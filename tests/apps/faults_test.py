# SPDX-License-Identifier: Apache-2.0
"""Fault rules under stock programs: the walk-through of docs/FAULTS.md as it is written there, files
of rules, and rules that hit the same packets in each run.

VERBENA_TEST_FULL=1: 20 runs instead of 3.
"""

import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "lib"))
import verbena_testing
from verbena_testing import ADDRESS, FULL, AppTestCase, Daemon, free_port, verbena_command

DOCUMENT = os.path.join(HERE, "..", "..", "docs", "FAULTS.md")


def walk_through():
    """The shell commands behind "Take `ib_write_bw` that loses PSN 100"."""
    with open(DOCUMENT, encoding="utf-8") as file:
        text = file.read()
    return re.search(r"Take `ib_write_bw`.*?```sh\n(.*?)```", text, re.S).group(1)


class WalkThrough(AppTestCase):

    def test_the_document_works_as_it_is_written(self):
        commands = walk_through()
        self.assertIn("psn=100", commands)
        # Another daemon, another port of perftest; nothing else is changed.
        commands = commands.replace("verbena up --nics 2\n", "")
        commands = commands.replace("ib_write_bw -d", f"ib_write_bw -p {free_port()} -d")
        script = f'verbena() {{ "{verbena_command()}" "$@"; }}\n' + commands + "wait\n"
        result = subprocess.run(["bash", "-c", script], env=self.daemon.environment,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=90,
                                encoding="utf-8", check=False)
        output = result.stdout
        try:
            self.assertRegex(output, r"(?m)^1 +1 +drop app=ib_write_bw nth_qp=1")  # ID HITS RULE
            lines = output[output.index("RULE"):]
            hit = lines.index("!! rule 1 (tx) hits RC_RDMA_WRITE")
            nak = lines.index("NAK, PSN sequence error", hit)
            self.assertIn(", again", lines[nak:])
        except (AssertionError, ValueError) as error:
            self.fail(f"{error}\n{output}")
        finally:
            self.daemon.command("fault", "clear")


class RuleFiles(AppTestCase):

    def write(self, text):
        file = tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False)
        self.addCleanup(os.unlink, file.name)
        with file:
            file.write(text)
        return file.name

    def test_a_file_adds_all_its_rules(self):
        name = self.write('[[rule]]\naction = "drop"\npsn = 3\ncount = 1\n\n'
                          '[[rule]]\naction = "fail"\nverb = "reg_mr"\nerrno = "ENOMEM"\n')
        status, output = self.daemon.command("fault", "add", "--file", name)
        self.assertEqual((status, len(output.split())), (0, 2), output)
        rules = self.daemon.json("fault", "list")
        self.assertEqual([rule["rule"] for rule in rules],
                         ["drop count=1 psn=3", "fail errno=ENOMEM verb=reg_mr"])
        self.daemon.command("fault", "clear")

    def test_an_error_names_line_and_field_and_adds_nothing(self):
        name = self.write('[[rule]]\naction = "drop"\n\n[[rule]]\naction = "drop"\npsn = -4\n')
        failed = subprocess.run([verbena_command(), "fault", "add", "--file", name],
                                env=self.daemon.environment, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, timeout=20, encoding="utf-8", check=False)
        self.assertEqual(failed.returncode, 1)
        self.assertIn(f"{name}:6: psn: ", failed.stdout)
        self.assertEqual(self.daemon.json("fault", "list"), [])

    def test_the_configuration_file_has_rules_to_start_with(self):
        good = self.write('nics = 1\n\n[[rule]]\naction = "drop"\nopcode = "send"\nnth = 1\n')
        with Daemon(nics=1, arguments=["--config", good]) as daemon:
            self.assertEqual([rule["rule"] for rule in daemon.json("fault", "list")],
                             ["drop nth=1 opcode=send"])


class StableCoordinates(AppTestCase):
    RULE = ("drop app=ib_write_bw nth_qp=2 dir=tx dev=verbena1 opcode=write psn=100 transmission=1")

    def test_a_rule_hits_the_same_packet_in_each_run(self):
        seen = set()
        for _ in range(20 if FULL else 3):
            port = free_port()
            rule = int(self.daemon.command("fault", "add", self.RULE)[1])
            common = ["ib_write_bw", "-F", "-x", 1, "-p", port, "-q", 3, "-n", 60]
            self.pair([*common, "-d", "verbena0"], [*common, "-d", "verbena1", ADDRESS], port)
            hits = {one["id"]: one["hits"] for one in self.daemon.json("fault", "list")}
            events = [event for event in self.daemon.json("trace", "--last", "100000")
                      if event["event"] == "fault" and event["rule"] == rule]
            self.daemon.command("fault", "clear", str(rule))
            self.assertEqual(hits[rule], 1)
            self.assertEqual(len(events), 1)
            seen.add((events[0]["opcode"], events[0]["bytes"], events[0]["side"]))
        self.assertEqual(len(seen), 1, seen)


class DeviceFaults(AppTestCase):

    def test_a_failed_registration_is_what_the_program_reports(self):
        self.daemon.command("fault", "add", "fail verb=reg_mr errno=ENOMEM app=ibv_rc_pingpong")
        status, output = self.daemon.run("ibv_rc_pingpong", "-d", "verbena0", "-g", "1")
        self.assertNotEqual(status, 0)
        self.assertIn("Couldn't register MR", output)
        self.daemon.command("fault", "clear")

    def test_a_completion_with_an_error_ends_a_pingpong(self):
        port = free_port()
        self.daemon.command(
            "fault", "add", "complete status=REM_OP_ERR vendor_err=0x81 dev=verbena1 queue=send nth=50 "
            "app=ibv_rc_pingpong")
        common = ["ibv_rc_pingpong", "-g", "1", "-p", port]
        server, client = self.start_pair([*common, "-d", "verbena0"],
                                         [*common, "-d", "verbena1", ADDRESS], port, limit=30)
        self.assertNotEqual(client.wait(), 0)
        self.assertIn("Failed status remote operation error (11)", client.output)
        server.kill()
        server.wait()
        for program in (client, server):
            program.close()
        explained = self.daemon.command("explain", "last")[1]
        self.assertIn("complete status=REM_OP_ERR", explained)
        self.daemon.command("fault", "clear")

    def test_a_device_that_is_pulled_out_is_in_no_list(self):
        self.daemon.command("fault", "add", "remove dev=verbena1")
        self.assertNotIn("verbena1", self.daemon.run("ibv_devices")[1])
        self.daemon.command("fault", "clear")
        self.assertIn("verbena1", self.daemon.run("ibv_devices")[1])

    def test_steps_of_the_connection_manager_end_as_they_are_told(self):
        for kind, status in (("ADDR_ERROR", -110), ("ROUTE_ERROR", -110), ("UNREACHABLE", -110),
                             ("CONNECT_ERROR", -110)):
            with self.subTest(kind=kind):
                self.daemon.command("fault", "add", f"cm_error type={kind} app=rping count=1")
                exit_status, output = self.daemon.run("rping", "-c", "-a", ADDRESS, "-C", 1, limit=20)
                self.assertNotEqual(exit_status, 0)
                self.assertIn(f"RDMA_CM_EVENT_{kind}, error {status}", output)
                self.daemon.command("fault", "clear")
        self.daemon.command("fault", "add", "cm_error type=REJECTED reason=24 app=rping")
        output = self.daemon.run("rping", "-c", "-a", ADDRESS, "-C", 1, limit=20)[1]
        self.assertIn("RDMA_CM_EVENT_REJECTED, error 24", output)
        self.daemon.command("fault", "clear")

    def test_a_call_of_librdmacm_fails(self):
        self.daemon.command("fault", "add", "fail verb=rdma_resolve_addr errno=ENODEV app=rping")
        status, output = self.daemon.run("rping", "-c", "-a", ADDRESS, "-C", 1, limit=20)
        self.assertNotEqual(status, 0)
        self.assertIn("rdma_resolve_addr", output)
        self.daemon.command("fault", "clear")

    def test_dev_selects_the_steps_of_the_connection_manager(self):
        client = ("rping", "-c", "-C", 1)
        for rule in ("cm_error type=ADDR_ERROR", "cm_error type=ROUTE_ERROR",
                     "fail verb=rdma_resolve_addr errno=ENODEV",
                     "fail verb=rdma_resolve_route errno=EIO"):
            with self.subTest(rule=rule):
                # To an address of the host itself, from that address.
                for device, address, hits in (("verbena1", "127.88.0.1", 0),
                                              ("verbena1", "127.88.0.2", 1)):
                    self.daemon.command("fault", "add", f"{rule} dev={device} app=rping")
                    self.assertNotEqual(self.daemon.run(*client, "-a", address, limit=20)[0], 0)
                    self.assertEqual([row["hits"] for row in self.daemon.json("fault", "list")],
                                     [hits], f"{rule} {address}")
                    self.daemon.command("fault", "clear")

    def test_a_gid_that_is_gone_is_shown_nowhere_and_leads_nowhere(self):
        self.assertIn("127.88.0.2", self.daemon.run("ibv_devinfo", "-v", "-d", "verbena1")[1])
        self.daemon.command("fault", "add", "gid_change dev=verbena1 index=1")
        self.assertNotIn("127.88.0.2", self.daemon.run("ibv_devinfo", "-v", "-d", "verbena1")[1])
        status, output = self.daemon.run("rping", "-c", "-a", "127.88.0.2", "-C", 1, limit=20)
        self.assertNotEqual(status, 0)
        self.assertIn("rdma_resolve_addr", output)
        self.daemon.command("fault", "clear")
        self.assertIn("127.88.0.2", self.daemon.run("ibv_devinfo", "-v", "-d", "verbena1")[1])


if __name__ == "__main__":
    verbena_testing.main()
