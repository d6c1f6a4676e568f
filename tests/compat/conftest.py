"""What the tests of flax's calls share."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import flax
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("absl").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Flax Checkpointing will soon be deprecated|Sharding info not provided")
        warnings.filterwarnings("ignore", message="Couldn't find sharding info")
        warnings.filterwarnings("ignore", category=np.exceptions.ComplexWarning)
        yield


@pytest.fixture(params=[True, False], ids=["orbax", "msgpack"])
def orbax(request: pytest.FixtureRequest) -> Iterator[bool]:
    """flax's option that chooses its backend."""
    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", request.param)
    yield request.param
    flax.config.update("flax_use_orbax_checkpointing", before)
