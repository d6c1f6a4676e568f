"""A process that asks a Ray cluster what its runs do, again and again, and writes each answer to its standard output.

Ray ends a process whose cluster goes away, and a cluster that comes back is another one. So `--watch` asks through this process, and
starts another in its place.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO

from raystate.core.formats.errors import RaystateError
from raystate.observe.status import RunReport
from raystate.waits import ANSWER_S, AT_ONCE_S, RETRY_FIRST_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """One answer. `problem`: why there is none; `address`: of the cluster."""

    address: str = ""
    reports: tuple[RunReport, ...] = ()
    problem: str = ""


class Asker:
    """Asks a cluster in another process; when that dies, or says nothing any more, in a new one.

    Args:
        every_s: between two answers.
        command: of the process; None: this module.
    """

    def __init__(self, every_s: float, command: list[str] | None = None):
        self._every_s = every_s
        # Not by -m: what it sends would be of its __main__.
        self._command = command or [sys.executable, "-c", f"from {__name__} import ask_for_ever; ask_for_ever({every_s!r})"]
        self._process: subprocess.Popen[bytes] | None = None
        self._heard: queue.SimpleQueue[Heard | None] = queue.SimpleQueue()
        self._since_s = 0.0

    def __enter__(self) -> Asker:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def next(self, timeout_s: float) -> Heard | None:
        """The newest answer, for which it waits so long; None: none came."""
        found: Heard | None = None
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                heard = self._heard.get(timeout=0.0 if found is not None else max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                break
            if heard is None:  # the process has ended
                self._end()
                self._start()
                continue
            found, self._since_s = heard, time.monotonic()
        if found is None and time.monotonic() - self._since_s > 3 * ANSWER_S + self._every_s:
            self._end()
            self._start()
        return found

    def _start(self) -> None:
        self._since_s = time.monotonic()
        # In a group of its own: Ctrl-C is for the process that watches.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
        )
        assert self._process.stdout is not None
        self._heard = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(self._process.stdout, self._heard), daemon=True).start()

    def _end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(AT_ONCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _listen(pipe: IO[bytes], heard: queue.SimpleQueue[Heard | None]) -> None:
    with pipe:
        try:
            while True:
                heard.put(pickle.load(pipe))
        except Exception:  # its end, or what no answer is
            time.sleep(RETRY_FIRST_S)  # what dies at once is not started in a busy loop
            heard.put(None)


def ask_for_ever(every_s: float) -> None:
    """The other process."""
    from raystate.actors.reporting import run_reports
    from raystate.cli.status import join_ray

    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Ray and others print is no answer
    address = ""
    while True:
        try:
            address = address or join_ray()
            heard = Heard(address=address, reports=tuple(run_reports()))
        except RaystateError as error:
            heard = Heard(problem=error.message)
        except Exception as error:  # Ray has no class for what it raises of a cluster that is gone
            heard = Heard(problem=f"the Ray cluster does not answer: {type(error).__name__}: {error}")
        try:
            pickle.dump(heard, pipe)
            pipe.flush()
        except BrokenPipeError:
            os._exit(0)  # its reader has gone
        if heard.problem and address:
            os._exit(1)  # the next process joins anew
        time.sleep(every_s)
