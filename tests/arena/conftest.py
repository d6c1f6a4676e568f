"""A private root on shared memory for each test, and the proof that nothing else was left there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from raystate.arena import HostArena, SlotSet, arena_path
from tests.arena.sets import NODE, SIZES, Child, OpenHost

SHARED = Path("/dev/shm")
MIB = 1024 * 1024


@pytest.fixture
def root() -> Iterator[Path]:
    base = SHARED if SHARED.is_dir() and os.access(SHARED, os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="raystate_test_", dir=base))
    yield directory
    shutil.rmtree(directory)
    assert base is None or directory.name not in os.listdir(base)


@pytest.fixture
def open_host(root: Path) -> Iterator[OpenHost]:
    """Opens arenas of run `run` on node `node` under the test's root; closes them after."""
    opened: list[HostArena] = []

    def open_(run: str = "r1", node: str = NODE, **options: object) -> HostArena:
        known = {"run": run, "storage": "/s", "node_id": node, "cap_bytes": 1 << 40, "timeout_s": 0.0, "memory_threshold": None}
        arena = HostArena.open(arena_path(root, run, node), **{**known, **options})
        opened.append(arena)
        return arena

    yield open_
    for arena in opened:
        arena.close()


@pytest.fixture
def host(open_host: OpenHost) -> HostArena:
    return open_host()


@pytest.fixture
def held(host: HostArena) -> SlotSet:
    """Slots of trainer t1."""
    return host.allot(trainer="t1", **SIZES)


@pytest.fixture
def child() -> Iterator[Child]:
    """Runs a Python script in a real process, until it says something: then it is where the test wants it."""
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str, *args: object) -> tuple[subprocess.Popen[bytes], bytes]:
        prelude = "import sys, os, time\nimport numpy as np\nfrom raystate.arena import *\n"
        prelude += "from raystate.core.formats.messages import Staged\n"
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        process = subprocess.Popen(
            [sys.executable, "-c", prelude + script, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()
