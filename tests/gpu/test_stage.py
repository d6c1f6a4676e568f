"""hold() and copy() by the driver: the bits of this step, whatever the next one does; and each way down when something fails."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import pytest

from raystate.arrays import device_copies, gpu
from raystate.arrays.gpu import GpuStager
from raystate.arrays.gpus import Gpus
from raystate.arrays.stage import copy, foresee, hold
from raystate.arrays.tree import describe
from raystate.core.formats.errors import RaystateError
from raystate.machine.checksum import Bytes
from tests.gpu.conftest import EVENT, OFF, OTHER, REGISTER, SYNC, WAIT, StandIn
from tests.gpu.states import Model, attached, count_up, join, slot, state, step, values, wrong
from tests.model.world import World


def ready(tree: Any) -> tuple[GpuStager, Any]:
    """(a stager with its programs, the plan)"""
    stager, described = GpuStager(), describe({"state": tree})
    foresee(described, stager)
    stager.prepare()
    return stager, described.plan


@pytest.mark.parametrize("prepared", [True, False])
def test_each_snapshot_of_a_donating_loop_is_of_its_step(gpus: Gpus, standin: StandIn, prepared: bool):
    """The copy comes late, when the next steps have written where the state was."""
    tree = state(0)
    stager, plan = ready(tree) if prepared else (GpuStager(), None)
    pages = slot(describe({"state": tree}))
    detach = attached(stager, pages)
    for _ in range(6):
        described, expected = describe({"state": tree}, previous=plan), values(tree)
        plan = described.plan
        held = hold(described, stager)
        for _ in range(2):
            tree = step(tree)
        jax.block_until_ready(tree)
        assert described.leaves[0].is_deleted()  # the danger is real
        assert not wrong(described, held, pages, expected)
    assert standin.calls(OFF) and not standin.unregistered_copies and not gpus.lost
    detach()
    assert standin.registered_bytes == 0


@pytest.mark.parametrize("steps", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_each_snapshot_of_500_arrays_is_of_its_step(gpus: Gpus, standin: StandIn, steps: int):
    """Every bit of the slot, beside numpy's model of it: each step counts up each element's bits."""
    tree = state(0, arrays=493, rows=4)  # and seven others
    model, stager, plan, slots = Model(describe({"state": tree}), tree), GpuStager(), None, list[Bytes]()
    detach = None
    for number in range(steps):
        described = describe({"state": tree}, previous=plan)
        if plan is None:
            foresee(described, stager)
            stager.prepare()
            slots = [slot(described) for _ in range(2)]
            detach = attached(stager, *slots)
        plan, pages = described.plan, slots[number % 2]
        held = hold(described, stager)
        tree = count_up(tree)
        copy(held, pages)
        assert np.array_equal(pages, model.slot), (number, model.names_of(np.flatnonzero(pages != model.slot)))
        model.count_up()
    assert standin.calls(OFF) >= steps and not gpus.lost and not standin.unregistered_copies
    assert detach is not None
    detach()


def test_without_the_copies_on_the_device_snapshots_are_torn(gpus: Gpus, monkeypatch: pytest.MonkeyPatch):
    """The test above must be able to fail."""

    def take(self: Any, group: Any, arrays: Any) -> Any:
        own = [arrays[member.index] for member in group.members]
        if any(len(member.parts) > 1 for member in group.members):
            return copies(self, group, arrays)
        return device_copies.Copied(group, own, [member.places[0] for member in group.members]), []

    copies = device_copies.CopyPrograms.copy
    monkeypatch.setattr(device_copies.CopyPrograms, "copy", take)
    monkeypatch.setattr(jax, "block_until_ready", lambda _: None)  # they are donated, which it would refuse
    pointers: dict[int, int] = {}
    tree = state(0)
    jax.tree.map(lambda a: a.block_until_ready(), tree)
    stager = GpuStager()
    described, expected = describe({"state": tree}), values(tree)
    held = hold(described, stager)
    arrays = [array for one in list(gpus._copies) for array in one.arrays]
    pointers = {id(array): array.unsafe_buffer_pointer() for array in arrays}
    tree = step(tree)
    jax.tree.map(lambda a: a.block_until_ready(), tree)
    monkeypatch.setattr(Gpus, "_queue", lambda _, stream, some, data: [_queue(stream, one, data, pointers) for one in some])
    assert wrong(described, held, slot(described), expected)


def _queue(stream: Any, one: Any, data: Any, pointers: dict[int, int]) -> Any:
    for array, place in zip(one.arrays, one.places, strict=True):
        stream.off(pointers[id(array)], data[place.offset : place.offset + place.nbytes])
    return stream.mark()


def test_nothing_is_compiled_on_the_training_thread_after_the_first_step(gpus: Gpus, standin: StandIn):
    """A whole manager, whose state grows once: what it needs is compiled behind the training."""
    compiled: list[str] = []

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append("training" if threading.get_ident() in training else "behind")

    def script(rank: Any) -> None:
        tree = {name: array for name, array in state(0).items() if name not in ("a8", "keys")}
        more = jax.block_until_ready(jax.device_put(tree["large"], tree["large"].sharding, may_alias=False))
        manager = rank.begin(jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), tree))
        for number in range(1, 16):
            tree = step(tree)
            manager.save(number, {**tree, "more still": more} if number > 8 else tree)
            training.add(threading.get_ident())
            for _ in range(50):
                rank.rest(0.01)
        manager.close()

    training = set[int]()
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        with World(5, ranks=1, nodes=1, save_every_steps=5, snapshot_every_steps=1) as world:
            world.play(script, 1)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert "training" not in compiled and "behind" in compiled
    assert standin.calls(OFF) and not gpus.lost


KINDS = {"off": [OFF], "event": [EVENT], "wait": [WAIT], "any": list(range(OTHER + 1))}


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "through the ring"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_call_may_fail_and_the_snapshot_is_whole(
    gpus: Gpus, standin: StandIn, kind: str, registered: bool, caplog: pytest.LogCaptureFixture
):
    """At the n-th call for each n. The snapshot comes by JAX then, and so do all after it; it is said once."""
    tree = state(0, arrays=4)
    stager, plan = ready(tree)
    described, expected = describe({"state": tree}, previous=plan), values(tree)
    pages = slot(described)
    detach = attached(stager, pages) if registered else None
    assert not wrong(described, hold(described, stager), pages, expected)  # streams and ring are made
    before = sum(map(standin.calls, KINDS[kind]))
    assert not wrong(described, hold(described, stager), pages, expected)
    calls, faults = sum(map(standin.calls, KINDS[kind])) - before, 0
    for after in range(0, calls, max(1, calls // 25)):
        caplog.clear()
        pages[:] = 0xAB
        gpus.lost, gpus._said = "", set()
        standin.fail(*KINDS[kind], after=after)
        assert not wrong(described, hold(described, stager), pages, expected), after
        standin.fail(times=0)
        if not gpus.lost:
            continue  # buffers were free sooner, so there were fewer calls
        faults += 1
        off = standin.calls(OFF)
        assert not wrong(described, hold(described, stager), pages, expected)
        assert standin.calls(OFF) == off
        assert [record.getMessage()[:44] for record in caplog.records] == ["snapshots no longer leave the GPU beside the"]
    assert faults >= min(4, calls // 2)
    assert not any(map(gpus.held_bytes, jax.devices()))
    if detach is not None:
        detach()


def test_while_a_copy_may_be_on_its_way_nothing_is_written_to_a_slot(gpus: Gpus, standin: StandIn):
    """The driver can't even say whether it has ended: neither that snapshot nor a later one is taken, until it can."""
    tree = state(0, arrays=4)
    stager, plan = ready(tree)
    described, expected = describe({"state": tree}, previous=plan), values(tree)
    pages = slot(described)
    detach = attached(stager, pages)
    standin.hold(True)
    held = hold(described, stager)
    standin.fail(WAIT, SYNC, times=1 << 30)
    with pytest.raises(RaystateError, match="can't say whether a copy into a slot has ended"):
        copy(held, pages)
    held.release()
    later = hold(described, stager)
    with pytest.raises(RaystateError, match="nothing is written to the slots"):
        copy(later, pages)
    before = standin.registered_bytes
    detach()
    assert standin.registered_bytes == before  # a copy may still go there
    standin.fail(times=0)
    standin.hold(False)
    assert not wrong(described, hold(described, stager), pages, expected)


