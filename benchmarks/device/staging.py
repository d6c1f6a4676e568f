"""What a snapshot costs the training on this device, beside Orbax's asynchronous saves of the same state in the same run."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.device.figures import Figures
from benchmarks.device.limits import OFF
from benchmarks.device.savers import OURS, STORED, Ours, Saver, savers
from benchmarks.device.slots import Snapshots, slots_of
from benchmarks.device.work import Case, Work

SLOTS = 3  # as many as a trainer has by default


def staging(
    figures: Figures, case: Case, *, step_s: float, rounds: int, every: int, snapshots: Sequence[int], limits: dict[str, float]
) -> None:
    """All figures of one state.

    Args:
        every: steps of the loops with a snapshot after each, and of those without.
        snapshots: after how many of them the memory is told.
        limits: GB/s, from `limits`.
    """
    import jax

    work = Work(case, step_s)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), work.state)
    with slots_of(SLOTS, work.nbytes + (1 << 20)) as slots, tempfile.TemporaryDirectory(prefix="raystate-bench-") as folder:
        taking = Snapshots(work.state, slots)
        others = savers(taking, Path(folder), work.nbytes)
        _one_at_a_time(figures, case, work, others, rounds, limits)
        _every_step(figures, case, work, taking, every)
        _restored(figures, case, work, others, abstract)
        _memory(figures, case, work, taking, snapshots)


def _one_at_a_time(
    figures: Figures, case: Case, work: Work, others: dict[str, Saver], rounds: int, limits: dict[str, float]
) -> None:
    """Each saver in turn, and steps until it is done."""
    alone: list[float] = []
    blocked: dict[str, list[float]] = {name: [] for name in others}
    beside: dict[str, list[float]] = {name: [] for name in others}
    done: dict[str, list[float]] = {name: [] for name in others}
    rates: list[float] = []
    for round_ in range(rounds + 1):  # the first one warms up
        alone.append(work.timed())
        for name, saver in others.items():
            work()
            work.wait()
            begin_s = time.perf_counter()
            saver.save(work.state)
            saved_s = time.perf_counter()
            ended: list[float] = []
            waiting = threading.Thread(target=lambda saver=saver, ended=ended: (saver.wait(), ended.append(time.perf_counter())))
            waiting.start()
            steps = [work.timed()]
            while waiting.is_alive():
                steps.append(work.timed())
            waiting.join()
            if round_ and ended:
                blocked[name].append(saved_s - begin_s)
                beside[name].append(max(steps))
                done[name].append(ended[0] - begin_s)
                if isinstance(saver, Ours) and saver.newest is not None:
                    rates.append(work.nbytes / saver.newest.seconds / 1e9)
    base = statistics.median(alone[1:])
    figures.add("step alone", 1e3 * base, "ms", of=case.name)
    _tell(figures, "blocked in save, the state computed", blocked, 1e3, "ms", case)
    ratios = {name: [one / base for one in all_] for name, all_ in beside.items()}
    _tell(figures, "slowest step beside the save / step alone", ratios, 1.0, "x", case)
    _tell(figures, "seconds until the slot (others: the folder) has it", done, 1.0, "s", case)
    rate = statistics.median(rates)
    figures.add("copy of a snapshot", rate, "GB/s", of=case.name)
    if OFF in limits:
        figures.add("copy of a snapshot / limit of pinned copies", rate / limits[OFF], "x", of=case.name)


def _every_step(figures: Figures, case: Case, work: Work, taking: Snapshots, steps: int) -> None:
    """A loop that runs ahead of its device, with a snapshot of each step for which a slot is free, beside one without."""
    ratios: list[float] = []
    blocked: list[float] = []
    taken = 0
    for _ in range(3):
        without_s = work.timed(steps)
        under_way: list[Any] = []
        work.wait()
        begin_s = time.perf_counter()
        for _ in range(steps):
            work()
            under_way = [one for one in under_way if one.thread.is_alive()]
            if len(under_way) < SLOTS - 1:  # one slot keeps the newest whole one
                under_way.append(taking.take(work.state))
                blocked.append(under_way[-1].held_s)
                taken += 1
        work.wait()
        ratios.append(without_s * steps / (time.perf_counter() - begin_s))
        for one in under_way:
            one.wait()
    figures.add("throughput with a snapshot of each step / without", statistics.median(ratios), "x", of=case.name)
    figures.add("steps that had a slot", taken / (3 * steps), "of all", of=case.name)
    blocked.sort()
    figures.add("blocked by a snapshot, p50", 1e3 * statistics.median(blocked), "ms", of=case.name)
    figures.add("blocked by a snapshot, p99", 1e3 * blocked[int(0.99 * (len(blocked) - 1))], "ms", of=case.name)


def _restored(figures: Figures, case: Case, work: Work, others: dict[str, Saver], abstract: Any) -> None:
    """Back onto the device, of what each has saved."""
    import jax

    took: dict[str, list[float]] = {name: [] for name in others}
    for name, saver in others.items():
        saver.save(work.state)
        saver.wait()
        for _ in range(2):
            begin_s = time.perf_counter()
            jax.block_until_ready(saver.restore(abstract))
            took[name].append(time.perf_counter() - begin_s)
    slot = min(took.pop(OURS))
    figures.add("restore slot -> device", slot, "s", of=case.name)
    figures.add("restore slot -> device", work.nbytes / slot / 1e9, "GB/s", of=case.name)
    if STORED in took:
        stored = min(took.pop(STORED))
        figures.add("restore storage -> device", stored, "s", of=case.name, beside={name: min(one) for name, one in took.items()})


def _memory(figures: Figures, case: Case, work: Work, taking: Snapshots, snapshots: Sequence[int]) -> None:
    """What the process has in memory as it takes more and more of them."""
    taken = 0
    for target in snapshots:
        while taken < target:
            work()
            taking.take(work.state).wait()
            taken += 1
        for what, mib in memory_mib().items():
            figures.add(f"{what} after {target} snapshots", mib, "MiB", of=case.name)


def memory_mib() -> dict[str, float]:
    """Private, shared and pinned memory of this process."""
    names = {"RssAnon": "private memory", "RssShmem": "shared memory", "VmPin": "pinned memory", "VmLck": "locked memory"}
    found: dict[str, float] = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in names and int(rest.split()[0]):
            found[names[name]] = int(rest.split()[0]) / 1024
    return found


def _tell(figures: Figures, name: str, found: dict[str, list[float]], scale: float, unit: str, case: Case) -> None:
    middle = {one: scale * statistics.median(all_) for one, all_ in found.items() if all_}
    figures.add(name, middle.pop(OURS), unit, of=case.name, beside=middle)
