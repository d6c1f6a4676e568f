"""Ten thousand schedules of a whole run, and bugs planted to show that they would be found."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os

import pytest

from tests.sim import simulate
from tests.sim.mutations import MUTATIONS

SEEDS = int(os.environ.get("RAYSTATE_SIM_SEEDS", "10000"))
CHUNK = 250
EVENTS = 90

# Where each planted bug was found first; other seeds are tried when the schedules have changed.
KNOWN = {
    "stale attempt commits": 49,
    "stop without waiting for the others": 288,
    "lost acknowledgement taken for failure": 190,
    "complete without one piece": 319,
    "discarded while it is read": 60,
    "restore without a new lineage": 187,
    "lost promise told as durable": 690,
    "merge takes strangers": 137,
    "stop step overtaken": 346,
    "mixed lineages chosen": 6435,
    "host rejoins without discarding": 131,
    "ends are not fenced": 114,
    "late retire deletes a step saved again": 4927,
    "host forgets over its restart": 15049,
    "late pieces of a given-up past believed": 15049,
}


# Failures of the past.
KEPT = (
    2010,  # a step that was saved once more overtakes its own first snapshot (the check was wrong)
    4091,  # a host that had just come back was given up on by a restore that had waited long for others
    10957,  # a host that spoke, and that the question had not reached yet, was given up by a restore, and a stable step with it
    5778,  # a host that slept beyond its deadline
)


def play(first: int) -> tuple[list[str], int, int, int, int]:
    """One chunk of seeds: (violations with their event logs, schedules, fewest events, fewest faults, steps that became durable)."""
    bad: list[str] = []
    fewest, faults, durable = 10**9, 10**9, 0
    for seed in range(first, min(first + CHUNK, SEEDS)):
        result = simulate(seed, events=EVENTS)
        fewest, faults = min(fewest, result.events), min(faults, result.faults)
        durable += result.durable_step >= 0
        if not result.ok:
            bad.append("\n".join((*result.trace[-60:], result.violation)))
            break
    return bad, min(CHUNK, SEEDS - first), fewest, faults, durable


def test_invariants_hold_in_all_schedules():
    context = multiprocessing.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        results = list(pool.map(play, range(0, SEEDS, CHUNK)))
    for bad, *_ in results:
        assert not bad, bad[0]
    assert min(fewest for _, _, fewest, _, _ in results) >= 50
    assert min(faults for _, _, _, faults, _ in results) >= 3
    assert sum(durable for *_, durable in results) == SEEDS


@pytest.mark.parametrize("seed", KEPT)
def test_what_failed_once(seed: int):
    result = simulate(seed, events=EVENTS)
    assert result.ok, result.violation


def test_same_seed_same_events():
    first, second = simulate(7, trace=True), simulate(7, trace=True)
    assert (first.events, first.seconds, first.durable_step) == (second.events, second.seconds, second.durable_step)
    assert [line.split(" ")[:3] for line in first.trace] == [line.split(" ")[:3] for line in second.trace]


# Found by no schedule of the first few thousand: they need schedules of their own.
RARE = {
    "recovery believes old reports",
    "retention by number alone",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if name in RARE else name for name in MUTATIONS])
def test_planted_bug_is_found(name: str):
    with MUTATIONS[name]() as flags:
        for seed in (KNOWN.get(name, 0), *range(SEEDS)):
            result = simulate(seed, events=EVENTS, mutations=flags)
            if not result.ok:
                assert f"seed {seed}" in result.violation
                assert result.trace
                return
    pytest.fail(f"{name}: not found in {SEEDS} schedules")
