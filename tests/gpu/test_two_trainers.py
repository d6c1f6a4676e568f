"""Two trainers of one job on one node, each with slots of its own, and shards of odd sizes."""

from __future__ import annotations

import pickle
from pathlib import Path

import ml_dtypes
import numpy as np

from raystate.arena import HostArena, arena_path
from raystate.arrays.holdings import Holding
from raystate.arrays.memory import MemorySource
from raystate.arrays.restore import restore_tree
from tests.gpu.conftest import StandIn
from tests.processes import run_job

STEPS = 9
SHAPES = {"alike": (7, 100_003), "halves": (10, 40_009), "quarters": (4 * 13, 1_009), "odd": (1, 65_537), "few": (3,)}
DTYPES = {"alike": np.float32, "halves": ml_dtypes.bfloat16, "quarters": np.uint8, "odd": np.uint16, "few": np.float32}


def model(step: int) -> dict[str, np.ndarray]:
    """The state after so many steps: one more in each."""
    return {name: ((np.arange(np.prod(shape)) % 97).reshape(shape) + step).astype(DTYPES[name]) for name, shape in SHAPES.items()}


PROGRAM = """
import pickle, sys
from pathlib import Path
import jax, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
from raystate.arena import TrainerArena
from raystate.arrays import gpu
from raystate.arrays.stage import copy, foresee, hold
from raystate.arrays.tree import describe
from raystate.core.formats.messages import Staged
from raystate.core.formats.tree import WriteOptions
from raystate.machine import cuda
from tests.gpu.conftest import StandIn
from tests.gpu.states import attached
from tests.gpu.test_two_trainers import STEPS, model

rank, port, library, path = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4 + int(sys.argv[1])]
jax.distributed.initialize(f"localhost:{port}", 2, rank)
cuda._library, cuda.COPY_BYTES, cuda.PIECE_BYTES, cuda.LEAST_PIECE_BYTES = library, 1 << 18, 1 << 20, 1 << 18
standin = StandIn(Path(library))
standin.reset(0.5)
gpu.is_cuda = lambda device: True
mesh = jax.make_mesh((2, 2), ("x", "y"))  # a row for each process
specs = {"alike": P(), "halves": P("y"), "quarters": P(("x", "y")), "odd": P(), "few": P()}
state = {
    name: jax.make_array_from_callback(value.shape, NamedSharding(mesh, specs[name]), lambda box, value=value: value[box])
    for name, value in model(0).items()
}
step = jax.jit(lambda tree: {name: (array + 1).astype(array.dtype) for name, array in tree.items()}, donate_argnums=0)
arena, stager, plan = TrainerArena.attach(path, trainer=f"t{rank}"), gpu.GpuStager(), None
arena.before_close([attached(stager, *(slot.pages for slot in arena.slots))])
for number in range(STEPS):
    described = describe({"state": state}, previous=plan, options=WriteOptions(chunk_bytes=1 << 16))
    if plan is None:
        foresee(described, stager)
        stager.prepare()
    plan, slot = described.plan, arena.slots[number % 3]
    held = hold(described, stager)
    state = step(state)
    table = pickle.dumps((described.layout, copy(held, slot.fill())))
    slot.commit(Staged(lineage="l", step=number, rank=rank, world=2, layout="", promised=False, nbytes=plan.layout.data_bytes), table)
assert standin.calls(3) >= STEPS and not standin.unregistered_copies and not gpu.GPUS.lost
registered = standin.registered_bytes
arena.close()
assert registered and not standin.registered_bytes
multihost_utils.sync_global_devices("done")
"""


def test_both_have_each_step_to_the_last_bit(built: StandIn, tmp_path: Path):
    (root := tmp_path / "arenas").mkdir(mode=0o700)
    path = arena_path(root, "r1", "0a1b2c3d4e5f")
    with HostArena.open(path, run="r1", storage="/s", node_id="0a1b2c3d4e5f", cap_bytes=1 << 40, memory_threshold=None) as host:
        sets = [host.allot(trainer=f"t{rank}", data_bytes=8 << 20, table_bytes=1 << 20) for rank in range(2)]
        run_job(lambda rank, port: ["-c", PROGRAM, rank, port, built.path, *(one.path for one in sets)], devices=2)
        shares = set[int]()
        for number in range(3):
            step, holdings = STEPS - 3 + number, list[Holding]()
            for rank, one in enumerate(sets):
                content = one.slots[number].read()
                assert content is not None and content.header.step == step
                layout, crc32c = pickle.loads(content.table)
                holdings.append(Holding(layout=layout, data=content.data, crc32c=crc32c, rank=rank))
                shares |= {piece.nbytes for piece in layout.pieces}
            found = restore_tree(None, holdings[0].layout.trees[0], MemorySource(holdings, "state"))
            for name, value in model(step).items():
                assert found[name].dtype == value.dtype and found[name].tobytes() == value.tobytes(), (name, step)
        assert len(shares) == len(SHAPES) and not any(nbytes % 64 == 0 for nbytes in shares), "nothing comes out even"
        host.close(remove=True)
