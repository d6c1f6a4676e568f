"""Chromium without a window, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S

WHERE = shutil.which("chromium")
needs_browser = pytest.mark.skipif(WHERE is None, reason="there is no chromium: .ci/debian chromium installs Debian's, as root")

_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip

# It reads from 3, and writes to 4.
_BECOME = """
import os, sys
there = [os.dup2(int(one), 60 + number) for number, one in enumerate(sys.argv[1:3])]
for number, one in enumerate(there):
    os.dup2(one, 3 + number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page. What it asked the network for, and its complaints, are kept.

    Attributes:
        requests: URLs, in order.
        complaints: errors of its console, and exceptions.
    """

    def __init__(self, asks: int, tells: int):
        self._asks, self._tells = asks, tells
        self._buffer = b""
        self._number = 0
        self._session = ""
        self._loaded = False
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Of the protocol: https://chromedevtools.github.io/devtools-protocol/"""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(self._asks, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path, *, width: int, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """Show it in a window of that many pixels; returns when all of it has been loaded."""
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.requests, self.complaints, self._loaded = [], [], False
        self.call("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._next()

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self) -> bytes:
        """All of the page, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def _next(self) -> dict[str, Any]:
        end_s = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            assert select.select([self._tells], [], [], max(0.0, end_s - time.monotonic()))[0], "chromium does not answer"
            data = os.read(self._tells, 1 << 20)
            assert data, "chromium has ended"
            self._buffer += data
        one, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(one)
        match message.get("method"), message.get("params", {}):
            case "Page.loadEventFired", _:
                self._loaded = True
            case "Network.requestWillBeSent", params:
                self.requests.append(params["request"]["url"])
            case "Log.entryAdded", params if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"]["text"])
            case "Runtime.exceptionThrown", params:
                self.complaints.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled", params if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(params["args"]))
            case _:
                pass
        return message


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Chromium, its profile in a folder that is empty."""
    assert WHERE is not None
    their_in, asks = os.pipe()
    tells, their_out = os.pipe()
    command = [WHERE, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", _BECOME, str(their_in), str(their_out), *command],
        pass_fds=(their_in, their_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(their_in)
    os.close(their_out)
    try:
        yield Browser(asks, tells)
    finally:
        with contextlib.suppress(OSError):
            os.write(asks, b'{"id": 0, "method": "Browser.close"}\0')
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            os.close(asks)
            os.close(tells)
