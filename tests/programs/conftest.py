"""One small Ray for each file, and pairs of trainings on it: one that nobody disturbs, one that is killed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import standing_ray
from tests.programs.running import DIES_AFTER, STOPPED_AFTER, End, Place, run_script

Digests = list[dict[str, str]]  # by rank


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """What it holds in memory outlives a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        with standing_ray(num_cpus=4) as address:
            yield address


@pytest.fixture
def place(make_run: Any, tmp_path: Path) -> Callable[[str], Place]:
    """Makes a training's folder and run."""

    def make(name: str) -> Place:
        run, out = make_run(), tmp_path / name
        out.mkdir()
        return Place(out, run.storage, run.run)

    return make


@pytest.fixture
def scripts(ray_address: str, place: Callable[[str], Place]) -> Callable[..., tuple[Digests, End]]:
    """(program, devices, ranks=1) -> how it ended undisturbed, and how after two kills and a SIGTERM.

    After each that ends the script, the same command starts it again.
    """

    def train(program: str, *, devices: int, ranks: int = 1) -> tuple[Digests, End]:
        calm, killed = place("undisturbed"), place("killed")
        given = {**killed.given(program, ranks - 1, 0), "stop": STOPPED_AFTER}
        kills = [-signal.SIGKILL] * (len(DIES_AFTER) if ranks == 1 else 0)  # a worker that is killed ends no script
        assert run_script(calm, ray_address, calm.given(program), ranks=ranks, devices=devices) == 0, _tail(calm)
        for expected in (*kills, 128 + signal.SIGTERM, 0):
            assert run_script(killed, ray_address, given, ranks=ranks, devices=devices) == expected, _tail(killed)
        return calm.end(ranks).digests, killed.end(ranks)

    return train


@pytest.fixture
def groups(ray_address: str, place: Callable[[str], Place]) -> Callable[..., tuple[Digests, End]]:
    """(launch, program, ranks, …) -> how two groups of workers ended, of which one loses its last rank and then its first on the way."""

    def train(launch: Callable[..., Any], program: str, *, ranks: int, **more: Any) -> tuple[Digests, End]:
        calm, killed = place("undisturbed"), place("killed")
        launch(calm, calm.given(program), ranks=ranks, **more)
        launch(killed, killed.given(program, ranks - 1, 0), ranks=ranks, **more)
        return calm.end(ranks).digests, killed.end(ranks)

    return train


def _tail(place: Place) -> str:
    return (place.out / "log").read_text()[-3000:]
