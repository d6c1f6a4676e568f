"""What a save waits for: storage, if the loop makes more steps durable than it can write, and the other ranks at an agreed step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from raystate.core.absence import MOST_AWAY_S
from raystate.core.errors import BarrierTimeoutError
from raystate.manager.session import Session
from raystate.runtime.link import Link

logger = logging.getLogger("raystate")

NO_PROGRESS_S = 4.0  # for so long a promised step may hold up the next one while storage does nothing
FIRST_PROGRESS_S = 8.0  # the same until a step has become durable: what writes it may still be loading
MOST_WAIT_S = MOST_AWAY_S  # the same while not storage, but a HostActor or a Coordinator that starts again is what saves wait for
ANSWER_S = 2.0
LOOK_S = 0.1


def wait_for(link: Link, changed: threading.Condition, done: Callable[[], bool], timeout_s: float) -> bool:
    """Whether `done` within `timeout_s`; it is called under the condition's lock."""
    deadline_s = link.clock() + timeout_s
    while True:
        with changed:
            if done():
                return True
        if link.clock() >= deadline_s:
            return False
        link.rest(changed)


def not_copied(rank: int, steps: Sequence[int], waited_s: float) -> BarrierTimeoutError:
    """The error of a wait for copies."""
    return BarrierTimeoutError(
        f"rank {rank}: not copied into host memory within {waited_s:.0f} s: {', '.join(f'step {n}' for n in steps)}",
        rank=rank, phase="staging", waited_s=waited_s, steps=steps,
    )  # fmt: skip


class StoragePace:
    """Of one trainer. What it waits for storage counts from one durable step to the next, over all its saves: where storage fails or stands
    still it waits for some seconds, and then not before a step has become durable again."""

    def __init__(self, session: Session):
        config = session.config
        self._session = session
        # Others wait for this rank meanwhile, and it must not look as if it hung.
        self._most_s = min(MOST_WAIT_S, config.barrier_timeout_s / 4, (config.hang_timeout_s or 2 * MOST_WAIT_S) / 2)
        self._lineage = ""
        self._durable = -1  # the newest step that was ever seen to be durable: a HostActor that has just started knows of none
        self._begin()

    def _begin(self) -> None:
        self._waited_s = 0.0
        self._ask_at_s = FIRST_PROGRESS_S if self._durable <= self._session.joined.newest_step else NO_PROGRESS_S
        self._is_told = self._has_given_up = False

    def wait_for_slot(self, has_slot: Callable[[float], bool]) -> None:
        """Return when the promised step that waits has a slot, or waiting has been given up: training goes on.

        Args:
            has_slot: waits for it, at most so many seconds.
        """
        session = self._session
        self._look()
        while not (self._has_given_up or session.is_over or session.is_left):
            began_s = session.link.clock()
            if has_slot(LOOK_S):
                self._waited_s += session.link.clock() - began_s
                return
            self._look()
            obstacle: str | None = None
            if self._waited_s >= self._ask_at_s and not session.storage_fails():
                obstacle = session.ask_for_obstacle(ANSWER_S)
            self._waited_s += session.link.clock() - began_s
            if session.storage_fails() or obstacle == "" or self._waited_s >= self._most_s:
                self._has_given_up = True
            elif obstacle is not None:
                self._ask_at_s = self._waited_s + NO_PROGRESS_S
                self._tell(obstacle)

    def _look(self) -> None:
        """Begin anew when a step has become durable, or in another lineage."""
        word = self._session.host_word()
        durable = -1 if word is None else word.durable_step
        if self._lineage != self._session.lineage:
            self._lineage, self._durable = self._session.lineage, durable
            self._begin()
        elif durable > self._durable:
            self._durable = durable
            self._begin()

    def _tell(self, obstacle: str) -> None:
        if not self._is_told:
            logger.info("a step that is due waits for room in host memory: %s", obstacle)
        self._is_told = True


class AgreedStep:
    """How long this rank has been waiting for the others at a step that was proposed to all."""

    def __init__(self, session: Session):
        self._session = session
        self._since_s: float | None = None

    def over(self) -> None:
        """It is decided."""
        self._since_s = None

    def wait_or_raise(self, step: int) -> None:
        """A moment's rest, or BarrierTimeoutError."""
        link, limit_s = self._session.link, self._session.config.barrier_timeout_s
        now_s = link.clock()
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s > limit_s:
            self.over()
            raise BarrierTimeoutError(
                f"rank {self._session.rank} (host {self._session.host[:8]}) waited {limit_s:.0f} s at step {step} for the other ranks",
                rank=self._session.rank, step=step, phase="agreement", waited_s=limit_s,
            )  # fmt: skip
        link.rest()
