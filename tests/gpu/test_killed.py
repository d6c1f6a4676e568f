"""A trainer that is killed while the driver copies into a slot."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from raystate.arena import HostArena, TrainerArena, arena_path
from tests.gpu.conftest import StandIn

_COPIES = """
import sys, threading
from pathlib import Path
from raystate.arena import TrainerArena
from raystate.arrays import gpu
from raystate.arrays.stage import copy, hold
from raystate.arrays.tree import describe
from raystate.core.formats.messages import Staged
from raystate.machine import cuda
from tests.gpu.conftest import StandIn
from tests.gpu.states import attached, state
cuda._library = sys.argv[1]
standin = StandIn(Path(sys.argv[1]))
gpu.is_cuda = lambda device: True
arena, stager = TrainerArena.attach(sys.argv[2], trainer="t1"), gpu.GpuStager()
arena.before_close([attached(stager, *(slot.pages for slot in arena.slots))])
described = describe({"state": state(0)})

def fill(number):
    slot = arena.slots[number]
    crc32c = copy(hold(described, stager), slot.fill())
    size = described.layout.data_bytes
    slot.commit(Staged(lineage="l", step=number, rank=0, world=1, layout="", promised=False, nbytes=size), b"table")

fill(0)
standin.hold(True)
threading.Thread(target=fill, args=[1], daemon=True).start()
while standin.calls(3) < 30:
    pass
print("copying", flush=True)
sys.stdin.read()
"""


def test_killed_in_mid_copy_the_slot_is_invalid_and_those_before_are_whole(built: StandIn, tmp_path: Path):
    (root := tmp_path / "arenas").mkdir(mode=0o700)
    path = arena_path(root, "r1", "0a1b2c3d4e5f")
    with HostArena.open(path, run="r1", storage="/s", node_id="0a1b2c3d4e5f", cap_bytes=1 << 40, memory_threshold=None) as host:
        held = host.allot(trainer="t1", data_bytes=16 << 20, table_bytes=4096)
        process = subprocess.Popen(
            [sys.executable, "-c", _COPIES, built.path, held.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "copying\n"
            process.send_signal(signal.SIGKILL)
        content = held.slots[0].read()
        assert content is not None and content.header.step == 0 and content.table == b"table"
        assert held.slots[1].read() is None and held.slots[2].read() is None
        again = host.allot(trainer="t2", data_bytes=16 << 20, table_bytes=4096)
        assert again is held
        with TrainerArena.attach(again.path, trainer="t2") as arena:
            assert arena.slots[0].read_header() is not None
        host.close(remove=True)
