"""Two jax processes: who owns what, and restoring without a word between them."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

DEADLINE_S = 100

PROGRAM = """
import pickle, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
from raystate.arrays import Holding, MemorySource, copy, describe, hold, restore_tree

rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", 2, rank)
mesh = jax.make_mesh((2, 2), ("x", "y"))

def made(function, *spec):
    return jax.jit(function, out_shardings=NamedSharding(mesh, P(*spec)))()

state = {
    "w": made(lambda: jnp.arange(64.0).reshape(8, 8), "x", "y"),
    "replicated": made(lambda: jnp.arange(8.0)),
    "y": made(lambda: jnp.arange(8.0), "y"),
    "keys": made(lambda: jax.random.split(jax.random.key(0), 4), "x"),
    "local": jnp.float32(3),  # each process has its own: process 0's is stored
    "numpy": np.arange(3),
    "step": 5,
}
described = describe({"state": state})
data = np.zeros(described.layout.data_bytes, np.uint8)
crc32c = copy(hold(described), data)
mine = Holding(layout=described.layout, data=data, crc32c=crc32c, holder=f"rank {rank}")
with open(f"{folder}/{rank}", "wb") as file:
    pickle.dump((mine, described.layout_hash), file)
spec = described.layout.trees[0].with_values(described.values[0])
if rank == 0:  # no collective inside: one process alone gets through
    again = restore_tree(state, spec, MemorySource([mine], "state"))
    assert again["w"].sharding == state["w"].sharding and again["step"] == 5 and float(again["local"]) == 3
multihost_utils.sync_global_devices("both are written")
every = [pickle.load(open(f"{folder}/{r}", "rb"))[0] for r in range(2)]
other = {
    "w": NamedSharding(mesh, P("y", "x")),
    "replicated": NamedSharding(mesh, P("x")),
    "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P())),
}
got = restore_tree(other, spec, MemorySource(every, "state"))
same = jax.jit(lambda t: (t["w"] == jnp.arange(64.0).reshape(8, 8)).all() & (t["replicated"] == jnp.arange(8.0)).all() & (t["step"] == 5))
assert bool(same(got))
elsewhere = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[2:]), ("z",)), P("z"))  # process 1's devices only
got = restore_tree({"y": elsewhere}, spec, MemorySource(every, "state"))["y"]
assert got.shape == (8,) and len(got.addressable_shards) == 2 * rank
multihost_utils.sync_global_devices("done")
"""


def test_two_processes(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    commands = [[sys.executable, "-c", PROGRAM, str(rank), str(port), str(tmp_path)] for rank in range(2)]
    processes = [subprocess.Popen(c, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    try:
        output = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(output)

    first, second = (pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(2))
    assert first[1] == second[1]  # the layout hash
    layouts = [first[0].layout, second[0].layout]
    assert layouts[0].trees == layouts[1].trees
    owned = [(piece.leaf, piece.start) for layout in layouts for piece in layout.pieces if piece.owned]
    every = {(piece.leaf, piece.start) for layout in layouts for piece in layout.pieces}
    assert len(owned) == len(set(owned))
    assert set(owned) == every
