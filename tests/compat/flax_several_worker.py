"""One process of a JAX job that saves and restores with flax's calls: `python flax_several_worker.py PROCESSES INDEX PORT FOLDER`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import flax
import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training import checkpoints as flax_checkpoints

SIZE = 4096  # so that the bytes lie in files of their own


def main() -> None:
    processes, index, port = map(int, sys.argv[1:4])
    folder = sys.argv[4]
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
    from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
    from jax.experimental.multihost_utils import sync_global_devices
    from jax.sharding import NamedSharding, PartitionSpec

    import raystate
    from raystate.compat import flax_checkpoints as checkpoints
    from raystate.compat import flax_several, flax_writing

    save = checkpoints.save_checkpoint_multiprocess
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), PartitionSpec("x"))

    def tree(factor: float, **more: Any) -> dict[str, Any]:
        whole = factor * np.arange(SIZE, dtype=np.float32)
        return {"w": jax.make_array_from_callback((SIZE,), sharding, lambda box: whole[box]), "n": 3, **more}

    def check(restored: Any, factor: float) -> None:
        assert restored["w"].sharding == sharding and restored["n"] == 3
        for shard in restored["w"].addressable_shards:
            assert np.array_equal(shard.data, factor * np.arange(SIZE, dtype=np.float32)[shard.index])

    def there() -> list[str]:
        sync_global_devices("saved")
        return sorted(os.listdir(folder))

    # whole, and what is not kept goes
    for step in (1, 2):
        assert save(folder, tree(step), step) == f"{folder}/checkpoint_{step}"
    assert there() == ["checkpoint_2"]
    check(checkpoints.restore_checkpoint(folder, tree(0)), 2)
    check(flax_checkpoints.restore_checkpoint(folder, tree(0)), 2)
    with pytest.raises(checkpoints.OutdatedCheckpointError, match="checkpoint_2 already exists"):
        save(folder, tree(3), 2)

    # in the background: the array is donated, the numpy array is changed, and the training computes meanwhile
    manager = checkpoints.AsyncManager()
    state = tree(3, local=np.full(3, 3.0))
    save(folder, state, 3, async_manager=manager)
    step = jax.jit(lambda w: (w + 1, w.sum()), donate_argnums=0)
    state["local"][:] = -1
    for _ in range(5):
        state["w"], _ = step(state["w"])
    manager.wait_previous_save()
    assert there() == ["checkpoint_3"]
    restored = checkpoints.restore_checkpoint(folder, tree(0, local=np.zeros(3)))
    check(restored, 3)
    assert restored["local"].tolist() == [3, 3, 3]

    # each refusal is told by all, and leaves nothing
    with pytest.raises(checkpoints.TargetError, match="local"):
        save(folder, tree(4, local=np.full(3, index)), 4)
    with pytest.raises(checkpoints.TargetError, match="save trees that differ" if index == 0 else "trees that differ"):
        save(folder, tree(4, **{f"of_{index}": jnp.ones(2)}), 4)
    with pytest.raises(checkpoints.TargetError, match="put it into a dict"):
        save(folder, tree(4)["w"], 4)
    with pytest.MonkeyPatch.context() as patch:
        if index == 1:

            def fails(*_: Any) -> Any:
                raise OSError("the disk is full")

            patch.setattr(flax_writing, "write_item", fails)
        with pytest.raises(OSError if index == 1 else raystate.StorageError, match="the disk is full"):
            save(folder, tree(4), 4)
    assert there() == ["checkpoint_3"]

    # a process that is refused is waited for by none, and named by all
    for refused in range(processes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flax_several, "MEET_S", 30.0)
            what = "can't save an object" if index == refused else f"rank {refused} can't save: .*can't save an object"
            with pytest.raises(checkpoints.TargetError, match=what):
                save(folder, tree(4, more=object() if index == refused else 3), 4)
    assert there() == ["checkpoint_3"]

    # process 1 alone: it is not there any more when process 0 comes
    if index == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flax_several, "MEET_S", -4.5)
            with pytest.raises(raystate.BarrierTimeoutError, match="rank 0 did not call save"):
                save(folder, tree(4), 4)
    sync_global_devices("given up")

    # process 0 alone
    if index == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flax_several, "MEET_S", 1.0)
            patch.setattr(flax_several, "SHARE_WRITTEN_S", 1.0)
            for call in (save, checkpoints.save_checkpoint):
                with pytest.raises(raystate.BarrierTimeoutError, match="rank 1 did not call save") as told:
                    call(folder, tree(4), 4)
                assert told.value.missing == (1,)
    assert there() == ["checkpoint_3"]
    save(folder, tree(4), 4)  # and it says nothing of the next one
    assert there() == ["checkpoint_4"]

    # a flipped bit is an error
    sync_global_devices("restored")
    if index == 0:
        begin = (4 * np.arange(8, dtype=np.float32)).tobytes()
        (path,) = [path for path in Path(folder, "checkpoint_4").rglob("*") if path.is_file() and begin in path.read_bytes()]
        held = bytearray(path.read_bytes())
        held[held.index(begin)] ^= 1
        path.write_bytes(held)
        with pytest.raises(raystate.CorruptCheckpointError):  # whoever reads it
            checkpoints.restore_checkpoint(folder, tree(0))

    # flax's older files, as flax writes them
    flax.config.update("flax_use_orbax_checkpointing", False)
    gda = GlobalAsyncCheckpointManager()
    with pytest.raises(flax.errors.MPACheckpointingRequiredError):
        save(folder, tree(5), 5)
    if index == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flax_several, "MEET_S", 1.0)
            with pytest.raises(raystate.BarrierTimeoutError, match="rank 1 did not call save"):
                save(folder, tree(5), 5, gda_manager=gda)
    sync_global_devices("alone")
    assert save(folder, tree(6), 6, prefix="old_", gda_manager=gda) == f"{folder}/old_6"
    gda.wait_until_finished()
    assert re.findall(r"old_6\w*", " ".join(there())) == ["old_6", "old_6_gda"]
    check(checkpoints.restore_checkpoint(folder, tree(0), prefix="old_", gda_manager=gda), 6)
    check(flax_checkpoints.restore_checkpoint(folder, tree(0), prefix="old_", gda_manager=gda), 6)
    sync_global_devices("end")
    print("done")  # noqa: T201


main()
