"""raystate status --watch: the same screen again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from raystate.cli.asking import Asker, Heard
from raystate.cli.console import at_utc, count, screen_out, span
from raystate.cli.status_stored import StoredRun, look_for, silent_block, stored_block
from raystate.cli.status_view import run_block, runs_table
from raystate.core.formats.texts import printable
from raystate.observe.byte_bars import can_show
from raystate.observe.status import RunReport
from raystate.waits import TOLD_AFTER_S

_BLOCKS = 2  # more runs than these get a row each


@dataclass(frozen=True, slots=True)
class _Seen:
    """A run's last answer. `heard_s`, `at_s`: when, by this process's clock, and in seconds since 1970."""

    heard_s: float
    at_s: float
    report: RunReport


class Screen:
    """The terminal's screen, between two answers, too.

    Args:
        which: the storage that was named; None: none was.
        chosen: which of the cluster's runs are asked for.
        every_s: between two refreshes.
    """

    def __init__(self, which: str | None, chosen: Callable[[Sequence[RunReport]], list[RunReport]], every_s: float):
        self._which = which
        self._chosen = chosen
        self._every_s = every_s
        self._heard: Heard | None = None
        self._heard_s = self._heard_at_s = 0.0
        self._seen: dict[str, _Seen] = {}  # by the name of its Coordinator: of the few runs that are shown whole
        self._stored: dict[str, tuple[float, StoredRun | None]] = {}  # by storage: when it was read, and what lies there

    def turn(self, heard: Heard | None, now_s: float) -> RenderableType:
        """The screen, with what has just been heard."""
        if heard is not None:
            self._heard, self._heard_s, self._heard_at_s = heard, now_s, time.time()
        shown = self._heard
        if shown is None:
            return Group(self._head("asks the Ray cluster"), Text("asking …", "dim"))
        silent_s = now_s - self._heard_s
        late = silent_s > self._every_s + TOLD_AFTER_S
        where = "no Ray cluster" if shown.problem else f"Ray at {shown.address}, {count(len(shown.reports), 'run')}"
        parts: list[RenderableType] = [self._head(where)]
        if late and not shown.problem:  # a line of its own: where the terminal is narrow, the end of the head is cut
            parts.append(Text(f"no answer for {span(silent_s)}: this is what was", "bold red"))
        reports = [one for one in self._chosen(shown.reports) if not (one.problem and one.name in self._seen)]
        if len(reports) > _BLOCKS:
            self._seen.clear()
            return Group(*parts, Text(), runs_table(reports), Text("\nraystate status --watch RUN shows all of one", "dim"))
        for one in reports:
            self._stored.pop(one.storage, None)  # what was read while it was silent is old
            if not one.problem:
                self._seen.pop(one.name, None)
                self._seen[one.name] = _Seen(self._heard_s, self._heard_at_s, one)
        gone = [seen for name, seen in self._seen.items() if name not in {one.name for one in reports}]
        for seen in gone[:-_BLOCKS]:
            del self._seen[seen.report.name]
        if not reports and not gone:
            return Group(*parts, Text(), self._never_seen(shown, now_s))
        parts += [part for one in reports for part in (Text(), run_block(one, full=False, at_s=self._heard_at_s))]
        return Group(*parts, *(part for seen in gone[-_BLOCKS:] for part in self._silent(seen, shown, now_s)))

    def _head(self, text: str) -> Text:
        return Text.assemble(
            (f"raystate status  {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}", "bold"), f"  {printable(text)}"
        )

    def _never_seen(self, shown: Heard, now_s: float) -> RenderableType:
        why = shown.problem or f"no run on the Ray cluster at {shown.address}{' is that' if self._which else ''}"
        found = self._look_for(self._which, now_s) if self._which else None
        return stored_block(found, why) if found is not None else Text(printable(why), "yellow")

    def _silent(self, seen: _Seen, shown: Heard, now_s: float) -> Iterator[RenderableType]:
        """A run that has answered before: what may be of it, and what was seen last."""
        last = seen.report
        problem = next((one.problem for one in shown.reports if one.name == last.name), "")
        why = shown.problem or problem or f"no Coordinator of it is on the Ray cluster at {shown.address}"
        silent_s = now_s - seen.heard_s
        yield Text()
        yield silent_block(last.run, last.storage, self._look_for(last.storage, now_s), silent_s, why)
        yield Text(f"\nseen last at {at_utc(seen.at_s)}, {span(silent_s)} ago:", "bold")
        yield run_block(last, full=False, at_s=seen.at_s)

    def _look_for(self, storage: str, now_s: float) -> StoredRun | None:
        """It is read again every ten seconds."""
        read_s, found = self._stored.get(storage, (float("-inf"), None))
        if now_s - read_s > TOLD_AFTER_S:
            found = look_for(storage)
            self._stored[storage] = (now_s, found)
        return found


def watch(screen: Screen, every_s: float, console: Console = screen_out) -> None:
    """Until Ctrl-C. In a pipe each refresh is a block of its own, without colours."""
    with Asker(every_s) as asker:
        last: RenderableType = Text()
        try:
            if not can_show(console):
                _print_on(screen, asker, console)
            with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
                while True:
                    last = screen.turn(asker.next(every_s), time.monotonic())
                    live.update(last, refresh=True)
        except KeyboardInterrupt:
            if can_show(console):
                console.print(last)  # what was seen last stays on the terminal


def _print_on(screen: Screen, asker: Asker, console: Console) -> None:
    while True:
        heard = asker.next(TOLD_AFTER_S)
        console.print(screen.turn(heard, time.monotonic()), soft_wrap=True)
        console.print()
        console.file.flush()
