"""What a run's log tells of its past: which attempts there were, which steps they committed, and what became of each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from raystate.core.formats.entries import WrittenEntry
from raystate.core.formats.errors import CorruptCheckpointError
from raystate.storage import LogReader, Storage
from raystate.storage.names import LOG, log_name, number_of

READERS = 16  # entries at a time
_AT_ONCE = 32  # at most so many for a thread, one after the other: to hand over one takes as long as to read it from a disk


@dataclass(frozen=True, kw_only=True)
class PastStep:
    """A step that was committed once, or adopted from stock Orbax.

    Attributes:
        step: number of completed steps.
        save: the save's id; None: stock Orbax wrote it.
        attempt: that committed it, or found it.
        time_s: wall clock at its commit, seconds since 1970; None: no file says it.
        lineage: of the snapshot that was saved; "": unknown.
        metrics: what was saved with it.
        fate: "live": it is still a step of the run. "retired": retention, a rollback or a delete took it. "set aside": it was damaged.
        why: of its fate.
    """

    step: int
    save: str | None
    attempt: int
    time_s: float | None = None
    lineage: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    fate: Literal["live", "retired", "set aside"] = "live"
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """A run as its log tells it.

    Attributes:
        run: its name; "": no entry can be read.
        entries: how many the log has.
        attempts: number -> why it claimed the run.
        steps: in the order of their commits.
        damaged: (name of an entry, what is wrong): what it told is not known.
    """

    run: str
    entries: int
    attempts: Mapping[int, str]
    steps: tuple[PastStep, ...]
    damaged: tuple[tuple[str, str], ...]


def _ignore(_done: int, _total: int) -> None:
    """Show no progress."""


def read_history(storage: Storage, *, on_entry: Callable[[int, int], None] = _ignore) -> RunHistory | None:
    """Read a run's whole log; None: there is none.

    Args:
        storage: of the run.
        on_entry: called with (entries read, all of them).

    Raises:
        StorageError: storage failed. ConfigError: a newer raystate wrote the log.
    """
    numbers = sorted(number for info in storage.list(LOG) if (number := number_of(info.name)))
    if not numbers:
        return None
    damaged: list[tuple[str, str]] = []
    entries: list[WrittenEntry] = []
    with ThreadPoolExecutor(READERS, thread_name_prefix="raystate-history") as pool:
        some = max(1, min(_AT_ONCE, len(numbers) // (4 * READERS)))
        blocks = [numbers[at : at + some] for at in range(0, len(numbers), some)]
        found = itertools.chain.from_iterable(pool.map(functools.partial(_read, storage), blocks))
        log = LogReader(storage)
        for done, (before, number, data) in enumerate(zip([0, *numbers], numbers, found, strict=False), 1):
            one = _entry(log, number, data)
            damaged += _missing(before + 1, number - 1)
            if isinstance(one, WrittenEntry):
                entries.append(one)
            else:
                damaged.append((log_name(number), one))
            on_entry(done, len(numbers))
    run = entries[-1].run if entries else ""
    attempts = {one.attempt: one.reason for one in entries if one.kind == "claim"}
    return RunHistory(run=run, entries=len(numbers), attempts=attempts, steps=_steps(entries), damaged=tuple(damaged))


def _missing(first: int, last: int) -> list[tuple[str, str]]:
    """What is wrong where a log should have these entries and has none: one line, also of a gap that a stray name makes."""
    if first > last:
        return []
    return [(log_name(first), "is missing" if first == last else f"is missing, and all up to entry {last}")]


def _read(storage: Storage, numbers: list[int]) -> list[bytes | None]:
    return [storage.find(log_name(number)) for number in numbers]


def _entry(log: LogReader, number: int, data: bytes | None) -> WrittenEntry | str:
    """It, or what is wrong with it. On one thread: many that parse wait for each other."""
    if data is None:
        return "is missing"
    try:
        return log.header_in(data, number, facts=False)
    except CorruptCheckpointError as error:
        return error.message


def _steps(entries: list[WrittenEntry]) -> tuple[PastStep, ...]:
    """An entry holds what has changed since its base, so a step may stand in many: the first that is whole and names it tells of it."""
    found: dict[tuple[int, str | None], PastStep] = {}
    since: dict[tuple[int, str | None], int] = {}  # entry
    for entry in entries:
        for live in entry.live:
            key = (live.step, live.save)
            if key not in found or (found[key].fate != "live" and live.save is None):  # Orbax may write a step again
                attempt = entry.attempt if live.save is None else _attempt_of(live.save, entry.attempt)
                since[key] = entry.seq
                found[key] = PastStep(
                    step=live.step,
                    save=live.save,
                    attempt=attempt,
                    time_s=live.time_s or None,
                    lineage=live.lineage,
                    metrics=live.metrics,
                )
        for intent in entry.intents:
            key = (intent.step, intent.save)
            if intent.kind == "retire" and intent.seq >= since.get(key, 0):
                past = found.get(key) or PastStep(step=intent.step, save=intent.save, attempt=intent.attempt)
                fate = "set aside" if intent.aside else "retired"
                found[key] = dataclasses.replace(past, fate=fate, why=intent.reason or entry.reason)
    return tuple(found.values())


def _attempt_of(save: str, otherwise: int) -> int:
    """A save's id begins with its attempt: "a3k17"."""
    number = save.removeprefix("a").partition("k")[0]
    return int(number) if number.isascii() and number.isdigit() else otherwise
