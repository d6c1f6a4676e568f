"""What a save waits for: storage, if the loop makes more steps durable than it can write, and the other ranks at an agreed step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from raystate.core.errors import BarrierTimeoutError
from raystate.manager.session import Session
from raystate.runtime.link import Link

NO_PROGRESS_S = 4.0  # for so long a promised step may hold up the next one while storage does nothing
FIRST_PROGRESS_S = 8.0  # the same until a step has become durable: what writes it may still be loading
MOST_WAIT_S = 30.0  # the same while not storage, but a HostActor or a Coordinator that starts again is what saves wait for
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
    """Of one trainer. Where storage fails or stands still it waits once, and then not before a step has become durable again."""

    def __init__(self, session: Session):
        self._session = session
        self._gave_up_at: int | None = None  # the newest durable step when a wait ended without a slot

    def wait_for_slot(self, has_slot: Callable[[float], bool]) -> None:
        """Return when the promised step that waits has a slot. When storage fails or makes no progress at all, training goes on.

        Args:
            has_slot: waits for it, at most so many seconds.
        """
        link, progress, since_s = self._session.link, self._progress(), self._session.link.clock()
        asked_s = since_s
        while progress[0] != self._gave_up_at and not has_slot(LOOK_S):
            if self._progress() != progress:
                since_s = asked_s = link.clock()
                progress = self._progress()
            patience_s = FIRST_PROGRESS_S if progress[0] == self._session.joined.newest_step else NO_PROGRESS_S
            if self._session.storage_fails():
                self._gave_up_at = progress[0]
            elif link.clock() - asked_s > patience_s:
                obstacle = self._session.ask_for_obstacle(ANSWER_S)
                asked_s = link.clock()
                if not obstacle or asked_s - since_s > MOST_WAIT_S:
                    self._gave_up_at = progress[0]

    def _progress(self) -> tuple[int, tuple[int, ...]]:
        """Changes when a step becomes durable or slots are granted."""
        word = self._session.host_word()
        return (-1, ()) if word is None else (word.durable_step, word.grants)


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
