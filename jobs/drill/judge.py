"""What must hold of a run's steps, whatever has hit it: what it goes on from, what it trains, and what lies in storage."""

from __future__ import annotations

from typing import Any

import raystate
from jobs.drill import training
from jobs.drill.outcomes import NONE
from jobs.drill.watch import Watch


class Judge:
    """Looks at what has not been looked at before.

    Args:
        storage: of the run.
        watch: its ranks' words.
    """

    def __init__(self, storage: str, watch: Watch):
        self._reader = raystate.Reader(storage)
        self._watch = watch
        self._exact = training.Exact()
        self._verified: set[int] = set()
        self._checked = 0  # events whose values have been looked at

    def newest_durable(self) -> int:
        """-1: none."""
        return max(self._reader.all_steps(), default=NONE)

    def wrong(self) -> list[str]:
        """All that is not as it must be."""
        found = [*self._wrong_starts(), *self.wrong_steps(), *self._watch.differing]
        self._watch.differing.clear()
        return found

    def _wrong_starts(self) -> list[str]:
        """Starts whose values are not those of their step."""
        found: list[str] = []
        for event in self._watch.events[self._checked :]:
            if event["event"] == "start":
                step, text = event["step"], f"rank {event['rank']} went on from step {event['step']} with"
                if event["at"] != step:
                    found.append(f"{text} its iterator at {event['at']}")
                if event["exact"] != training.mark(self._exact.at(step)):
                    found.append(f"{text} other values than those of that step")
        self._checked = len(self._watch.events)
        return found

    def wrong_steps(self) -> list[str]:
        """Durable steps that can't be read in full or have other values than they must have."""
        found: list[str] = []
        for step in self._reader.all_steps():
            if step in self._verified:
                continue
            try:
                state: Any = self._reader.restore(step=step).state
            except raystate.StepNotFoundError:
                continue  # retention has taken it meanwhile
            except raystate.RaystateError as error:
                found.append(f"durable step {step} can't be read: {error}")
                continue
            if training.mark(state["exact"]) != training.mark(self._exact.at(step)):
                found.append(f"durable step {step} has other values than it must have")
            self._verified.add(step)
        return found

    def compare(self, calm: Watch) -> tuple[bool, list[str]]:
        """Beside a run of as many steps that nobody disturbs: (the ends have the same bits, what is not as it must be).

        An elastic run sums over other devices, so its bits differ: the examples must have been the same, in the same order, and each
        step's loss must be as close as TOLERANCE.
        """
        ends, calm_ends = self._watch.ends(), calm.ends()
        equal = {rank: end["digest"] for rank, end in ends.items()} == {rank: end["digest"] for rank, end in calm_ends.items()}
        last = {(end["step"], end["exact"]) for end in (*ends.values(), *calm_ends.values())}
        found = [] if len(last) == 1 else ["the run has not seen the examples of the undisturbed one in its order"]
        return equal, found + self._watch.differing_from(calm)
