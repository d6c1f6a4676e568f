"""What the terminal of `fit` shows, and `ray job logs`: the user's lines, what becomes of the run, and no noise of processes that end.

Ray prints in the driver what all processes of its job print. Of a death that is mostly what those say that die of it: stacks of JAX's
coordination service, Gloo's lines, raylets that miss a process. All of it stays in Ray's log files.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

import ray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raystate.actors.rays import worker
from raystate.core.formats.texts import counted, printable
from raystate.log_lines import OURS
from raystate.patching import patched
from raystate.train.result import Recovery, RunResult
from raystate.waits import SAID_AGAIN_S

logger = logging.getLogger(__name__)

_FILE_COLUMNS = 160  # for lines that go to no terminal: a file, the log of a job

# At the beginning of a line.
_NOISE = re.compile(
    # A worker's stdout has no buffer, and Gloo writes its line in pieces: Ray may show the rest as a line of its own.
    r"\[Gloo\] Rank|[\d ]*(is connected to \d* *)?peer ranks\. |\d* is connected to \d* *$|Expected number of connected peer ranks is|"
    r"(Starting|Connecting to) JAX distributed service on |"
    r"JAX detected proxy variable\(s\) in the environment |"  # it goes past them: nodes.reach_directly
    r"[IWEF]\d{4} [\d:.]+ +\d+ (preemption_sync_manager|coordination_service\w*|client)\.(cc|h):\d+\] |"
    r"Additional GRPC error information from remote target coordination_service |"
    r":UNKNOWN:Error received from peer |"
    r"\[[-\d:, ]+ [EW] \d+ \d+\] core_worker\.cc:\d+: Actor with class name: 'PreemptionWatcher'|"
    r"A worker died or was killed while executing a task by an unexpected system error"
)
_OURS = re.compile(OURS)
_DIES_OF_ANOTHER = re.compile(r"F\d{4} .*Terminating process because the JAX distributed service detected fatal errors")


class Shown:
    """Which lines of one `fit` are shown."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._dies_until_s: dict[object, float] = {}  # processes that another one's death ends

    def of(self, process: object, lines: Iterable[str]) -> list[str]:
        """Those of a process's new lines that are."""
        return [line for line in lines if self._is_shown(process, line)]

    def _is_shown(self, process: object, line: str) -> bool:
        if _DIES_OF_ANOTHER.match(line):
            self._dies_until_s[process] = self._now_s() + SAID_AGAIN_S  # later its number may be a new process's
        return self._now_s() >= self._dies_until_s.get(process, 0.0) and not _NOISE.match(line)


@contextlib.contextmanager
def calm() -> Generator[None]:
    """Meanwhile only that is shown, where this process shows its job's lines at all."""
    theirs = worker.print_worker_logs
    if isinstance(theirs, functools.partial):  # in a `fit` of another thread
        yield
        return
    calmed = functools.partial(_print, theirs, Shown())
    with patched(worker, "print_worker_logs", calmed):  # test_sixty_steps_of_two_workers_and_a_death
        yield


def _print(theirs: Callable[..., None], shown: Shown, data: dict[str, Any], file: Any, ignore_prefix: bool = False) -> None:
    lines = data.get("lines", [])
    if data.get("pid") != "autoscaler":
        lines = shown.of((data.get("ip"), data.get("pid")), lines)
    for is_ours, some in itertools.groupby(lines, lambda line: _OURS.match(line) is not None):
        theirs({**data, "lines": [*some]}, file, ignore_prefix or is_ours)  # ours say themselves whose they are


def tell_start(run: str, workers: int | tuple[int, int]) -> None:
    """The first line, for the seconds in which nothing else is said. It says where all lines are."""
    count = counted(workers, "worker") if isinstance(workers, int) else "{} to {} workers".format(*workers)
    where = ""
    if worker.global_worker_stdstream_dispatcher.handlers:  # pyright: ignore[reportPrivateImportUsage]
        context = ray.get_runtime_context()
        where = f"; all that they print is in {context.get_temp_dir()}/{context.get_session_name()}/logs, on their nodes"
    logger.info("%s will start, which takes some seconds%s", count, where, extra={"run": run})


def tell_end(result: RunResult, run: str, console: Console | None = None) -> None:
    """The last lines: how far the run is, and its restarts."""
    restarts = f", after {counted(len(result.recoveries), 'restart')}:" if result.recoveries else ""
    logger.info("finished with step %d in %s%s", result.step, result.path, restarts, extra={"run": run})
    if result.recoveries and logger.isEnabledFor(logging.INFO):
        console = console or Console(stderr=True)
        if not console.is_terminal:
            console.width = _FILE_COLUMNS
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
