"""Which rank of a worker group failed first: what its trainers and HostActors have said, in that order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raystate.core.formats.names import HostId

_JAX_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")
_ANOTHERS_END = ("Gloo ", "oordination service", "Connection reset by peer", "Connection closed by peer", "Socket closed", "NCCL")


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one rank's trainer ended.

    Attributes:
        rank: of the worker group.
        kind: "raised" an exception. "died" by itself. "hung": it made no step any more, and
            raystate ended it. "ended" by raystate, because another one had. "interrupted" by
            raystate, because a node goes away and the ranks did not stop in time.
        reason: one line for a person.
        collateral: "raised", and only because another process was gone.
        error: "raised": the exception, pickled; None if it can't be.
        traceback: "raised": as text. "hung": where its Python was.
    """

    rank: int
    kind: Literal["raised", "died", "hung", "ended", "interrupted"]
    reason: str
    collateral: bool = False
    error: bytes | None = None
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the run's Coordinator knows when a worker group ends.

    Attributes:
        ends: of its trainers, in the order in which they became known; None: no such group has joined.
        awaited: ranks that hang: where they are is being found out, and then they end.
        newest_step: that a trainer has saved since the last rollback; -1: none; None: it doesn't say.
        leaving: hosts that are to go away.
    """

    ends: tuple[End, ...] | None = ()
    awaited: frozenset[int] = frozenset()
    newest_step: int | None = None
    leaving: frozenset[HostId] = frozenset()

    def has(self, dead: Collection[int]) -> bool:
        """Whether no news of the group is to be waited for, if these ranks have died."""
        return self.ends is None or (not self.awaited and set(dead) <= {end.rank for end in self.ends})


def is_collateral(error: BaseException, traceback_text: str = "") -> bool:
    """Whether a collective failed because another rank ended. By text: jax raises ValueError for gloo's errors.

    Args:
        error: what was raised.
        traceback_text: its traceback; an exception that was raised from such an error is one, too.
    """
    if type(error).__name__ in ("ValueError", "RuntimeError", *_JAX_ERRORS) and _tells_of_another(str(error)):
        return True
    lines = traceback_text.splitlines()
    return any(name in line and _tells_of_another(line) for line in lines for name in ("ValueError: ", *_JAX_ERRORS))


def _tells_of_another(text: str) -> bool:
    return any(mark in text for mark in _ANOTHERS_END)


def first_to_fail(ends: Sequence[End]) -> End | None:
    """The end that led to the others; None if nothing is known of any.

    A trainer that raystate ended, or that another's death has made fail, is no cause. When rank 0 dies, jax ends all others within
    milliseconds, and the news may arrive in any order: so of several that died by themselves rank 0 was first.

    Args:
        ends: in the order in which they became known.
    """
    own = [end for end in ends if end.kind != "ended" and not end.collateral]
    if not own:
        return next((end for end in ends if end.kind != "ended"), None)
    if own[0].kind == "died":
        return next((end for end in own if end.rank == 0 and end.kind == "died"), own[0])
    return own[0]


class Ends:
    """The ends of one lineage's trainers, one for each rank, in the order in which they became known."""

    def __init__(self) -> None:
        self._by_rank: dict[int, End] = {}

    def add(self, end: End) -> None:
        """The first word of a rank counts: what becomes of its process afterwards follows from that."""
        self._by_rank.setdefault(end.rank, end)

    @property
    def in_order(self) -> tuple[End, ...]:
        return tuple(self._by_rank.values())


def one_line(error: Any) -> str:
    """Type and first line of an exception."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
