"""Debian's chromium, driven over its DevTools protocol: one page at a time, everything that it says kept."""

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager

from websockets.sync.client import connect

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0"),
    *("--window-size=1280,1000", "--remote-allow-origins=*"),
)


def missing():
    """Whether there is no chromium here."""
    return shutil.which("chromium") is None


@contextmanager
def opened(page, profile):
    """A file in a browser of its own.

    Args:
        page: The file.
        profile: A folder for the browser.
    """
    command = ["chromium", *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        port = _wait(lambda: (profile / "DevToolsActivePort").read_text().split()[0], process)
        from urllib.request import urlopen

        targets = _wait(lambda: json.load(urlopen(f"http://127.0.0.1:{port}/json", timeout=5)), process)
        address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
        with connect(address, max_size=None) as socket:
            tab = Tab(socket)
            for domain in ("Page", "Runtime", "Log", "Network"):
                tab.ask(f"{domain}.enable")
            tab.ask("Page.navigate", url=page.as_uri())
            tab.until("Page.loadEventFired")
            yield tab
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(look, process):
    for _ in range(300):
        try:
            return look()
        except (OSError, IndexError, ValueError):
            if process.poll() is not None:
                raise RuntimeError(f"chromium ended with {process.returncode}") from None
            time.sleep(0.2)
    raise RuntimeError("chromium did not start within a minute")


class Tab:
    """A page.

    Attributes:
        events: All that the browser reported, in order: (method, parameters).
    """

    def __init__(self, socket):
        self._socket, self._last, self.events = socket, 0, []

    def ask(self, method, **parameters):
        """A command's result."""
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": parameters}))
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]

    def until(self, method):
        """Wait for an event."""
        while method not in [name for name, _ in self.events]:
            self._next()

    def _next(self):
        answer = json.loads(self._socket.recv(timeout=60))
        if "method" in answer:
            self.events.append((answer["method"], answer["params"]))
        return answer

    def value(self, expression):
        """Of an expression in the page."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key, code=None, text=""):
        """A key, as a hand would."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            number = codes.get(key, ord(key.upper()) if len(key) == 1 else 0)
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=number, **extra)

    def said(self):
        """Console lines, errors and refusals of the page's policy, as texts."""
        found = []
        for name, parameters in self.events:
            if name == "Log.entryAdded":
                found.append(parameters["entry"]["text"])
            elif name == "Runtime.consoleAPICalled":
                found.append(str(parameters["args"]))
            elif name == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
        return found

    def fetched(self):
        """Addresses that were asked for."""
        return [p["request"]["url"] for name, p in self.events if name == "Network.requestWillBeSent"]
