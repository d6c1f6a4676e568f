"""How a host learns that its node is to go away: from Google Compute Engine's metadata server, and from SIGTERM.

The metadata server answers `instance/preempted` with TRUE from the moment of a preemption on; a spot machine has 30 seconds then.
Source: https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import threading
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from raystate.waits import ANSWER_S, HELD_S, OVERDUE_S, PREEMPTION_S, RETRY_FIRST_S

logger = logging.getLogger("raystate.host")

GCE_METADATA_URL = "http://metadata.google.internal"
PREEMPTED = "/computeMetadata/v1/instance/preempted"

Tell = Callable[[float, str], None]
"""Takes (seconds until the end, who says so)."""


class Clock(Protocol):
    """The part of the module `time` that is needed here."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


def on_gce() -> bool:
    """Whether this machine is one of Google's, without asking the network."""
    with contextlib.suppress(OSError):
        return Path("/sys/class/dmi/id/product_name").read_text().startswith("Google")
    return False


class Notice:
    """The end of this node, told until then.

    Args:
        tell: called from a thread, again and again: what it sends may get lost.
        metadata_url: of the metadata server; None: Google's if this is one of its machines, else none is asked.
        clock: what has `monotonic` and `sleep`.
    """

    def __init__(self, tell: Tell, *, metadata_url: str | None = None, clock: Clock = time):
        self._tell = tell
        self._clock = clock
        self._url = metadata_url or (GCE_METADATA_URL if on_gce() else None)
        self._until_s: float | None = None
        self._why = ""
        self._noticed = threading.Event()
        self._closed = False

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._repeat, name="raystate-notice", daemon=True).start()
        if self._url is not None:
            threading.Thread(target=self._watch, args=(self._url,), name="raystate-metadata", daemon=True).start()

    def close(self) -> None:
        """Stop watching: no news are wanted any more."""
        self._closed = True
        self._noticed.set()

    def notice(self, within_s: float, why: str) -> None:
        """The node goes away. An earlier notice stands until its end is over. A signal handler may
        call it."""
        now_s, until_s = self._clock.monotonic(), self._until_s
        if until_s is None or until_s < now_s:
            self._until_s, self._why = now_s + within_s, why
            self._noticed.set()

    def _repeat(self) -> None:
        while self._noticed.wait() and not self._closed:
            left_s = (self._until_s or 0.0) - self._clock.monotonic()
            if left_s < -OVERDUE_S / 2:
                self._until_s = None
                self._noticed.clear()
                if self._until_s is not None:  # there was news in between
                    self._noticed.set()
                logger.warning("this node was to go away %.0f s ago, and is still there: %s", -left_s, self._why)
                continue
            try:
                self._tell(max(0.0, left_s), self._why)
            except Exception as error:  # Ray's head is out of reach, say
                logger.warning("the Coordinator could not be told that this node goes away: %s: %s", type(error).__name__, error)
            self._clock.sleep(RETRY_FIRST_S)

    def _watch(self, url: str) -> None:
        tag, was, is_quiet = "0", "FALSE", True
        while not self._closed:
            try:
                tag, value = ask(url, PREEMPTED, tag)
            except (OSError, http.client.HTTPException, ValueError) as error:
                log = logger.warning if is_quiet else logger.debug  # once; it may come to itself
                log("the metadata server at %s does not say whether this node is preempted: %s", url, error)
                is_quiet = False
            else:
                is_quiet = True
                if value == "TRUE" and was != "TRUE":
                    self.notice(PREEMPTION_S, "its cloud preempts it")
                was = value
            self._clock.sleep(RETRY_FIRST_S)


def ask(url: str, path: str, tag: str) -> tuple[str, str]:
    """(tag, value) of a metadata key, once it is other than at `tag`; or as it was, after HELD_S.

    Args:
        url: base of the server.
        path: of the key.
        tag: of the value that is known; "0": none is, so that any value is news.
    """
    base = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(base.netloc, timeout=HELD_S + ANSWER_S)
    query = urllib.parse.urlencode({"wait_for_change": "true", "timeout_sec": int(HELD_S), "last_etag": tag})
    try:
        connection.request("GET", f"{base.path.rstrip('/')}{path}?{query}", headers={"Metadata-Flavor": "Google"})
        reply = connection.getresponse()
        value = reply.read(64).decode(errors="replace").strip()
        if reply.status != http.HTTPStatus.OK:
            raise ValueError(f"HTTP {reply.status}")
        if value not in ("TRUE", "FALSE"):
            raise ValueError(f"it answers {value!r}, neither TRUE nor FALSE")
        return reply.headers.get("ETag", "0"), value
    finally:
        connection.close()
