"""The lines that raystate prints, of every process alike: `12:34:56 raystate lr-0.003: step 20 is durable`.

A script that sets up the logger "raystate" (its handlers, its level) has them as it likes. So does
one that wants them in its root logger's files: `logging.getLogger("raystate").propagate = True`,
and no handler. Then no line of this form is printed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Generator
from typing import TextIO

from raystate.core.formats.texts import printable
from raystate.patching import patch

SWITCH = "RAYSTATE_LOG"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
OURS = r"^\d\d:\d\d:\d\d raystate\b"  # how each of these lines begins
_ALLOWED = "RAY_DEDUP_LOGS_ALLOW_REGEX"  # Ray's: lines that it never folds into one

logger = logging.getLogger("raystate")
_runs: list[str] = []  # that this process works for
_newest: deque[str] = deque(maxlen=12)


class _Lines(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        if logger.handlers == [self]:  # else the script has others
            self.stream = sys.stderr  # notebooks and bars replace it
            super().emit(record)
            if not getattr(record, "is_routine", False):
                _newest.append(self.format(record))

    def format(self, record: logging.LogRecord) -> str:
        runs = {*_runs}
        run = getattr(record, "run", runs.pop() if len(runs) == 1 else "")
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno < logging.WARNING else f"{record.levelname}: "
        return printable(f"{clock} raystate{run and f' {run}'}: {level}{super().format(record)}")


def newest() -> tuple[str, ...]:
    """The last lines that this process has printed, oldest first, without those that come with each save."""
    return tuple(_newest)


def set_up() -> None:
    """In every process that imports raystate."""
    asked = os.environ.get(SWITCH, "info").lower()
    if logger.level == logging.NOTSET:
        logger.setLevel(_LEVELS.get(asked, logging.INFO))
    if not logger.handlers:
        logger.addHandler(_Lines())
        logger.propagate = False  # absl's handler, or basicConfig's, would say each line again
    if asked not in _LEVELS:
        logger.warning("%s=%s is none of %s: info is taken", SWITCH, asked, ", ".join(_LEVELS))
    _keep_unfolded()


def _keep_unfolded() -> None:
    """Ray takes words with digits in them for the same, and so the lines of lr-0.003 and lr-0.01."""
    loaded = sys.modules.get("ray._private.worker")  # which has read the variable
    if os.environ.setdefault(_ALLOWED, OURS) == OURS and loaded is not None:
        patch(loaded.stderr_deduplicator, "allow_re", re.compile(OURS))  # tests/cluster/test_train_internals.py


def follow(level: int) -> None:
    """As much as the process that this one works for."""
    logger.setLevel(level)


@contextlib.contextmanager
def naming(run: str) -> Generator[None]:
    """Meanwhile this process works for a run, which its lines name. Where it works for several at once they name none."""
    begin(run)
    try:
        yield
    finally:
        end(run)


def begin(run: str, level: int | None = None) -> None:
    """This process works for a run. `level`: of the process that this one works for."""
    _runs.append(run)
    if level is not None:
        follow(level)


def end(run: str) -> None:
    if run in _runs:
        _runs.remove(run)
