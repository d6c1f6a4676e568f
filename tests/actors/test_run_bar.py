"""The bar of `fit` in a terminal."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest
from rich.console import Console

from raystate.observe.progress import Going
from raystate.train import bar

GIB = 1 << 30


def going(since_s: float, done: int, total: int, step: int = 120, what: str = "saving") -> Going:
    return Going(what=what, step=step, of=f"a1k{step}", since_s=since_s, done_bytes=done * GIB, total_bytes=total * GIB)


def lines(shown: io.StringIO) -> list[str]:
    found = [line for line in re.split(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]", shown.getvalue()) if line.strip()]
    shown.seek(0)
    shown.truncate()
    return found


def test_what_takes_long_is_shown_until_it_ends():
    shown = io.StringIO()
    one = bar.RunBar(Console(file=shown, force_terminal=True, width=80, no_color=True))
    one.show([going(0.5, 1, 8)])
    one.show([going(9.0, 0, 0)])
    assert shown.getvalue() == "", "it has just begun; nobody has said anything"
    one.show([going(3.0, 2, 8)])
    one.show([going(4.0, 3, 8), going(3.0, 1, 2, step=100, what="restoring")])
    one._progress.refresh()
    seen = lines(shown)
    assert any(re.match(r"saving step 120 +━.* 3\.0/8\.0 GiB ", line) for line in seen), seen
    assert any(re.match(r"restoring step 100 +━.* 1\.0/2\.0 GiB ", line) for line in seen), seen
    assert max(map(len, seen)) <= 80
    one.show([])
    lines(shown)
    one.close()
    assert lines(shown) == []


def test_a_pipe_is_asked_nothing(monkeypatch):
    monkeypatch.setattr(bar.threading, "Thread", lambda **_: (_ for _ in ()).throw(AssertionError("a thread")))
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")  # of what is printed; it makes no terminal of a pipe
    with bar.run_bar(None):  # type: ignore[arg-type]
        pass


def test_the_bar_looks_until_the_run_has_ended():
    shown, ended = io.StringIO(), threading.Event()
    answers = [[going(3.0, 1, 8)], []]

    def look() -> list[Going]:
        if len(answers) == 1:
            ended.set()
        return answers.pop(0)

    ended.wait = lambda timeout=None: ended.is_set()
    bar._watch(bar.RunBar(Console(file=shown, force_terminal=True, width=80)), look, ended)
    assert answers == []
    assert "saving step 120" in shown.getvalue()


@pytest.mark.parametrize("passes", [False, True])
def test_what_the_driver_prints_meanwhile_stays_where_it_belongs(passes: bool, monkeypatch: pytest.MonkeyPatch):
    """Standard output that goes to a file has no bars to go past: rich would send it to the terminal, and the file would lack it."""
    printed, shown = io.StringIO(), io.StringIO()
    printed.isatty = lambda: passes
    monkeypatch.setattr("sys.stdout", printed)
    one = bar.RunBar(Console(file=shown, force_terminal=True, width=80))
    one.show([going(3.0, 2, 8)])
    sys.stdout.write("loss 1.0\n")
    one.close()
    assert ("loss 1.0" in printed.getvalue(), "loss 1.0" in shown.getvalue()) == (not passes, passes)
    assert sys.stdout is printed
