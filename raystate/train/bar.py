"""A bar for saves and restores that take long, where `fit` runs in a terminal. Elsewhere the run's log has lines (`runtime.long_waits`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import Progress, TaskID

from raystate.config.state_config import StateConfig
from raystate.observe.byte_bars import byte_columns, can_show, passes_bars
from raystate.observe.progress import Going
from raystate.observe.status import RunReport
from raystate.train.onlookers import answer_of, looking_on
from raystate.waits import LOOK_EVERY_S, SHOWN_AFTER_S


class RunBar:
    """What goes on in a run, one bar each. Not thread-safe.

    Args:
        console: a terminal.
    """

    def __init__(self, console: Console):
        self._progress = Progress(*byte_columns(), console=console, transient=True, redirect_stdout=passes_bars())
        self._tasks: dict[tuple[str, int, str], TaskID] = {}

    def show(self, going: Sequence[Going]) -> None:
        """Show this, and nothing else. A copy that has just begun, or has told nothing of its
        bytes, is not shown."""
        long = {(one.what, one.step, one.of): one for one in going if one.since_s >= SHOWN_AFTER_S and one.total_bytes}
        for key in [key for key in self._tasks if key not in long]:
            self._progress.remove_task(self._tasks.pop(key))
        for key, one in long.items():
            if key not in self._tasks:
                self._tasks[key] = self._progress.add_task(f"{one.what} step {one.step}", total=one.total_bytes)
            self._progress.update(self._tasks[key], completed=one.done_bytes, total=one.total_bytes)
        if self._tasks:
            self._progress.start()
        else:
            self._progress.stop()

    def close(self) -> None:
        """Take them away."""
        self.show(())


@contextlib.contextmanager
def run_bar(config: StateConfig) -> Iterator[None]:
    """While this lasts, long saves and restores of the run are shown, if standard error is a
    terminal that can move its cursor."""
    console = Console(stderr=True)
    if not can_show(console):
        yield
        return
    bar = RunBar(console)
    with looking_on("raystate-bar", lambda ended: _watch(bar, lambda: _going(config), ended)):
        yield


def _watch(bar: RunBar, look: Callable[[], Sequence[Going]], ended: threading.Event) -> None:
    try:
        while not ended.wait(LOOK_EVERY_S):
            bar.show(look())
    finally:
        bar.close()


def _going(config: StateConfig) -> Sequence[Going]:
    """What the Coordinator knows; nothing if it can't be asked now."""
    report: RunReport | None = answer_of(config, lambda coordinator: coordinator.status.remote())
    return () if report is None else report.going
