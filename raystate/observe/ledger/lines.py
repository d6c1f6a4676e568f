"""The lines of a run's ledger: what is noted, its form in storage, and how a line is read back."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from raystate.core.formats.codec import decode, dumps

EVENTS = ".raystate/events"
VERSION = 1
ALL_CLOSED = "all ranks have closed"  # why a run has left whose training came to its own end
_HEADER = "raystate_ledger"
_LONGEST = 1000  # characters of a text
_LARGEST = 2**63  # of any number: what is made of a few of them is finite, too
_BATCH = re.compile(rf"{re.escape(EVENTS)}/(\d{{6,}})-(\d{{6,}})\.jsonl")


class NewerError(ValueError):
    """A newer raystate has written this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Something that is noted. Subclasses have the fields; the table `KINDS` has their names in storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptBegan(Line):
    """A Coordinator owns the run from now on. `host`: name of its machine."""

    reason: str
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJoined(Line):
    """All ranks of a worker group have constructed their StateManagers.

    Attributes:
        hosts: of its ranks; of very many only the first.
        ages: what came before -> seconds ago, the largest of the ranks; see `Joined.ages`.
    """

    group: str
    world: int
    hosts: tuple[str, ...] = ()
    ages: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRestored(Line):
    """A worker group goes on from a step; -1: there was none. `tier`: as in `Restored`."""

    group: str
    step: int
    tier: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled(Line):
    """How far a worker group is. All grow over its life, so that a lost line costs nothing but detail.

    Attributes:
        step: the newest that a rank has saved.
        steps: done since it joined.
        step_s: seconds that an undisturbed step takes; 0.0: not measured.
        lived: seconds since its ranks joined, on average.
        spent: cause -> seconds of the training thread that were no steps, on average over the ranks.
        requests: to storage, of all processes in this attempt: see `observe.counted.requests_in`.
    """

    group: str
    step: int
    steps: int = 0
    step_s: float = 0.0
    lived: float = 0.0
    spent: dict[str, float] = field(default_factory=dict[str, float])
    requests: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded(Line):
    """A worker group goes on no more. `how`: as `End.kind`, of the rank that failed first; "ended": not known yet."""

    group: str
    how: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRecovery(Line):
    """One restart of the trainers. `seconds`: from the news of the end that led to it to the first new step, to the restore if no step
    was left to do, or to its own end."""

    attempt: int
    group: str  # the start of the worker group that it led to
    cause: str
    step: int  # the step it went on from; -1: it ended before that was settled
    tier: str  # "memory", "peer", "storage", …; "": as with the step
    seconds: float
    steps_repeated: int
    back: bool = True  # False: its trainers ended before they had made a new step


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSave(Line):
    """One durable save.

    Attributes:
        seconds: from the first order to write it to its publication.
        writing_s: of these, until all hosts had written; 0.0: not known.
        nbytes: of its pieces in host memory; 0: not known.
    """

    attempt: int
    step: int
    save: str
    seconds: float
    writing_s: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveLost(Line):
    """A save that was promised never becomes durable."""

    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChanged(Line):
    """`state`: "down", "left" (as announced), "up" (again), or "new": its HostActor has ended, and another one has begun. `machine`: name
    of the host's machine; "": not known."""

    host: str
    state: str
    why: str = ""
    machine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageChanged(Line):
    """`works` False: storage fails or stands still. True: a step has become durable since. `why`: its newest failure."""

    works: bool
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStood(Line):
    """The Coordinator has done nothing for so long, as where its process or its machine was stopped. It heard nothing meanwhile."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed(Line):
    """A host is to go away, or the training is to stop (`host` is ""). `within_s`: -1.0: nothing goes away. `machine`: name
    of the host's machine; "": not known."""

    host: str
    reason: str
    within_s: float = -1.0
    machine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung(Line):
    """Ranks make no step any more, and are ended. `section`: where they are; "": it isn't known."""

    group: str
    ranks: tuple[int, ...]
    section: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowed(Line):
    """A rank makes the others wait: by `by_s` seconds in each step since `since_step`. `ends`: it does so no more. `machine`: name
    of the host's machine; "": not known."""

    rank: int
    host: str
    section: str
    by_s: float
    since_step: int
    ends: bool = False
    machine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLeft(Line):
    """The run has ended. `closing_s`: for so long its ranks have waited for that, in `close`. `requests`: as in `Sampled`."""

    reason: str
    closing_s: float = 0.0
    requests: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(Line):
    """Older lines that gave way, so that the ledger stays small.

    Attributes:
        lines: how many.
        saves, seconds, nbytes: how many of them were of saves, with their sums.
    """

    lines: int
    saves: int = 0
    seconds: float = 0.0
    nbytes: int = 0


