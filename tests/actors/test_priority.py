"""Threads that give way do so for every user, and at every niceness that Ray may have given their process."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from raystate.machine.priority import give_way

os.setpriority(os.PRIO_PROCESS, 0, int(sys.argv[1]))
if sys.argv[2] == "user" and os.getuid() == 0:
    os.setuid(65534)  # who isn't root may not raise a priority again
with ThreadPoolExecutor(1, initializer=give_way) as pool:
    print(pool.submit(os.getpriority, os.PRIO_PROCESS, 0).result())
"""


@pytest.mark.parametrize("who", ["root", "user"])
@pytest.mark.parametrize(("given", "then"), [(0, 10), (15, 19)])
def test_a_thread_gives_way_to_its_own_process(given: int, then: int, who: str):
    """Ray's workers, trainers among them, have niceness 15 unless it is told otherwise."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(given), who], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == then