@pytest.mark.parametrize("room", ["all", "some", "none"])
def test_room_is_what_the_device_says(
    gpus: Gpus, standin: StandIn, monkeypatch: pytest.MonkeyPatch, room: str, caplog: pytest.LogCaptureFixture
):
    """Without room for all, a save that has its slot copies in turns, and waits; a held one, or without any room, is copied by JAX."""
    monkeypatch.setattr(device_copies, "GROUP_BYTES", 1 << 18)
    tree = state(0)
    stager, plan = ready(tree)
    groups = stager._groups
    assert groups is not None
    bytes_by = {"all": groups.needs, "some": {d: 2 * n for d, n in groups.most.items()}, "none": dict.fromkeys(groups.needs, 0)}
    monkeypatch.setattr(Gpus, "_room", lambda self, device: bytes_by[room][device] - self.held_bytes(device))
    for has_slot in (True, False):
        described, expected = describe({"state": tree}, previous=plan), values(tree)
        pages, before = slot(described), standin.calls(OFF)
        held = hold(described, stager, into=(lambda pages=pages: pages) if has_slot else None)
        at_once = standin.calls(OFF) > before
        tree = step(tree)
        jax.block_until_ready(tree)
        assert not wrong(described, held, pages, expected)
        assert at_once == (room == "some" and has_slot)
        assert (standin.calls(OFF) > before) == (room == "all" or at_once)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == {"all": 0, "some": 2, "none": 1}[room] and not gpus.lost
    assert not any(map(gpus.held_bytes, jax.devices()))


