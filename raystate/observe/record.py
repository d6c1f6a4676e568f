"""The record of a Coordinator: each event and the commands that it led to, as JSON lines in a folder of its node, which its user alone
can enter.

The files are small, compressed once they are full, and the oldest go first. Nothing depends on
them: an event that can't be written is left out.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any

from raystate.arena.files import create_file, is_private_dir
from raystate.core.coordinator.machine import Coordinator
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.messages import Command, Event, Settings
from raystate.machine.own_time import wall_clock
from raystate.machine.priority import give_way
from raystate.observe.record_codec import Record, UnknownMessageError, decode, encode, messages_format
from raystate.waits import AGAIN_S

logger = logging.getLogger("raystate.coordinator")

PART_BYTES = 2 << 20  # of a file before it is compressed, to about a tenth
TOTAL_BYTES = 6 << 20  # of all files of a run, on one node
MOST_WAITING = 20_000  # records that wait to be written; more are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """What is there of one attempt, oldest first. `settings`: of its machine."""

    attempt: int
    settings: Settings
    records: tuple[Record, ...]


class Recorder:
    """Writes the record, on a thread of its own.

    Args:
        folder: of one run; made when the first attempt begins.
        wall_clock: seconds since 1970.
        part_bytes, total_bytes: see the module's constants.
    """

    def __init__(
        self,
        folder: Path,
        *,
        wall_clock: Callable[[], float] = wall_clock,
        part_bytes: int = PART_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ):
        self._folder = folder
        self._wall_clock = wall_clock
        self._part_bytes = part_bytes
        self._total_bytes = total_bytes
        self._waiting: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._attempt = -1
        self._count = 0
        self._off = False
        self._closing = threading.Event()
        self._header = b""
        self._part = 0
        self._file: BufferedWriter | None = None

    def begin(self, attempt: int, settings: Settings) -> None:
        """The attempt's first event is about to come."""
        self._attempt = attempt
        header = {"format": messages_format(), "attempt": attempt, "settings": encode(settings)}
        self._header = json.dumps(header).encode() + b"\n"
        self._thread = threading.Thread(target=self._run, name="raystate-record", daemon=True)
        self._thread.start()

    def record(self, event: Event, commands: Sequence[Command], now_s: float, *, more: bool = False) -> None:
        """Called on the machine's thread: it only hands the values over, which never change."""
        number, self._count = self._count, self._count + 1
        if self._off or self._waiting.qsize() >= MOST_WAITING:
            return
        self._waiting.put(
            Record(
                attempt=self._attempt,
                number=number,
                time_s=round(self._wall_clock(), 6),
                now_s=now_s,
                event=event,
                commands=tuple(commands),
                more=more,
            )
        )

    def close(self, timeout_s: float = 10.0) -> None:
        """Return when everything so far is in the files, or after `timeout_s`: then the newest events are missing there."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._closing.set()
            self._waiting.put(None)
            thread.join(timeout=timeout_s)

    # ------------------------------------------------------------ its own thread

    def _run(self) -> None:
        give_way()
        try:
            self._forget_later_attempts()
            self._open()
            while self._write_waiting():
                self._closing.wait(AGAIN_S)
        except Exception as error:
            self._off = True
            logger.warning("the record in %s ends here: %s", self._folder, error)
        if self._file is not None:
            self._file.close()

    def _write_waiting(self) -> bool:
        """Write what waits, at least one record. False: there will be no more."""
        record: Record | None = self._waiting.get()
        while record is not None:
            self._write(json.dumps(encode(record), separators=(",", ":")).encode() + b"\n")
            try:
                record = self._waiting.get_nowait()
            except queue.Empty:
                assert self._file is not None
                self._file.flush()
                return True
        return False

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        self._file.write(line)
        if self._file.tell() >= self._part_bytes:
            self._file.close()
            _compress(self._path)
            self._part += 1
            self._open()
            self._drop_oldest()

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._attempt:06d}-{self._part:06d}.jsonl"

    def _open(self) -> None:
        self._file = _created(self._path)
        self._file.write(self._header)
        self._file.flush()

    def _forget_later_attempts(self) -> None:
        """They belong to a run that somebody has deleted: attempts are counted up."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        if not is_private_dir(self._folder):  # anybody may make folders among Ray's logs
            raise RaystateError("it is not a folder that only this user can enter: remove it, or set another record_dir")
        for path in _parts(self._folder):
            if _attempt_of(path) >= self._attempt:
                path.unlink(missing_ok=True)

    def _drop_oldest(self) -> None:
        paths = [path for path in _parts(self._folder) if path != self._path]
        sizes = {path: path.stat().st_size for path in paths}
        total = sum(sizes.values()) + self._part_bytes  # the one that is being written will have so much
        for path in paths:
            if total <= self._total_bytes:
                return
            path.unlink(missing_ok=True)
            total -= sizes[path]


