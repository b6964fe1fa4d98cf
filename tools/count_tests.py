# SPDX-License-Identifier: Apache-2.0
"""count_tests.py EVENTS STATUS: counts single test cases of one `bazel test` run.

EVENTS is the file of --build_event_json_file, STATUS is Bazel's exit status. Cases come from the
test.xml of every test, cached ones too. A test without a failing case that failed all the same
(time limit, crash, not built) counts as one failure, and so does a failed Bazel run that shows no
failure. Exit status 1 if anything failed.
"""

import json
import sys
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ET


def count_xml(path):
    """Returns (passed, failed, skipped) of one test.xml."""
    passed = failed = skipped = 0
    for case in ET.parse(path).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None or case.get("status") == "notrun":
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def main():
    events_path, bazel_status = sys.argv[1], int(sys.argv[2])
    results = {}  # (label, run, shard) -> (attempt, status, path of test.xml)
    not_built = set()
    with open(events_path, encoding="utf-8") as events:
        for line in events:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # A killed Bazel leaves half a line.
            ident = event.get("id", {})
            if "testResult" in ident and "testResult" in event:
                key = ident["testResult"]
                result = event["testResult"]
                xml = None
                for output in result.get("testActionOutput", []):
                    if output.get("name") == "test.xml" and output.get("uri", "").startswith("file:"):
                        xml = urllib.request.url2pathname(
                            urllib.parse.urlparse(output["uri"]).path)
                place = (key.get("label"), key.get("run", 1), key.get("shard", 1))
                attempt = key.get("attempt", 1)
                if attempt >= results.get(place, (0,))[0]:
                    results[place] = (attempt, result.get("status"), xml)
            elif "targetCompleted" in ident and not event.get("completed", {}).get("success"):
                if "aborted" not in event or event["aborted"].get("reason") != "SKIPPED":
                    not_built.add(ident["targetCompleted"].get("label"))

    passed = failed = skipped = 0
    failures = []
    for (label, _, _), (_, status, xml) in sorted(results.items()):
        good = status in ("PASSED", "FLAKY")
        counts = None
        if xml:
            try:
                counts = count_xml(xml)
            except (OSError, ET.ParseError):
                counts = None
        if counts is None:
            counts = (1, 0, 0) if good else (0, 1, 0)
        if not good and counts[1] == 0:
            counts = (counts[0], 1, counts[2])
        passed, failed, skipped = (a + b for a, b in zip((passed, failed, skipped), counts))
        if counts[1]:
            failures.append(f"{label}: {counts[1]} failed ({status})")
    tested = {label for label, _, _ in results}
    for label in sorted(not_built - tested):
        failed += 1
        failures.append(f"{label}: not built")
    if bazel_status not in (0, 4) and failed == 0:
        failed = 1
        failures.append(f"bazel ended with status {bazel_status}")

    for line in failures:
        print(line)
    if skipped:
        print(f"{skipped} skipped")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
