"""What the tests of flax's calls share."""

from __future__ import annotations

from collections.abc import Iterator

import flax
import pytest


@pytest.fixture(params=[True, False], ids=["orbax", "msgpack"])
def orbax(request: pytest.FixtureRequest) -> Iterator[bool]:
    """flax's option that chooses its backend."""
    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", request.param)
    yield request.param
    flax.config.update("flax_use_orbax_checkpointing", before)
