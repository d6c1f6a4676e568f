"""One process of a JAX job that saves and restores with flax's calls: `python flax_several_worker.py PROCESSES INDEX PORT FOLDER`."""

from __future__ import annotations

import os
import sys
import warnings

import jax
import numpy as np
import pytest


def main() -> None:
    processes, index, port = map(int, sys.argv[1:4])
    folder = sys.argv[4]
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
    from jax.experimental.multihost_utils import sync_global_devices
    from jax.sharding import NamedSharding, PartitionSpec

    from raystate.compat import flax_checkpoints as checkpoints

    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), PartitionSpec("x"))

    def tree(factor: float) -> dict[str, object]:
        whole = factor * np.arange(16.0, dtype=np.float32)
        return {"w": jax.make_array_from_callback((16,), sharding, lambda box: whole[box]), "n": 3}

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in (1, 2):
            assert checkpoints.save_checkpoint_multiprocess(folder, tree(step), step) == f"{folder}/checkpoint_{step}"
    assert any("Orbax itself writes" in str(warning.message) for warning in told)
    sync_global_devices("saved")
    assert os.listdir(folder) == ["checkpoint_2"]
    restored = checkpoints.restore_checkpoint(folder, tree(0))
    assert restored["w"].sharding == sharding and restored["n"] == 3
    for shard in restored["w"].addressable_shards:
        assert np.array_equal(shard.data, 2 * np.arange(16.0, dtype=np.float32)[shard.index])
    with pytest.raises(ValueError, match="checkpoint_2 already exists"):
        checkpoints.save_checkpoint_multiprocess(folder, tree(3), 2)
    print("done")  # noqa: T201


main()
