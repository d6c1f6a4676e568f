"""Bars of the commands: in terminals alone, of what takes longer than a moment, and gone when it has ended."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from raystate.cli import bars, console
from raystate.inspection.verification import verify_log
from raystate.storage import find_garbage, open_storage, remove_garbage
from tests.storage.test_garbage import claim, started


class Terminal(io.StringIO):
    """Standard error of somebody who sits there."""

    def isatty(self) -> bool:
        return True


class ByHand:
    """A timer that ends when the test says so."""

    daemon = False

    def __init__(self, seconds: float, call: Callable[[], None]):
        assert seconds == bars.SHOWN_AFTER_S
        self.fires = call
        self.begun = self.cancelled = False
        timers.append(self)

    def start(self) -> None:
        self.begun = True

    def cancel(self) -> None:
        self.cancelled = True


timers: list[ByHand] = []


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    timers.clear()
    shown = Terminal()
    for name, value in {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bars, "progress_out", console._Terminal(file=shown))
    return shown


def lines(terminal: Terminal) -> list[str]:
    """What was seen, without what moves the cursor."""
    return [
        line
        for line in re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "\n", terminal.getvalue()).replace("\r", "\n").split("\n")
        if line.strip()
    ]


@pytest.mark.parametrize("make", [bars.byte_progress, bars.count_progress])
def test_what_ends_soon_shows_nothing(make: Callable[..., bars.Bars], terminal: Terminal):
    with make(quiet=False, timer=ByHand) as progress:
        progress.update(progress.add_task("step 7", total=10), completed=10)
    assert terminal.getvalue() == ""
    assert timers[0].begun and timers[0].cancelled
    timers[0].fires()  # it was already on its way
    assert terminal.getvalue() == ""


def test_a_bar_has_bytes_rate_and_time_left_in_80_columns_and_no_colour(terminal: Terminal):
    now_s = 0.0
    progress = bars.byte_progress(quiet=False, timer=ByHand)
    progress.get_time = lambda: now_s
    with progress:
        task = progress.add_task("step 1200", total=10 << 30)
        timers[0].fires()
        for second in range(1, 5):
            now_s = float(second)
            progress.update(task, completed=second << 30)
        progress.refresh()
        seen = lines(terminal)
    assert re.search(r"step 1200 +━+.* 4\.0/10\.0 GiB +1\.0 GiB/s +00:06", seen[-1]), seen[-1]
    assert max(map(cell_len, seen)) <= 80
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", terminal.getvalue()), "a colour"
    assert terminal.getvalue().rstrip("\n").endswith("\x1b[2K"), "the line is wiped"


def test_a_pipe_a_dumb_terminal_and_json_show_nothing(monkeypatch: pytest.MonkeyPatch, terminal: Terminal):
    for quiet, file, term in ((True, terminal, "xterm"), (False, io.StringIO(), "xterm"), (False, terminal, "dumb")):
        monkeypatch.setenv("TERM", term)
        monkeypatch.setattr(bars, "progress_out", console._Terminal(file=file))
        for progress in (bars.byte_progress(quiet=quiet, timer=ByHand), bars.wait_progress("asking", quiet=quiet, timer=ByHand)):
            with progress:
                progress.add_task("step 7", total=10)
        assert file.getvalue() == ""
    assert timers == []


def test_a_wait_says_what_for_and_how_long(terminal: Terminal):
    with bars.wait_progress("asking the Ray cluster", quiet=False, timer=ByHand):
        timers[0].fires()
        seen = lines(terminal)
    assert re.fullmatch(r"asking the Ray cluster [━ ]+ 0 s *", seen[-1])


def test_gc_and_verify_tell_how_far_they_are(tmp_path: Path):
    storage = open_storage(tmp_path)
    claim(storage)
    started(storage, 3, "a1k1")
    claim(storage)
    entries: list[tuple[int, int]] = []
    assert verify_log(storage, on_entry=lambda done, total: entries.append((done, total))) == ()
    assert entries == [(done, len(entries)) for done in range(1, len(entries) + 1)] and len(entries) >= 2
    counts: list[int] = []
    found = find_garbage(storage, on_found=counts.append)
    assert counts == list(range(1, len(found) + 1)) and counts
    freed: list[int] = []
    remove_garbage(storage, found, on_bytes=freed.append)
    assert freed == sorted(freed) and freed[-1] == sum(one.nbytes for one in found) > 0
    assert find_garbage(storage) == []


def test_what_is_printed_to_a_file_meanwhile_stays_there(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    printed = io.StringIO()
    monkeypatch.setattr("sys.stdout", printed)
    with bars.byte_progress(quiet=False, timer=ByHand) as progress:
        progress.add_task("step 7", total=10)
        timers[0].fires()
        sys.stdout.write("{}\n")
    assert printed.getvalue() == "{}\n"


def test_colours_that_are_asked_for_make_no_terminal_of_a_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(bars, "progress_out", console._Terminal(file=io.StringIO()))
    assert bars.progress_out.is_terminal, "rich thinks so"
    assert bars.byte_progress(quiet=False, timer=ByHand).disable
