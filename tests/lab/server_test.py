# SPDX-License-Identifier: Apache-2.0
"""Who may use the lab page: not other sites, not other names, not who lacks the token."""

import http.client
import json
import os
import re
import sys
import time
import unittest
from urllib.parse import urlsplit

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "apps", "lib")]

import verbena_testing as vt  # noqa: E402
from refusing_daemon import RefusingDaemon  # noqa: E402


class LabServer(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.daemon = vt.Daemon(start=False)
        cls.addClassCleanup(cls.daemon.close)
        cls.lab = vt.Program([cls.daemon.verbena, "lab", "--no-open"], 120,
                             environment=cls.daemon.environment)
        cls.addClassCleanup(cls.lab.close)
        assert cls.lab.wait_for(r"http://\S+/", 60), cls.lab.describe()
        cls.url = urlsplit(re.search(r"http://\S+/", cls.lab.output).group(0))

    def ask(self, path="", method="GET", headers=None, body=None, host=None):
        """(status, headers, body) of one request below the token, or of an absolute path."""
        connection = http.client.HTTPConnection("127.0.0.1", self.url.port, timeout=20)
        try:
            connection.putrequest(method, path if path.startswith("/") else self.url.path + path,
                                  skip_host=True)
            for name, value in {"Host": host or self.url.netloc, **(headers or {})}.items():
                connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body.encode() if body is not None else None)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    def post(self, name, body, **headers):
        given = {"Content-Type": "application/json", "Origin": f"http://{self.url.netloc}"}
        given.update({key.replace("_", "-"): value for key, value in headers.items()})
        status, _, text = self.ask(f"api/{name}", "POST", given, body)
        return status, json.loads(text)

    def test_page_is_served_with_a_strict_policy_and_nothing_from_elsewhere(self):
        status, headers, page = self.ask()
        self.assertEqual(status, 200)
        self.assertIn("default-src 'none'", headers["Content-Security-Policy"])
        self.assertEqual(headers["Referrer-Policy"], "no-referrer")
        for name in ("", "app.js", "style.css"):
            text = self.ask(name)[2].replace("http://www.w3.org/2000/svg", "")
            self.assertNotRegex(text, r"https?://", name)

    def test_without_the_token_there_is_nothing(self):
        for path in ("/", "/index.html", "/" + "0" * 32 + "/", self.url.path[:-2] + "/",
                     "/x" + self.url.path, "//" + self.url.path):
            self.assertEqual(self.ask(path)[0], 404, path)
        self.assertRegex(self.url.path, r"^/[0-9a-f]{32}/$")

    def test_other_names_for_this_machine_are_refused(self):
        for host in ("example.com", f"example.com:{self.url.port}", "127.0.0.1", "localhost",
                     f"127.0.0.1:{self.url.port + 1}", ""):
            self.assertEqual(self.ask(host=host or " ")[0], 403, host)
        self.assertEqual(self.ask(host=f"localhost:{self.url.port}")[0], 200)

    def test_other_sites_pages_are_refused(self):
        for origin in ("http://example.com", "null", f"https://{self.url.netloc}",
                       f"http://127.0.0.1:{self.url.port + 1}"):
            self.assertEqual(self.ask(headers={"Origin": origin})[0], 403, origin)
            self.assertEqual(self.post("stop", "{}", Origin=origin)[0], 403, origin)
        self.assertEqual(self.ask(headers={"Sec-Fetch-Site": "cross-site"})[0], 403)
        self.assertEqual(self.post("stop", "{}", Sec_Fetch_Site="same-site")[0], 403)
        self.assertEqual(self.post("stop", "{}", Content_Type="text/plain")[0], 415)
        self.assertEqual(self.post("stop", "{}")[0], 200)

    def test_wrong_commands_are_answered_with_a_sentence(self):
        for name, body in (("stop", "["), ("stop", "[]"), ("stop", '"x"'), ("start", "{}"),
                           ("start", '{"kind":"../../bin/sh"}'),
                           ("start", '{"kind":"send","size":0}'),
                           ("start", '{"kind":"send","size":-1}'),
                           ("start", '{"kind":"send","size":99999999999}'),
                           ("start", '{"kind":["send"]}'), ("fault_add", "{}"),
                           ("fault_add", '{"rule":"explode"}')):
            status, answer = self.post(name, body)
            self.assertIn(status, (400, 409), body)
            self.assertIn("error", answer, body)
        self.assertEqual(self.ask("api/stop", "GET")[0], 404)
        self.assertEqual(self.ask("api/stop", "POST", {"Content-Type": "application/json"},
                                  "{" + " " * 100000 + "}")[0], 413)

    def test_events_begin_with_the_state(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.url.port, timeout=20)
        try:
            connection.request("GET", self.url.path + "events")
            answer = connection.getresponse()
            self.assertEqual(answer.getheader("Content-Type"), "text/event-stream")
            text = b""
            end = time.monotonic() + 20
            while b"event: state\ndata: " not in text or not text.endswith(b"\n\n"):
                self.assertLess(time.monotonic(), end, text)
                text += answer.read1(65536)
            data = json.loads(text.split(b"event: state\ndata: ")[1].split(b"\n")[0])
            self.assertEqual([nic["device"] for nic in data["status"]["nics"]],
                             ["verbena0", "verbena1"])
        finally:
            connection.close()

    # What the page asks for while many packets go.
    def test_trace_with_a_limit_is_the_end_of_the_whole_trace(self):
        self.assertEqual(self.post("start", '{"kind":"send","count":20,"pause_ms":0}')[0], 200)
        end = time.monotonic() + 30
        while "wr_id 19" not in self.daemon.command("trace")[1] and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.5)  # Both programs have ended: nothing is added.
        whole = self.daemon.json("trace")
        self.assertGreater(len(whole), 60)
        for last in (1, 7, 50, len(whole), 2 * len(whole)):
            self.assertEqual(self.daemon.json("trace", "--last", last), whole[-last:], last)

    def test_events_say_that_this_user_may_not_see_packets(self):
        own = vt.Daemon(start=False)
        self.addCleanup(own.close)
        daemon = RefusingDaemon(os.path.join(own.folder, "verbena", "t.sock"))
        self.addCleanup(daemon.close)
        lab = vt.Program([own.verbena, "lab", "--no-open"], 60, environment=own.environment)
        self.addCleanup(lab.close)
        self.assertTrue(lab.wait_for(r"http://\S+/", 30), lab.describe())
        url = urlsplit(re.search(r"http://\S+/", lab.output).group(0))
        connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=20)
        self.addCleanup(connection.close)
        connection.request("GET", url.path + "events")
        answer = connection.getresponse()
        text = b""
        end = time.monotonic() + 20
        while b"event: state\ndata: " not in text or not text.endswith(b"\n\n"):
            self.assertLess(time.monotonic(), end, text)
            text += answer.read1(65536)
        state = json.loads(text.split(b"event: state\ndata: ")[1].split(b"\n")[0])
        self.assertIn("members of its group", state["refused"])

    def test_report_is_one_file_that_holds_the_trace(self):
        status, answer = self.post("start", '{"kind":"send","count":2}')
        self.assertEqual((status, answer), (200, {"ok": True}))
        path = os.path.join(self.daemon.folder, "report.html")
        end = time.monotonic() + 30
        while "RECV" not in self.daemon.command("trace")[1] and time.monotonic() < end:
            time.sleep(0.1)
        status, output = self.daemon.command("report", path)
        self.assertEqual(status, 0, output)
        with open(path, encoding="utf-8") as file:
            page = file.read()
        run = json.loads(re.search(r'<script type="application/json" id="run">(.*?)</script>',
                                   page, re.DOTALL).group(1))
        self.assertIn("RC_SEND_ONLY", {event.get("opcode") for event in run["events"]})
        self.assertEqual(len(run["states"]), 1)
        self.assertEqual(self.daemon.command("report", "/nonexistent/x.html")[0], 1)
        trace = os.path.join(self.daemon.folder, "trace.json")
        with open(trace, "w", encoding="utf-8") as file:
            json.dump([{"time_ns": 1, "event": "</script><script>alert(1)</script>"}], file)
        self.assertEqual(self.daemon.command("report", path, "--trace", trace)[0], 0)
        with open(path, encoding="utf-8") as file:
            self.assertNotIn("</script><script>alert(1)", file.read())
        with open(trace, "w", encoding="utf-8") as file:
            file.write("{}")
        self.assertEqual(self.daemon.command("report", path, "--trace", trace)[0], 1)

    def test_z_the_daemon_that_it_has_started_ends_with_it(self):
        self.assertEqual(self.daemon.command("status")[0], 0)
        self.lab.signal(2)
        self.assertEqual(self.lab.wait(), 0, self.lab.describe())
        self.assertEqual(self.daemon.command("status")[0], 1)


if __name__ == "__main__":
    vt.main()
