"""What is seen from outside: what the trainers have written down, and what the Coordinator says of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import ray

from jobs.drill.plan import PHASES
from jobs.drill.training import ACTORS, Scribe
from jobs.striking import NAMESPACE, actors, place_of

POLL_S = 0.02
ANSWER_S = 2.0
IDLE, STAGING, SAVING, COMMITTING, RECOVERING = PHASES
UNKNOWN = "unknown"


class TooLate(Exception):  # noqa: N818 - it is for the drill's own use
    """Something has not come in time."""


class Watch:
    """What the trainers have written down so far.

    Args:
        tolerance: relative, of the losses of a step that is computed twice.

    Attributes:
        events: as the scribe has them.
        newest: the newest step.
        differing: steps that had one loss first and another one later.
    """

    def __init__(self, scribe: Any, *, tolerance: float = 0.0):
        self._scribe = scribe
        self._tolerance = tolerance
        self.events: list[dict[str, Any]] = []
        self.newest = -1
        self._losses: dict[int, float] = {}
        self.differing: list[str] = []

    def look(self) -> None:
        """Read what is new."""
        for event in ray.get(self._scribe.since.remote(len(self.events)), timeout=60.0):
            self.events.append(event)
            if event["event"] != "step":
                continue
            step, loss = event["step"], float.fromhex(event["loss"])
            self.newest = max(self.newest, step)
            before = self._losses.setdefault(step, loss)
            if not self._same(loss, before):
                self.differing.append(f"step {step} has loss {loss} on rank {event['rank']}, and had {before} before")

    def _same(self, loss: float, other: float) -> bool:
        return math.isclose(loss, other, rel_tol=self._tolerance)

    def differing_from(self, other: Watch) -> list[str]:
        """Steps whose loss is not that of another training."""
        both = self._losses.keys() & other._losses.keys()
        return [
            f"step {step} has loss {self._losses[step]}, and {other._losses[step]} in the undisturbed run"
            for step in sorted(both)
            if not self._same(self._losses[step], other._losses[step])
        ]

    def of_ranks(self) -> dict[int, dict[str, Any]]:
        """rank -> its newest start, of the ranks that the newest worker group has."""
        starts = [event for event in self.events if event["event"] == "start"]
        return {event["rank"]: event for event in starts if event["rank"] < starts[-1]["world"]}

    def ends(self) -> dict[int, dict[str, Any]]:
        """rank -> its end, of the ranks that have come to the end."""
        return {event["rank"]: event for event in self.events if event["event"] == "end"}

    def sizes(self) -> list[int]:
        """How many ranks each worker group had that has started."""
        return [event["world"] for event in self.events if event["event"] == "start" and event["rank"] == 0]

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float, failed: Callable[[], str | None]) -> Any:
        """Look until `condition` is true; TooLate naming `what` at the deadline, or with what `failed` says."""
        end_s = time.monotonic() + timeout_s
        while True:
            self.look()
            found = condition()
            if found:
                return found
            problem = failed()
            if problem is not None:
                raise TooLate(f"while waiting for {what}: {problem}")
            if time.monotonic() > end_s:
                raise TooLate(f"no {what} within {timeout_s:.0f} s")
            time.sleep(POLL_S)


def new_scribe(name: str) -> Any:
    """On this node, which nobody strikes."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Scribe).options(name=name, namespace=ACTORS, num_cpus=0, scheduling_strategy=here).remote()


class Run:
    """The run's actors, by their names in Ray."""

    def __init__(self, name: str):
        self._name = name
        self.hash = ""

    def find(self) -> bool:
        """Whether there is a Coordinator of this run; its hash is known then."""
        for name in actors():
            if name.startswith("coordinator-"):
                report = _ask(name, "status", ANSWER_S)
                if report is not None and report.run == self._name:
                    self.hash = name.removeprefix("coordinator-")
                    return True
        return False

    def status(self, timeout_s: float = ANSWER_S) -> Any | None:
        """The Coordinator's status; None if it does not answer."""
        report = _ask(f"coordinator-{self.hash}", "status", timeout_s)
        return None if report is None else report.status

    def coordinator(self) -> tuple[str, int] | None:
        """(its node, its pid), if it answers."""
        return place_of(f"coordinator-{self.hash}", ANSWER_S)

    def host(self, node: str) -> tuple[str, int] | None:
        """(node, pid) of the HostActor there, if it answers."""
        return place_of(f"host-{self.hash}-{node}", ANSWER_S)

    def actors(self) -> list[str]:
        """Names of those that live."""
        return [name for name in actors() if self.hash and self.hash in name]


def _ask(name: str, method: str, timeout_s: float) -> Any | None:
    try:
        return ray.get(getattr(ray.get_actor(name, namespace=NAMESPACE), method).remote(), timeout=timeout_s)
    except Exception:  # dead, stopped, of an older version, or too busy
        return None


def phase_of(status: Any | None, trained: int) -> str:
    """What a Coordinator is doing, by its own status.

    Args:
        status: its RunStatus; None: it did not answer.
        trained: the newest step that the trainers have made.
    """
    if status is None:
        return UNKNOWN
    if status.recovery != "idle" or not status.training:
        return RECOVERING
    phases = {save.phase for save in status.saves}
    if phases & {"packaging", "committing"}:
        return COMMITTING
    if "writing" in phases:
        return SAVING
    if "queued" in phases or status.memory_step < trained:
        return STAGING
    return IDLE