KINDS: Mapping[str, type[Line]] = {
    "coordinator": AttemptBegan,
    "joined": GroupJoined,
    "restored": GroupRestored,
    "sample": Sampled,
    "ended": GroupEnded,
    "recovery": LoggedRecovery,
    "save": LoggedSave,
    "lost": SaveLost,
    "host": HostChanged,
    "storage": StorageChanged,
    "stood": CoordinatorStood,
    "notice": Noticed,
    "hang": Hung,
    "slow": Slowed,
    "left": RunLeft,
    "dropped": Dropped,
}
_NAMES: Mapping[type[Line], str] = {kind: name for name, kind in KINDS.items()}


class Noted(NamedTuple):
    """A line with its place: the `n`th of its attempt, at `t` seconds since 1970 by the clock of that attempt's machine."""

    attempt: int
    n: int
    t: float
    what: Line


# ---------------------------------------------------------------- as bytes


def line_of(noted: Noted) -> bytes:
    """Without its end of line."""
    values = {one.name: _brief(getattr(noted.what, one.name)) for one in dataclasses.fields(noted.what)}
    return dumps({"kind": _NAMES[type(noted.what)], "attempt": noted.attempt, "n": noted.n, "t": round(noted.t, 3)} | values)


def _brief(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST:
        return f"{value[: _LONGEST - 1]}…"
    if isinstance(value, dict):
        return {name: _brief(one) for name, one in value.items()}
    return round(value, 6) if isinstance(value, float) else value


def noted_in(line: bytes) -> Noted:
    """A line, read. Raises NewerError, or ValueError: it is not what was written."""
    raw = load(line)
    try:
        name, attempt, n, t = raw["kind"], raw["attempt"], raw["n"], raw["t"]
    except KeyError as error:
        raise ValueError(f"it has no {error}") from None
    if type(attempt) is not int or type(n) is not int or type(t) not in (int, float):
        raise ValueError("its attempt, number or time is none")
    return Noted(attempt, n, float(t), _what(name, raw, ("kind", "n", "t")))


def noted_alone(data: bytes) -> tuple[float, Line]:
    """(seconds since 1970, what) of an object that an older raystate wrote: one alone. Raises as `noted_in`."""
    raw = load(data)
    if type(raw.get("time_s")) not in (int, float):
        raise ValueError("its time is none")
    return float(raw["time_s"]), _what(raw.get("kind"), raw, ("kind", "time_s"))


def _what(name: Any, raw: dict[str, Any], beside: tuple[str, ...]) -> Line:
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise NewerError(f"{str(name)[:40]!r} is no kind that this raystate knows")
    if "attempt" not in _fields(kind):
        beside = (*beside, "attempt")
    if new := raw.keys() - _fields(kind) - {*beside}:
        raise NewerError(f"its {min(new)[:40]!r} is no field that this raystate knows")
    return decode(kind, {name: value for name, value in raw.items() if name not in beside})


@functools.cache
def _fields(kind: type[Line]) -> frozenset[str]:
    return frozenset(one.name for one in dataclasses.fields(kind))


def load(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError; also for numbers that no clock or counter has."""
    try:
        raw = _DECODER.decode(data.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(raw, dict):
        raise ValueError("it is no object")
    return raw


def _number(text: str) -> float:
    number = float(text)
    return number if abs(number) < _LARGEST else _refuse(text)


def _integer(text: str) -> int:
    number = int(text) if len(text) < 21 else _refuse(text)
    return number if abs(number) < _LARGEST else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is no number")


_DECODER = json.JSONDecoder(parse_float=_number, parse_int=_integer, parse_constant=_refuse)


# ---------------------------------------------------------------- batches of lines


def batch_name(attempt: int, number: int) -> str:
    return f"{EVENTS}/{attempt:06d}-{number:06d}.jsonl"


def is_batch(name: str) -> bool:
    """Whether raystate gives such names to its batches."""
    return _BATCH.fullmatch(name) is not None


def batch_of(attempt: int, lines: list[bytes], replaces: str = "") -> bytes:
    """One object: a line that says what it is, then the lines. `replaces`: the name of the object that it was made from, by dropping."""
    header = {_HEADER: VERSION, "attempt": attempt} | ({"replaces": replaces} if replaces else {})
    return b"".join(line + b"\n" for line in (dumps(header), *lines))


class Batch(NamedTuple):
    """An object's lines. `replaces`: see `batch_of`. `is_whole`: its end is there."""

    lines: list[bytes]
    replaces: str
    is_whole: bool


def batch_in(data: bytes) -> Batch:
    """The lines, as they are, and the name it replaces. Raises NewerError, or ValueError: it is none of ours."""
    first, _, rest = data.partition(b"\n")
    raw = load(first)
    if type(version := raw.get(_HEADER)) is not int:
        raise ValueError("it does not begin as a ledger does")
    if version > VERSION:
        raise NewerError(f"it is of version {version}, and this raystate knows {VERSION}")
    replaces = raw.get("replaces", "")
    return Batch(
        lines=[line for line in rest.split(b"\n") if line],
        replaces=replaces if isinstance(replaces, str) else "",
        is_whole=data.endswith(b"\n"),
    )
