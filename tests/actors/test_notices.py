"""What a host is told of its node's end, by a server that speaks as Google's metadata server does."""

from __future__ import annotations

import contextlib
import http.server
import os
import queue
import signal
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raystate.runtime.host import notices
from raystate.runtime.host.notices import PREEMPTED, Notice
from raystate.waits import PREEMPTION_S
from tests.patience import PATIENCE_S


class Metadata(http.server.ThreadingHTTPServer):
    """One key, whose readers wait for its next value."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Reply)
        self.changed = threading.Condition()
        self.value, self.tag, self.down = "FALSE", 1, False
        self.holds = True  # the answer until there is news
        self.asked: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def set(self, value: str) -> None:
        with self.changed:
            self.value, self.tag = value, self.tag + 1
            self.changed.notify_all()


class _Reply(http.server.BaseHTTPRequestHandler):
    server: Metadata

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        given = dict(urllib.parse.parse_qsl(query))
        server = self.server
        server.asked.put(given)
        if server.down or path != PREEMPTED or self.headers["Metadata-Flavor"] != "Google":
            self.send_error(503 if server.down else 403)
            return
        with server.changed:
            if server.holds and given.get("wait_for_change") == "true":
                server.changed.wait_for(lambda: str(server.tag) != given.get("last_etag"), float(given["timeout_sec"]))
            value, tag = server.value.encode(), str(server.tag)
        self.send_response(200)
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.set("over")  # lets go of who waits
        server.shutdown()
        thread.join()


class Told(queue.SimpleQueue[tuple[float, str]]):
    """What was told of: seconds, and why."""

    def __call__(self, within_s: float, why: str) -> None:
        self.put((within_s, why))

    def why(self) -> str:
        return self.get(timeout=PATIENCE_S)[1]


@pytest.fixture
def told() -> Told:
    return Told()


class Sleeps:
    """A clock: who sleeps is seen, and waits for the test."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.asked: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.on = threading.Semaphore(0)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.asked.put(seconds)
        self.on.acquire(timeout=PATIENCE_S)


@pytest.fixture
def sleeps() -> Iterator[Sleeps]:
    made = Sleeps()
    yield made
    for _ in range(8):
        made.on.release()


@pytest.fixture
def begun(sleeps: Sleeps, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Notice]]:
    """Watches until the test has ended, by default on no cloud."""
    monkeypatch.setattr(notices, "on_gce", lambda: False)
    monkeypatch.setattr(notices, "RETRY_FIRST_S", 0.01)
    with contextlib.ExitStack() as stack:

        def begin(tell: Callable[[float, str], None], **more: Any) -> Notice:
            notice = Notice(tell, **more)
            notice.start()
            return stack.enter_context(contextlib.closing(notice))

        yield begin


def test_a_preemption_is_told_until_somebody_has_heard(begun: Callable[..., Notice], told: Told, metadata: Metadata):
    begun(told, metadata_url=metadata.url)
    assert metadata.asked.get(timeout=PATIENCE_S)["last_etag"] == "0"
    assert metadata.asked.get(timeout=PATIENCE_S)["last_etag"] == "1", "from now on it waits for a change"
    assert told.empty()
    metadata.set("TRUE")
    first, second = told.get(timeout=PATIENCE_S), told.get(timeout=PATIENCE_S)
    assert first[1] == second[1] == "its cloud preempts it"
    assert 0 < second[0] < first[0] <= PREEMPTION_S


def test_a_preemption_from_before_the_first_question(begun: Callable[..., Notice], told: Told, metadata: Metadata):
    metadata.set("TRUE")
    begun(told, metadata_url=metadata.url)
    assert told.why() == "its cloud preempts it"


def test_a_server_that_is_down_is_asked_again(begun: Callable[..., Notice], told: Told, metadata: Metadata):
    metadata.down = True
    begun(told, metadata_url=metadata.url)
    for _ in range(3):
        metadata.asked.get(timeout=PATIENCE_S)
    metadata.set("TRUE")
    metadata.down = False
    assert told.why() == "its cloud preempts it"


