"""Two jax processes: who owns what, what each holds for itself, and restoring without a word between them."""

import pickle
from pathlib import Path

import pytest

from raystate.core.formats.local_values import disagreement
from tests.processes import run_job

PROGRAM = """
import pickle, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from raystate.arrays.holdings import Holding
from raystate.arrays.memory import MemorySource
from raystate.arrays.restore import restore_tree
from raystate.arrays.spare import Spare
from raystate.arrays.stage import copy, hold
from raystate.arrays.tree import describe
from raystate.core.formats.errors import ConfigError
from raystate.core.formats.local_values import local_checksums
from raystate.core.formats.tree import SlotTable

rank, port, folder, mesh_kind = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.distributed.initialize(f"localhost:{port}", 2, rank)
kind = AxisType.Auto if mesh_kind == "Auto" else AxisType.Explicit
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
jax.set_mesh(mesh if mesh_kind != "none" else None)

def made(function, *spec):
    return jax.jit(function, out_shardings=NamedSharding(mesh, P(*spec)))()

state = {
    "w": made(lambda: jnp.arange(64.0).reshape(8, 8), "x", "y"),
    "replicated": made(lambda: jnp.arange(8.0)),
    "y": made(lambda: jnp.arange(8.0), "y"),
    "keys": made(lambda: jax.random.split(jax.random.key(0), 4), "x"),
    "local": jax.device_put(np.float32(3), jax.local_devices()[0]),  # each process has its own: process 0's is stored
    "other": jax.device_put(np.arange(4.0) + rank, jax.local_devices()[1]),
    "numpy": np.arange(3),
    "table": np.arange(3) * rank,
    "step": 5,
}
spare, plan = Spare(), None
for _ in range(3):  # the second time and later into the same memory
    described = describe({"state": state}, previous=plan)
    plan = described.plan
    data = np.zeros(described.layout.data_bytes, np.uint8)
    crc32c = copy(hold(described, spare), data)
    spare.prepare()
mine = Holding(layout=described.layout, data=data, crc32c=crc32c, rank=rank, holder=f"rank {rank}")
table = SlotTable(layout_ref="", crc32c=crc32c, values=described.values)
with open(f"{folder}/{rank}", "wb") as file:
    pickle.dump((mine, described.layout_hash, local_checksums(described.layout, table)), file)
spec = described.layout.trees[0].with_values(described.values[0])
if rank == 0:  # no collective inside: one process alone gets through
    again = restore_tree(state, spec, MemorySource([mine], "state", rank=0, world=2))
    assert again["w"].sharding == state["w"].sharding and again["step"] == 5 and float(again["local"]) == 3
multihost_utils.sync_global_devices("both are written")
every = [pickle.load(open(f"{folder}/{r}", "rb"))[0] for r in range(2)]
other = {
    "w": NamedSharding(mesh, P("y", "x")),
    "replicated": NamedSharding(mesh, P("x")),
    "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P())),
}
got = restore_tree(other, spec, MemorySource(every, "state", rank=rank, world=2))
same = jax.jit(lambda t: (t["w"] == jnp.arange(64.0).reshape(8, 8)).all() & (t["replicated"] == jnp.arange(8.0)).all() & (t["step"] == 5))
assert bool(same(got))
elsewhere = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[2:]), ("z",)), P("z"))  # process 1's devices only
got = restore_tree({"y": elsewhere}, spec, MemorySource(every, "state"))["y"]
assert got.shape == (8,) and len(got.addressable_shards) == 2 * rank
own = {name: state[name] for name in ("local", "other", "numpy", "table")}
got = restore_tree(own, spec, MemorySource(every, "state", rank=rank, world=2))
assert got["local"].sharding == state["local"].sharding and float(got["local"]) == 3
assert np.array_equal(got["other"], np.arange(4.0) + rank) and np.array_equal(got["table"], np.arange(3) * rank)
far = jax.make_array_from_callback((8,), elsewhere, lambda box: np.arange(8, dtype=np.float32)[box], dtype=np.float32)
try:  # process 1 takes it for an array of its own, which process 0 can't know
    describe({"state": {"far": far}})
    assert rank == 1
except ConfigError as error:
    assert rank == 0 and "on the devices of process 1" in str(error), error
multihost_utils.sync_global_devices("done")
"""


@pytest.mark.parametrize("mesh", ["none", "Auto", "Explicit"], ids=lambda kind: f"mesh set: {kind}")
def test_two_processes(tmp_path: Path, mesh: str):
    run_job(lambda rank, port: ["-c", PROGRAM, rank, port, tmp_path, mesh], devices=2)
    first, second = (pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(2))
    assert first[1] == second[1]  # the layout hash
    assert set(first[2]) == {f"state/{name}" for name in ("local", "other", "numpy", "table", "step")}
    text = disagreement({0: first[2], 1: second[2]})
    assert text.startswith(
        "2 leaves that each process holds for itself differ between ranks: state/other (rank 0 | rank 1); state/table ("
    )
    layouts = [first[0].layout, second[0].layout]
    assert layouts[0].trees == layouts[1].trees
    owned = [(piece.leaf, piece.start) for layout in layouts for piece in layout.pieces if piece.owned]
    every = {(piece.leaf, piece.start) for layout in layouts for piece in layout.pieces}
    assert len(owned) == len(set(owned))
    assert set(owned) == every
