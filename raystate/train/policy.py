"""When to start again, when to give up, and where: decisions of the launcher, without Ray and without a clock."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raystate.core.launcher.elastic import Newest

NEAR_STEPS = 3  # two failures this close to each other are at the same place
_SIGNATURE_CHARS = 300
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a worker group ended.

    Attributes:
        kind: "failed": counts. "interrupted": ended on purpose or with its node, doesn't count.
            "waiting": it never started, because the cluster had no room. "final": trying again
            can't help.
        cause: one line for a person, naming the rank where there is one.
        rank: whose error it is, None if there isn't one rank.
        error: that rank's exception, None for a death.
        traceback: the exception's traceback, as text; "" if there is none.
        is_known: whether it is known which rank failed first.
        signature: equal for failures that are one and the same; "" if they can't be told apart, as deaths can't.
    """

    kind: Literal["failed", "interrupted", "waiting", "final"]
    cause: str
    rank: int | None = None
    error: BaseException | None = None
    traceback: str = ""
    is_known: bool = True
    signature: str = ""


class RetryPolicy:
    """Gives up after `max_failures` failed starts in a row that brought no new step, or that all failed in the same way.

    A step or two between two failures is no progress if the same exception comes back. Otherwise a
    mistake in the second step of every start would be tried for ever.

    Asking for the newest step takes time that a restart doesn't have, so probes run on their own and are only waited for when they
    could matter.

    Args:
        max_failures: -1: never give up.
        start_limit_s: give up when the cluster has had no room for the workers for so long.
    """

    def __init__(self, max_failures: int, start_limit_s: float):
        self._max_failures = max_failures
        self._start_limit_s = start_limit_s
        self._streak = 0  # failures in a row without a new step, as of _newest
        self._newest: int | None = None
        self._repeated = 0  # failures in a row with _signature, each within NEAR_STEPS of the one before
        self._signature = ""
        self._at_first: Newest | None = None  # the newest step before the first failure
        self._unseen: list[tuple[Newest, str]] = []  # failures, with their signatures, whose probes were not looked at yet
        self._waiting_since_s: float | None = None

    def started(self, probe: Newest, now_s: float) -> None:  # noqa: ARG002 - the same shape as `ended`
        """A worker group is running. What the first one's probe finds, the first failure's is compared with."""
        self._waiting_since_s = None
        self._at_first = self._at_first or probe

    def ended(self, ending: Ending, probe: Newest, now_s: float) -> str | None:
        """Decide after a worker group's end.

        Args:
            ending: how it ended.
            probe: the newest step now.
            now_s: monotonic.

        Returns:
            None to start again, else why not.
        """
        if ending.kind == "final":
            return "trying again cannot help"
        if ending.kind == "waiting":
            if self._waiting_since_s is None:
                self._waiting_since_s = now_s
            waited_s = now_s - self._waiting_since_s
            return f"the workers could not be placed for {waited_s:.0f} s" if waited_s >= self._start_limit_s else None
        self._waiting_since_s = None
        if ending.kind == "interrupted" or self._max_failures == -1:
            return None
        self._at_first = self._at_first or probe
        self._unseen.append((probe, ending.signature))
        if self._could_give_up():
            self._look()
        if self._streak >= self._max_failures:
            return self._streak_text()
        if self._repeated >= self._repeats_allowed:
            return f"{self._repeated} starts in a row failed in the same way within {NEAR_STEPS} steps ({self._newest_text()})"
        return None

    def begin_again(self) -> None:
        """Forget the failures so far: the next group is another one."""
        self._streak = self._repeated = 0
        self._signature = ""
        self._unseen.clear()

    @property
    def _repeats_allowed(self) -> int:
        return max(2, self._max_failures)  # one failure repeats nothing

    def _could_give_up(self) -> bool:
        if self._streak + len(self._unseen) >= self._max_failures:
            return True
        signature = self._unseen[-1][1]
        alike = len(list(itertools.takewhile(lambda one: one[1] == signature, reversed(self._unseen))))
        before = self._repeated if alike == len(self._unseen) and self._signature == signature else 0
        return bool(signature) and before + alike >= self._repeats_allowed

    def _look(self) -> None:
        if self._newest is None:
            found = self._at_first() if self._at_first is not None else None
            self._newest = -1 if found is None else found
        for probe, signature in self._unseen:
            step = probe()
            near = step is None or step - self._newest <= NEAR_STEPS
            alike = bool(signature) and signature == self._signature and near
            self._repeated = self._repeated + 1 if alike else int(bool(signature))
            self._signature = signature
            if step is not None and step > self._newest:
                self._newest, self._streak = step, 0
            else:
                self._streak += 1
                if step is not None and step < self._newest:
                    self._newest = step  # only after a rollback: the steps that come now are new
        self._unseen.clear()

    def _streak_text(self) -> str:
        if self._max_failures == 0:
            return "max_failures is 0"
        starts = "start" if self._max_failures == 1 else "starts in a row"
        return f"{self._streak} failed {starts} without a new step ({self._newest_text()})"

    def _newest_text(self) -> str:
        return "no step yet" if not self._newest or self._newest < 0 else f"newest step {self._newest}"


def signature_of(error: BaseException) -> str:
    """What two exceptions have in common if they are the same failure: type and message, without
    numbers and addresses."""
    return f"{type(error).__name__}: {_NUMBER.sub('#', str(error))[:_SIGNATURE_CHARS]}"


def pinned_nodes(previous: Sequence[str], usable: frozenset[str], workers: int, ready: Sequence[str] = ()) -> list[str | None]:
    """The node for each rank of the next worker group: where that rank ran before, None for wherever there is room.

    Args:
        previous: node id by rank, of the group before; empty for the first group.
        usable: nodes that are alive and not draining.
        workers: size of the next group. Of another size, its first ranks are on the nodes that stay: what is restored lies there.
        ready: other nodes, with a process that waits for a rank, once for each.
    """
    if len(previous) == workers:
        pins = [node if node in usable else None for node in previous]
    else:
        staying = [node for node in previous if node in usable][:workers]
        pins = [*staying, *[None] * (workers - len(staying))]
    others = iter(ready)
    return [next(others, None) if node is None else node for node in pins]
