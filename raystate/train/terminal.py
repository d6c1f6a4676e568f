"""What the terminal of `fit` shows, and `ray job logs`: the user's lines, what becomes of the run, and no noise of processes that end.

Ray prints in the driver what all processes of its job print. Of a death that is mostly what those say that die of it: stacks of JAX's
coordination service, Gloo's lines, raylets that miss a process. All of it stays in Ray's log files.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Generator, Iterable
from typing import Any

import ray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raystate.actors.rays import worker
from raystate.core.formats.texts import counted, printable
from raystate.train.result import Recovery, RunResult

_FILE_COLUMNS = 160  # for lines that go to no terminal: a file, the log of a job

# At the beginning of a line.
_NOISE = re.compile(
    r"\[Gloo\] Rank \d+ is connected to |"
    r"(Starting|Connecting to) JAX distributed service on |"
    r"JAX detected proxy variable\(s\) in the environment |"  # it goes past them: nodes.reach_directly
    r"[IWEF]\d{4} [\d:.]+ +\d+ (preemption_sync_manager|coordination_service\w*|client)\.(cc|h):\d+\] |"
    r"Additional GRPC error information from remote target coordination_service |"
    r":UNKNOWN:Error received from peer |"
    r"\[[-\d:, ]+ [EW] \d+ \d+\] core_worker\.cc:\d+: Actor with class name: 'PreemptionWatcher'|"
    r"A worker died or was killed while executing a task by an unexpected system error|"
    # Ours: what a recovery's one line says, and what only its record needs.
    r"raystate INFO (attempt \d+ of run |(all \d+ ranks have|the only rank has) joined: )|"
    r"raystate WARNING lineage \S+ has ended: |"
    r"rank \d+ has restored step \d+: "
)
_RESTORES = re.compile(r"raystate INFO (lineage \S+ (restores|begins) |(all \d+ ranks have|the only rank has) restored )")
_JOINED = re.compile(r"raystate INFO (all \d+ ranks have|the only rank has) joined: ")
_DIES_OF_ANOTHER = re.compile(r"F\d{4} .*Terminating process because the JAX distributed service detected fatal errors")


class Shown:
    """Which lines of one `fit` are shown."""

    def __init__(self) -> None:
        self._dying: set[object] = set()  # processes that another one's death ends
        self._has_ended = False  # a worker group has: the next restore is told as a recovery

    def of(self, process: object, lines: Iterable[str]) -> list[str]:
        """Those of a process's new lines that are."""
        return [line for line in lines if self._is_shown(process, line)]

    def _is_shown(self, process: object, line: str) -> bool:
        if _JOINED.match(line):
            self._dying.clear()  # their numbers may be those of new processes
        if _DIES_OF_ANOTHER.match(line):
            self._dying.add(process)
        self._has_ended = self._has_ended or (line.startswith("raystate WARNING lineage ") and " has ended: " in line)
        is_told = self._has_ended and _RESTORES.match(line)
        return process not in self._dying and not is_told and not _NOISE.match(line)


@contextlib.contextmanager
def calm() -> Generator[None]:
    """Meanwhile only that is shown, where this process shows its job's lines at all. Says where the rest is."""
    theirs = worker.print_worker_logs
    if isinstance(theirs, functools.partial):  # in a `fit` of another thread
        yield
        return
    worker.print_worker_logs = functools.partial(_print, theirs, Shown())
    if worker.global_worker_stdstream_dispatcher.handlers:  # pyright: ignore[reportPrivateImportUsage]
        context = ray.get_runtime_context()
        folder = f"{context.get_temp_dir()}/{context.get_session_name()}/logs"
        Console(stderr=True).print(
            Text(f"raystate: all that the run's processes print is in {folder}, on their nodes"), soft_wrap=True
        )
    try:
        yield
    finally:
        worker.print_worker_logs = theirs


def _print(theirs: Callable[..., None], shown: Shown, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    lines = data.get("lines", [])
    if data.get("pid") != "autoscaler":
        lines = shown.of((data.get("ip"), data.get("pid")), lines)
    if lines:
        theirs({**data, "lines": lines}, *args, **kwargs)


def tell_start(run: str, workers: int | tuple[int, int], console: Console | None = None) -> None:
    """The first line, for the seconds in which nothing else is said."""
    console = console or Console(stderr=True)
    count = counted(workers, "worker") if isinstance(workers, int) else "{} to {} workers".format(*workers)
    text = f"raystate: run {run!r} begins; {count} will start, which takes some seconds"
    console.print(Text(printable(text)), soft_wrap=True)


def tell_end(result: RunResult, run: str, console: Console | None = None) -> None:
    """The last lines: how far the run is, and its restarts."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    restarts = f", after {counted(len(result.recoveries), 'restart')}:" if result.recoveries else ""
    text = f"raystate: run {run!r} has finished with step {result.step} in {result.path}{restarts}"
    console.print(Text(printable(text)), soft_wrap=True)
    if result.recoveries:
        console.print(_table(result.recoveries))


def _table(recoveries: Iterable[Recovery]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("start", justify="right")
    table.add_column("why", overflow="fold")
    for name in ("step", "from", "repeated", "seconds"):
        table.add_column(name, justify="left" if name == "from" else "right", no_wrap=True)
    for one in recoveries:
        known = (one.step, one.tier or None, one.steps_repeated, None if one.seconds is None else f"{one.seconds:.1f}")
        table.add_row(str(one.attempt), Text(printable(one.cause)), *("?" if fact is None else str(fact) for fact in known))
    return table
