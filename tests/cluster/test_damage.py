"""A step that was damaged in storage: the run says so, sets it aside, and goes on from the one before."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import raystate
from raystate.storage import open_storage
from raystate.verification import verify_log, verify_step


def values(step: int) -> Any:
    return {"w": jnp.arange(4000.0) + step, "n": jnp.int32(step)}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.long
def test_a_damaged_step_is_set_aside(ray_cluster: Any, make_run: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run()
    config = raystate.StateConfig(storage=run.storage, run=run.run, keep_last=None)
    with raystate.StateManager(config) as manager:
        manager.restore_or_init(lambda: values(0))
        for step in (10, 20, 30):
            manager.save(step, values(step), force=True)
            manager.wait_until_finished()
    for step in (20, 30):  # a data file, and a node of the tree of arrays
        for path in Path(run.storage).glob(f"{step}/state/**/d/*"):
            flip(path)
    with caplog.at_level(logging.WARNING), raystate.StateManager(config) as manager:
        restored = manager.restore_or_init(lambda: values(0))
        assert restored.step == 10
        assert [step for step, _ in restored.set_aside] == [30, 20]
        assert all("step" in reason and "item 'state'" in reason for _, reason in restored.set_aside)
        assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (restored.state, values(10))), strict=True))
        assert manager.all_steps() == [10]
        manager.save(20, values(21), force=True)  # the number is free again
    assert "step 30 was set aside" in caplog.text and "step 20 was set aside" in caplog.text
    reader = raystate.Reader(run.storage)
    assert reader.all_steps() == [10, 20]
    assert int(reader.restore().state["n"]) == 21
    storage = open_storage(run.storage)
    assert sorted(info.name.split("/")[2].split(".")[0] for info in storage.list(".raystate/aside", recursive=False)) == [
        "20",
        "30",
    ]
    assert verify_log(storage) == () and verify_step(storage, 20).bad == ()
