"""Copies that slow the steps are spread over the time to the next snapshot; who waits for them ends their pauses. The clock is made."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from raystate.arrays import device_copies, ways
from raystate.arrays.gpus import Gpus
from raystate.arrays.tree import describe
from raystate.arrays.ways import Ways
from raystate.machine import cuda
from tests.gpu.conftest import OFF, StandIn
from tests.gpu.states import attached, slot, state, step, values, wrong


class Clock:
    """Passes while somebody pauses. `paused`: for how many seconds, each time, with the copies that were queued by then."""

    def __init__(self, standin: StandIn):
        self.now_s = 100.0
        self.paused: list[tuple[float, int]] = []
        self.hurried_after = 1 << 30
        self._standin = standin
        self._lock = threading.Lock()

    def event(self) -> Any:
        clock, is_set = self, [False]

        def wait(seconds: float) -> None:
            with clock._lock:
                if is_set[0]:
                    return
                clock.now_s += seconds
                clock.paused.append((seconds, clock._standin.calls(OFF)))
                is_set[0] = len(clock.paused) >= clock.hurried_after

        return SimpleNamespace(wait=wait, set=lambda: is_set.__setitem__(0, True), clear=lambda: is_set.__setitem__(0, False))


@pytest.fixture
def clock(standin: StandIn, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """One device, whose groups are small."""
    del gpus
    made = Clock(standin)
    monkeypatch.setattr("raystate.arrays.gpus.time", SimpleNamespace(monotonic=lambda: made.now_s))
    monkeypatch.setattr(device_copies, "GROUP_BYTES", 1 << 21)
    monkeypatch.setattr(cuda, "COPY_BYTES", 1 << 18)
    ways.of_restores.cache_clear()
    yield made
    ways.of_restores.cache_clear()


def on_one_device() -> dict[str, jax.Array]:
    (device, *_) = jax.devices()
    return {name: jax.device_put(array, device) for name, array in values(state(0)).items() if name != "a8"}  # int4: JAX's


def ready(clock: Clock) -> Ways:
    made = Ways()
    assert made._gpu is not None
    made._gpu._hurries = clock.event()
    return made


def test_a_copy_is_spread_evenly_and_is_of_its_step(clock: Clock):
    """Between two pieces of at most COPY_BYTES nothing is on its way, and all takes as long as it may."""
    made, tree = ready(clock), on_one_device()
    described, expected = describe({"state": tree}), values(tree)
    pages = slot(described)
    assert made._gpu is not None
    detach = attached(made._gpu, pages)
    made.spread(8.0)
    held = made.hold(described)
    tree = step(tree)
    jax.block_until_ready(tree)
    assert not wrong(described, held, pages, expected)
    pauses = [(seconds, queued) for seconds, queued in clock.paused if seconds]
    share = (1 << 18) / described.layout.data_bytes
    assert len(pauses) >= 0.7 / share and max(seconds for seconds, _ in pauses) <= 8.0 * share * 1.01
    assert 8.0 * (1 - 2 * share) <= clock.now_s - 100.0 <= 8.0
    queued = [number for _, number in pauses]
    assert queued == sorted(set(queued)), "each pause is behind another piece"
    detach()


def test_without_a_reason_there_are_no_pauses(clock: Clock):
    made, tree = ready(clock), on_one_device()
    described, expected = describe({"state": tree}), values(tree)
    made.spread(0.0)
    assert not wrong(described, made.hold(described), slot(described), expected)
    assert not clock.paused


@pytest.mark.parametrize("by", ["a wait", "a durable save"])
def test_who_waits_for_a_copy_ends_its_pauses(clock: Clock, by: str):
    made, tree = ready(clock), on_one_device()
    described, expected = describe({"state": tree}), values(tree)
    made.spread(8.0)
    held = made.hold(described)
    made.hurry() if by == "a wait" else made.spread(0.0)
    assert not wrong(described, held, slot(described), expected)
    assert not clock.paused
    clock.hurried_after = 3
    made.spread(8.0)
    assert not wrong(described, made.hold(described), slot(described), expected)
    assert len(clock.paused) == 3


def test_errors_between_two_pieces_leave_nothing_under_way(clock: Clock, gpus: Gpus, standin: StandIn):
    made, tree = ready(clock), on_one_device()
    described, expected = describe({"state": tree}), values(tree)
    made.spread(8.0)
    held = made.hold(described)
    standin.fail(OFF, after=5)
    assert not wrong(described, held, slot(described), expected)  # by JAX
    assert gpus.lost and gpus.is_settled and not any(map(gpus.held_bytes, jax.devices()))
