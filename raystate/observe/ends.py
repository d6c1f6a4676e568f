"""How the trainers of a worker group ended, and which of them failed first: what trainers, HostActors and the launcher say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raystate.core.formats.errors import (
    ConfigError,
    Interrupted,
    ItemTopologyError,
    RaystateError,
    ReferenceMismatchError,
    RunInUseError,
    StaleAttemptError,
    StepOrderError,
    StorageError,
)
from raystate.core.formats.names import HostId

# No restart can help: the run belongs to somebody else, or the caller has made a mistake.
FINAL = (
    StaleAttemptError, RunInUseError, ConfigError, ReferenceMismatchError, ItemTopologyError, StepOrderError,
)  # fmt: skip
_JAX_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")
_ANOTHERS_END = ("Gloo ", "oordination service", "Connection reset by peer", "Connection closed by peer", "Socket closed", "NCCL")


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one rank's trainer ended.

    Attributes:
        rank: of the worker group; -1: the group could not start.
        kind: "raised" an exception, "final" one that no restart can help. "died" by itself.
            "missing": its launcher has lost it, and its HostActor may yet say how. "hung": it made
            no step any more, and raystate ended it. "ended" by raystate or by its launcher, because
            another one had. "interrupted": it stopped on request; or raystate or its node ended it,
            as was announced.
        reason: one line for a person.
        collateral: "raised", and only because another process was gone.
        error: the exception, pickled; None if it raised none.
        traceback: of the exception, as text. "hung": where its Python was.
    """

    rank: int
    kind: Literal["final", "interrupted", "raised", "died", "missing", "hung", "ended"]
    reason: str
    collateral: bool = False
    error: bytes | None = None
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the run's Coordinator knows when a worker group ends.

    Attributes:
        ends: of its trainers, in the order in which they became known.
        has_joined: the Coordinator knows the group, and hears of more ends.
        hanging: ranks that hang: where they are is being found out, and then they end.
        newest_step: that a trainer has saved since the last rollback; -1: none; None: it doesn't say.
        leaving: hosts that are to go away.
    """

    ends: tuple[End, ...] = ()
    has_joined: bool = True
    hanging: frozenset[int] = frozenset()
    newest_step: int | None = None
    leaving: frozenset[HostId] = frozenset()

    @property
    def is_all(self) -> bool:
        """Whether no news is to be waited for."""
        return not self.has_joined or not (self.hanging or any(end.kind == "missing" for end in self.ends))


class Ends:
    """The ends of one group's trainers, one for each rank, in the order in which they became known."""

    def __init__(self) -> None:
        self.is_swept = False  # its launcher ends the ranks of which nothing is known yet
        self._by_rank: dict[int, End] = {}

    def add(self, end: End) -> None:
        """The first word of a rank counts: what becomes of its process afterwards follows from that.

        Its own exception says more than others see from outside.
        """
        old = self._by_rank.get(end.rank)
        if old is not None and old.kind == "missing":
            del self._by_rank[end.rank]
        elif old is not None and (old.error is not None or end.error is None):
            return
        self._by_rank[end.rank] = end

    def __contains__(self, rank: int) -> bool:
        return rank in self._by_rank

    @property
    def in_order(self) -> tuple[End, ...]:
        return tuple(self._by_rank.values())


def first_to_fail(ends: Sequence[End], *, is_all: bool = False) -> End | None:
    """The end that led to the others; None if nothing is known of any, or if that will be known later.

    What no restart can help comes first, then what was asked for. A trainer that raystate ended, or that another's death has made fail,
    is no cause. When rank 0 dies, jax ends all others within milliseconds, and the news may arrive in any order: so of several that died
    by themselves rank 0 was first.

    Args:
        ends: in the order in which they became known.
        is_all: no more will be known.
    """
    for kind in ("final", "interrupted"):
        if those := [end for end in ends if end.kind == kind]:
            return min(those, key=lambda end: end.rank)
    own = [end for end in ends if end.kind in ("raised", "died", "hung") and not end.collateral]
    if own and own[0].kind == "died":
        return next((end for end in own if end.rank == 0 and end.kind == "died"), own[0])
    missing = sorted((end for end in ends if end.kind == "missing"), key=lambda end: end.rank)
    if own or (missing and not is_all and len(missing) > 1):
        return own[0] if own else None
    return next(iter((*missing, *(end for end in ends if end.collateral), *ends)), None)


def cause_of(ends: Sequence[End], *, is_all: bool = False) -> str:
    """Why the group ended, in one line; "": nothing is known."""
    first = first_to_fail(ends, is_all=is_all)
    if first is None:
        ranks = " and ".join(str(end.rank) for end in sorted(ends, key=lambda end: end.rank) if end.kind == "missing")
        return f"the processes of ranks {ranks} died; which of them was first is not known yet" if ends else ""
    if first.kind in ("died", "missing"):
        return f"the process of rank {first.rank} died"
    if first.kind != "interrupted":
        return first.reason
    # No other text names what other ranks raised while this one stopped on request.
    return "; ".join((first.reason, *(end.reason for end in ends if end.kind == "raised" and not end.collateral)))


def kind_of(ends: Sequence[End], *, is_all: bool = False) -> str:
    """Why the group ended, in one word of a few: "died", "hung", "raised", "interrupted", "ended", "unknown"."""
    first = first_to_fail(ends, is_all=is_all)
    if first is None:
        return "unknown" if not ends else "died"  # several died, and which was first isn't known
    return {"final": "raised", "missing": "died"}.get(first.kind, first.kind)


def is_final(error: BaseException) -> bool:
    """Whether trying again cannot help."""
    if isinstance(error, FINAL):
        return not _was_replaced(error)
    if is_of_rehearsal(error):
        return True
    if isinstance(error, StorageError) and (error.released or error.gone):
        # close() has ended the run: another start would have nothing to do, and say nothing of what is lost. Or its folder is gone,
        # and only the user can say whether what memory holds is given up.
        return True
    return type(error) is RaystateError and error.item is not None  # an item or a leaf that can't be saved


def is_of_rehearsal(error: BaseException) -> bool:
    """Whether a rehearsal has come to its end: its run is closed, and nothing is to be started again."""
    return isinstance(error, Interrupted) and error.phase == "rehearsal"


def _was_replaced(error: BaseException) -> bool:
    """Whether only this worker group was replaced by a newer start of the same run: the run itself is still ours."""
    return isinstance(error, StaleAttemptError) and bool(error.replaced)


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


def one_line(error: Any) -> str:
    """Type and first line of an exception."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
