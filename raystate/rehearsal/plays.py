"""One play of a rehearsal: a process of its own, ended at its deadline, and nothing of it left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raystate.arena.files import PREFIX, default_root
from raystate.config.rehearsing import Play
from raystate.core.formats.errors import RaystateError
from raystate.rehearsal.verdict import Played
from raystate.storage import open_storage
from raystate.storage.url import canonical_url
from raystate.waits import ENDS_S, STARTS_S

_MOST_OUTPUT = 1 << 20


@contextlib.contextmanager
def scratch_folder(given: str | None) -> Iterator[str]:
    """URL of an empty folder, which is gone at the end.

    Args:
        given: a folder in which it is made; None: the system's temporary one.
    """
    if given is not None and "://" in given:
        url = canonical_url(f"{given.rstrip('/')}/raystate-rehearsal-{os.urandom(6).hex()}")
        try:
            yield url
        finally:
            open_storage(url).delete_tree("")
        return
    folder = tempfile.mkdtemp(prefix="raystate-rehearsal-", dir=given)
    try:
        yield canonical_url(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is played, and where.

    Args:
        command: of the process.
        environment: variables that it gets beside this process's own.
    """

    command: Sequence[str]
    environment: Mapping[str, str]

    def play(self, play: Play) -> Played:
        """Let it run to its end, or for `play.limit_s`. None of its actors and none of its shared memory is left."""
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                self.command,
                env={**play.environment(), **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            try:
                problem = _wait(process, play.limit_s)
            finally:
                _end(process)
            output.seek(max(0, output.tell() - _MOST_OUTPUT))
            text = output.read().decode(errors="replace")
        played = Played(records=records_of(play), problem=problem, output=text)
        _clear(played)
        return played


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"it had not come to its end after {limit_s:.0f} s"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """And what it has started, which may outlive it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_S)


def records_of(play: Play) -> list[dict[str, Any]]:
    """All that the processes of a play have to say."""
    storage = open_storage(play.scratch)
    names = sorted(info.name for info in storage.list(f"records/{play.name}"))
    return [json.loads(storage.read(name)) for name in names]


def _clear(played: Played) -> None:
    """End what a play that was killed has left."""
    opened = {record["hash"]: record["address"] for record in played.of("opened")}
    if len(played.of("closed")) == len(played.of("opened")):
        return
    for address in {*opened.values()} - {""}:
        hashes = [name for name, of in opened.items() if of == address]
        command = [sys.executable, "-m", "raystate.rehearsal.child", "release", address, *hashes]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=STARTS_S, check=False)
    for arena_dir in {record["arena_dir"] for record in played.of("opened")}:
        with contextlib.suppress(RaystateError):
            for left in default_root(arena_dir).glob(f"{PREFIX}*"):
                if any(name in left.name for name in opened):  # its Ray is gone with all of its processes
                    shutil.rmtree(left, ignore_errors=True)
