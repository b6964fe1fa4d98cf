# SPDX-License-Identifier: Apache-2.0
"""The lab page in a browser: transfers, faults, steps, export, attaching to ib_write_bw."""

import json
import os
import re
import subprocess
import sys
import time
import unittest
import xml.dom.minidom

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "apps", "lib")]

import verbena_testing as vt  # noqa: E402
from webdriver import Browser  # noqa: E402

ROWS = "window.verbenaLab.model.rows"
PACKETS = f"{ROWS}.filter((row) => row.type === 'packet')"


class Lab:
    """`verbena lab` over a daemon of the test's own."""

    def __init__(self, daemon, *options):
        self.program = vt.Program([daemon.verbena, "lab", "--no-open", *options], 300,
                                  environment=daemon.environment)
        if not self.program.wait_for(r"http://\S+/", 60):
            raise AssertionError(self.program.describe())
        self.url = re.search(r"http://\S+/", self.program.output).group(0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.program.signal(2)
        self.program.wait()
        self.program.close()


class PageTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.daemon = vt.Daemon()
        cls.addClassCleanup(cls.daemon.close)
        cls.lab = Lab(cls.daemon)
        cls.addClassCleanup(cls.lab.__exit__)
        cls.browser = Browser()
        cls.addClassCleanup(cls.browser.close)

    def setUp(self):
        self.daemon.command("fault", "clear")
        self.browser.logs("browser")
        self.browser.requests()
        self.browser.open(self.lab.url)
        self.browser.wait("document.querySelector('#status').classList.contains('live')", "the feed")
        self.browser.click("#clear")

    def tearDown(self):
        self.browser.script("return fetch('api/stop', {method: 'POST', body: '{}', headers: "
                            "{'Content-Type': 'application/json'}}).then(() => 1)")
        bad = [entry for entry in self.browser.logs("browser") if entry["level"] in ("SEVERE", "WARNING")]
        self.assertEqual(bad, [], "messages on the console")
        elsewhere = [url for url in self.browser.requests()
                     if not url.startswith((self.lab.url, "data:", "blob:", "file:", "chrome:"))]
        self.assertEqual(elsewhere, [], "requests to somewhere else")

    def start(self, kind, size="64", count="4", pause="0"):
        self.browser.choose("#size", size)
        self.browser.choose("#count", count)
        self.browser.choose("#pause", pause)
        self.browser.click(f"[data-transfer={kind}]")

    def add_rule(self, rule):
        self.browser.click("summary")
        self.browser.choose("#f-rule", rule)
        self.browser.click("#fault-form button[type=submit]")
        self.browser.wait("document.querySelector('#rules .chip')", "the rule among the active ones")
        self.browser.click("summary")


class LabPage(PageTest):

    # PSNs of the example's sender begin at 100, and a message of 4096 bytes has 4 packets.
    def test_dropped_psn_gives_a_nak_and_retransmissions_and_the_qp_stays_in_rts(self):
        self.add_rule("drop opcode=send psn=2 count=1")
        self.start("send", size="4096", count="10", pause="200")
        self.browser.wait(f"{PACKETS}.some((row) => row.psn === 102 && row.rules.length === 1)",
                          "the hit on PSN 102")
        self.browser.wait(f"{PACKETS}.some((row) => row.aeth && row.aeth.kind === 'nak' && "
                          "row.psn === 102)", "a NAK for PSN 102")
        self.browser.wait(f"{PACKETS}.some((row) => row.psn === 102 && row.again && "
                          "row.fate === 'arrived')", "PSN 102 again")
        # What a person sees.
        self.browser.click("#follow")
        self.browser.script("document.querySelector('#ladder').scrollTop = 0")
        self.browser.wait("document.querySelector('.ladder text.lost')", "the loss in the ladder")
        for words in ("lost (rule", "NAK: PSN sequence error", "↻ again: SEND"):
            self.browser.wait(
                "document.querySelector('#ladder').textContent.includes(arguments[0])".replace(
                    "arguments[0]", json.dumps(words)), words)
        states = self.browser.wait(
            "(() => { const s = [...document.querySelectorAll('#machine-names span')]"
            ".map((e) => e.textContent); return s.length === 2 && s; })()", "both ends")
        self.assertTrue(all(state.endswith(": RTS") for state in states), states)
        self.assertEqual(self.browser.script(
            f"return {ROWS}.filter((row) => / → (ERR|SQE)/.test(row.text || '')).length"), 0)

    def test_one_click_faults_hit_what_runs(self):
        for kind, words in (("send", "Drop a data packet"), ("read", "Drop a data packet"),
                            ("write", "Drop an ACK"), ("write", "Duplicate"), ("read", "Delay 50 ms"),
                            ("send", "Forge a NAK"), ("write", "Wrong R_Key"),
                            ("atomic", "Wrong R_Key")):
            with self.subTest(f"{words}, {kind}"):
                self.daemon.command("fault", "clear")
                self.start(kind, count="0", pause="200")
                state = "window.verbenaLab.model.state"
                self.browser.wait(f"{state}.transfer.kind === '{kind}' && {state}.transfer.running "
                                  "&& !document.querySelector('#rules .chip')", "its start")
                self.browser.click(f"[data-fault='{words}']")
                self.browser.wait(f"({state}.rules[0] || {{}}).hits > 0", "a hit")

    def test_held_packets_go_one_by_one(self):
        self.browser.click("#hold")
        self.browser.wait("!document.querySelector('#step').disabled", "the hold rule")
        self.start("send", count="1")
        sent = f"{PACKETS}.filter((row) => row.opcode === 'RC_SEND_ONLY')"
        self.browser.wait(f"{sent}.length === 1", "the packet")
        time.sleep(0.3)
        self.assertEqual(self.browser.script(f"return {sent}[0].fate"), "flying")
        self.browser.wait("document.querySelector('.ladder text.held')", "the packet as held")
        self.browser.click("#step")
        self.browser.wait(f"{sent}[0].fate === 'arrived'", "its arrival after a step")
        acks = f"{PACKETS}.filter((row) => row.opcode === 'RC_ACKNOWLEDGE')"
        self.browser.wait(f"{acks}.length >= 1", "the ACK")
        self.assertEqual(self.browser.script(f"return {acks}[0].fate"), "flying")
        self.browser.keys("s")  # the key for Step
        self.browser.wait(f"{acks}[0].fate === 'arrived'", "the ACK's arrival")
        self.browser.click("#hold")
        self.browser.wait("document.querySelector('#step').disabled", "the end of holding")

    def test_every_built_in_transfer_ends_well(self):
        last_words = {"send": "bytes sent", "write": "bytes written", "read": "reads of",
                      "atomic": "fetch-and-add: 4", "kv": "4 gets", "events": "events"}
        transfer = "window.verbenaLab.model.state.transfer"
        for kind, words in last_words.items():
            with self.subTest(kind):
                self.start(kind, count="4")
                self.browser.wait(f"!{transfer}.running && ({transfer}.result || "
                                  f"{transfer}.output.includes('{words}'))", "its end")
                done = self.browser.script(f"return {transfer}")
                self.assertEqual(done["result"], "", done["output"])

    def test_memory_shows_the_bytes_that_were_written(self):
        self.start("write", count="0", pause="200")
        self.browser.wait("[...document.querySelectorAll('#left .letters')].map((e) => "
                          "e.textContent).join('').includes('by the client')", "the bytes")
        self.assertIn("remote write", self.browser.script(
            "return document.querySelector('#left .rights').textContent"))
        self.browser.wait("document.querySelector('#left .byte.fresh')", "what has changed")

    def test_export_opens_alone_and_replays(self):
        self.start("write", count="4")
        self.browser.wait(f"{ROWS}.some((row) => (row.text || '').startsWith('CQE RDMA_WRITE'))",
                          "completions")
        self.browser.wait("!window.verbenaLab.model.state.transfer.running", "the end")
        rows = self.browser.script(f"return {PACKETS}.length")
        self.browser.click("#export-svg")
        picture = xml.dom.minidom.parse(self.browser.downloaded("ladder.svg"))
        self.assertIn("WRITE ONLY", picture.documentElement.toxml())
        self.browser.click("#export-run")
        path = self.browser.downloaded("run.html")
        self.browser.open(f"file://{path}")
        self.browser.wait("window.verbenaLab && window.verbenaLab.replay", "the page alone")
        self.assertEqual(self.browser.script(f"return {PACKETS}.length"), rows)
        self.browser.script("window.verbenaLab.replay.seek(0)")
        self.assertLess(self.browser.script(f"return {ROWS}.length"), 2)
        self.browser.click("#replay-step")
        self.browser.click("#play")
        self.browser.wait(f"{PACKETS}.length === {rows}", "the replay's end")
        self.browser.wait("document.querySelectorAll('.ladder .packet').length > 3", "its ladder")
        self.browser.open(self.lab.url)

    def test_attaches_to_ib_write_bw_that_runs_already(self):
        port = vt.free_port()
        server = self.daemon.program("ib_write_bw", "-d", "verbena0", "-x", "1", "-F", "-D", "6",
                                     "-p", port)
        try:
            self.assertTrue(server.wait_for("Waiting for client", 20), server.describe())
            client = self.daemon.program("ib_write_bw", "-d", "verbena1", "-x", "1", "-F", "-D", "6",
                                         "-p", port, vt.ADDRESS)
            try:
                self.browser.wait("[...document.querySelectorAll('#left .owner')].some((e) => "
                                  "e.textContent.includes('ib_write_bw'))", "the program's name")
                self.browser.wait(f"{PACKETS}.length > 200 && {PACKETS}.some((row) => "
                                  "row.opcode.startsWith('RC_RDMA_WRITE'))", "its packets")
                started = time.monotonic()
                self.browser.script("return new Promise((done) => requestAnimationFrame(done))"
                                    ".then(() => 1)")
                self.assertLess(time.monotonic() - started, 3, "the page is frozen")
                self.assertEqual(client.wait(), 0, client.describe())
            finally:
                client.close()
            self.assertEqual(server.wait(), 0, server.describe())
        finally:
            server.close()

    def test_ten_thousand_packets_are_few_elements(self):
        count = self.browser.script("""
            const page = window.verbenaLab, events = [];
            for (let i = 0; i < 10000; ++i) {
              const t = page.model.now + 1000 * i;
              const packet = {peer_qpn: 8, psn: i, opcode: 'RC_SEND_ONLY', bytes: 64};
              events.push({time_ns: t, event: 'sent', device: 'verbena0', qpn: 7, ...packet},
                          {time_ns: t, event: 'received', device: 'verbena1', qpn: 8, ...packet});
            }
            const start = performance.now();
            page.model.addEvents(events);
            page.ladder.update();
            const took = performance.now() - start;
            return [page.ladder.shown.length, document.querySelectorAll('.ladder .row').length, took];
            """)
        self.assertGreaterEqual(count[0], 10000)
        self.assertLess(count[1], 100)
        self.assertLess(count[2], 5000)

    def test_names_from_applications_are_text(self):
        evil = "<img src=x onerror=alert(1)>"
        self.browser.script("""
            const page = window.verbenaLab;
            const device = arguments[0];
            page.model.addEvents([{time_ns: page.model.now + 1, event: 'sent', device, qpn: 77,
              peer_qpn: 78, psn: 1, opcode: arguments[0], bytes: 1}]);
            page.model.addState({...page.model.state, qp: [{qpn: 77, device, comm: arguments[0],
              pid: 1, type: arguments[0], state: arguments[0], dest_qpn: 78}]});
            page.hosts.draw(); page.ladder.update(); page.drawPairs();
            """, evil)
        self.assertEqual(self.browser.script("return document.querySelectorAll('img').length"), 0)
        self.assertIn(evil, self.browser.script("return document.body.textContent"))

    def test_keyboard_chooses_rows_and_says_what_they_are(self):
        self.start("read", count="1")
        self.browser.wait(f"{PACKETS}.some((row) => row.opcode.includes('READ_RESPONSE'))", "packets")
        self.browser.script("document.querySelector('#ladder').focus()")
        for _ in range(12):
            self.browser.keys("\ue013")  # up
            if self.browser.script("return document.querySelector('#details strong').textContent"
                                   ) == "RC RDMA READ REQUEST":
                break
        details = self.browser.script("return document.querySelector('#details').textContent")
        self.assertRegex(details, r"READ REQUEST.*PSN 100.*R_Key 0x")


@unittest.skipUnless(os.environ.get("AXE_CORE"), "AXE_CORE is not the path of axe.min.js")
class Accessibility(PageTest):
    """npm pack axe-core; tar xzf axe-core-*.tgz; AXE_CORE=$PWD/package/axe.min.js browser_test.py"""

    def findings(self):
        with open(os.environ["AXE_CORE"], encoding="utf-8") as file:
            self.browser.script(file.read() + "; window.axe = axe;")
        result = self.browser.script_async(
            "const done = arguments[0]; window.axe.run(document).then(done, (e) => done({violations: "
            "[{id: String(e), impact: 'critical', nodes: []}]}))")
        return [(each["id"], each["impact"], each["help"], [node["html"][:120] for node in
                                                            each["nodes"]][:4])
                for each in result["violations"] if each["impact"] in ("serious", "critical")]

    def test_nothing_serious_is_found_in_light_and_dark(self):
        self.add_rule("drop opcode=send psn=2 count=1")
        self.start("send", size="4096", count="4", pause="200")
        self.browser.wait(f"{PACKETS}.length > 10", "packets")
        self.browser.wait("document.querySelector('#plots svg')", "the plots")
        for _ in range(2):
            self.assertEqual(self.findings(), [])
            self.browser.click("#theme")


if __name__ == "__main__":
    vt.main()
