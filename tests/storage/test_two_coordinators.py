"""Two clusters want one run: whatever happens between any two operations on storage, one goes on and all others learn that they don't.

By default a few races are run, drawn by a seed that is printed (RAYSTATE_SEED=n draws them again); RAYSTATE_ALL=1 runs many and long ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from raystate.core.formats.errors import StorageError
from raystate.storage import Storage
from tests.storage.crash_sweep import HISTORIES, overtake, record
from tests.storage.race import Overwriting, Race
from tests.storage.stages import ALL, BACKENDS, SEED, Fresh, stage

RACES = {"directory": 10, "memory": 10, "gcs": 3} if ALL else {"directory": 1, "memory": 1, "gcs": 1}
SAVES = {"directory": 200, "memory": 200, "gcs": 60} if ALL else {"directory": 40, "memory": 60, "gcs": 8}
# In how many histories somebody is overtaken, and before how many operations of each.
OVERTAKEN = (
    {"directory": (5, 1000), "memory": (5, 1000), "gcs": (5, 12)} if ALL else {"directory": (5, 8), "memory": (5, 8), "gcs": (2, 1)}
)
BLIND_RACES = 3  # each of them almost always goes wrong


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[tuple[str, Fresh]]:
    with stage(request.param, entry_bytes=450) as fresh:  # some log entries have a new base, some an older one
        yield request.param, fresh


def test_one_goes_on_and_nothing_is_lost(backend: tuple[str, Fresh]):
    kind, fresh = backend
    for number in range(RACES[kind]):
        seed = SEED * 1000 + number
        race = Race(fresh(), seed, saves=SAVES[kind])
        try:
            race.run()
        except BaseException as error:
            error.add_note(f"Race(…, {seed}, saves={race.saves}) on {kind} after {race.scheduler.turn} turns; RAYSTATE_SEED={SEED}")
            raise
        assert len(race.lives) > 1
        print(f"seed {seed} on {kind}: {race.durable} saves, {race.operations} operations, {race.endings}")  # noqa: T201


def test_a_race_can_be_run_again():
    def run() -> list[tuple[str, int, str]]:
        with stage("memory") as fresh:
            race = Race(fresh(), SEED, saves=8)
            race.run()
        return [(entry.writer, entry.attempt, entry.reason) for entry in race.truth.entries]

    assert run() == run()


def test_whoever_is_overtaken_before_any_operation(backend: tuple[str, Fresh]):
    """Somebody else claims, saves and cleans up while it sleeps there; it wakes up and goes on where it was."""
    kind, fresh = backend
    draw = random.Random(f"{SEED} {kind}")
    for name in draw.sample(sorted(HISTORIES), OVERTAKEN[kind][0]):
        history = HISTORIES[name]
        operations = record(history, fresh(), tell_dead=False)
        claim = next(nth for nth, one in enumerate(operations) if one.kind == "create" and "/log/" in one.name)
        places = range(claim + 1, len(operations))
        for nth in draw.sample(places, min(len(places), OVERTAKEN[kind][1])):
            try:
                overtake(history, fresh(), nth)
            except Exception as error:
                error.add_note(f"{name} on {kind}, before operation {nth}, {operations[nth]}; RAYSTATE_SEED={SEED}")
                raise


# ---------------------------------------------------------------- without preconditions


def _overwriting() -> Iterator[Callable[[], Storage]]:
    with stage("directory") as fresh:
        yield lambda: Overwriting(fresh().url)


def _lax() -> Iterator[Callable[[], Storage]]:
    with stage("gcs", strict=False) as fresh:
        yield fresh


BLIND = {"directory": _overwriting, "gcs": _lax}


@pytest.fixture(params=[kind for kind in BLIND if kind in BACKENDS])
def overwriting(request: pytest.FixtureRequest) -> Iterator[Fresh]:
    yield from BLIND[request.param]()


def test_without_preconditions_it_goes_wrong(overwriting: Fresh):
    wrong: list[str] = []
    for number in range(BLIND_RACES):
        race = Race(overwriting(), SEED * 1000 + number, saves=10, blind=True)
        try:
            race.run()
        except AssertionError as error:
            wrong.append(str(error))
    print(f"{len(wrong)} of {BLIND_RACES} races went wrong: {wrong}")  # noqa: T201
    assert len(wrong) >= BLIND_RACES - 1


def test_a_storage_without_preconditions_is_refused(overwriting: Fresh):
    with pytest.raises(StorageError, match="cannot hold a run"):
        overwriting().self_test()
