"""`raystate.save` in a bucket, beside stock Orbax."""

from __future__ import annotations

import numpy as np
import pytest
from orbax.checkpoint import v1

import raystate
from raystate.storage import open_storage
from raystate.testing.gcs import FaultRule, GcsServer

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