def test_the_first_notice_counts(begun: Callable[..., Notice], told: Told):
    notice = begun(told)
    before = signal.signal(signal.SIGUSR1, lambda *_: notice.notice(20.0, "its processes got a signal"))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert told.why() == "its processes got a signal"
        notice.notice(5.0, "something else")
        assert told.why() == "its processes got a signal"
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("value", ["FALSE", "<html>a portal</html>"])
def test_a_server_that_answers_at_once_is_not_asked_without_end(
    begun: Callable[..., Notice], metadata: Metadata, sleeps: Sleeps, value: str
):
    metadata.holds = False
    metadata.value = value
    begun(lambda *_: None, metadata_url=metadata.url, clock=sleeps)
    for _ in range(3):
        assert sleeps.asked.get(timeout=PATIENCE_S) == notices.RETRY_FIRST_S
        sleeps.on.release()


def test_a_server_that_says_nothing_of_use_is_named_once(
    begun: Callable[..., Notice], metadata: Metadata, caplog: pytest.LogCaptureFixture
):
    metadata.value = "<html>a portal</html>"
    metadata.holds = False
    with contextlib.closing(begun(lambda *_: None, metadata_url=metadata.url)):
        for _ in range(3):
            metadata.asked.get(timeout=PATIENCE_S)
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(warnings) == 1 and metadata.url in warnings[0] and "neither TRUE nor FALSE" in warnings[0]


def test_news_that_cannot_be_told_are_told_again(begun: Callable[..., Notice], told: Told):
    def tell(within_s: float, why: str) -> None:
        told(within_s, why)
        raise RuntimeError("Ray's head is away")

    begun(tell).notice(20.0, "its processes got SIGTERM")
    for _ in range(3):
        assert told.why() == "its processes got SIGTERM"


def test_a_node_that_outlives_its_end_is_not_told_of_any_more(
    begun: Callable[..., Notice], told: Told, sleeps: Sleeps, monkeypatch: pytest.MonkeyPatch
):
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(notices.logger, "warning", lambda text, *_: said.put(text))
    notice = begun(told, clock=sleeps)
    notice.notice(20.0, "a signal by mistake")
    assert told.get(timeout=PATIENCE_S) == (20.0, "a signal by mistake")
    sleeps.asked.get(timeout=PATIENCE_S)
    sleeps.now_s += 20.0 + notices.OVERDUE_S + 1.0
    sleeps.on.release()
    assert "still there" in said.get(timeout=PATIENCE_S)
    notice.notice(30.0, "its cloud preempts it")
    assert told.get(timeout=PATIENCE_S) == (30.0, "its cloud preempts it")


def test_a_signal_by_mistake_does_not_hide_a_preemption(
    begun: Callable[..., Notice], told: Told, metadata: Metadata, sleeps: Sleeps
):
    notice = begun(told, metadata_url=metadata.url, clock=sleeps)
    metadata.asked.get(timeout=PATIENCE_S)
    notice.notice(20.0, "a signal by mistake")
    assert told.why() == "a signal by mistake"
    metadata.set("FALSE")  # the server answers, and is to be asked again
    assert _released(sleeps, metadata.asked)
    sleeps.now_s += 20.0 + notices.OVERDUE_S + 1.0
    metadata.set("TRUE")
    while (why := _released(sleeps, told)[1]) == "a signal by mistake":
        pass
    assert why == "its cloud preempts it"


def _released(sleeps: Sleeps, awaited: queue.SimpleQueue[Any]) -> Any:
    """What comes while both threads of a notice may sleep as they like."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        sleeps.on.release()
        with contextlib.suppress(queue.Empty):
            return awaited.get(timeout=0.05)
    raise TimeoutError
