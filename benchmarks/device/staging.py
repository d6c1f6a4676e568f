"""What a snapshot costs the training on this device, beside Orbax's asynchronous saves of the same state in the same run."""

from __future__ import annotations

import shutil
import statistics
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.device.goals import held
from benchmarks.device.here import has
from benchmarks.device.slots import Snapshots, slots_of
from benchmarks.side.figures import Teller
from benchmarks.side.savers import OTHERS, OURS, STORED, Saver, Stored
from benchmarks.side.states import Case, Work
from raystate.arrays import gpu
from raystate.arrays.gpu import is_cuda
from raystate.core.coordinator.interval import Measured
from raystate.core.formats.settings import Settings

MOST_SLOTS = 3  # as many as a trainer has by default
LEAST_S = 15  # to free the slots and the pinned pool takes seconds, too
SPARE_BYTES = 4 << 30  # of the machine's memory, for everything else
SAVE_OVERHEAD = Settings(run="", storage="").save_overhead  # as users have it without an option


class Staging:
    """All figures of one state.

    Args:
        step_s: of a step.
        quick: one round of everything.
    """

    def __init__(self, tell: Teller, case: Case, *, step_s: float, quick: bool):
        self._tell, self._case, self._step_s = tell, case, step_s
        self._rounds = 1 if quick else 3
        self._every = 4 if quick else 10  # steps of a loop with a snapshot of each, and of one without
        self._snapshots = (1, 3) if quick else (1, 10, 100)  # the memory is told after so many
        self._step = 0
        self._saved_at: dict[Saver, int] = {}  # the newest step of each

    def run(self, folder: Path, pinned_gb_s: float | None) -> None:
        """`folder`: for the others' saves. `pinned_gb_s`: the machine's limit, if it is known."""
        import jax

        room = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 1 << 60)  # CPU devices don't say
        if room < 1.2 * self._case.mib * 2**20:
            self._tell.note(f"{self._case.name}: left out, JAX has {room / 2**30:.1f} GiB of the device's memory")
            return
        self._work = work = Work(self._case, self._step_s)
        before = memory()["available"]
        slot_bytes = work.nbytes + (1 << 20)
        fit = min(
            shutil.disk_usage("/dev/shm").free // slot_bytes,
            # Beside the slots: two snapshots on their way in the pinned pool.
            (memory()["available"] - SPARE_BYTES - min(2 * work.nbytes, 64 << 30)) // slot_bytes
            if work.nbytes > SPARE_BYTES
            else 99,
        )
        if fit < 1:
            self._tell.note(f"{self._case.name}: left out, the machine's memory has no room for a slot and pinned memory")
            return
        if fit < MOST_SLOTS:
            self._tell.note(f"{self._case.name}: {fit} slots of {MOST_SLOTS}, the machine's memory has no room for more")
        with slots_of(min(fit, MOST_SLOTS), slot_bytes) as slots:
            self._at_a_time = max(1, len(slots) - 1)  # one slot keeps the newest whole one
            self._taking = Snapshots(work.state, slots)
            savers: dict[str, Saver] = {OURS: self._taking, **self._others(folder)}
            self._one_at_a_time(savers, pinned_gb_s)
            self._by_default(self._every_step())
            self._without_room()
            self._restored(savers)
            self._memory(before - len(slots) * slot_bytes)

    def _others(self, folder: Path) -> dict[str, Saver]:
        """Those that this machine can run: each needs its package, and room on the disk for two states."""
        found: dict[str, Saver] = {}
        for name, (make, needs) in OTHERS.items():
            if name in self._case.without:
                continue
            if not has(needs):
                self._tell.note(f"{name} is left out: there is no {needs}")
            elif shutil.disk_usage(folder).free < 2 * len(OTHERS) * self._work.nbytes:
                self._tell.note(f"{name} is left out: the disk has no room for it")
            else:
                try:
                    found[name] = make(folder / name.replace(" ", "-"))
                except Exception as error:
                    self._tell.note(f"{name} is left out: {type(error).__name__}: {error}")
        return found

    def _add(self, name: str, value: float, unit: str, beside: dict[str, float] | None = None) -> None:
        self._tell.add(name, value, unit, of=self._case.name, beside=beside, goals=held(name, value, self._case))

    def _one_at_a_time(self, savers: dict[str, Saver], pinned_gb_s: float | None) -> None:
        """Each saver in turn, and steps until it is done. Begins no round that may not end in time."""
        work = self._work
        alone: list[float] = []
        blocked, slowest, done = (defaultdict[str, list[float]](list) for _ in range(3))
        rates: list[float] = []
        took_s = 0.0
        for round_ in range(self._rounds + 1):  # the first one warms up
            if round_ and self._tell.left_s < 3 * took_s:
                self._tell.note(f"{self._case.name}: {max(1, round_ - 1)} of {self._rounds} rounds, the time has no room for more")
                break
            begun_s = time.perf_counter()
            alone.append(work.timed())
            for name, saver in list(savers.items()):
                try:
                    times = self._saved(saver)
                except Exception as error:
                    if saver is self._taking:
                        raise
                    self._tell.note(f"{name} is left out: {type(error).__name__}: {error}")
                    savers.pop(name)
                    for found in (blocked, slowest, done):
                        found.pop(name, None)
                    continue
                for found, took in zip((blocked, slowest, done), times, strict=True):
                    found[name].append(took)
            rates.append(work.nbytes / self._taking.saved.seconds / 1e9)
            took_s = time.perf_counter() - begun_s
        base = warm(alone)
        self._add("step alone", 1e3 * base, "ms")
        first = {name: found[0] for name, found in blocked.items()}
        self._add("blocked by the first save", first.pop(OURS), "s", first)
        self._told("blocked in save, the state computed", blocked, 1e3, "ms")
        self._told("slowest step beside the save / step alone", slowest, 1 / base, "x")
        self._told("seconds until the slot (others: the folder) has it", done, 1.0, "s")
        rate = warm(rates)
        self._add("copy of a snapshot", rate, "GB/s")
        if pinned_gb_s:
            self._add("copy of a snapshot / limit of pinned copies", rate / pinned_gb_s, "x")

    def _saved(self, saver: Saver) -> tuple[float, float, float]:
        """A save of a state that is computed, and steps until it is done: seconds blocked, of the slowest step, until it was done."""
        work = self._work
        work()
        work.wait()
        self._step += 1
        with ThreadPoolExecutor(1) as waiting:
            begin_s = time.perf_counter()
            saver.save(self._step, work.state)
            blocked_s = time.perf_counter() - begin_s

            def until_done() -> float:
                saver.wait()
                return time.perf_counter() - begin_s

            done = waiting.submit(until_done)
            steps = [work.timed()]
            while not done.done():
                steps.append(work.timed())
        if isinstance(saver, Stored):
            saver.keep_only(self._step)
        self._saved_at[saver] = self._step
        return blocked_s, max(steps), done.result()

    def _told(self, name: str, found: dict[str, list[float]], scale: float, unit: str) -> None:
        middle = {one: scale * warm(all_) for one, all_ in found.items()}
        self._add(name, middle.pop(OURS), unit, middle)

    def _every_step(self) -> Measured:
        """A loop that is a step ahead of its device, with a snapshot of each step for which a slot is free, beside one without.

        Returns what raystate would have measured.
        """
        ratios: list[float] = []
        blocked: list[float] = []
        lost_s = without_s = 0.0
        for _ in range(self._rounds):
            without_s = self._loop(None)
            with_s = self._loop(blocked)
            lost_s += with_s - without_s
            ratios.append(without_s / with_s)
            if self._tell.left_s < 10 * without_s:
                break
        self._add("throughput with a snapshot of each step / without", statistics.median(ratios), "x")
        self._add("steps that had a slot", len(blocked) / (len(ratios) * self._every), "of all")
        self._add("blocked by a snapshot, p50", 1e3 * statistics.median(blocked), "ms")
        self._add("blocked by a snapshot, p99", 1e3 * float(np.percentile(blocked, 99)), "ms")
        return Measured(without_s / self._every, max(0.0, lost_s) / len(blocked))

    def _by_default(self, found: Measured) -> None:
        """The same with as few snapshots as `save_overhead` asks for."""
        every = found.interval(SAVE_OVERHEAD)
        self._add("steps from one snapshot to the next by default", every, "steps")
        steps = 2 * max(every, self._every // 2)
        if steps * found.step_s > self._tell.left_s / 6:
            self._tell.note(f"{self._case.name}: no time for two loops of {steps} steps, as the default interval needs")
            return
        without_s = self._loop(None, steps=steps)
        self._add("throughput with snapshots by default / without", without_s / self._loop([], steps=steps, every=every), "x")

    def _without_room(self) -> None:
        """Other arrays fill the device, until it has no room for copies of the whole state: save() waits for them, in turns."""
        import jax

        device = jax.devices()[0]
        if not is_cuda(device) or gpu.GPUS.lost:
            return
        filling: list[Any] = []
        size = max(1 << 20, self._work.nbytes // 8)
        fill = jax.jit(lambda: jax.numpy.zeros(size, "uint8"))
        while gpu.GPUS.has_room({device: self._work.nbytes}):
            filling.append(jax.block_until_ready(fill()))
        first_s, *later_s = [self._saved(self._taking)[0] for _ in range(1 + self._rounds)]
        self._add("blocked by the first save, no room on the device", first_s, "s")
        self._add("blocked by later saves, no room on the device", statistics.median(later_s), "s")
        ratio = self._loop(None) / self._loop([])
        self._add("throughput with a snapshot of each step / without, no room on the device", ratio, "x")
        filling.clear()

    def _loop(self, blocked: list[float] | None, *, steps: int = 0, every: int = 1) -> float:
        """Its seconds. With a list: what each snapshot has blocked is added to it."""
        work, under_way = self._work, list[Any]()
        work.wait()
        begin_s = time.perf_counter()
        for step in range(steps or self._every):
            work()
            if blocked is not None and step % every == 0:
                under_way = [one for one in under_way if one.thread.is_alive()]
                if len(under_way) < self._at_a_time:
                    under_way.append(self._taking.take(work.state))
                    blocked.append(under_way[-1].held_s)
            work.keep_up()
        work.wait()
        took_s = time.perf_counter() - begin_s
        for one in under_way:
            one.wait()
        return took_s

    def _restored(self, savers: dict[str, Saver]) -> None:
        """Back onto the device, where nothing else is then, of what each has saved."""
        import jax

        work = self._work
        reference = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), work.state)
        self._taking.save(0, work.state)  # the others' folders are there
        self._taking.wait()
        took = defaultdict[str, list[float]](list)
        for name, saver in savers.items():
            try:
                for _ in range(2):
                    if took[name] and self._tell.left_s < 4 * took[name][0]:
                        break
                    work.state = None
                    begin_s = time.perf_counter()
                    work.state = jax.block_until_ready(saver.restore(self._saved_at[saver], reference))
                    took[name].append(time.perf_counter() - begin_s)
            except Exception as error:
                if saver is self._taking:
                    raise
                self._tell.note(f"{name} does not restore: {type(error).__name__}: {error}")
                took.pop(name)
                work.state = self._taking.restore(0, reference)
        work.timed()  # compiles again where these arrays are committed to their device
        fastest = {name: min(all_) for name, all_ in took.items()}
        slot_s = fastest.pop(OURS)
        self._add("restore slot -> device", slot_s, "s")
        self._add("restore slot -> device, rate", work.nbytes / slot_s / 1e9, "GB/s")
        if STORED in fastest:
            self._add("restore storage -> device", fastest.pop(STORED), "s", fastest)

    def _memory(self, before: int) -> None:
        """What the machine has less of than before, the slots apart, as more and more snapshots are taken: the pinned pool above all."""
        taken = 0
        for target in self._snapshots:
            begin_s = time.perf_counter()
            while taken < target:
                self._work(repeats=1)
                self._taking.take(self._work.state).wait()
                taken += 1
                if self._tell.left_s < LEAST_S:
                    self._tell.note(f"{self._case.name}: no time for {target} snapshots, {taken} taken")
                    return
            self._add(f"snapshots one after the other, {target}", time.perf_counter() - begin_s, "s")
            now = memory()
            self._add(f"host memory beside the slots after {target} snapshots", (before - now["available"]) / 2**20, "MiB")
            self._add(f"private memory of the process after {target} snapshots", now["private"] / 2**20, "MiB")


def warm(rounds: list[float]) -> float:
    """The median, without the round that warmed up if there is another."""
    return statistics.median(rounds[1:] or rounds)


def memory() -> dict[str, int]:
    """Bytes that the machine has available, and the private ones of this process. The driver's pinned memory is in the former only."""
    free, private = (Path(path).read_text() for path in ("/proc/meminfo", "/proc/self/status"))
    kib = {"available": free.partition("MemAvailable:")[2], "private": private.partition("RssAnon:")[2]}
    return {name: int(text.split()[0]) << 10 for name, text in kib.items()}
