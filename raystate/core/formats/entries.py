"""The entries of a run's log: what they hold, and how they are written down.

In memory an entry holds the whole state after it. Written down it holds what has changed since its *base*: an object of its own with the
whole state after some earlier entry. So an entry stays small however many steps are kept, and the newest entry and its base are enough.
While the whole state is small there is no base, and the changes are the state.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from raystate.core.formats.codec import decode, seal, unseal
from raystate.core.formats.names import SnapshotId

FORMAT = 4
DELETE = "delete"  # the reason of a retirement that the user wants
ENTRY_BYTES = 16 << 10  # a larger entry gets a new base. Smaller entries mean more bases, each with the whole state
MOST_FACTS = 256  # of a kind, in an entry: as many promises as a trainer remembers
WHY_CHARS = 300


class Fact(NamedTuple):
    """The fate of a save, and its reason; "" for a save that was given up and whose step was made durable since."""

    snapshot: SnapshotId
    why: str


class OtherFormatError(ValueError):
    """Another version of raystate wrote it, in the format of that number."""

    def __init__(self, number: int):
        super().__init__(f"another version of raystate wrote it: log format {number}, this one knows {FORMAT}")
        self.number = number


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStep:
    """A committed step. `save` is None for a step that stock Orbax wrote and a claim adopted."""

    step: int
    save: str | None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    time_s: float = 0.0  # wall clock at the commit, for reports and time-based retention; never compared for safety
    lineage: str = ""  # of the snapshot that was saved; "" unknown: adopted

    @property
    def snapshot(self) -> SnapshotId:
        """What was saved; without a lineage if that is unknown."""
        return SnapshotId(self.lineage, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A commit or retire that has been decided and may not be carried out yet."""

    kind: Literal["commit", "retire"]
    step: int
    save: str | None
    attempt: int
    seq: int  # of the entry that opened it
    aside: bool = False  # retire: keep the data, unpublished
    reason: str = ""
    carriers: tuple[int, ...] = ()  # attempts whose process may still carry it out; none named: `attempt` alone


IntentKey = tuple[str, int, str | None, int]
"""(kind, step, save, seq): names an intent for ever."""


