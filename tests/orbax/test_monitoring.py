"""Who listens for Orbax's events hears raystate's saves and restores under the same names, each once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1

import raystate
from tests.orbax.listening import Heard, listening
from tests.patience import PATIENCE_S

OURS = ("/jax/orbax/", "/jax/checkpoint/")


@pytest.fixture
def heard() -> Iterator[Heard]:
    with listening() as found:
        yield found


def names(heard: Heard) -> set[str]:
    return {name for name, _ in heard if name.startswith(OURS)}


def number(heard: Heard, name: str) -> float:
    (one,) = [number for heard_name, number in heard if heard_name == name]
    return one


def tree(nbytes: int) -> dict[str, Any]:
    return {"w": np.ones(nbytes, np.uint8), str(nbytes): 1}  # of its own structure: Orbax's scratch visit is not one of before


def test_saves_and_loads_under_orbaxs_names(heard: Heard, tmp_path: Path):
    v1.save(str(tmp_path / "orbax"), tree(7 << 20))
    stock_save = names(heard)
    heard.clear()
    v1.load(str(tmp_path / "orbax"))
    stock_load = names(heard)
    heard.clear()
    raystate.save(tmp_path / "ours", tree(5 << 20))
    assert names(heard) <= stock_save and len(names(heard)) >= 9
    assert number(heard, "/jax/orbax/write/gbytes") == pytest.approx(5 / 1024)
    assert number(heard, "/jax/orbax/write/success") == 1
    total_s, blocked_s = (number(heard, f"/jax/orbax/write/{part}_duration_secs") for part in ("total", "blocking"))
    assert 0 < total_s <= blocked_s
    heard.clear()
    raystate.load(tmp_path / "ours")
    assert names(heard) <= stock_load and len(names(heard)) == 7
    assert number(heard, "/jax/checkpoint/read/gbytes") == pytest.approx(5 / 1024, rel=1e-3)


def test_saves_in_the_background(heard: Heard, tmp_path: Path):
    future = raystate.save_async(tmp_path / "ours", tree(3))
    assert number(heard, "/jax/orbax/write/async/start") == 1
    blocked_s = number(heard, "/jax/orbax/write/async/blocking_duration_secs")
    future.result(PATIENCE_S)
    assert number(heard, "/jax/orbax/write/async/total_duration_secs") >= 0 < blocked_s
    assert number(heard, "/jax/checkpoint/write/async/total_duration_secs") > 0
    assert number(heard, "/jax/orbax/write/success") == 1


def test_a_failure_is_no_success(heard: Heard, tmp_path: Path):
    raystate.save(tmp_path / "ours", tree(4))
    heard.clear()
    with pytest.raises(raystate.StorageError):
        raystate.save(tmp_path / "ours", tree(4))
    with pytest.raises(raystate.StepNotFoundError):
        raystate.load(tmp_path / "none")
    assert names(heard) == {
        f"/jax/orbax/{part}"
        for part in ("write/start", "write/start_time", "write/storage_type", "read/start", "read/storage_type")
    }


def test_others_are_heard_meanwhile(heard: Heard, tmp_path: Path):
    assert jax.monitoring.record_event.__module__ == "jax._src.monitoring"
    raystate.save(tmp_path / "ours", tree(6))
    assert jax.monitoring.record_event.__module__ == "jax._src.monitoring", "put back"
