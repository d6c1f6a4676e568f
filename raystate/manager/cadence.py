"""The calls of save() as such: when they come, and those that keep nothing, as most do where snapshots are seldom."""

# JAX's own functions are only partly typed; everything of ours is checked strictly.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import jax

from raystate.config.state_config import StateConfig
from raystate.core.formats.messages import HostWord
from raystate.manager.pipeline import Pipeline
from raystate.manager.session import Session
from raystate.manager.spent import STEPS
from raystate.waits import AGAIN_S, LOOK_EVERY_S, REPORT_EVERY_S

logger = logging.getLogger("raystate")


class Cadence:
    """One trainer's. For one thread at a time."""

    def __init__(self, config: StateConfig, session: Session, pipeline: Pipeline):
        self._waits = config.snapshot_every_steps is None
        self._is_measured = self._waits or config.core_settings().save_measured
        self._session = session
        self._pipeline = pipeline
        self._shown_s = float("-inf")
        self._lineage = ""  # in which the newest call has begun
        self._word: HostWord | None = None  # of then

    def begin(self, step: int, state: Any, *, force: bool) -> bool:
        """save(step) begins. Whether it keeps nothing: its state is not looked at then, only held."""
        if self._is_measured:
            self._measure(step, state)
        with self._pipeline.lock:
            self._lineage = self._session.lineage
            self._word = self._session.words.host_word()
            return not force and self._pipeline.check.has_looked and self._pipeline.machine.passes(step, self._word)

    def _measure(self, step: int, state: Any) -> None:
        """A few calls wait until their state is computed, where the interval of snapshots is measured."""
        times = self._pipeline.machine.times
        # By the interval at the call before: a guess will do, and each read of the word costs a loop that saves at every step.
        waited = self._waits and times.waits(self._pipeline.machine.due_in(self._word))
        if waited:
            with self._session.spent.span(STEPS):
                waited = self._is_computed(state)
        durable = -1 if self._word is None else self._word.durable_step
        with self._pipeline.lock:
            now_s = self._session.link.clock()
            times.called(step, now_s, waited=waited, copying=self._pipeline.machine.staging, durable=durable)

    def _is_computed(self, state: Any) -> bool:
        """Wait for it; False if it is not to be: a rank that hangs may be in a collective of it."""
        computed, over = list[bool](), threading.Event()

        def wait() -> None:
            try:
                jax.block_until_ready(state)
                computed.append(True)
            except Exception:  # an array that was donated, or can't be computed: it is said where it is needed
                logger.debug("a step is not measured", exc_info=True)
            finally:
                over.set()

        # JAX's wait has no deadline, and to ask a donated array whether it is ready crashes the process.
        threading.Thread(target=wait, name="raystate-measure", daemon=True).start()
        give_up_s = self._session.link.clock() + self._session.config.barrier_timeout_s
        while not over.wait(AGAIN_S):
            if self._session.fails or self._session.link.clock() > give_up_s:
                return False
        return bool(computed)

    def pass_by(self, step: int, decided: Callable[[None], None]) -> None:
        """Do all that such a save does."""
        with self._pipeline.lock:
            self._pipeline.pass_by(step, self._lineage)
            decided(None)
            self._show_life(REPORT_EVERY_S)  # its HostActor reports no oftener

    def show_life(self) -> None:
        """Any call is a sign of life for the hang watch: a word, if it is a while since the last."""
        if not self._session.is_over:
            self._show_life(LOOK_EVERY_S)

    def _show_life(self, after_s: float) -> None:
        now_s = self._session.link.clock()
        if now_s >= self._shown_s + after_s:
            self._shown_s = now_s
            self._pipeline.speak()
