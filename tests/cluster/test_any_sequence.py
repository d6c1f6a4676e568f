"""Some of the model's sequences, with two processes on real Ray: HostActors, Coordinator and trainers that are killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import sequences
from tests.model import script, truth, world

SEEDS = 40 if os.environ.get("RAYSTATE_ALL") else 3


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> Iterator[None]:
    from ray import cloudpickle

    modules = (sequences, script, truth, world)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, SEEDS))])
def test_any_sequence_of_calls_on_ray(seed: int, ray_cluster: Any, make_run: Any) -> None:
    run = make_run()
    sequences.RaySequence(seed, run.storage, run.run).play()
