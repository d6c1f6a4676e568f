"""Progress on standard error while a command works: a bar with its rate, for what takes longer than a moment, in a terminal only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from raystate.cli.console import progress_out
from raystate.observe.byte_bars import byte_columns, can_show, passes_bars
from raystate.orbax.step_reader import StepReader
from raystate.waits import SHOWN_AFTER_S


class Timer(Protocol):
    """As much of `threading.Timer` as is needed."""

    daemon: bool

    def start(self) -> None: ...
    def cancel(self) -> None: ...


class Bars(Progress):
    """Rich's bars, of which nothing is seen of what ends within `SHOWN_AFTER_S`. They leave no line behind.

    Args:
        columns: see `rich.progress.Progress`.
        quiet: nothing is ever shown. Nor is it where standard error is no terminal, or one that can't move its cursor.
        timer: as `threading.Timer`: calls a function after so many seconds.
    """

    def __init__(
        self, *columns: str | ProgressColumn, quiet: bool, timer: Callable[[float, Callable[[], None]], Timer] | None = None
    ):
        super().__init__(
            *columns,
            console=progress_out,
            transient=True,
            disable=quiet or not can_show(progress_out),
            redirect_stdout=passes_bars(),
        )
        self._timer_of = timer or threading.Timer
        self._timer: Timer | None = None
        self._ended = False
        self._turn = threading.Lock()

    def start(self) -> None:
        """Show the bars, in a moment."""
        if not self.disable and self._timer is None:
            self._timer = self._timer_of(SHOWN_AFTER_S, self._show)
            self._timer.daemon = True
            self._timer.start()

    def _show(self) -> None:
        with self._turn:
            if not self._ended:
                super().start()

    def stop(self) -> None:
        """Take them away."""
        if self._timer is not None:
            self._timer.cancel()
        with self._turn:
            self._ended = True
            super().stop()


class _Rate(ProgressColumn):
    """How many a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f}/s" if speed else "", style="progress.data.speed")


def byte_progress(*, quiet: bool, **options: Any) -> Bars:
    """A bar for bytes: how many of how many, at which rate, and how long it still takes."""
    return Bars(*byte_columns(), quiet=quiet, **options)


def count_progress(*, quiet: bool, **options: Any) -> Bars:
    """As `byte_progress`, for things that are counted; without a total, it shows that something goes on."""
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(compact=True),
        quiet=quiet,
        **options,
    )


def wait_progress(what: str, *, quiet: bool, **options: Any) -> Bars:
    """For a wait that can't tell how far it is."""
    bars = Bars(
        TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.elapsed:.0f} s"), quiet=quiet, **options
    )
    bars.add_task(what, total=None)
    return bars


def watched(reader: StepReader, progress: Progress) -> StepReader:
    """The same, with a bar for the time in which it opens its arrays."""
    task = progress.add_task("opening arrays", total=None)
    reader.on_open = lambda done, total: progress.update(task, completed=done, total=total, visible=done < total)
    return reader


class TransferBar:
    """A bar with rate for each phase of a transfer.

    Args:
        quiet: there is none.
    """

    def __init__(self, *, quiet: bool):
        self._bar = byte_progress(quiet=quiet)
        self._task: tuple[str, TaskID] | None = None

    def __enter__(self) -> TransferBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, what: str, done: int, total: int) -> None:
        """What goes on, and how many bytes of it are done."""
        if self._task is None or self._task[0] != what:
            if self._task is not None:
                self._bar.remove_task(self._task[1])
            self._task = (what, self._bar.add_task(what, total=total))
        self._bar.update(self._task[1], completed=done, total=total)
