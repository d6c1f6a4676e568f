"""What a save waits for: storage, if the loop makes more steps durable than it can write, and the other ranks at an agreed step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from raystate.core.errors import BarrierTimeoutError
from raystate.manager.session import Session
from raystate.runtime.link import Link

NO_PROGRESS_S = 30.0  # for so long a promised step may hold up the next ones: a HostActor or a Coordinator may be starting again
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
    """Of one trainer. Where storage fails or stands still it waits once, and then not before a step has become durable again."""

    def __init__(self, session: Session):
        self._session = session
        self._gave_up_at: int | None = None  # the newest durable step when a wait ended without a slot

    def wait_for_slot(self, has_slot: Callable[[float], bool]) -> None:
        """Return when the promised step that waits has a slot. When storage fails, or no step becomes durable at all, training goes on.

        Args:
            has_slot: waits for it, at most so many seconds.
        """
        link, durable, since_s = self._session.link, self._durable_step(), self._session.link.clock()
        while durable != self._gave_up_at and not has_slot(LOOK_S):
            if self._durable_step() != durable:
                since_s, durable = link.clock(), self._durable_step()
            if link.clock() - since_s > NO_PROGRESS_S or self._session.storage_fails():
                self._gave_up_at = durable

    def _durable_step(self) -> int:
        word = self._session.host_word()
        return -1 if word is None else word.durable_step


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
