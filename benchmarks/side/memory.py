"""How much memory saving takes beyond the state itself: of all processes of one contestant, and of the shared memory between them."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.side.measure import own_cluster, own_folder
from benchmarks.side.savers import OURS, SAVERS, Raystate, Saver
from benchmarks.side.states import MIB, Case, Work

LOOK_S = 0.02
OF_RAYSTATE = ("ray::", "raystate")  # begin of the names of actors' processes


def used_bytes(arena: Path) -> int:
    """Private memory of this process and raystate's actors, and the shared memory of their arena."""
    processes = [psutil.Process()]
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name().startswith(OF_RAYSTATE):
                processes.append(process)
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found = process.memory_info()
            total += found.rss - found.shared
    for path in arena.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_blocks * 512 if path.is_file() else 0
    return total


@contextlib.contextmanager
def watched(arena: Path) -> Iterator[list[int]]:
    """What was in use, looked at every few milliseconds, until the end of the block."""
    seen, ended = [used_bytes(arena)], threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            seen.append(used_bytes(arena))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def peak_mib(case: Case, name: str, folder: Path, saves: int = 4) -> float:
    """The most that a loop takes with a durable save of every step, beyond the same loop without."""
    work = Work(case)
    arena = Path(tempfile.mkdtemp(prefix="raystate-bench-", dir="/dev/shm"))
    try:
        with watched(arena) as without:
            for _ in range(2):
                work.timed()
        saver: Saver = Raystate(folder, arena_dir=str(arena)) if name == OURS else SAVERS[name](folder)
        with contextlib.closing(saver), watched(arena) as seen:
            for step in range(1, saves + 1):
                saver.save(step, work.state)
                work()
            saver.wait()
            work.wait()
        return (max(seen) - max(without)) / MIB
    finally:
        shutil.rmtree(arena, ignore_errors=True)


if __name__ == "__main__":
    mib, contestant = sys.argv[1:]
    with (own_cluster if contestant == OURS else own_folder)(None) as place:
        print(peak_mib(Case(mib=int(mib)), contestant, place / "saves"))
