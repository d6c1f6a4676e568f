"""The background thread that carries held steps into the arena."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raystate._session import Session
from raystate.arena import Slot, SlotHeader
from raystate.arrays import Held, copy
from raystate.core.errors import CapacityError, RaystateError
from raystate.core.tree import SlotTable

logger = logging.getLogger("raystate")

POLL_S = 0.005  # how often a held step looks for a free slot; only while the trainer waits for nothing


@dataclass(frozen=True, kw_only=True)
class Job:
    """One step on its way into a slot. `slot` is None for a durable step that found none free: it waits here, not the trainer."""

    step: int
    slot: int | None
    held: Held
    durable: bool
    iterators: Mapping[str, bytes]
    json_items: Mapping[str, Any]
    metrics: Mapping[str, Any]  # numbers or arrays that may still be computing
    custom: Any


class Stager:
    """Stages jobs in order.

    Args:
        session: the slots.
        take_slot: gives a free slot for a waiting job, or None.
        on_staged, on_failed: told (slot, step) at the end of each job, from the thread.
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

    def drain(self, timeout_s: float) -> bool:
        """Whether everything that was put is staged (or failed) within `timeout_s`."""
        with self._condition:
            return self._condition.wait_for(lambda: not self.busy, timeout_s)

    def close(self) -> None:
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
                self._on_failed(slot_index, job.step)
            finally:
                job.held.release()
                with self._condition:
                    self._running = None
                    self._condition.notify_all()
                del job

    def _wait_for_slot(self, job: Job) -> int:
        if job.slot is not None:
            return job.slot
        deadline_s = time.monotonic() + self._session.config.save_timeout_s
        while True:
            slot = self._take_slot(job.step)
            if slot is not None:
                return slot
            if time.monotonic() > deadline_s:
                raise CapacityError(
                    f"no slot became free for step {job.step} within {self._session.config.save_timeout_s:.0f} s "
                    "(earlier saves still hold them)",
                    step=job.step, waited_s=self._session.config.save_timeout_s,
                )  # fmt: skip
            with self._condition:
                self._condition.wait_for(lambda: self._stopping, POLL_S)
                if self._stopping and slot is None and time.monotonic() > deadline_s - self._session.config.save_timeout_s + 30.0:
                    raise RaystateError(f"step {job.step} was still waiting for a slot at the end", step=job.step)

    def _stage(self, job: Job, slot_index: int) -> None:
        arena = self._session.arena
        assert arena is not None
        plan = job.held.described.plan
        ref = arena.put_layout(plan.layout_bytes)
        slot: Slot = arena.slots[slot_index]
        slot.begin()
        crcs = copy(job.held, slot.data_mut)
        table = SlotTable(
            layout_ref=ref,
            crc32c=crcs,
            values=job.held.described.values,
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
