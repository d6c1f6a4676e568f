"""One Ray cluster for all examples that need one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from tests.docs.running import Interpreter, interpreter


@pytest.fixture(scope="module")
def python() -> Iterator[Interpreter]:
    """An interpreter for pages that need no Ray."""
    with interpreter() as one:
        yield one


@pytest.fixture(scope="module")
def python_on_ray() -> Iterator[Interpreter]:
    """An interpreter whose pages find a Ray that stands, as after `ray start --head`."""
    import ray

    settings = {"RAYSTATE_STANDBY": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "XLA_FLAGS": ""}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)  # before Ray starts, whose processes inherit it
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    try:
        with interpreter(RAY_ADDRESS=ray.get_runtime_context().gcs_address, **settings) as one:
            yield one
    finally:
        ray.shutdown()
