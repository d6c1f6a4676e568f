"""The `keep_*` fields through Orbax's own policies."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from orbax.checkpoint import checkpoint_managers as cm

from raystate.config import StateConfig
from raystate.core.messages import LiveStep
from raystate.core.retention import choose_retired
from raystate.runtime.retention import orbax_keep

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
    assert kept(live(), keep_policy=policy) == [1, 2, 3, 4, 5, 6, 7]
    assert "every step is kept" in caplog.text
