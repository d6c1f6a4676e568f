"""Damage of one kind each, as it was found, or as `raystate verify` has to find it."""

from __future__ import annotations

import json
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raystate.arrays.items import set_iterators
from raystate.core.formats.errors import CorruptCheckpointError, ReferenceMismatchError
from raystate.core.formats.tree import ArraySpec, LeafSpec
from raystate.inspection import verification
from raystate.observe.ledger.lines import EVENTS, LoggedRecovery
from raystate.observe.ledger.reader import read_ledger
from raystate.orbax.array_reads import read_boxes
from raystate.storage import open_storage
from raystate.storage.names import GUARD, LOG, PACKAGES
from tests.damage.a_run import STEPS, Counting
from tests.damage.damages import FIRST, Copy, Damage, Kind, is_data
from tests.damage.judging import NEWEST, Flat, restore, step_in

# ---------------------------------------------------------------- objects that changed places


def exchanges(copy: Copy) -> list[Damage]:
    """Every pair of data objects of the same size."""
    pairs = [
        (one, other) for one in copy.names if is_data(one) for other in copy.exchangeable(one) if is_data(other) and one < other
    ]
    return [copy.exchange(*pair) for pair in pairs]


@pytest.mark.xfail(strict=True, reason="a chunk takes its own checksum along; only verify reads whole objects")
def test_a_restore_after_an_exchange_is_right_or_says_so(copy: Copy, expected: dict[int, Flat]):
    damages = exchanges(copy)
    assert damages
    for damage in damages:
        with copy.damaged(damage) as root:
            outcomes = [restore(root, step_in(name), expected) for name in damage.names]
        assert {outcome.kind for outcome in outcomes} <= {"right", "said"}, f"{damage}: {outcomes}"


def test_verify_reports_objects_that_changed_places(copy: Copy):
    damages = exchanges(copy)
    assert damages
    for damage in damages:
        with copy.damaged(damage) as root:
            storage = open_storage(root)
            bad = {one.name for name in damage.names for one in verification.verify_step(storage, step_in(name) or 0).bad}
        assert bad == {*damage.names}, damage


# ---------------------------------------------------------------- what verify must see beside the objects of a step


def test_verify_reports_a_package_that_is_gone(copy: Copy):
    package = package_of(copy, NEWEST)
    with copy.damaged(Damage(seed=0, kind="delete", name=package)) as root:
        storage = open_storage(root)
        assert package in {one.name for one in (*verification.verify_step(storage, NEWEST).bad, *verification.verify_log(storage))}


@pytest.mark.parametrize("kind", ["flip", "delete"])
def test_verify_reports_every_entry_of_the_log_and_its_guard(copy: Copy, kind: Kind):
    entries = [name for name in copy.names if name.startswith(f"{LOG}/")]
    # Nothing tells of a lost newest entry that changed nothing; what it committed is looked for below. Of the guard only that it is
    # there matters.
    for name in entries if kind == "flip" else [GUARD, *entries[:-1]]:
        with copy.damaged(copy.draw(FIRST, kinds=[kind], among=[name])) as root:
            assert name in {one.name for one in verification.verify_log(open_storage(root))}


def test_verify_reports_steps_that_the_log_has_lost(copy: Copy):
    lost = [name for name in copy.names if name.startswith(f"{LOG}/")][-2:]  # the newest commit, and the entry that closed it
    for name in lost:
        (copy.root / name).unlink()
    assert any(f"{NEWEST}" in one.name for one in verification.verify_log(open_storage(copy.root)))


# ---------------------------------------------------------------- errors that say what it is


def test_damaged_nodes_are_not_taken_for_an_outage(copy: Copy, expected: dict[int, Flat]):
    """After damage a run goes back to an older step; after an outage it waits for storage, in vain."""
    [nodes] = [name for name in copy.names if name.startswith(f"{NEWEST}/notes/d/")]
    for seed in range(FIRST, FIRST + 60):
        damage = copy.draw(seed, kinds=["flip"], among=[nodes])
        with copy.damaged(damage) as root:
            outcome = restore(root, NEWEST, expected)
        assert outcome.kind == "right" or isinstance(outcome.error, CorruptCheckpointError), f"{damage}: {outcome}"


def test_the_package_of_another_step_is_a_damaged_one(copy: Copy, expected: dict[int, Flat]):
    older, newest = (copy.root / package_of(copy, step) for step in (STEPS[0], NEWEST))
    newest.unlink()
    newest.write_bytes(older.read_bytes())
    assert restore(copy.root, NEWEST, expected).kind == "right"  # from the small files, as without any package
    assert verification.verify_step(open_storage(copy.root), NEWEST).bad


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Reading:
    """A future of TensorStore; also the array that it reads from."""

    fails: bool

    def __getitem__(self, box: Any) -> Reading:
        return self

    def read(self, order: str) -> Reading:
        future = Reading(fails=self.fails)
        started.append(weakref.ref(future))
        return future

    def result(self, timeout: float) -> Any:
        if self.fails:
            raise ValueError("NOT_FOUND: a chunk")
        return np.zeros(1, np.uint8)

    def cancel(self) -> bool:
        raise AssertionError("it holds Python's lock while it waits for a thread that wants that lock")


started: list[weakref.ref[Reading]] = []


def test_reads_that_nobody_wants_any_more_are_dropped_and_not_cancelled():
    """Seen with damage that lets many reads fail at once. No deadline helps: no line of Python is executed any more."""
    leaf = LeafSpec(path=("x",), kind="array", array=ArraySpec(shape=(1,), dtype="uint8", chunk=(1,)))
    arrays: Any = {index: (leaf, Reading(fails=index == 1)) for index in range(4)}
    with pytest.raises(CorruptCheckpointError) as caught:
        read_boxes(
            arrays,
            [(index, (0,), (1,)) for index in arrays],
            what=lambda leaf: "reading",
            facts=lambda leaf: {},
            on_bytes=lambda nbytes: None,
        )
    assert caught.value.__cause__ is not None  # whose traceback holds the frames
    assert [future() is None for future in started] == [True, False, True, True], "only the one that failed is still referred to"


def package_of(copy: Copy, step: int) -> str:
    [package] = [name for name in copy.names if name.startswith(f"{PACKAGES}/{step}.")]
    return package


def test_a_damaged_iterator_state_names_its_item():
    """Of a step without a package: it may as well be another iterator's."""
    for damaged in (b'{"next": 4', b'{"next": \xff}'):
        with pytest.raises(ReferenceMismatchError, match=r"'data'.* it is damaged"):
            set_iterators({"data": Counting()}, {"data": {0: damaged}}, old_world=1, world=1, process_index=0)


def test_a_damaged_event_does_not_keep_the_others_from_the_report(tmp_path: Path):
    storage = open_storage(tmp_path)
    recovery = LoggedRecovery(attempt=1, group="g", cause="killed", step=4, tier="memory", seconds=1.0, steps_repeated=0)
    fields = {name: getattr(recovery, name) for name in LoggedRecovery.__slots__}
    for number, data in enumerate(
        [b'{"kind": "reco', b"[]", b'{"kind": "recovery"}', json.dumps({"kind": "recovery", "time_s": 1.0, **fields}).encode()]
    ):
        storage.create(f"{EVENTS}/000001-{number:04d}.json", data)
    assert [one for _, one in read_ledger(storage).recoveries] == [recovery]
