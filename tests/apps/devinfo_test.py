# SPDX-License-Identifier: Apache-2.0
"""Stock discovery programs, and what they say when the daemon is absent or dies."""

import os
import re
import signal
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import ADDRESS, AppTestCase, Daemon, Program, free_port, run


class Devinfo(AppTestCase):

    def test_ibv_devices_lists_both_nics(self):
        status, output = self.daemon.run("ibv_devices")
        self.assertEqual(status, 0, output)
        self.assertEqual(re.findall(r"^\s+(\w+)\s+[0-9a-f]{16}$", output, re.M),
                         ["verbena0", "verbena1"], output)

    def test_ibv_devinfo_shows_the_documented_values(self):
        status, output = self.daemon.run("ibv_devinfo", "-v", "-d", "verbena1")
        self.assertEqual(status, 0, output)
        values = dict(re.findall(r"^\s*([a-z_A-Z\[\]0-9]+):\s+(.*?)\s*$", output, re.M))
        expected = {
            "hca_id": "verbena1", "phys_port_cnt": "1", "max_qp": "16384", "max_qp_wr": "16384",
            "max_sge": "32", "max_sge_rd": "32", "max_cq": "16384", "max_cqe": "1048576",
            "max_mr": "131072", "max_pd": "16384", "max_ah": "131072", "max_qp_rd_atom": "16",
            "max_qp_init_rd_atom": "16", "atomic_cap": "ATOMIC_HCA (1)", "max_pkeys": "1",
            "local_ca_ack_delay": "15", "state": "PORT_ACTIVE (4)", "max_mtu": "4096 (5)",
            "active_mtu": "4096 (5)", "link_layer": "Ethernet", "max_msg_sz": "0x80000000",
            "gid_tbl_len": "16", "pkey_tbl_len": "1", "active_width": "4X (2)",
            "active_speed": "25.0 Gbps (32)", "phys_state": "LINK_UP (5)",
        }
        for name, value in expected.items():
            self.assertEqual(values.get(name), value, f"{name}\n{output}")
        self.assertRegex(output, r"GID\[\s*0\]:\s+fe80:.*RoCE v2")
        self.assertRegex(output, r"GID\[\s*1\]:\s+::ffff:127\.88\.0\.2, RoCE v2")
        self.assertNotRegex(output, r"GID\[\s*2\]")

    def test_the_status_command_agrees(self):
        status = self.daemon.json("status")
        self.assertEqual(status["name"], "t")
        self.assertEqual([nic["device"] for nic in status["nics"]], ["verbena0", "verbena1"])
        self.assertEqual([nic["ipv4"] for nic in status["nics"]], ["127.88.0.1", "127.88.0.2"])
        for nic in status["nics"]:
            self.assertEqual(nic["state"], "ACTIVE")
            self.assertRegex(nic["mac"], r"^([0-9a-f]{2}:){5}[0-9a-f]{2}$")

    def test_an_environment_by_eval_works_like_run(self):
        status, output = run(["ibv_devinfo", "-l"], environment=self.daemon.shell_environment())
        self.assertEqual(status, 0, output)
        self.assertIn("verbena0", output)
        self.assertIn("verbena1", output)

    def test_works_with_stdin_closed(self):
        status, output = self.daemon.run("ibv_devinfo", "-d", "verbena0", close_stdin=True)
        self.assertEqual(status, 0, output)
        self.assertIn("PORT_ACTIVE", output)


