"""A manager on a folder that stock Orbax wrote, which restores and saves nothing: it leaves nothing there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import raystate
from raystate.core.formats.errors import ReferenceMismatchError
from raystate.storage.names import STATE
from tests.model.test_uses import run
from tests.model.world import Rank


@pytest.mark.parametrize("refused", [False, True])
def test_a_folder_that_was_only_read_is_left_as_it_was(refused: bool):
    def script(rank: Rank) -> None:
        folder = Path(rank.world.config.storage.removeprefix("file://"))
        raystate.save(folder / "5", {"w": np.ones(3)})
        before = sorted(folder.rglob("*"))
        manager = rank.open("first")
        if refused:
            with pytest.raises(ReferenceMismatchError):
                manager.restore({"w": np.ones(4)})
        else:
            restored = manager.restore({"w": np.ones(3)})
            assert restored is not None and restored.step == 5
        assert (folder / STATE / "log").is_dir()
        manager.close()
        rank.rest_until(lambda: not (folder / STATE).exists())
        assert sorted(folder.rglob("*")) == before

    run(script)
