"""`raystate.save` in a bucket, beside stock Orbax."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from orbax.checkpoint import v1

import raystate
from raystate.storage import open_storage
from raystate.testing.gcs import FaultRule, GcsServer

TREE = {"w": np.arange(10_000.0).reshape(100, 100), "b": np.ones(3), "n": 3}  # data files, small arrays and numbers

pytestmark = pytest.mark.usefixtures("environment")


def test_in_a_bucket(bucket: str, server: GcsServer):
    path, tree = f"gs://{bucket}/runs/one", {"w": np.arange(1000.0), "n": 3}
    raystate.save(path, tree)
    assert raystate.load(path, tree)["w"].tolist() == v1.load(path)["w"].tolist() == tree["w"].tolist()
    with pytest.raises(raystate.StorageError, match="exists already"):
        raystate.save(path, tree)
    raystate.save_async(path, {"n": 4}, overwrite=True).result(60)
    assert raystate.load(path) == v1.load(path) == {"n": 4}
    for name in ("_CHECKPOINT_METADATA", "state/manifest"):  # the first and one of the last of the small files
        server.faults([FaultRule(status=403, match=name)])
        with pytest.raises(raystate.StorageError, match="objectAdmin"):
            raystate.save(f"gs://{bucket}/runs/two", tree)
        server.faults([])
        assert not [info for info in open_storage(f"gs://{bucket}/runs").list() if info.name.startswith("two")]


@pytest.mark.parametrize("mode", ["corrupt", "reset_after_commit"])
@pytest.mark.parametrize("overwrite", [False, pytest.param(True, marks=pytest.mark.long)])
def test_one_fault_of_any_request_costs_no_save(bucket: str, server: GcsServer, mode: str, overwrite: bool):
    """A lost answer of a writer's manifest, and a damaged download of the merge, ended it."""
    for number in itertools.count():
        path = f"gs://{bucket}/{number}/one"
        if overwrite:
            raystate.save(path, {"w": np.zeros(3)})
        server.faults([FaultRule(mode=mode, skip=number, times=1)])
        raystate.save(path, TREE, items={"notes": {"a": 1}}, metrics={"loss": 0.5}, overwrite=overwrite)
        hits = server.hits()
        server.faults([])
        assert (raystate.load(path)["w"] == TREE["w"]).all()
        saves = {
            save for info in open_storage(f"gs://{bucket}/{number}").list() for save in re.findall(r"s[0-9a-f]{16}", info.name)
        }
        assert len(saves) == 1, "a spoiled one leaves nothing"
        if hits == [0]:
            break
    assert number > 10