def key_of(intent: Intent) -> IntentKey:
    """What names this intent, and no other one, for ever."""
    return (intent.kind, intent.step, intent.save, intent.seq)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """An entry holds the whole state after it.

    Attributes:
        retired, given_up: the newest saves that were durable once (but for damaged ones), and those that never will be; oldest first.
    """

    seq: int
    attempt: int
    writer: str  # random id of the process that created it
    kind: Literal["claim", "commit", "retire", "close"]
    run: str
    live: tuple[LiveStep, ...] = ()  # by step, ascending
    intents: tuple[Intent, ...] = ()
    retired: tuple[Fact, ...] = ()
    given_up: tuple[Fact, ...] = ()
    reason: str = ""

    def to_json(self) -> bytes:
        """The entry as it is written down without a base."""
        return _sealed_entry(self, NO_BASE)

    @classmethod
    def from_json(cls, data: bytes) -> LogEntry:
        """An entry that is written down without a base. Raises as `WrittenEntry.parse`; also ValueError if there is a base."""
        return WrittenEntry.parse(data).entry(NO_BASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What the changes in an entry are to be applied to.

    Attributes:
        name: "<entry that first named it>.<checksum of its bytes>.json": two writers, or two tries, never mean two things by one name.
            "": there is no such object, and the state is empty.
        live: live steps after some earlier entry.
        intents: open ones after it.
        retired, given_up: facts after it.
        before: the base that was in use until then; "": none. It is kept as long as this one is in
            use, so readers have time. This one can be rebuilt from it if it is damaged, and the log
            can be read if its very last entries are lost.
    """

    name: str
    live: tuple[LiveStep, ...]
    intents: tuple[Intent, ...]
    before: str = ""
    retired: tuple[Fact, ...] = ()
    given_up: tuple[Fact, ...] = ()

    @classmethod
    def parse(cls, name: str, data: bytes) -> Base:
        """Raises OtherFormatError; ValueError, KeyError or TypeError if it is not what `plan` gave for this name, bit for bit."""
        raw = _unsealed(data)
        if (expected := _base_name(raw["seq"], data)) != name:
            raise ValueError(f"it is the base {expected}")
        fields = ("live", "intents", "before", "retired", "given_up")
        return decode(cls, {"name": name, **{field: raw[field] for field in fields}})


def own_commits(entry: LogEntry | WrittenEntry) -> list[Intent]:
    """What this very entry commits, beside what earlier ones have left open."""
    return [one for one in entry.intents if one.kind == "commit" and one.seq == entry.seq]


def deleted_steps(entry: LogEntry) -> dict[int, str]:
    """Steps that the user has deleted lately, and that were not committed again, each with its lineage."""
    newest = {one.snapshot.step: one for one in entry.retired}
    live = {one.step for one in entry.live}
    return {step: one.snapshot.lineage for step, one in newest.items() if one.why == DELETE and step not in live}


def lost_saves(entry: LogEntry | None) -> tuple[Fact, ...]:
    """Saves that were given up, and whose step was not made durable since, in the same lineage or a later one."""
    made = kept_steps(entry)
    return tuple(fact for fact in (entry.given_up if entry is not None else ()) if fact.why and not is_made(fact.snapshot, made))


def kept_steps(entry: LogEntry | None) -> dict[int, SnapshotId]:
    """The newest snapshot of each step that is durable, or was."""
    kept: dict[int, SnapshotId] = {}
    for one in () if entry is None else (*(fact.snapshot for fact in entry.retired), *(live.snapshot for live in entry.live)):
        kept[one.step] = max(one, kept.get(one.step, one), key=lambda key: key.order)
    return kept


def is_made(lost: SnapshotId, kept: dict[int, SnapshotId]) -> bool:
    """Whether its step was made durable all the same, in its lineage or a later one."""
    one = kept.get(lost.step)
    return one is not None and (one.lineage == lost.lineage or one.order > lost.order)


NO_BASE = Base(name="", live=(), intents=())


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenEntry:
    """An entry as it lies in storage: changes to its base. The header is readable without the base, also when that is gone."""

    seq: int
    attempt: int
    writer: str
    kind: Literal["claim", "commit", "retire", "close"]
    run: str
    reason: str
    base: str  # its name; "": none
    live: tuple[LiveStep, ...]  # new or changed
    gone: tuple[int, ...]  # steps that are not live any more
    intents: tuple[Intent, ...]  # new or changed
    closed: tuple[IntentKey, ...]  # intents that are not open any more
    retired: tuple[Fact, ...]  # new
    given_up: tuple[Fact, ...]  # new

    @classmethod
    def parse(cls, data: bytes, *, facts: bool = True) -> WrittenEntry:
        """Raises OtherFormatError; ValueError or KeyError if it is not what was written, bit for bit. `facts` False: without those, of
        which there may be hundreds."""
        raw = _unsealed(data)
        return decode(cls, raw if facts else raw | {"retired": [], "given_up": []})

    def entry(self, base: Base) -> LogEntry:
        """The whole entry. Raises ValueError if it is another base that it names."""
        if base.name != self.base:
            raise ValueError(f"entry {self.seq} is written as changes to {self.base or 'nothing'}, not to {base.name or 'nothing'}")
        live = {one.step: one for one in base.live}
        for step in self.gone:
            del live[step]
        live.update({one.step: one for one in self.live})
        intents = {key_of(one): one for one in base.intents}
        for key in self.closed:
            del intents[key]
        intents.update({key_of(one): one for one in self.intents})  # a changed one keeps its place
        return LogEntry(
            seq=self.seq, attempt=self.attempt, writer=self.writer, kind=self.kind, run=self.run, reason=self.reason,
            live=tuple(live[step] for step in sorted(live)), intents=tuple(intents.values()),
            retired=newest_facts(base.retired, self.retired), given_up=newest_facts(base.given_up, self.given_up),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEntry:
    """How an entry is to be written. A function of the entry and of the one before it, so that a second try writes the same bytes."""

    entry: LogEntry
    data: bytes  # of the entry
    base: Base
    base_data: bytes | None  # the base has to be created with these bytes, before the entry; None: it is there


def plan(entry: LogEntry, previous: LogEntry | None, base: Base, *, entry_bytes: int | None = None) -> PlannedEntry:
    """Decide on an entry's base.

    Args:
        entry: to be written.
        previous: the entry before it; None: it is the first.
        base: the previous one's.
        entry_bytes: limit; None: `ENTRY_BYTES`. Only what no base can hold, such as the entry's own reason, may exceed it.
    """
    limit = ENTRY_BYTES if entry_bytes is None else entry_bytes
    planned = PlannedEntry(entry=entry, data=_sealed_entry(entry, base), base=base, base_data=None)
    # A base after the entry itself is for one that changes too much: thousands of steps are adopted or retired.
    for state in (previous, entry):
        if len(planned.data) > limit and state is not None:
            other, base_data = _new_base(state, entry, base.name)
            planned = PlannedEntry(entry=entry, data=_sealed_entry(entry, other), base=other, base_data=base_data)
    return planned


def rebuilt_base(name: str, state: LogEntry, first: WrittenEntry, before: str) -> Base | None:
    """The base of this name, made anew after its object was damaged or lost; None if it is not what these entries say.

    Args:
        name: of the base; the checksum in it decides.
        state: the entry before the first that names it.
        first: that first entry, as it is written.
        before: the base that `state` is written with.
    """
    base, _ = _new_base(state, first, before)
    return base if base.name == name else None


# ------------------------------------------------------------ inside

_EMPTY_BY_DEFAULT = frozenset({"metrics", "time_s", "lineage", "aside", "reason", "carriers"})


def _new_base(state: LogEntry, first: LogEntry | WrittenEntry, before: str) -> tuple[Base, bytes]:
    document = {
        "format": FORMAT, "seq": first.seq, "attempt": first.attempt, "writer": first.writer, "state_after": state.seq, "before": before,
        "live": [_plain(one) for one in state.live], "intents": [_plain(one) for one in state.intents],
        "retired": state.retired, "given_up": state.given_up,
    }  # fmt: skip
    data = seal(document)
    name = _base_name(first.seq, data)
    base = Base(name=name, live=state.live, intents=state.intents, before=before, retired=state.retired, given_up=state.given_up)
    return base, data


def _base_name(seq: int, data: bytes) -> str:
    return f"{seq:012d}.{hashlib.sha256(data).hexdigest()[:16]}.json"


def _sealed_entry(entry: LogEntry, base: Base) -> bytes:
    live_before = {one.step: one for one in base.live}
    open_before = {key_of(one): one for one in base.intents}
    live_now, open_now = {one.step for one in entry.live}, {key_of(one) for one in entry.intents}
    return seal(
        {
            "seq": entry.seq, "attempt": entry.attempt, "writer": entry.writer, "kind": entry.kind, "run": entry.run,
            "reason": entry.reason, "format": FORMAT, "base": base.name,
            "live": [_plain(one) for one in entry.live if _is_new(one, live_before.get(one.step))],
            "gone": [step for step in live_before if step not in live_now],
            "intents": [_plain(one) for one in entry.intents if _is_new(one, open_before.get(key_of(one)))],
            "closed": [key for key in open_before if key not in open_now],
            "retired": _new_facts(entry.retired, base.retired), "given_up": _new_facts(entry.given_up, base.given_up),
        }
    )  # fmt: skip


def _is_new(one: LiveStep | Intent, before: LiveStep | Intent | None) -> bool:
    return before is not one and before != one


def _plain(one: LiveStep | Intent) -> dict[str, Any]:
    """Its fields, without those that are as they are by default."""
    values = {name: getattr(one, name) for name in one.__slots__}
    return {name: value for name, value in values.items() if value or name not in _EMPTY_BY_DEFAULT}


def newest_facts(known: Iterable[Fact], new: Iterable[Fact]) -> tuple[Fact, ...]:
    """Those of the newest saves, oldest first, each save once."""
    facts = {one.snapshot: one for one in (*known, *new)}
    return tuple(sorted(facts.values(), key=lambda one: one.snapshot.order)[-MOST_FACTS:])


def _new_facts(now: Iterable[Fact], before: Collection[Fact]) -> list[Fact]:
    known = set(before)
    return [one for one in now if one not in known]


def _unsealed(data: bytes) -> dict[str, Any]:
    raw = unseal(data)
    if (number := raw.pop("format")) != FORMAT:
        raise OtherFormatError(number)
    return raw
