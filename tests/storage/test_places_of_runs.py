"""Where a run may begin: in a folder of its own, which is no other run's, no checkpoint's, and no whole bucket."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import raystate
from raystate.core.errors import ConfigError
from raystate.core.log import claim_entry, live_steps
from raystate.storage import RunLog, Storage, foreign_steps, open_storage, owner_of
from raystate.storage.names import STATE


def begin(storage: Storage) -> None:
    """As the Coordinator and `raystate import` do."""
    RunLog(storage).claim(lambda tail: claim_entry(tail, "w", "lm", foreign_steps(storage, live_steps(tail))))


@pytest.mark.parametrize("inside", ["1200", "1200/state", "other", f"{STATE}/work", "a/b/c"])
def test_no_run_begins_inside_another(storage: Storage, inside: str):
    begin(storage)
    below = open_storage(f"{storage.url}/{inside}")
    with pytest.raises(ConfigError, match=r"no run can begin in .* alone writes there\. Give it a folder beside"):
        begin(below)
    assert not below.list(STATE)
    begin(storage)  # the run itself goes on


def test_no_run_begins_inside_a_checkpoint(tmp_path: Path):
    raystate.save(tmp_path / "one", {"w": np.ones(2)})
    for inside, why in (
        ("one/state", "is the folder of one checkpoint"),
        ("one/other/run", r"no run can begin in .*one is a checkpoint"),
    ):
        with pytest.raises(ConfigError, match=why):
            begin(open_storage(tmp_path / inside))


def test_runs_beside_each_other_begin_and_one_that_has_begun_goes_on(storage: Storage):
    inner = open_storage(f"{storage.url}/sweep/trial_1")
    begin(inner)
    begin(open_storage(f"{storage.url}/sweep/trial_2"))
    begin(storage)  # above them: an older run in such a place is not thrown out
    begin(inner)


def test_no_run_begins_where_its_steps_would_be_runs(storage: Storage):
    """Each of its saves failed, and the error said to move such a run away."""
    begin(open_storage(f"{storage.url}/1"))
    with pytest.raises(ConfigError, match=r"holds runs: 1/ is the storage of one\. Give this run a folder of its own"):
        begin(storage)


def test_no_run_begins_at_the_root_of_a_bucket():
    bucket = open_storage("memory://root-of-a-bucket")
    with pytest.raises(ConfigError, match=r"memory://root-of-a-bucket is a whole bucket.*such as memory://root-of-a-bucket/run"):
        begin(bucket)
    begin(open_storage("memory://root-of-a-bucket/run"))
    assert owner_of("memory://root-of-a-bucket/other") == "", "others may save there"
    with mock.patch("raystate.storage.steps.refuse_place"):
        begin(bucket)  # by an older raystate
    begin(bucket)
    assert "whose StateManager alone writes there" in owner_of("memory://root-of-a-bucket/other")
    for info in bucket.list():
        bucket.delete(info.name)
