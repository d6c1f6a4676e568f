"""`pytest -n 2 -p tests.one_core`: each process of pytest-xdist keeps to a core of its own, and so does all that it starts.

Threads that take turns, as in tests/model, hand over at half the system's time on one core; nothing else runs on the two.
"""

from __future__ import annotations

import os

_WORKER = os.environ.get("PYTEST_XDIST_WORKER")  # gw0, gw1 …; none in the process that hands out the tests

if _WORKER is not None and hasattr(os, "sched_setaffinity"):
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(_WORKER.removeprefix("gw")) % len(_cores)]})
