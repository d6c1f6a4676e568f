"""One state, every contestant in turn, in one process: what saving and restoring it takes."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.side.limits import Limits
from benchmarks.side.savers import OURS, SAVERS, Saver
from benchmarks.side.states import Case, Work, on_axis

STEP_S = 0.2

Seconds = dict[str, dict[str, list[float]]]  # figure -> contestant or limit -> one value per round


class Bench:
    """Measures one case.

    Args:
        folder: where all of it goes; on the disk that is meant.
        names: the contestants.
    """

    def __init__(self, case: Case, folder: Path, names: list[str]):
        self.case = case
        self.seconds: Seconds = {}
        self.facts: dict[str, Any] = {}
        self._folder = folder
        self._step = 0
        self._work = Work(case, STEP_S)
        self._limits = Limits(folder, case.nbytes)
        self._savers: dict[str, Saver] = {}
        for name in names:
            begin = time.perf_counter()
            self._savers[name] = SAVERS[name](self._folder_of(name))
            self._note("start", name, time.perf_counter() - begin)

    def run(self) -> None:
        """All rounds. The first warms up, and says what the first saves cost."""
        began = time.perf_counter()
        for number in range(self.case.rounds + 1):
            names = list(self._savers)
            names = names[number % len(names) :] + names[: number % len(names)]
            for name in names:
                self._round(name, first=number == 0)
            if number:
                for name, seconds in self._limits.measure().items():
                    self._note("limits", name, seconds)
            if number >= 2 and time.perf_counter() - began > self.case.budget_s:
                break

    def close(self) -> None:
        for saver in self._savers.values():
            saver.close()

    def _note(self, figure: str, who: str, seconds: float) -> None:
        self.seconds.setdefault(figure, {}).setdefault(who, []).append(seconds)

    def _round(self, name: str, *, first: bool) -> None:
        saver = self._savers[name]
        ready = self._save(saver)
        self._note("blocked, first save" if first else "blocked, ready", name, ready[0])
        if not first:
            self._note("durable", name, ready[1])
            self._note("bytes on disk", name, size_of(self._folder_of(name) / str(self._step)))
        self._restores(name, first=first)
        # A loop that runs ahead of its devices: the state is still being computed. It was donated to that, and it will be again.
        self._work.wait()
        begin = time.perf_counter()
        self._work()
        began_save = time.perf_counter()
        blocked = self._save_only(saver)
        self._work()
        self._work.wait()
        self._note("blocked, second save" if first else "blocked, computing", name, blocked)
        if not first:
            self._note("two steps and a save", name, time.perf_counter() - begin)
            self._note("dispatch of a step", name, began_save - begin)
        saver.wait()

    def _save(self, saver: Saver) -> tuple[float, float]:
        """(seconds blocked, seconds until it is durable) of a state that is ready."""
        self._work.wait()
        begin = time.perf_counter()
        blocked = self._save_only(saver)
        saver.wait()
        return blocked, time.perf_counter() - begin

    def _save_only(self, saver: Saver) -> float:
        self._step += 1
        begin = time.perf_counter()
        saver.save(self._step, self._work.state)
        return time.perf_counter() - begin

    def _restores(self, name: str, *, first: bool) -> None:
        saver = self._savers[name]
        ways: dict[str, Callable[[], Any]] = {"restore from storage": lambda: saver.restore(self._step, self._reference(0))}
        if self.case.devices > 1:
            ways["restore from storage, other sharding"] = lambda: saver.restore(self._step, self._reference(1))
        for figure, way in ways.items():
            self._restore(figure, name, way, first=first)
            if name == OURS:
                self.facts[f"{figure}: bytes read / bytes needed"] = self._savers[OURS].bytes_read / self._work.nbytes  # type: ignore[attr-defined]
        from_memory = getattr(saver, "restore_from_memory", None)
        if from_memory is not None:
            self._restore("restore from memory", name, lambda: from_memory(self._reference(0)), first=first)

    def _restore(self, figure: str, name: str, way: Callable[[], Any], *, first: bool) -> None:
        import jax
        import numpy as np

        begin = time.perf_counter()
        restored = jax.block_until_ready(way())
        if not first:
            self._note(figure, name, time.perf_counter() - begin)
            return
        for key, value in self._work.state.items():
            if np.asarray(value).tobytes() != np.asarray(restored[key]).tobytes():
                raise RuntimeError(f"{figure}: {name} gave other values of {key} than were saved")

    def _reference(self, axis: int) -> Any:
        import jax

        def leaf(value: Any) -> Any:
            sharding = value.sharding if axis == 0 or value.ndim < 2 else on_axis(self.case, axis)
            return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

        return jax.tree.map(leaf, self._work.state)

    def _folder_of(self, name: str) -> Path:
        return self._folder / name.replace(" ", "-").replace(",", "")


def size_of(folder: Path) -> float:
    """Bytes of the files in a folder."""
    return float(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))


@contextlib.contextmanager
def own_folder(parent: str | None) -> Iterator[Path]:
    """A folder that ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="raystate-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def own_cluster(parent: str | None) -> Iterator[Path]:
    """A Ray cluster and a folder that end with the block."""
    import logging

    import ray

    with own_folder(parent) as folder:
        ray.init("local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
        try:
            yield folder
        finally:
            ray.shutdown()


def measure(cases: list[Case], names: list[str], parent: str | None) -> list[dict[str, Any]]:
    """Everything about each case, as JSON. Starts a Ray cluster of its own."""
    with own_cluster(parent) as folder:
        return [_measured(case, folder / str(number), names) for number, case in enumerate(cases)]


def _measured(case: Case, folder: Path, names: list[str]) -> dict[str, Any]:
    folder.mkdir()
    bench = Bench(case, folder, [name for name in names if name not in case.without])
    with contextlib.closing(bench):
        bench.run()
    return {"case": case.name, "seconds": bench.seconds, "facts": bench.facts}
