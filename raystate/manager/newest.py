"""What a trainer knows of the newest steps: the one that it saved last, and the one that is durable."""

# JAX's own functions are only partly typed; everything of ours is checked strictly.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from raystate.arrays.items import PackedItems, pack_items
from raystate.config.state_config import StateConfig
from raystate.core.formats.messages import DeleteAsked, FlushReply, RestoreSettled
from raystate.core.trainer.save_decision import SaveDecision
from raystate.manager.pipeline import Pipeline
from raystate.manager.session import Session
from raystate.manager.staging import KeptArguments, SaveArguments
from raystate.reader import Reader, StepMetadata

logger = logging.getLogger("raystate")


LARGE_BYTES = 1 << 20  # of an item's state: it is no mere position


class NewestSave:
    """The arguments of the newest save, to stage it at the end if it wasn't. A restore, and the end, forget it."""

    def __init__(self, pipeline: Pipeline):
        self._pipeline = pipeline
        self._given: KeptArguments | None = None
        self.largest: float = LARGE_BYTES
        self._large: frozenset[str] = frozenset()  # items whose state was large when it was read last

    def pack(self, items: Mapping[str, Any] | None, *, passes: bool) -> PackedItems:
        """The items of a save. Of a step that isn't captured, what is small is read all the same: it may become the last one."""
        leave = self._large if passes else frozenset[str]()
        packed = pack_items(items, process_index=self._pipeline.machine.rank, leave=leave)
        sizes = {name: len(state) for name, state in packed.iterators.items()}
        sizes |= {name: sum(map(len, files.values())) for name, files in packed.files.items()}
        self._large = frozenset(name for name, size in sizes.items() if size > self.largest or name in packed.unread)
        return packed

    def decided(self, given: KeptArguments, decision: SaveDecision | None) -> None:
        """Take note of a save and its decision; None: it keeps nothing."""
        if decision is None or not decision.ignored:
            self._given = given
            if decision is not None and decision.action == "skip":
                self._pipeline.keep_skipped(given)
        elif (machine := self._pipeline.machine).is_safe and machine.rank == 0 and given.has_words:
            logger.warning("%s: the metrics and custom values of this save() come too late", decision.reason)

    def forget(self) -> None:
        """There is none."""
        self._given = None

    @property
    def step(self) -> int | None:
        """Its number."""
        return self._given.step if self._given is not None else None

    def metrics(self) -> dict[str, float]:
        """As numbers: waits for those that are still computing."""
        metrics = self._given.metrics if self._given is not None else {}
        return {name: float(np.asarray(value)) for name, value in metrics.items()}

    def make_durable(self) -> None:
        """It may not have been due; its arrays still exist unless they were donated."""
        last = self._given
        if last is None:
            return
        with self._pipeline.lock:
            if self._pipeline.machine.is_safe:
                return  # it is promised: durable or on its way, or close() says why not
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in last.leaves):
            logger.warning("step %d was donated after its save: the newest snapshot is the last step", last.step)
            return
        self._pipeline.drain()  # nothing is in a hurry any more: no earlier durable step has to give way
        given = last.again()
        self._pipeline.save(dataclasses.replace(given, items=given.items.read()), force=True)


class Ranking:
    """Says once that a step lacks the metric by which the best ones are kept."""

    def __init__(self, config: StateConfig, rank: int):
        self._metric = config.best_metric if config.keep_best is not None and rank == 0 else None

    def look(self, given: SaveArguments) -> None:
        """At a step that becomes durable."""
        if self._metric is None or self._metric in given.metrics:
            return
        items = given.items
        has = any(self._metric in names for names in (items.trees, items.iterators, items.files, items.json_items))
        logger.warning(
            "step %d has no metric %r, so keep_best will not keep it: save(…, metrics={%r: …})%s",
            given.step, self._metric, self._metric, "; `items`, the third argument, has that name" if has else "",
        )  # fmt: skip
        self._metric = None


class DurableSteps:
    """What this process knows of the durable steps.

    Storage lists them. The newest is also told by the host's word, which may be a moment behind:
    what storage has once listed, or the Coordinator answered, is not forgotten for it. A newer list
    counts: a step may have been removed.
    """

    def __init__(self, session: Session, asked: Callable[[], None]):
        self._session = session
        self._asked = asked  # is told of each question
        self._known = -1
        self._as_of = (0, 0)  # (attempt, seq) of the newest Advice at the last restore: what is older is of before it

    @functools.cached_property
    def reader(self) -> Reader:
        """Of the run's storage, from the first question on: at a start that may be out while the run comes back from memory."""
        return Reader(self._session.config.storage)

    def settled(self, reply: RestoreSettled) -> None:
        """A restore may have gone back behind what was durable."""
        self._known, self._as_of = reply.durable_step, reply.advice

    def answered(self, step: int) -> None:
        """The Coordinator, or storage, says that this step is durable."""
        self._asked()
        self._known = max(self._known, step)

    def delete(self, step: int) -> None:
        """Ask the Coordinator to remove one; it is gone then."""
        session = self._session
        reply = session.ask(
            FlushReply, lambda ask: DeleteAsked(ask=ask, step=step), timeout_s=session.config.save_timeout_s, phase="delete"
        )
        self.answered(reply.durable_step)

    def told(self) -> int:
        """What the host's word tells, -1: nothing. Shared memory: a loop may ask at every step."""
        word = self._session.words.host_word()
        return word.durable_step if word is not None and word.advice >= self._as_of else -1

    def latest(self) -> int | None:
        """The newest, None if there is none."""
        self._asked()
        known = -1 if self._session.is_over else max(self._known, self.told())
        return known if known >= 0 else self.reader.latest_step()

    def list(self) -> list[int]:
        """All, ascending."""
        self._asked()
        steps = self.reader.all_steps()
        self._known = max(steps, default=-1)
        return steps

    def best(self, metric: str | None, mode: Literal["min", "max"]) -> int | None:
        """See `Reader.best_step`."""
        step = self.reader.best_step(metric, mode)
        self.answered(-1 if step is None else step)
        return step

    def metadata(self, step: int | None) -> StepMetadata:
        """See `Reader.metadata`."""
        found = self.reader.metadata(step)
        self.answered(found.step)
        return found
