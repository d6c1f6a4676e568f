"""Restores the newest step of a run on another topology: `python read_elsewhere.py STORAGE OUT WIDTH PROCESSES INDEX PORT`.

Compares every shard of this process with the whole arrays in OUT/whole.npz and prints what it read, as JSON.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np


def main() -> None:
    storage, out, width, processes, index, port = sys.argv[1:]
    if int(processes) > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(index))
    import raystate
    from tests.cluster import toy

    _, init, shardings, _ = toy.build(int(width))
    abstract = jax.eval_shape(init)
    reference = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), abstract, shardings(abstract)
    )
    reader = raystate.Reader(storage)
    restored = reader.restore(reference)
    needed = 0
    with np.load(f"{out}/whole.npz") as whole:
        for number, leaf in enumerate(jax.tree.leaves(restored.state)):
            boxes = {str(shard.index): shard for shard in leaf.addressable_shards}
            for shard in boxes.values():
                data = np.asarray(shard.data)
                assert data.tobytes() == whole[f"arr_{number}"][shard.index].tobytes(), (number, shard.index)
                needed += data.nbytes
    facts = {"step": restored.step, "read": reader.bytes_read, "needed": needed, "devices": jax.device_count()}
    sys.stdout.write(json.dumps(facts) + "\n")


main()
