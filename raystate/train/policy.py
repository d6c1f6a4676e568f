"""When to start again, when to give up, and where: decisions of the launcher, without Ray and without a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Probe = Callable[[], int | None]  # the newest step (snapshots included) when it was made; None: nobody could say


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a worker group ended.

    Attributes:
        kind: "failed": counts; "interrupted": ended on purpose or with its node, doesn't count; "waiting": it never started because
            the cluster had no room; "final": trying again cannot help.
        cause: one line for a person, naming the rank where there is one.
        rank: whose error it is, None if there isn't one rank.
        error: that rank's exception, None for a death.
        traceback: the exception's traceback, as text; "" if there is none.
    """

    kind: Literal["failed", "interrupted", "waiting", "final"]
    cause: str
    rank: int | None = None
    error: BaseException | None = None
    traceback: str = ""


class RetryPolicy:
    """Gives up after `max_failures` failed attempts in a row that brought no new step.

    Asking for the newest step takes time that a restart doesn't have, so probes run on their own and are only waited for when they
    could matter.

    Args:
        max_failures: None or -1: never give up.
        start_limit_s: give up when the cluster has had no room for the workers for so long.
    """

    def __init__(self, max_failures: int | None, start_limit_s: float):
        self._max_failures = None if max_failures == -1 else max_failures
        self._start_limit_s = start_limit_s
        self._streak = 0  # failures in a row without a new step, as of _newest
        self._newest: int | None = None
        self._probes: list[Probe] = []  # not looked at yet: the first is the base of the second, and so on
        self._waiting_since_s: float | None = None

    def started(self, probe: Probe, now_s: float) -> None:  # noqa: ARG002 - the same shape as `ended`
        """A worker group is running. The first one's probe is the base for the first failure's."""
        self._waiting_since_s = None
        if self._newest is None and not self._probes:
            self._probes.append(probe)

    def ended(self, ending: Ending, probe: Probe, now_s: float) -> str | None:
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
        if ending.kind == "interrupted" or self._max_failures is None:
            return None
        self._probes.append(probe)
        failures = len(self._probes) - (self._newest is None)  # one of them may be the base
        if self._streak + failures < self._max_failures:
            return None
        self._look()
        if self._streak < self._max_failures:
            return None
        if self._max_failures == 0:
            return "max_failures is 0"
        newest = "no step yet" if not self._newest or self._newest < 0 else f"newest step {self._newest}"
        attempts = "attempt" if self._max_failures == 1 else "attempts in a row"
        return f"{self._streak} failed {attempts} without a new step ({newest})"

    def _look(self) -> None:
        for probe in self._probes:
            step = probe()
            if self._newest is None:
                self._newest = -1 if step is None else step  # the base
            elif step is not None and step > self._newest:
                self._newest, self._streak = step, 0
            else:
                self._streak += 1
        self._probes.clear()


def root_cause(errors: dict[int, BaseException], *, collateral: Callable[[BaseException], bool]) -> int:
    """The rank whose error to show: the lowest one whose error is not `collateral` of another rank's death, else the lowest."""
    own = [rank for rank in sorted(errors) if not collateral(errors[rank])]
    return own[0] if own else min(errors)


def pinned_nodes(previous: Sequence[str], usable: frozenset[str], workers: int) -> list[str | None]:
    """The node for each rank of the next worker group: where that rank ran before, None for wherever there is room.

    Args:
        previous: node id by rank, of the group before; empty for the first group.
        usable: nodes that are alive and not draining.
        workers: size of the next group. Of another size, nothing is pinned: its shards are cut differently anyway.
    """
    if len(previous) != workers:
        return [None] * workers
    return [node if node in usable else None for node in previous]
