"""One Ray cluster for all examples that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs.running import Interpreter, interpreter
from tests.processes import standing_ray, xla_flags

# A dead worker is noticed soon; one device, as a user has it.
SETTINGS = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "XLA_FLAGS": xla_flags(1)}


@pytest.fixture(scope="module")
def python() -> Iterator[Interpreter]:
    """An interpreter for pages that need no Ray."""
    with interpreter() as one:
        yield one


@pytest.fixture(scope="module")
def python_on_ray() -> Iterator[Interpreter]:
    """An interpreter whose pages find a Ray that stands."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)  # before Ray starts, whose processes inherit it
        with standing_ray(num_cpus=8) as address, interpreter(RAY_ADDRESS=address, **SETTINGS) as one:
            yield one
