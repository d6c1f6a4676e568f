"""Threads that give way do so for every user, and at every niceness that Ray may have given their process."""

from __future__ import annotations

import pytest

from tests.processes import run_python

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
    assert int(run_python("-c", SCRIPT, given, who).stdout) == then