class Device:
    """Says how full it is."""

    def __init__(self) -> None:
        self.peak = 0

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 80 << 30, "peak_bytes_in_use": self.peak << 30}

    def copies(self, gpus: Gpus, gib: int) -> device_copies.Copied:
        one = device_copies.Copied(device_copies.CopyGroup(self, (), gib << 30, None), [jax.numpy.zeros(1)], [])
        gpus.add(one)
        return one

    def room(self, gpus: Gpus) -> int:
        """In GiB, of which 2 % are left alone."""
        return next(gib for gib in range(80, -200, -1) if gpus.has_room({self: gib << 30}))


def test_room_counts_the_peak_of_the_training_without_our_copies(gpus: Gpus):
    device = Device()
    device.peak = 30
    assert device.room(gpus) == 48
    held = device.copies(gpus, 40)
    assert device.room(gpus) == 8
    device.peak = 70  # beside the copies
    gpus.drop(held)
    assert device.room(gpus) == 48
    held = device.copies(gpus, 40)
    device.peak = 79  # 39 of its own since then
    gpus.drop(held)
    assert device.room(gpus) == 39
    interrupted = device.copies(gpus, 30)
    assert device.room(gpus) == 9
    del interrupted
    assert device.room(gpus) == 39


def test_room_counts_a_peak_that_came_when_no_copies_were_there(gpus: Gpus):
    """The first save comes before the first step, and an evaluation needs more than a step: neither was beside copies of ours."""
    device = Device()
    device.peak = 24
    assert device.room(gpus) == 54
    gpus.drop(device.copies(gpus, 24))
    device.peak = 58
    assert device.room(gpus) == 20, "not 44"


def test_room_counts_what_has_grown_while_some_copies_had_gone(gpus: Gpus):
    device = Device()
    device.peak = 10
    assert device.room(gpus) == 68
    first, last = device.copies(gpus, 20), device.copies(gpus, 10)
    device.peak = 42
    gpus.drop(first)  # 12 of its own
    device.peak = 60
    gpus.drop(last)
    assert device.room(gpus) == 28, "50 of its own"


@pytest.mark.parametrize("some", [0, 1 << 20])
def test_slots_that_are_not_registered_are_reached_through_the_ring(
    gpus: Gpus, standin: StandIn, some: int, caplog: pytest.LogCaptureFixture
):
    tree = state(0)
    stager, plan = ready(tree)
    described, expected = describe({"state": tree}, previous=plan), values(tree)
    pages = slot(described)
    standin.let_register(some)
    detach = attached(stager, pages)
    standin.let_register(1 << 40)
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == ["the driver does not register all of the slots"]
    assert not wrong(described, hold(described, stager), pages, expected)
    assert standin.calls(OFF) and not standin.unregistered_copies and not gpus.lost
    detach()


