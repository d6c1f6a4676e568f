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
from raystate.inspection.verification import verify_log, verify_step
from raystate.manager import StateManager
from raystate.storage import open_storage
from tests.model.test_restore_uses import Play, play  # noqa: F401 - a fixture


def values(step: int) -> Any:
    return {"w": jnp.arange(4000.0) + step, "n": jnp.int32(step)}


def test_a_damaged_step_is_set_aside(play: Play, caplog: pytest.LogCaptureFixture):  # noqa: F811
    def first(manager: StateManager) -> None:
        manager.restore_or_init(lambda: values(0))
        for step in (10, 20, 30):
            manager.save(step, values(step), force=True)
            manager.wait_until_finished()

    def goes_on(manager: StateManager) -> None:
        restored = manager.restore_or_init(lambda: values(0))
        assert restored.step == 10
        assert [step for step, _ in restored.set_aside] == [30, 20]
        assert all("step" in reason and "item 'state'" in reason for _, reason in restored.set_aside)
        assert jax.tree.all(jax.tree.map(np.array_equal, restored.state, values(10)))
        assert manager.all_steps() == [10]
        manager.save(20, values(21), force=True)  # the number is free again
        manager.wait_until_finished()

    play(first)
    play.lose_memory()
    folder = play.world.storage.inner.url
    for step in (20, 30):  # a data file, and a node of the tree of arrays
        for path in Path(folder.removeprefix("file://")).glob(f"{step}/state/**/d/*"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 4
            path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        play(goes_on)
    assert "step 30 was set aside" in caplog.text and "step 20 was set aside" in caplog.text
    reader = raystate.Reader(folder)
    assert reader.all_steps() == [10, 20] and int(reader.restore().state["n"]) == 21
    storage = open_storage(folder)
    aside = {info.name.split("/")[2].partition(".")[0] for info in storage.list(".raystate/aside", recursive=False)}
    assert aside == {"20", "30"}
    assert verify_log(storage) == () and verify_step(storage, 20).bad == ()