def _compress(path: Path) -> None:
    packed = path.with_name(f"{path.name}.gz")
    temporary = path.with_name(f"{path.name}.part")
    with _created(temporary) as file:
        file.write(gzip.compress(path.read_bytes(), compresslevel=6))
    temporary.rename(packed)
    path.unlink()


def _created(path: Path) -> BufferedWriter:
    """A file of that name, whatever has had it, that only this user can read."""
    path.unlink(missing_ok=True)
    return os.fdopen(create_file(path), "wb")


def _parts(folder: Path) -> list[Path]:
    """Oldest first."""
    found = {path.name.removesuffix(".gz"): path for path in sorted(folder.glob("*.jsonl*")) if not path.name.endswith(".part")}
    return [found[name] for name in sorted(found)]


def _attempt_of(path: Path) -> int:
    return int(path.name.split("-")[0])


# ---------------------------------------------------------------- reading


def run_folders(root: Path) -> list[Path]:
    """The folders of runs in it, or itself if it is one."""
    if _parts(root):
        return [root]
    return [path for path in sorted(root.iterdir()) if path.is_dir() and _parts(path)] if root.is_dir() else []


def read_record(folder: Path) -> list[AttemptRecord]:
    """All attempts that a run's folder knows of, oldest first.

    Raises:
        RaystateError: a file can't be read; says which, and why.
    """
    settings: dict[int, Settings] = {}
    records: dict[int, list[Record]] = {}
    for path in _parts(folder):
        try:
            if not (found := _lines(path)):
                continue
            header, *lines = found
            if header["format"] != messages_format():
                raise UnknownMessageError(f"its format is {header['format']}")
            attempt: int = header["attempt"]
            settings[attempt] = decode(header["settings"])
            read = [decode(raw) for raw in lines]
            if not all(isinstance(one, Record) for one in read):
                raise ValueError("a line is no record")
            records.setdefault(attempt, []).extend(read)
        except UnknownMessageError as error:
            raise RaystateError(f"{path} was written by another version of raystate: {error}", path=str(path)) from None
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RaystateError(f"{path} is not the record of a run: {error or type(error).__name__}", path=str(path)) from None
    return [AttemptRecord(attempt=one, settings=settings[one], records=tuple(records[one])) for one in sorted(records)]


def _lines(path: Path) -> list[dict[str, Any]]:
    """What a part says; nothing if it is gone by now, or was not begun before its writer died."""
    packed = path if path.suffix == ".gz" else path.with_name(f"{path.name}.gz")
    try:
        data = path.read_bytes() if path != packed else gzip.decompress(path.read_bytes())
    except FileNotFoundError:  # a living writer has compressed it, or it was the oldest
        data = gzip.decompress(packed.read_bytes()) if packed.exists() else b""
    whole, _, _ = data.rpartition(b"\n")  # what follows was cut off by the writer's death
    return [json.loads(line) for line in whole.split(b"\n") if line]


def replay(attempt: AttemptRecord) -> Iterator[tuple[Record, tuple[Command, ...], Coordinator]]:
    """Give the events to a fresh machine.

    Yields:
        Each record, the commands that the machine gives now, and the machine.

    Raises:
        RaystateError: events are missing.
    """
    machine = Coordinator(attempt.settings)
    for number, record in enumerate(attempt.records):
        if record.number != number:
            missing = f"event {number} of attempt {attempt.attempt} is not in the record any more"
            raise RaystateError(f"it can't be replayed: {missing}")
        yield record, tuple(machine.handle(record.event, record.now_s, more=record.more)), machine
