# SPDX-License-Identifier: Apache-2.0
"""A browser without a window, by the W3C's WebDriver protocol; needs chromium and chromedriver only."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """Use with `with`. Downloads go to `folder`."""

    def __init__(self, width=1280, height=800, dark=False):
        self.folder = tempfile.mkdtemp(prefix="vlab.", dir="/tmp")
        for program in ("chromedriver", "chromium"):
            if not shutil.which(program):
                raise AssertionError(f"{program} is missing: apt-get install chromium chromium-driver")
        self._log = open(os.path.join(self.folder, "chromedriver.log"), "w+b")
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0", "--allowed-ips=127.0.0.1"], stdin=subprocess.DEVNULL,
            stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "HOME": self.folder, "XDG_CONFIG_HOME": self.folder})
        self._session = None
        try:
            self._root = f"http://127.0.0.1:{self._port()}"
            arguments = [
                "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--disable-background-networking", "--disable-component-update", "--no-first-run",
                "--disable-sync", "--disable-default-apps", "--hide-scrollbars",
                f"--window-size={width},{height}", f"--user-data-dir={self.folder}/profile",
            ] + (["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else [])
            capabilities = {"alwaysMatch": {
                "browserName": "chrome",
                "goog:chromeOptions": {
                    "args": arguments, "binary": shutil.which("chromium")},
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}}
            answer = self._call("POST", "/session", {"capabilities": capabilities}, limit=90)
            self._session = f"/session/{answer['sessionId']}"
            self.cdp("Browser.setDownloadBehavior", behavior="allow", downloadPath=self.folder)
            self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height,
                     deviceScaleFactor=1, mobile=False)
        except BaseException:
            self.close()
            raise

    def _port(self):
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with open(self._log.name, encoding="utf-8", errors="replace") as log:
                match = re.search(r"started successfully on port (\d+)", log.read())
            if match:
                return int(match.group(1))
            time.sleep(0.05)
        raise AssertionError("chromedriver does not start")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        try:
            if self._session:
                self._call("DELETE", self._session, limit=10)
        except (AssertionError, OSError):
            pass
        try:
            os.killpg(self._driver.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._driver.wait()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _call(self, method, path, body=None, limit=60):
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self._root + path, data, method=method,
                                         headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=limit) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"].split("\n")[0]) from None

    def open(self, url):
        self._call("POST", f"{self._session}/url", {"url": url})

    def script(self, code, *arguments):
        """What `return`s in the code; arguments[0], ... are its values."""
        return self._call("POST", f"{self._session}/execute/sync",
                          {"script": code, "args": list(arguments)})

    def script_async(self, code, *arguments):
        """What the code gives to its last argument, a function."""
        return self._call("POST", f"{self._session}/execute/async",
                          {"script": code, "args": list(arguments)}, limit=120)

    def click(self, selector):
        element = self._call("POST", f"{self._session}/element",
                             {"using": "css selector", "value": selector})[ELEMENT]
        self._call("POST", f"{self._session}/element/{element}/click")

    def choose(self, selector, value):
        self.script("const e = document.querySelector(arguments[0]); e.value = arguments[1];"
                    "e.dispatchEvent(new Event('input', {bubbles: true}));"
                    "e.dispatchEvent(new Event('change', {bubbles: true}));", selector, value)

    def keys(self, text):
        actions = [{"type": "key", "id": "keyboard", "actions": [
            step for key in text
            for step in ({"type": "keyDown", "value": key}, {"type": "keyUp", "value": key})]}]
        self._call("POST", f"{self._session}/actions", {"actions": actions})

    def cdp(self, command, **parameters):
        return self._call("POST", f"{self._session}/goog/cdp/execute",
                          {"cmd": command, "params": parameters})

    def logs(self, kind):
        return self._call("POST", f"{self._session}/se/log", {"type": kind})

    def requests(self):
        """URLs that pages asked for since the last call."""
        found = []
        for entry in self.logs("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def screenshot(self, path):
        picture = base64.b64decode(self._call("GET", f"{self._session}/screenshot"))
        with open(path, "wb") as file:
            file.write(picture)

    def wait(self, condition, what, limit=30):
        """The first true value of a JavaScript expression."""
        end = time.monotonic() + limit
        while True:
            value = self.script(f"return {condition}")
            if value:
                return value
            if time.monotonic() > end:
                raise AssertionError(f"waited {limit} s for {what}")
            time.sleep(0.05)

    def downloaded(self, name, limit=20):
        path = os.path.join(self.folder, name)
        end = time.monotonic() + limit
        while not (os.path.exists(path) and os.path.getsize(path) > 0):
            if time.monotonic() > end:
                raise AssertionError(f"{name} was not downloaded; there: {os.listdir(self.folder)}")
            time.sleep(0.05)
        return path
