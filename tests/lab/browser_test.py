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
from refusing_daemon import RefusingDaemon  # noqa: E402
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

    # States without news are not sent: the rate is that of the time in which there was some.
    def test_rate_begins_where_something_began(self):
        rates = self.browser.script("""
            const model = window.verbenaLab.model;
            model.clear();
            const counters = (words) => ({verbena0: {counters: {port_xmit_data: words}}});
            model.addState({t: 1e9, counters: counters(0)});
            model.addState({t: 2e9, same_until: 18e8, counters: counters(250)});
            return model.points.map((point) => Math.round(point.bytes));""")
        self.assertEqual(rates, [0, 5000])

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

    def test_page_speaks_chinese_when_asked_and_changes_at_once(self):
        fixed = ("return [...document.querySelectorAll('header button, nav button, h1, h2, summary, "
                 ".group-name, .field > span, .lanes label, .lanes .dim, .legend, #packets, "
                 "#status-text, #details, #rules .dim, .host p, figcaption')]"
                 ".filter((e) => e.checkVisibility()).map((e) => e.textContent.trim())")
        self.browser.open(self.lab.url + "?lang=zh")
        self.browser.wait("document.querySelector('#status-text').textContent === '实时'", "the feed")
        self.browser.wait("document.querySelector('.host p')", "the hosts")
        self.assertEqual(self.browser.script("return document.documentElement.lang"), "zh-CN")
        # Names of NICs and what is the same in every language.
        same = re.compile(r"verbena\d|English|µs|PSN \+|")
        english = [words for words in self.browser.script(fixed)
                   if not re.search("[\u4e00-\u9fff]", words) and not same.fullmatch(words)]
        self.assertEqual(english, [])
        self.start("write", count="2")
        self.browser.wait(f"{PACKETS}.some((row) => row.fate === 'arrived')", "packets")
        self.browser.click("#hold")
        self.browser.wait("document.querySelector('#hold').textContent === '全部放行'", "the other words")
        self.browser.click("#language")
        self.browser.wait("document.querySelector('#hold').textContent === 'Release all'", "English")
        self.browser.wait("document.querySelector('#packets').textContent.startsWith('packets: ')",
                          "English")
        chinese = [words for words in self.browser.script(fixed)
                   if re.search("[\u4e00-\u9fff]", words) and words != "中文"]
        self.assertEqual(chinese, [])
        self.browser.click("#hold")
        self.browser.wait("document.querySelector('#step').disabled", "the end of holding")

    # The table of texts has no holes: whatever the page says by tr() is in it, and nothing else.
    def test_every_text_has_a_translation(self):
        missing, unused = self.browser.script("""
            return fetch('app.js').then((reply) => reply.text()).then((code) => {
              const table = /export const ZH|const ZH = \\{([^]*?)\\n\\};/.exec(code)[1];
              const keys = new Set([...table.matchAll(/^  ('(?:[^'\\\\]|\\\\.)*'):/gm)].map((m) => m[1]));
              const rest = code.replace(table, '');
              const asked = new Set([...rest.matchAll(/\\b(?:tr|setWords)\\((?:[\\w$.()'-]+, )?('(?:[^'\\\\]|\\\\.)*')[,)]/g)]
                .map((m) => m[1]));
              return fetch('./').then((reply) => reply.text()).then((html) => [
                [...asked].filter((each) => !keys.has(each)),
                [...keys].filter((each) => !rest.includes(each.slice(1, -1)) &&
                  !html.includes(each.slice(1, -1)) &&
                  !rest.replace(/' \\+\\s*'/g, '').includes(each.slice(1, -1)))]);
            })""")
        self.assertEqual((missing, unused), ([], []))

    def test_nothing_is_clipped_after_a_failure(self):
        self.start("atomic", count="4", pause="0")
        self.browser.wait("document.querySelector('#requests').textContent.includes('FETCH ADD')",
                          "the longest names")
        self.start("write", count="0", pause="200")
        self.browser.wait(f"{PACKETS}.length > 4", "packets")
        self.browser.click("[data-fault='Wrong R_Key']")
        result = "document.querySelector('#transfer-state')"
        self.browser.wait(f"{result}.textContent.includes('remote access error')", "the program's last words")
        self.browser.wait("document.querySelector('#requests').textContent.includes('REM_ACCESS_ERR')",
                          "the status of the work request")
        self.browser.script("window.verbenaLab.model.sums.packets = 12345678; "
                            "window.verbenaLab.model.sums.done = 12345678; "
                            "window.verbenaLab.version = -1; window.verbenaLab.wantDrawing()")
        for words in ("5 % loss", "Duplicate", "Damage", "Delay 50 ms"):
            self.browser.click(f"[data-fault='{words}']")
        self.browser.wait("document.querySelectorAll('#rules .chip').length === 5", "the rules")
        for width, height in ((1280, 800), (1920, 1080)):
            self.browser.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height,
                             deviceScaleFactor=1, mobile=False)
            time.sleep(0.3)
            clipped = self.browser.script("""
                return [...document.querySelectorAll('button, .region div, .region header, .owner, ' +
                    '#transfer-state, .rule, .notice, h2, figcaption, .chip')]
                  .filter((e) => e.checkVisibility() && (e.scrollWidth > e.clientWidth + 1 ||
                    e.getBoundingClientRect().right > innerWidth) &&
                    getComputedStyle(e).display !== 'inline').map((e) => e.outerHTML.slice(0, 120))
                  .concat([...document.querySelectorAll('#requests text')].filter((e) => {
                    const text = e.getBoundingClientRect();
                    const all = document.querySelector('#requests svg').getBoundingClientRect();
                    return text.right > all.right + 1 || text.left < all.left - 1;
                  }).map((e) => e.textContent))""")
            self.assertEqual(clipped, [], f"at {width}x{height}")
            rows = self.browser.script(
                "return [document.querySelector('header').offsetHeight, document.querySelector('#steps')"
                ".offsetHeight, document.querySelector('button').offsetHeight]")
            self.assertLess(rows[0], 2 * rows[2], "the top is one row")
            self.assertLess(rows[1], 5 * rows[2], "what is active takes few rows")
        self.browser.cdp("Emulation.setDeviceMetricsOverride", width=1280, height=800,
                         deviceScaleFactor=1, mobile=False)

    def test_ended_queue_pairs_keep_their_counts(self):
        self.start("send", count="4", pause="200")
        transfer = "window.verbenaLab.model.state.transfer"
        self.browser.wait(f"!{transfer}.running && {transfer}.output.includes('sent')", "its end")
        self.browser.wait("document.querySelector('#left .owner').textContent.includes('ended')", "the end")
        rings = self.browser.script("return [...document.querySelectorAll('#left .qp:first-of-type .ring')]"
                                    ".map((e) => e.textContent.trim())")
        self.assertEqual([ring[:2] for ring in rings], ["SQ", "RQ", "CQ"])
        self.assertIn("Σ4", rings[2])

    def test_read_is_acknowledged_by_its_last_response(self):
        self.browser.click("#hold")
        self.browser.wait("!document.querySelector('#step').disabled", "the hold rule")
        self.start("read", size="4096", count="1")
        for done in range(5):  # the request, and four responses
            self.browser.wait(f"{PACKETS}.filter((row) => row.opcode.includes('READ')).length > "
                              f"{min(done, 1)}", "a packet" )
            self.assertEqual(self.browser.script(
                "return [...window.verbenaLab.model.qps.values()].flatMap((qp) => qp.requests)"
                ".filter((wr) => wr.acked !== null).length"), 0, f"after {done} steps")
            self.browser.click("#step")
            self.browser.wait(f"{PACKETS}.filter((row) => row.fate === 'arrived').length === {done + 1}",
                              "its arrival")
        self.browser.wait("[...window.verbenaLab.model.qps.values()].flatMap((qp) => qp.requests)"
                          ".some((wr) => wr.acked !== null && wr.done !== null)", "its completion")
        self.browser.click("#hold")
        self.browser.wait("document.querySelector('#step').disabled", "the end of holding")

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


