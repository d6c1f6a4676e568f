"""Reader beside retention: a step that goes away while it is read is missing, not damaged, and the newest is then another one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raystate
from raystate.orbax.step_reader import StepReader
from tests.orbax.published import publish


@pytest.fixture
def retire_while_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with steps 1 and 2; at the first read of step 2's arrays, 3 is committed and 2 is gone."""
    publish(tmp_path, 1)
    publish(tmp_path, 2)
    read = StepReader.read

    def racing(self: StepReader, *args: Any) -> Any:
        if not (tmp_path / "3").exists():
            publish(tmp_path, 3)
            shutil.rmtree(tmp_path / "2")
        return read(self, *args)

    monkeypatch.setattr(StepReader, "read", racing)
    return tmp_path


def test_a_given_step_is_reported_as_retired(retire_while_reading: Path) -> None:
    with pytest.raises(raystate.StepNotFoundError, match=r"step 2 of .* was retired while it was read") as caught:
        raystate.Reader(retire_while_reading).restore(step=2)
    assert isinstance(caught.value.__cause__, raystate.CorruptCheckpointError | raystate.StorageError)


def test_the_newest_is_then_a_newer_one(retire_while_reading: Path) -> None:
    assert raystate.Reader(retire_while_reading).restore().step == 3


def test_follow_goes_on_with_the_newer_one(retire_while_reading: Path) -> None:
    steps = [restored.step for restored in raystate.Reader(retire_while_reading).follow(after=1, timeout_s=0.0)]
    assert steps == [3]


def test_a_damaged_step_is_not_called_retired(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    for path in tmp_path.rglob("ocdbt.process_a7*/d/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(raystate.CorruptCheckpointError):
        raystate.Reader(tmp_path).restore()


def test_follow_ends_after_its_timeout_and_gives_each_step_once(tmp_path: Path) -> None:
    publish(tmp_path, 4)
    following = raystate.Reader(tmp_path).follow(timeout_s=0.1)
    first = next(following)
    assert (first.step, np.asarray(first.state["n"]).item()) == (4, 3)
    publish(tmp_path, 9)
    assert [restored.step for restored in following] == [9]