class Run(AppTestCase):

    def test_the_exit_status_is_the_commands(self):
        for wanted in (0, 1, 7, 255):
            status, output = self.daemon.run("sh", "-c", f"exit {wanted}")
            self.assertEqual(status, wanted, output)

    def test_a_missing_command_is_127(self):
        status, output = self.daemon.run("no-such-command-here")
        self.assertEqual(status, 127, output)

    def test_signals_reach_the_command_and_are_reported(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            program = self.daemon.program(
                "sh", "-c", 'trap "echo got it; exit 5" TERM INT; echo ready;'
                " while :; do sleep 0.05; done", limit=20)
            self.assertTrue(program.wait_for("ready"), program.describe())
            program.signal(number)
            self.assertEqual(program.wait(), 5, program.describe())
            self.assertIn("got it", program.output)
            program.close()
        status, output = self.daemon.run("sh", "-c", "kill -KILL $$")
        self.assertEqual(status, 128 + signal.SIGKILL, output)

    def test_a_second_start_is_refused(self):
        status, output = self.daemon.command("up")
        self.assertNotEqual(status, 0)
        self.assertRegex(output, r"(?i)already|runs|running")

    def test_an_idle_daemon_needs_less_than_one_percent_of_a_core(self):
        def ticks():
            total = 0
            for pid in processes:
                with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
                    fields = stat.read().rsplit(")", 1)[1].split()
                total += int(fields[11]) + int(fields[12])
            return total

        processes = self.daemon.processes()
        time.sleep(0.5)
        before, start = ticks(), time.monotonic()
        time.sleep(4)
        used = (ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - start)
        self.assertLess(used, 0.01)


class Starting(unittest.TestCase):

    def test_twenty_runs_at_once_start_one_daemon(self):
        daemon = Daemon(start=False)
        try:
            programs = [daemon.program("ibv_devinfo", limit=60) for _ in range(20)]
            for program in programs:
                self.assertEqual(program.wait(), 0, program.describe())
                self.assertIn("verbena0", program.output)
                program.close()
            # Started by `run`: it ends by itself 10 s after its last client (we are one as well).
            processes = daemon.processes()
            end = time.monotonic() + 30
            while any(os.path.exists(f"/proc/{pid}") for pid in processes):
                self.assertLess(time.monotonic(), end, "the daemon stays")
                time.sleep(0.2)
        finally:
            daemon.close()


class Absent(unittest.TestCase):

    def setUp(self):
        with Daemon(1) as daemon:
            self.environment = daemon.shell_environment()

    def test_no_device_is_found_and_nothing_else_is_said(self):
        status, output = run(["ibv_devinfo"], environment=self.environment)
        self.assertNotEqual(status, 0)
        self.assertEqual(output.strip(), "No IB devices found")
        status, output = run(["ibv_devices"], environment=self.environment)
        self.assertEqual(status, 0, output)
        self.assertNotIn("verbena", output)

    def test_one_line_says_so_when_warnings_are_asked_for(self):
        self.environment["IBV_SHOW_WARNINGS"] = "1"
        _, output = run(["ibv_devinfo"], environment=self.environment)
        lines = [line for line in output.splitlines() if "erbena" in line]
        self.assertEqual(len(lines), 1, output)

    def test_programs_that_use_no_device_are_not_disturbed(self):
        status, output = run(["sh", "-c", "ls / >/dev/null && echo fine"],
                             environment=self.environment)
        self.assertEqual((status, output), (0, "fine\n"))


class DeadEngine(unittest.TestCase):

    def test_pingpong_and_asyncwatch_end_with_errors(self):
        with Daemon(2) as daemon:
            port = free_port()
            watch = daemon.program("ibv_asyncwatch", "-d", "verbena0", limit=40)
            server = daemon.program("ibv_rc_pingpong", "-d", "verbena0", "-g", 1, "-p", port,
                                    "-n", 10000000, limit=40)
            end = time.monotonic() + 15
            while not verbena_testing.listening(port) and time.monotonic() < end:
                time.sleep(0.02)
            client = daemon.program("ibv_rc_pingpong", "-d", "verbena1", "-g", 1, "-p", port,
                                    "-n", 10000000, ADDRESS, limit=40)
            self.assertTrue(client.wait_for("remote address"), client.describe())
            sleeper_port = free_port()
            sleeper = daemon.program("ibv_rc_pingpong", "-d", "verbena0", "-g", 1, "-e", "-p",
                                     sleeper_port, limit=40)
            self.assertTrue(watch.wait_for("verbena0|uverbs|async event"), watch.describe())
            time.sleep(0.3)
            os.kill(daemon.engine(), signal.SIGKILL)
            killed = time.monotonic()
            for program in (server, client):
                self.assertNotIn(program.wait(), (0, None), program.describe())
            self.assertLess(time.monotonic() - killed, 10)
            self.assertTrue(watch.wait_for(r"(?i)fatal|event_type DEVICE_FATAL|8"),
                            watch.describe())
            for program in (watch, server, client, sleeper):
                program.close()


if __name__ == "__main__":
    verbena_testing.main()
