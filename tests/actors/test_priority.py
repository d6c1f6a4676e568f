"""Threads that give way do so for every user, and at every niceness that Ray may have given their process."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from raystate.runtime.priority import give_way

os.setpriority(os.PRIO_PROCESS, 0, int(sys.argv[1]))
if os.getuid() == 0:
    os.setuid(65534)  # who isn't root may not raise a priority again
with ThreadPoolExecutor(1, initializer=give_way) as pool:
    print(pool.submit(os.getpriority, os.PRIO_PROCESS, 0).result())
"""


@pytest.mark.parametrize(("given", "then"), [(0, 10), (15, 15)])
def test_who_is_not_root_gives_way_as_far_as_it_may(given: int, then: int):
    """Ray's workers have niceness 15 unless it is told otherwise."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(given)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == then
