"""The entries of a run's log: what they hold, and how they are written down."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from raystate.core.sealed import seal, unseal


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStep:
    """A committed step. `save` is None for a step that stock Orbax wrote and a claim adopted."""

    step: int
    save: str | None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    time_s: float = 0.0  # wall clock at the commit, for reports and time-based retention; never compared for safety
    lineage: str = ""  # of the snapshot that was saved; "" unknown: adopted, or written by an older raystate
    again: int = 0  # which save() of that step in the lineage


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """An entry holds the whole state after it, so that the tail alone is enough."""

    seq: int
    attempt: int
    writer: str  # random id of the process that created it
    kind: Literal["claim", "commit", "retire", "close"]
    run: str
    live: tuple[LiveStep, ...] = ()  # by step, ascending
    intents: tuple[Intent, ...] = ()
    reason: str = ""
    format: int = 1

    def to_json(self) -> bytes:
        return seal(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> LogEntry:
        """Raises ValueError, KeyError or TypeError if it is not what `to_json` gave, bit for bit."""
        raw = unseal(data)
        raw["live"] = tuple(LiveStep(**live) for live in raw["live"])
        for intent in raw["intents"]:
            intent["carriers"] = tuple(intent.get("carriers", ()))
        raw["intents"] = tuple(Intent(**intent) for intent in raw["intents"])
        return cls(**raw)
