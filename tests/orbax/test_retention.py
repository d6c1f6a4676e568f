"""The `keep_*` fields through Orbax's own policies."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint import checkpoint_managers as cm

from raystate.config.state_config import StateConfig
from raystate.core.coordinator.retention import choose_retired
from raystate.core.formats.messages import LiveStep
from raystate.runtime.coordinator.retention import orbax_keep

NAN = float("nan")


def live(losses: Sequence[float | None] = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)) -> list[LiveStep]:
    """Steps 1, 2, …, one per minute, with these losses."""
    return [
        LiveStep(step=step, save="k", time_s=60.0 * step, metrics={} if loss is None else {"loss": loss})
        for step, loss in enumerate(losses, start=1)
    ]


def kept(steps: Sequence[LiveStep], **fields: Any) -> list[int]:
    config = pickle.loads(pickle.dumps(StateConfig(storage="/x", run="lm", **fields)))  # as Ray brings it to the Coordinator
    gone = {one[0] for one in choose_retired(steps, orbax_keep(config)(steps))}
    return [one.step for one in steps if one.step not in gone]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [5, 6, 7]),
        ({"keep_last": None}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_last": 1}, [7]),
        ({"keep_last": None, "keep_every_steps": 3}, [3, 6, 7]),  # the newest stays whatever the rules say
        ({"keep_last": 1, "keep_every_steps": 3}, [3, 6, 7]),
        ({"keep_last": None, "keep_best": 2, "best_metric": "loss"}, [1, 2, 7]),
        ({"keep_last": None, "keep_best": 2, "best_metric": "loss", "best_mode": "max", "keep_every_steps": 4}, [4, 6, 7]),
        ({"keep_last": 1, "keep_every_s": 120.0}, [1, 3, 5, 7]),
        ({"keep_policy": cm.SpecificStepsPolicy}, None),
        ({"keep_policy": cm.preservation_policy.CustomSteps([2])}, [2, 7]),
        ({"keep_policy": cm.AnyPreservationPolicy([cm.LatestN(2), cm.EveryNSteps(3)])}, [3, 6, 7]),
    ],
)
def test_what_is_kept(fields: dict[str, Any], expected: list[int] | None) -> None:
    if expected is None:
        with pytest.raises(Exception, match="keep_policy"):
            kept(live(), **fields)
    else:
        assert kept(live(), **fields) == expected


@pytest.mark.parametrize(
    ("losses", "mode", "expected"),
    [
        ((0.1, NAN, 0.9, 0.2, None, None), "min", [1, 4, 6]),  # neither NaN nor a step without the metric is among the best
        ((0.1, NAN, 0.9, 0.2, None, None), "max", [3, 4, 6]),
        ((0.5, 0.5, 0.5, None), "min", [2, 3, 4]),  # of equal ones the newer
        ((NAN, NAN, None), "min", [3]),
    ],
)
def test_the_best(losses: Sequence[float | None], mode: str, expected: list[int]) -> None:
    assert kept(live(losses), keep_last=None, keep_best=2, best_metric="loss", best_mode=mode) == expected


class Broken:
    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        raise ZeroDivisionError


class Short:
    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        return [False]


@pytest.mark.parametrize("policy", [Broken(), Short()])
def test_a_policy_that_fails_deletes_nothing(policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    keep = orbax_keep(StateConfig(storage="/x", run="lm", keep_policy=policy))
    assert [sorted(keep(live())) for _ in range(3)] == [[1, 2, 3, 4, 5, 6, 7]] * 3
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False], "one traceback is enough"
    assert caplog.messages[0].startswith("keep_policy failed at step 7: ")
    assert "every step is kept" in caplog.text


INTERVAL_S = 120.0


def kept_in_the_end(times_s: Sequence[float], **fields: Any) -> list[int]:
    """Steps 1, 2, … are committed at these times, each with its retirements as in a run."""
    keep = orbax_keep(StateConfig(storage="/x", run="lm", **fields))
    steps: list[LiveStep] = []
    for step, time_s in enumerate(times_s, start=1):
        steps.append(LiveStep(step=step, save="k", time_s=time_s))
        gone = {one[0] for one in choose_retired(steps, keep(steps))}
        steps = [one for one in steps if one.step not in gone]
    return [one.step for one in steps]


@pytest.mark.parametrize("jump_s", [-1e6, -600.0, -90.0, 0.0, 90.0, 600.0, 1e6])
@pytest.mark.parametrize("wrong", [1, 2, 7, 100], ids="{} wrong".format)
def test_a_clock_that_jumps_stops_and_empties_nothing(jump_s: float, wrong: int) -> None:
    """One step a minute; the clock is wrong for this many commits from the tenth on, or for good."""
    times_s = [60.0 * step + (jump_s if 10 <= step < 10 + wrong else 0.0) for step in range(1, 61)]
    kept_now = kept_in_the_end(times_s, keep_last=1, keep_every_s=INTERVAL_S)
    assert [step for step in kept_now if step < 10] == [1, 3, 5, 7, 9]
    assert max(later - step for step, later in itertools.pairwise(kept_now)) <= 6, "three intervals at most"
    assert len(kept_now) <= 31 + 2, "and one step more for each jump"


@given(
    waits_s=st.lists(st.floats(min_value=0.0, max_value=300.0), max_size=40),
    interval_s=st.sampled_from([1.0, 60.0, 100.5, 1000.0]),
)
def test_without_jumps_it_is_orbaxs_rule(waits_s: list[float], interval_s: float) -> None:
    times_s = list(itertools.accumulate(waits_s))
    orbax = cm.AnyPreservationPolicy([cm.LatestN(1), cm.EveryNSeconds(interval_s)])  # pyright: ignore[reportArgumentType]
    assert kept_in_the_end(times_s, keep_last=1, keep_every_s=interval_s) == kept_in_the_end(times_s, keep_policy=orbax)
