"""What starting costs: the import, and the first StateManager on a Ray that runs."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.side.measure import own_cluster
from benchmarks.side.savers import Raystate

TIMES = 5
IMPORT = "import time; begin = time.perf_counter(); import raystate; print(time.perf_counter() - begin)"


def started(parent: str | None, times: int) -> dict[str, list[float]]:
    """Milliseconds by figure; `times`: of the StateManager, each of a run of its own."""
    imports: list[float] = []
    for _ in range(TIMES + 1):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        imports.append(1e3 * float(done.stdout))
    managers: list[float] = []
    with own_cluster(parent) as folder:
        import jax

        jax.devices()
        for number in range(times):
            begin = time.perf_counter()
            saver = Raystate(folder / f"run{number}")
            managers.append(1e3 * (time.perf_counter() - begin))
            saver.close()
    return {"import raystate": imports[1:], "first StateManager on a running Ray": managers}