class PlainUser(unittest.TestCase):

    def test_page_says_why_a_plain_user_of_a_system_wide_daemon_sees_no_packets(self):
        own = vt.Daemon(start=False)
        self.addCleanup(own.close)
        daemon = RefusingDaemon(os.path.join(own.folder, "verbena", "t.sock"))
        self.addCleanup(daemon.close)
        with Lab(own) as lab, Browser() as browser:
            browser.open(lab.url)
            browser.wait("!document.querySelector('#notice').hidden", "the notice")
            for words, language in (("members of its group", "zh"), ("它的组", "en")):
                self.assertIn(words, browser.script("return document.querySelector('#notice').textContent"))
                browser.click("#language")
                browser.wait(f"document.documentElement.lang.startsWith('{language}')", "the language")
            self.assertIn("see above", browser.script("return document.querySelector('#ladder').textContent"))
            self.assertTrue(browser.script(
                "return [...document.querySelectorAll('#faults button')].every((e) => e.disabled)"))
            self.assertEqual([entry for entry in browser.logs("browser") if entry["level"] == "SEVERE"], [])


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
        self.browser.click("#language")
        self.browser.wait("document.documentElement.lang === 'zh-CN'", "the other language")
        self.assertEqual(self.findings(), [])
        self.browser.click("#language")


if __name__ == "__main__":
    vt.main()
