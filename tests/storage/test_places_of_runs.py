"""Where a run may begin: in a folder of its own, which is no other run's, no checkpoint's, and no whole bucket."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import raystate
from raystate.core.formats.errors import ConfigError, StorageError
from raystate.storage import Storage, open_storage, owner_of
from raystate.storage.names import GUARD, GUARD_TEXT, STATE
from raystate.transfer.importing import import_steps
from tests.storage.backends import claim
from tests.storage.harness import Process
from tests.storage.test_given_up import Nobody


@pytest.mark.parametrize("inside", ["1200", "1200/state", "other", f"{STATE}/work", "a/b/c"])
def test_no_run_begins_inside_another(storage: Storage, inside: str):
    claim(storage)
    below = open_storage(f"{storage.url}/{inside}")
    with pytest.raises(ConfigError, match=r"no run can begin in .* alone writes there\. Give it a folder beside"):
        claim(below)
    assert not below.list(STATE)
    claim(storage)  # the run itself goes on


def test_no_run_begins_inside_a_checkpoint(tmp_path: Path):
    raystate.save(tmp_path / "one", {"w": np.ones(2)})
    for inside, why in (
        ("one/state", "is the folder of one checkpoint"),
        ("one/other/run", r"no run can begin in .*one is a checkpoint"),
    ):
        with pytest.raises(ConfigError, match=why):
            claim(open_storage(tmp_path / inside))


def test_runs_beside_each_other_begin_and_one_that_has_begun_goes_on(storage: Storage):
    inner = open_storage(f"{storage.url}/sweep/trial_1")
    claim(inner)
    claim(open_storage(f"{storage.url}/sweep/trial_2"))
    claim(storage)  # above them: an older run in such a place is not thrown out
    claim(inner)


def test_no_run_begins_where_its_steps_would_be_runs(storage: Storage):
    """Each of its saves failed, and the error said to move such a run away."""
    claim(open_storage(f"{storage.url}/1"))
    with pytest.raises(ConfigError, match=r"holds runs, such as 1/\. Give this run a folder of its own"):
        claim(storage)


def test_no_run_begins_at_the_root_of_a_bucket():
    bucket = open_storage("memory://root-of-a-bucket")
    with pytest.raises(ConfigError, match=r"memory://root-of-a-bucket is a whole bucket.*such as memory://root-of-a-bucket/run"):
        claim(bucket)
    claim(open_storage("memory://root-of-a-bucket/run"))
    assert owner_of("memory://root-of-a-bucket/other") == "", "others may save there"
    with mock.patch("raystate.storage.steps.refuse_place"):
        claim(bucket)  # by an older raystate
    claim(bucket)
    assert "whose StateManager alone writes there" in owner_of("memory://root-of-a-bucket/other")
    for info in bucket.list():
        bucket.delete(info.name)


# ---------------------------------------------------------------- who is refused leaves nothing


FOREIGN = {
    "steps with a prefix": {
        "step_20/_CHECKPOINT_METADATA": b"{}",
        "step_20/commit_success.txt": b"",
        "step_20/state/_METADATA": b"{}",
    },
    "steps of fixed width": {"00000020/_CHECKPOINT_METADATA": b"{}", "00000020/commit_success.txt": b""},
    "one checkpoint": {"_CHECKPOINT_METADATA": b"{}", "commit_success.txt": b"", "state/_METADATA": b"{}"},
    "one item": {"_METADATA": b"{}", "_sharding": b"{}"},
    "files of flax": {"checkpoint_7": b"x"},
    "runs": {"1/.raystate/log/000000000001.json": b"{}"},
    "a run above": {"../.raystate/log/000000000001.json": b"{}"},
}


def everything(storage: Storage) -> list[str]:
    """All that is there; of a directory its folders, too."""
    if not storage.is_directory:
        return [info.name for info in storage.list()]
    return sorted(str(path) for path in storage.local_path("").parent.rglob("*"))


@pytest.mark.parametrize("what", FOREIGN)
def test_a_run_that_is_refused_leaves_nothing(storage: Storage, what: str):
    """An empty `.raystate` changed what everybody said of the folder afterwards."""
    for name, data in FOREIGN[what].items():
        above, _, own = storage.url.rpartition("/")
        open_storage(above).create(name.removeprefix("../") if ".." in name else f"{own}/{name}", data)
    before = everything(storage)
    for begin_here in (Process(storage, name="p", witness=Nobody()).claim, lambda: import_steps(storage.url, [])):
        with pytest.raises(ConfigError):
            begin_here()
        assert everything(storage) == before


def test_a_run_whose_folder_is_away_writes_nothing_in_its_place(storage: Storage):
    before = everything(storage)
    Process(storage, name="p", witness=Nobody(), known_attempt=3).claim()  # it tries again until the folder is back
    assert everything(storage) == before


@pytest.mark.parametrize("begun", [False, True])
def test_a_storage_that_is_unfit_is_left_as_it_was(storage: Storage, begun: bool):
    if begun:
        storage.create_or_same(GUARD, GUARD_TEXT)  # another run, that begins at this moment
    before = everything(storage)
    with (
        mock.patch.object(type(storage), "read", return_value=b"other bytes"),
        pytest.raises(StorageError, match=r"cannot hold|exists"),
    ):
        storage.self_test()
    assert everything(storage) == before
