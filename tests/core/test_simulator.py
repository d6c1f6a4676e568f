"""Ten thousand schedules of a whole run, and bugs planted to show that they would be found."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.core import test_copies, test_host
from tests.searching import search
from tests.sim import Result, coordinators, simulate
from tests.sim.mutations import MUTATIONS, WITH_COPIES, WITH_TWO_COPIES

LONG_SEARCH = 150  # schedules
SEEDS = int(os.environ.get("RAYSTATE_SIM_SEEDS", "10000"))
CHUNK = 250
SHOWN = 4  # chunks that `make test` plays
EVENTS = 90

# Where each planted bug was found first; other seeds are tried when the schedules have changed.
KNOWN = {
    "stale attempt commits": 266,
    "stop without waiting for the others": 52,
    "lost acknowledgement taken for failure": 266,
    "complete without one piece": 1671,
    "discarded while it is read": 283,
    "restore without a new lineage": 151,
    "lost promise told as durable": 325,
    "merge takes strangers": 1135,
    "stop step overtaken": 92,
    "mixed lineages chosen": 283,
    "slots are handed on by the lock alone": 113,
    "host rejoins without discarding": 236,
    "late retire deletes a step saved again": 12309,
}


LONG_EVENTS = 260  # more than one thing goes wrong at a time, and what was left behind by the first meets the second
LONG_SEEDS = 20
STILL_SEEDS = 200


def chunks(seeds: int, size: int, *what: int) -> list[Any]:
    """(`what`, first seed) of each chunk; those after the first few have the mark `more`."""
    return [pytest.param(*what, first, marks=pytest.mark.more if first >= SHOWN * size else ()) for first in range(0, seeds, size)]


@pytest.mark.parametrize("first", chunks(SEEDS, CHUNK))
def test_invariants_hold_in_all_schedules(first: int):
    for seed in range(first, min(first + CHUNK, SEEDS)):
        result = simulate(seed, events=EVENTS)
        assert result.ok, "\n".join((*result.trace[-60:], result.violation))
        assert result.events >= 50 and result.faults >= 3 and result.durable_step >= 0, seed


def test_invariants_hold_in_longer_schedules():
    for seed in range(LONG_SEEDS):
        result = simulate(seed, events=LONG_EVENTS)
        assert result.ok, "\n".join((*result.trace[-60:], result.violation))


def test_a_coordinator_that_counts_its_own_gap_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coordinators, "OwnTime", lambda clock: clock)
    assert not all(simulate(seed, events=EVENTS, is_still=True).ok for seed in range(10))


@pytest.mark.parametrize("replicas", [0, 1])
def test_processes_that_stand_still_together_go_on_as_if_nothing_had_been(replicas: int):
    for seed in range(STILL_SEEDS):
        result = simulate(seed, events=EVENTS, replicas=replicas, is_still=True)
        assert result.ok, "\n".join((*result.trace[-60:], result.violation))


def test_same_seed_same_events():
    first, second = simulate(7, trace=True), simulate(7, trace=True)
    assert (first.events, first.seconds, first.durable_step) == (second.events, second.seconds, second.durable_step)
    assert [line.split(" ")[:3] for line in first.trace] == [line.split(" ")[:3] for line in second.trace]


# Found by no schedule of the first few thousand: they need schedules of their own.
RARE = {"recovery believes old reports"}


# Hardly any schedule shows them (no one of the first few thousand). A test of the machine itself is red with each of them.
DIRECT = {
    "late pieces of a given-up past believed": test_host.test_what_is_staged_late_in_a_past_that_was_given_up_is_discarded,
    "reported before all is found": test_host.test_the_first_report_says_all_that_lies_there,
    "let go while its heir has fewer copies": test_copies.test_what_has_its_copies_stays_until_what_was_restored_has_them,
    "host forgets over its restart": test_host.test_a_restarted_host_still_knows_what_was_given_up_and_what_was_proposed,
}


@pytest.mark.parametrize("name", DIRECT)
def test_planted_bug_is_found_by_a_test_of_the_machine(name: str, monkeypatch: pytest.MonkeyPatch):
    DIRECT[name]()
    with (MUTATIONS | WITH_TWO_COPIES)[name]() as flags:
        if "forgetful_host" in flags:  # as the simulator's HostActors start then
            real = test_host.adopted
            monkeypatch.setattr(test_host, "adopted", lambda *contents, memory=None: real(*contents))
        with pytest.raises(AssertionError):
            DIRECT[name]()


SEARCHED = [name for name in MUTATIONS if name not in DIRECT]


def find(name: str, known: int | None, seeds: int, play_seed: Callable[[int], Result]) -> None:
    """Fail unless a schedule shows the planted bug."""

    def shows(seed: int) -> bool:
        result = play_seed(seed)
        if not result.ok:
            assert f"seed {seed}" in result.violation
            assert result.trace
        return not result.ok

    search(name, known, seeds, shows, long_search=LONG_SEARCH)


@pytest.mark.more
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if name in RARE else name for name in SEARCHED])
def test_planted_bug_is_found(name: str):
    with MUTATIONS[name]() as flags:
        find(name, KNOWN.get(name), SEEDS, lambda seed: simulate(seed, events=EVENTS, mutations=flags))


# ---------------------------------------------------------------- with peer copies

COPY_SEEDS = SEEDS // 10
COPY_CHUNK = 50
COPY_EVENTS = 260


@pytest.mark.parametrize(("replicas", "first"), [*chunks(COPY_SEEDS, COPY_CHUNK, 1), *chunks(COPY_SEEDS // 2, COPY_CHUNK, 2)])
def test_invariants_hold_with_peer_copies(replicas: int, first: int):
    """Loss of as many hosts as there are copies costs nothing that was stable, unless the Coordinator had said that it had none.

    With one seed in four Coordinators fight, too.
    """
    for seed in range(first, first + COPY_CHUNK):
        for rivals in (False, True) if seed % 4 == 0 else (False,):
            result = simulate(seed, events=COPY_EVENTS, replicas=replicas, rivals=rivals)
            assert result.ok, "\n".join((*result.trace[-60:], result.violation))


KNOWN_WITH_COPIES = {"copy's slot is given away": 1746, "a growth taken back": 599}


@pytest.mark.more
@pytest.mark.parametrize("name", WITH_COPIES)
def test_planted_bug_of_peer_copies_is_found(name: str):
    known = KNOWN_WITH_COPIES.get(name)
    with WITH_COPIES[name]() as flags:
        find(name, known, COPY_SEEDS, lambda seed: simulate(seed, events=COPY_EVENTS, mutations=flags, replicas=1))


# ---------------------------------------------------------------- with two peer copies


@pytest.mark.more
@pytest.mark.parametrize("name", [name for name in WITH_TWO_COPIES if name not in DIRECT])
def test_planted_bug_of_two_peer_copies_is_found(name: str):
    with WITH_TWO_COPIES[name]() as flags:

        def play_seed(seed: int) -> Result:
            return simulate(seed, events=COPY_EVENTS, mutations=flags, replicas=2, rivals=seed % 4 == 0)

        find(name, None, COPY_SEEDS, play_seed)
