"""What must hold, whatever the calls were: a short model of what a user has been promised.

Every call of `save` gives a token: a number that fills the state, and that each rank's iterator says, too. So bytes tell from which
call they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raystate.core.formats.messages import SnapshotId, Staged
from raystate.inspection import open_step
from raystate.inspection.listing import given_up
from raystate.restored import content_from_storage
from raystate.storage import open_storage
from tests.model.world import Violation


@dataclass
class Line:
    """One rank's view of the present line of training."""

    newest: int = -1
    token: float | None = None  # of what counts for the newest step
    promised: bool = False
    saved: bool = False  # by a call of this line


ANSWER_S = 0.5  # an answer is on its way for at most so long


@dataclass
class Truth:
    """All ranks' together."""

    storage: str
    ranks: int
    clock: Callable[[], float]
    given: dict[float, int] = field(default_factory=dict)  # token -> step
    called: dict[float, set[int]] = field(default_factory=dict)  # token -> ranks whose save took it
    published: dict[int, set[float]] = field(default_factory=dict)  # step -> tokens that were ever in storage under it
    published_s: dict[float, float] = field(default_factory=dict)  # token -> when it was first in storage
    given_up: dict[float, str] = field(default_factory=dict)  # tokens that must never be seen again, and since when
    items: dict[tuple[float, int], tuple[Any, Any]] = field(
        default_factory=dict
    )  # (token, rank) -> its rows, and its place in the data
    line_of: dict[float, int] = field(default_factory=dict)
    line: int = 0  # grows with each settled restore
    base_of: dict[int, float | None] = field(default_factory=dict)  # line -> the token that it began with
    newest: int = -1  # step of this line
    floor: tuple[int, str] = (-1, "")  # no restore of the newest may fall below, and why
    settled: dict[int, set[tuple[int, float | None]]] = field(default_factory=dict)

    # ------------------------------------------------------------ what is seen

    def publish(self, step: int) -> None:
        """A step has become visible: it must be one call's bytes, whole, of a line that is believed."""
        storage = open_storage(self.storage)
        content = content_from_storage(open_step(storage, step), step)
        restored = content.restore(None, None, _options(), world=self.ranks, process_index=0)
        token = self.token_of(f"step {step} in storage", restored.state)
        states, world = content.iterator_states("data") if "data" in content.iterators else ({}, self.ranks)
        tokens = {float(state.decode()) for state in states.values()}
        if states and (tokens != {token} or sorted(states) != list(range(world))):
            raise Violation(f"step {step} in storage mixes calls: the state is of {token}, the iterators of {tokens}")
        self._known(f"step {step} in storage", step, token)
        self.published.setdefault(step, set()).add(token)
        self.published_s.setdefault(token, self.clock())

    @staticmethod
    def token_of(where: str, state: Any) -> float:
        arrays = [np.asarray(array, np.float64).ravel() for array in state.values() if array is not None]
        values = np.unique(np.concatenate(arrays))
        if len(values) != 1:
            raise Violation(f"{where} mixes the bytes of several calls: {values}")
        return float(values[0])

    def _known(self, where: str, step: int, token: float) -> None:
        if self.given.get(token) != step:
            raise Violation(f"{where} has token {token}, which was given to save({self.given.get(token)})")
        if token in self.given_up:
            raise Violation(f"{where} has token {token}, {self.given_up[token]}")

    # ------------------------------------------------------------ save

    def save(self, rank: int, step: int, token: float) -> None:
        """save(step) was accepted with this token's bytes."""
        self.given[token] = step
        self.called.setdefault(token, set()).add(rank)
        self.line_of.setdefault(token, self.line)
        self.newest = max(self.newest, step)

    def durable(self, who: str, promises: Iterable[tuple[int, float]]) -> None:
        """Nobody has said that these are lost."""
        for step, token in promises:
            if not self.is_kept(step, token):
                raise Violation(f"{who} returned without an error, and save({step}) with token {token} never was in storage")

    def is_kept(self, step: int, token: float) -> bool:
        """Whether the promise is: in the same line a step has one state, and what the line began with counts, too."""
        line = self.line_of.get(token)
        shown = self.published.get(step, set())
        return token in shown or any(self.line_of.get(one) == line or one == self.base_of.get(line or 0) for one in shown)

    def told_lost(self, who: str, error: str, promises: Iterable[tuple[int, float]]) -> None:
        """What is in storage, or was, is not lost."""
        given = set(promises)
        for step in sorted({step for step, _ in given}):
            tokens = {token for one, token in given if one == step}
            named = re.search(rf"\bstep {step}\b", error)
            named = named and f"step {step} is committed but not published" not in error  # when the deadline came
            named = named and f"step {step} could not be retired" not in error  # why another one is late
            if re.search(rf"\bstep {step} is not (committed|durable after)", error):  # it was not then; it may be since
                named = named and all(self.clock() - self.published_s.get(token, 0.0) > ANSWER_S for token in tokens)
            if named and all(self.is_kept(step, token) for token in tokens):
                raise Violation(f"{who} is told that step {step} is not durable, and it was in storage: {error}")

    def ended(self, who: str, promises: Sequence[tuple[int, float]]) -> None:
        """An end is judged by its newest step: each older one that is not durable is a fact of the log."""
        if promises and not any(step > promises[-1][0] and self._is_of_this_line(step) for step in self.published):
            self.durable(who, promises[-1:])
        lost = {key.step for key in given_up(open_storage(self.storage)) or ()}
        self.durable(f"{who}, where the log says nothing of it,", [one for one in promises if one[0] not in lost])

    def _is_of_this_line(self, step: int) -> bool:
        return any(self.line_of.get(token) == self.line for token in self.published[step])

    def ended_in_vain(self, who: str, error: str, newest: int, promises: Sequence[tuple[int, float]]) -> None:
        """A close that could not make the last step durable is the end for most: its error names whatever else isn't."""
        since_s = self.published_s.get(promises[-1][1]) if promises and promises[-1][0] == newest else None
        if since_s is not None and self.clock() - since_s > ANSWER_S:
            raise Violation(f"{who} raised {error}, and step {newest}, the newest, is in storage")
        for step, token in promises:
            if not self.is_kept(step, token) and not re.search(rf"\bstep {step}\b", error):
                raise Violation(f"{who} raised {error}, and save({step}) with token {token} never was in storage")

    def latest(self, step: int | None) -> None:
        """What latest_step() has answered."""
        if step is not None and step not in self.published:
            raise Violation(f"latest_step() says {step}, which never was in storage")

    # ------------------------------------------------------------ restore

    def restored(self, rank: int, line: int, wanted: int | None, step: int, token: float | None) -> None:
        where = f"restore on rank {rank}"
        if token is not None:
            self._known(where, step, token)
        if wanted is not None and step != wanted:
            raise Violation(f"{where} gives step {step} instead of {wanted}")
        outcomes = self.settled.setdefault(line, set())
        if not outcomes and wanted is None and step < self.floor[0]:  # the first to return; it sets the next one's floor
            raise Violation(f"{where} gives step {step}, but step {self.floor[0]} {self.floor[1]}")
        outcomes.add((step, token))
        if len(outcomes) > 1:
            raise Violation(f"the ranks restored different things: {outcomes}")

    def has_items(self, rank: int, token: float, rows: Any, place: Any) -> None:
        """What a restore of this token has set."""
        for what, got, expected in zip(("rows", "place in the data"), (rows, place), self.items[token, rank], strict=True):
            if got != expected:
                raise Violation(f"restore on rank {rank} gives the {what} {got} with token {token}, saved was {expected}")

    def begin(self, step: int, token: float | None, *, rollback: bool, stored: Iterable[int]) -> None:
        """A restore has settled: what was not durable and lies beyond it is gone for ever."""
        past = self._past(token)
        self.line += 1
        self.base_of[self.line] = token
        self.newest = step
        visible = set(stored)
        for old, its_step in self.given.items():
            kept = old == token or its_step <= past.get(self.line_of.get(old, -1), -1)
            in_storage = old in self.published.get(its_step, ()) and its_step in visible
            if not kept and not in_storage:
                self.given_up.setdefault(old, f"which a restore of step {step} had given up")
        self.floor = (max((one for one in visible), default=-1), "was durable")
        if rollback and any(one > step for one in visible):
            raise Violation(f"rolled back to step {step}, and steps {sorted(visible)} are in storage")

    def _past(self, token: float | None) -> dict[int, int]:
        """What this token's training has gone through: line -> its newest step of it."""
        past: dict[int, int] = {}
        while token is not None and (line := self.line_of.get(token)) is not None:
            past[line] = self.given[token]
            token = self.base_of.get(line)
        return past

    def crashed(self, stored: Iterable[int], held: Iterable[Staged] = (), lineage: str = "") -> None:
        """All trainers are dead. What is complete in memory, of the newest line, must come back, or something newer.

        Args:
            stored: steps in storage.
            held: what all hosts hold; nothing if one of them can't say.
            lineage: of all ranks; "" if they were in several.
        """
        pieces: dict[SnapshotId, set[int]] = {}
        for one in held:
            pieces.setdefault(one.id, set()).add(one.rank)
        complete = [one for one, ranks in pieces.items() if len(ranks) == self.ranks]
        newest = max((one.step for one in complete if one.lineage == lineage), default=-1)
        durable = max(stored, default=-1)
        self.floor = (newest, "was complete in memory") if newest > durable else (durable, "was durable")

    def memory_gone(self, stored: Iterable[int]) -> None:
        """A host has lost what it held: what crashed since may come back from storage only."""
        self.floor = min(self.floor, (max(stored, default=-1), "was durable"))


def _options() -> Any:
    from raystate.restored import ReadOptions

    return ReadOptions()
