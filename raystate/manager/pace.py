"""What a save waits for: storage, if the loop makes more steps durable than it can write, and the other ranks at an agreed step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from raystate.core.formats.errors import BarrierTimeoutError
from raystate.core.formats.settings import most_wait_s
from raystate.manager.session import Session
from raystate.runtime.link import Link
from raystate.waits import AGAIN_S, AT_ONCE_S


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


def wait_for_copies(session: Session, changed: threading.Condition, done: Callable[[], bool], timeout_s: float) -> bool:
    """The same. Once the Coordinator knows that a rank hangs, nothing is waited for that may need it: a slot, a computation.

    Raises:
        BarrierTimeoutError: names that rank.
    """
    first_s = min(timeout_s, session.config.barrier_timeout_s)
    if wait_for(session.link, changed, done, first_s):
        return True
    is_over = wait_for(session.link, changed, lambda: session.fails or done(), timeout_s - first_s)
    session.refuse_failed()
    return is_over


def not_copied(rank: int, steps: Sequence[int], waited_s: float) -> BarrierTimeoutError:
    """The error of a wait for copies."""
    return BarrierTimeoutError(
        f"rank {rank}: not copied into host memory within {waited_s:.0f} s: {', '.join(f'step {n}' for n in steps)}",
        rank=rank, phase="staging", waited_s=waited_s, steps=steps,
    )  # fmt: skip


class StoragePace:
    """Of one trainer. It waits while storage makes progress; where that fails or stands still not
    at all, until a step has become durable again. The HostActor's word says which it is. If the
    HostActor is dead, waiting ends by itself."""

    def __init__(self, session: Session):
        config = session.config
        self._session = session
        self._most_s = AT_ONCE_S + most_wait_s(config.barrier_timeout_s, config.hang_timeout_s)
        self._lineage = ""
        self._durable = -1  # the newest step that was ever seen to be durable: a HostActor that has just started knows of none
        self._waited_s = 0.0

    def wait_for_slot(self, has_slot: Callable[[float], bool]) -> None:
        """Return when the promised step that waits has a slot, or is not worth waiting for: training goes on.

        Args:
            has_slot: waits for it, at most so many seconds.
        """
        session = self._session
        while not (session.is_over or session.is_left or session.storage_fails()):
            self._look()
            if self._waited_s >= self._most_s:
                return
            began_s = session.link.clock()
            done = has_slot(AGAIN_S)
            self._waited_s += session.link.clock() - began_s
            if done:
                return

    def _look(self) -> None:
        """Begin anew when a step has become durable, or in another lineage."""
        word = self._session.words.host_word()
        durable = -1 if word is None else word.durable_step
        if self._lineage != self._session.lineage or durable > self._durable:
            self._lineage, self._durable, self._waited_s = self._session.lineage, durable, 0.0


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
        self._session.refuse_failed()
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