def test_where_not_even_a_buffer_can_be_registered_jax_copies(gpus: Gpus, standin: StandIn, caplog: pytest.LogCaptureFixture):
    tree = state(0)
    stager, plan = ready(tree)
    described, expected = describe({"state": tree}, previous=plan), values(tree)
    pages = slot(described)
    standin.let_register(0)
    detach = attached(stager, pages)
    for _ in range(2):
        assert not wrong(described, hold(described, stager), pages, expected)
    said = [record.getMessage()[:40] for record in caplog.records]
    assert said == ["the driver does not register all of the ", "snapshots no longer leave the GPU beside"]
    assert not standin.calls(OFF) and not standin.registered_bytes and not any(map(gpus.held_bytes, jax.devices()))
    detach()


def test_copies_may_begin_while_slots_are_being_registered(gpus: Gpus, standin: StandIn):
    tree = state(0)
    stager, plan = ready(tree)
    slots = [slot(describe({"state": tree})) for _ in range(3)]
    for _ in range(4):
        described, expected = describe({"state": tree}, previous=plan), values(tree)
        detach = stager.attach(slots)
        for pages in slots:
            assert not wrong(described, hold(described, stager), pages, expected)
        detach()
        join("raystate-register")
        tree = step(tree)
    assert not standin.unregistered_copies and not gpus.lost


def test_a_copy_that_the_device_refuses_is_made_by_jax(gpus: Gpus, monkeypatch: pytest.MonkeyPatch):
    tree = state(0)
    stager, plan = ready(tree)

    def full(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(device_copies.CopyPrograms, "copy", full)
    described, expected = describe({"state": tree}, previous=plan), values(tree)
    assert not wrong(described, hold(described, stager), slot(described), expected)
    assert "RESOURCE_EXHAUSTED" in gpus.lost and not any(map(gpus.held_bytes, jax.devices()))


def test_errors_of_the_computation_pass_and_leave_nothing_under_way(gpus: Gpus, standin: StandIn, monkeypatch: pytest.MonkeyPatch):
    tree = state(0)
    stager, plan = ready(tree)
    described = describe({"state": tree}, previous=plan)
    pages = slot(described)
    detach = attached(stager, pages)
    left = 2

    def block(arrays: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise jax.errors.JaxRuntimeError("INTERNAL: the step failed")
        return arrays

    held = hold(described, stager)
    monkeypatch.setattr(jax, "block_until_ready", block)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the step failed"):
        copy(held, pages)
    assert standin.calls(SYNC) and not gpus.lost and not any(map(gpus.held_bytes, jax.devices()))
    detach()


def test_slots_that_stay_registered_are_the_last_that_the_driver_writes_to(
    gpus: Gpus, standin: StandIn, monkeypatch: pytest.MonkeyPatch
):
    """Others may come to lie at their addresses, where the driver still has the pages of before."""
    tree = state(0, arrays=4)
    stager, plan = ready(tree)
    described, expected = describe({"state": tree}, previous=plan), values(tree)
    pages = slot(described)
    detach = attached(stager, pages)
    held, later = hold(described, stager), hold(described, stager)
    with monkeypatch.context() as patched:

        def block(_: Any) -> Any:
            raise jax.errors.JaxRuntimeError("INTERNAL: the step failed")

        patched.setattr(jax, "block_until_ready", block)
        standin.fail(SYNC, times=1 << 30)
        with pytest.raises(RaystateError, match="can't say whether a copy into a slot has ended"):
            copy(held, pages)
    detach()
    assert standin.registered_bytes
    standin.fail(times=0)
    before = standin.calls(OFF)
    assert not wrong(described, later, pages, expected)
    assert standin.calls(OFF) == before and gpus.lost


def test_a_loop_that_was_lost_registers_nothing_more(gpus: Gpus, standin: StandIn):
    gpus.lose("a fault")
    stager = GpuStager()
    detach = stager.attach([slot(describe({"state": state(0)}))])
    detach()
    join("raystate-register")
    assert standin.calls(REGISTER) == 0 and gpu.GPUS is gpus
