"""What the Coordinator's machines share: settings, the time of the event at hand, and the commands they give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raystate.core.coordinator.facts import remember
from raystate.core.formats.commands import Answer, Command, Log
from raystate.core.formats.declared import Failure
from raystate.core.formats.names import Ask
from raystate.core.formats.replies import Reply
from raystate.core.formats.settings import Settings
from raystate.core.formats.texts import brief
from raystate.waits import RETRY_FIRST_S, RETRY_LAST_S

_LEAST_REPLIES, _REPLIES_OF_A_RANK = 1024, 8  # remembered: a rank asks again only for what it waits for
NAMED = 8  # ranks or hosts in a message; more are counted


@dataclass(slots=True, eq=False)
class Context:
    """One event's worth of output, and the replies given so far."""

    settings: Settings
    now_s: float = 0.0
    out: list[Command] = field(default_factory=list[Command])
    attempt: int = 0
    claimed_s: float = 0.0  # when it has begun
    storage_error: str = ""  # how the newest request of this process fails, also one that is made again; "": it does not
    replies: dict[Ask, Reply] = field(default_factory=dict[Ask, Reply])
    ranks: int = 1  # of the newest group
    open_asks: dict[Ask, type] = field(default_factory=dict[Ask, type])  # what has no reply yet -> which event asked

    def log(self, level: Any, text: str, *, step: int = -1, kind: str = "", is_routine: bool = False) -> None:
        """Write a line into the process's log. All the rest: see `Log`."""
        self.out.append(Log(level=level, text=brief(text), step=step, kind=kind, is_routine=is_routine))

    def answer(self, ask: Ask, reply: Reply) -> None:
        """Answer and remember: a caller that repeats its ask gets the same reply."""
        remember(self.replies, ask, reply, most=max(_LEAST_REPLIES, _REPLIES_OF_A_RANK * self.ranks))
        self.open_asks.pop(ask, None)
        self.out.append(Answer(ask=ask, reply=reply))

    def fail(self, asks: Iterable[Ask], error: str, message: str, **details: Any) -> None:
        """Answer these asks with an error: the name of its class in core.formats.errors, a sentence, and facts by name."""
        failure = Failure(error=error, message=brief(message), details=details)
        for ask in asks:
            self.answer(ask, failure)


def retry_delay_s(tries: int) -> float:
    """How long to wait before the next try: twice as long after each one, up to `RETRY_LAST_S`."""
    return min(RETRY_LAST_S, RETRY_FIRST_S * 2 ** max(0, tries - 1))


def step_text(step: int) -> str:
    """A step's number for people, who don't know that -1 is none."""
    return str(step) if step >= 0 else "none"


@dataclass(slots=True, eq=False)
class Barrier:
    """Who has asked, by rank. Every rank may have asked more than once (a repeated call); all its asks get the reply."""

    asks: dict[int, list[Ask]] = field(default_factory=dict[int, list[Ask]])

    def add(self, rank: int, ask: Ask) -> None:
        """A rank has asked."""
        mine = self.asks.setdefault(rank, [])
        if ask not in mine:
            mine.append(ask)

    def is_full(self, world: int | None) -> bool:
        """All ranks are there; costs nothing while they are too few."""
        return world is not None and len(self.asks) >= world and not self.missing(world)

    def missing(self, world: int | None) -> list[int]:
        """Ranks that have not asked; none if the number of ranks is not known."""
        return [] if world is None else [rank for rank in range(world) if rank not in self.asks]

    def everybody(self) -> list[Ask]:
        """All asks, by rank."""
        return [ask for rank in sorted(self.asks) for ask in self.asks[rank]]


def all_have(world: int | None) -> str:
    """`all 4 ranks have`, `the only rank has`: for messages."""
    return f"all {world} ranks have" if world != 1 else "the only rank has"


def ranks_text(ranks: Iterable[int], hosts: Mapping[int, Any]) -> str:
    """`rank 1 (host ab12), rank 3 and 5 more`: for messages."""
    return named([f"rank {rank} (host {hosts[rank]})" if rank in hosts else f"rank {rank}" for rank in ranks]) or "no rank"


def named(parts: Sequence[str]) -> str:
    """The first few of these names, and how many more there are."""
    more = f" and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
    return ", ".join(parts[:NAMED]) + more
