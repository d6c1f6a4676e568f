"""The background thread that carries held steps into the arena."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raystate import fault_points
from raystate._session import Session
from raystate.arena import Slot, SlotHeader
from raystate.arrays import Held, copy
from raystate.core.errors import CapacityError
from raystate.core.tree import SlotTable

logger = logging.getLogger("raystate")

PROMISE_WAIT_S = 2.0  # for a slot of the durable step before this one
POLL_S = 0.005  # how often a held step looks for a free slot; only while the trainer waits for nothing


@dataclass(frozen=True, kw_only=True)
class Job:
    """One step on its way into a slot. `slot` is None for a durable step that found none free: it waits here, not the trainer."""

    step: int
    slot: int | None
    held: Held
    values: tuple[Any, ...]  # of the scalar leaves, per tree
    durable: bool
    iterators: Mapping[str, bytes]
    json_items: Mapping[str, Any]
    metrics: Mapping[str, Any]  # numbers or arrays that may still be computing
    custom: Any


class Stager:
    """Stages jobs in order.

    Args:
        session: the slots.
        take_slot: gives a slot for the step that waits for one, or None: none is free, or another step has taken its place.
        on_staged, on_failed: told (slot, step) at the end of each job, from the thread; the slot is None if it never got one.
    """

    def __init__(
        self,
        session: Session,
        *,
        take_slot: Callable[[int], int | None],
        on_staged: Callable[[int, int], None],
        on_failed: Callable[[int | None, int], None],
    ):
        self._session = session
        self._take_slot = take_slot
        self._on_staged = on_staged
        self._on_failed = on_failed
        self._jobs: deque[Job] = deque()
        self._running: Job | None = None
        self._condition = threading.Condition()
        self._stopping = False
        self._dropped: set[int] = set()
        self._slotless: int | None = None  # the step at the head that has found no free slot
        self.errors: list[str] = []
        self._thread = threading.Thread(target=self._run, name="raystate-stager", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return bool(self._jobs) or self._running is not None

    def put(self, job: Job) -> None:
        with self._condition:
            self._jobs.append(job)
            self._condition.notify_all()

    def wait_for_turn(self, timeout_s: float) -> None:
        """Return when no earlier step waits behind a copy that is still running, nor, for a moment, for a free slot."""
        with self._condition:
            self._condition.wait_for(lambda: self._slotless is not None or not self._behind(), timeout_s)
            # Steps of milliseconds: slots are on their way back. In a storage outage none come, and training goes on after this.
            self._condition.wait_for(lambda: self._slotless is None, PROMISE_WAIT_S)

    def _behind(self) -> bool:
        return any(job.slot is None for job in self._jobs)

    def drop(self, step: int) -> None:
        """Forget a step that still waits for a slot: a newer one takes its place."""
        with self._condition:
            for job in [job for job in self._jobs if job.step == step and job.slot is None]:
                self._jobs.remove(job)
                job.held.release()
                self.errors.append(f"step {step}: no slot became free before the next durable step")
            self._dropped.add(step)

    def drain(self, timeout_s: float) -> bool:
        """Whether everything that was put is staged (or failed) within `timeout_s`."""
        with self._condition:
            return self._condition.wait_for(lambda: not self.busy, timeout_s)

    def close(self) -> None:
        """End the thread: a copy that is running is finished, a step that still waits for a slot is given up."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        self._thread.join(timeout=30.0)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._jobs or self._stopping)
                if self._stopping and not self._jobs:
                    return
                self._running = self._jobs.popleft()
            job = self._running
            slot_index = job.slot
            try:
                slot_index = self._wait_for_slot(job)
                self._stage(job, slot_index)
                self._on_staged(slot_index, job.step)
            except Exception as error:
                logger.warning("step %d was not snapshotted: %s", job.step, error)
                self.errors.append(f"step {job.step}: {error}")
                with contextlib.suppress(Exception):  # the next jobs must get their turn whatever is broken
                    self._on_failed(slot_index, job.step)
            finally:
                job.held.release()
                with self._condition:
                    self._running = self._slotless = None
                    self._condition.notify_all()
                del job

    def _wait_for_slot(self, job: Job) -> int:
        if job.slot is not None:
            return job.slot
        timeout_s = self._session.config.save_timeout_s
        deadline_s = time.monotonic() + timeout_s
        while True:
            slot = self._take_slot(job.step)
            with self._condition:
                self._slotless = job.step if slot is None else None
                self._condition.notify_all()
            if slot is not None:
                return slot
            if job.step in self._dropped or self._stopping:
                then = "the end" if self._stopping else "the next durable step"
                raise CapacityError(f"no slot became free for step {job.step} before {then}", step=job.step)
            if time.monotonic() > deadline_s:
                raise CapacityError(
                    f"no slot became free for step {job.step} within {timeout_s:.0f} s (earlier saves still hold them)",
                    step=job.step, waited_s=timeout_s,
                )  # fmt: skip
            time.sleep(POLL_S)

    def _stage(self, job: Job, slot_index: int) -> None:
        arena = self._session.arena
        assert arena is not None
        plan = job.held.plan
        ref = arena.put_layout(plan.layout_bytes)
        slot: Slot = arena.slots[slot_index]
        slot.begin()
        crcs = copy(job.held, slot.data_mut)
        fault_points.reached("staging")
        table = SlotTable(
            layout_ref=ref,
            crc32c=crcs,
            values=job.values,
            iterators=dict(job.iterators),
            json_items=dict(job.json_items),
            metrics={name: float(np.asarray(value)) for name, value in job.metrics.items()},
            custom=job.custom,
        )
        header = SlotHeader(
            lineage=self._session.lineage,
            step=job.step,
            rank=self._session.rank,
            world=self._session.world,
            layout=plan.layout_hash,
            durable=job.durable,
            data_bytes=plan.layout.data_bytes,
        )
        slot.commit(header, table.to_bytes())
