"""Entries of the log stay small however many steps are kept: they are changes to a base, and the newest entry and its base are enough."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raystate.core.formats import entries
from raystate.core.formats.codec import seal, unseal
from raystate.core.formats.entries import NO_BASE, Base, LiveStep, LogEntry, WrittenEntry, plan
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError, StorageError
from raystate.core.formats.log import claim_entry, key_of, next_entry
from raystate.inspection.verification import verify_log
from raystate.storage import ObjectMissingError, RunLog, Storage, StorageWrapper, collect_garbage, find_garbage
from raystate.storage.names import BASES, LOG, base_name, base_number, log_name
from raystate.testing.storage import DiedError, DyingAt, Failing, LosingAnswers, Recording
from tests.storage.backends import BACKENDS

SEED = int(os.environ["RAYSTATE_SEED"])
SMALL = 930  # bytes of an entry: half a dozen steps


# A base is an object like others, and the contract suite holds every back end to the same. A hundred entries take seconds in a bucket.
@pytest.fixture(
    params=[name if name in ("directory", "memory") else pytest.param(name, marks=pytest.mark.long) for name in sorted(BACKENDS)]
)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    with BACKENDS[request.param](tmp_path) as storage:
        yield storage


@pytest.fixture
def small_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "ENTRY_BYTES", SMALL)


def live(step: int, attempt: int = 1) -> LiveStep:
    metrics = {"loss": 1 / (step + 1), "accuracy": step / 1e5}
    return LiveStep(
        step=step, save=f"a{attempt}k{step}", metrics=metrics, time_s=1.7e9 + 60 * step, lineage=f"{attempt}.0.0123abcd"
    )


def following(tail: LogEntry, step: int, *retired: int) -> LogEntry:
    """The commit of a step by the tail's own attempt, everything else being carried out."""
    carried = [key_of(intent) for intent in tail.intents]
    retires = [(one, False, "enough are kept") for one in retired]
    return next_entry(
        tail, attempt=tail.attempt, writer=tail.writer, carried=carried, dead=range(tail.attempt), commit=live(step, tail.attempt),
        retires=retires, reason="due",
    )  # fmt: skip


def claim(log: RunLog, writer: str = "w") -> LogEntry:
    return log.claim(lambda tail: claim_entry(tail, writer, "lm"), timeout_s=30.0)


def commit(log: RunLog, tail: LogEntry, *steps: int) -> LogEntry:
    for step in steps:
        tail = following(tail, step)
        assert log.append(tail).outcome == "ok"
    return tail


def trained(storage: Storage, steps: int = 40) -> LogEntry:
    log = RunLog(storage)
    return commit(log, claim(log), *range(1, steps + 1))


def bases(storage: Storage) -> list[str]:
    return [info.name for info in storage.list(BASES)]


def named_base(storage: Storage, seq: int) -> str:
    return base_name(RunLog(storage).read_header(seq).base)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_kept_steps(tmp_path):
    """The last of ten thousand; all of them with RAYSTATE_ALL."""
    from raystate.storage import open_storage

    kept, written = 10_000, 10_000 if os.environ.get("RAYSTATE_ALL") else 300
    storage = open_storage(tmp_path / "run")
    log = RunLog(storage)
    first = claim(log)
    tail = dataclasses.replace(first, seq=2, kind="commit", live=tuple(map(live, range(kept - written))))
    assert log.append(tail).outcome == "ok"
    recording = Recording(storage)
    log, sizes, began_s = RunLog(recording), list[int](), time.monotonic()
    assert log.tail() == tail
    for step in range(kept - written, kept):
        recording.operations.clear()
        tail = commit(log, tail, step)
        sizes.append(storage.stat(log_name(tail.seq)).size)
        creates = [name for operation, name in recording.operations if operation == "create"]
        assert len([name for name in creates if base_number(name)]) == len(creates) - 1 <= 1
        others = {operation for operation, name in recording.operations if operation != "create" and not base_number(name)}
        assert step == kept - written or not others, "a commit costs one create"
    took_s = time.monotonic() - began_s
    assert len(tail.live) == kept
    assert max(sizes) <= 16 << 10
    found = bases(storage)
    assert len(found) == 2
    base_bytes = [storage.stat(name).size for name in found]
    entry_bytes = sum(info.size for info in storage.list(LOG))
    print(  # noqa: T201
        f"{kept} live steps: entries of {min(sizes)} to {max(sizes)} bytes, {entry_bytes} bytes in {tail.seq} entries, "
        f"bases of {base_bytes} bytes, {took_s / written * 1e3:.1f} ms for an entry; whole it has {len(tail.to_json())} bytes"
    )

    recording.operations.clear()
    assert RunLog(recording).tail() == tail
    assert recording.count("read") == 2
    assert recording.count("exists") <= 2 * math.log2(tail.seq) + 4
    assert recording.count("list") == 0

    log = RunLog(recording)
    assert log.tail() == tail
    recording.operations.clear()
    claimed = claim(RunLog(storage), "next")
    assert log.tail() == claimed
    assert [name for operation, name in recording.operations if operation == "read"] == [log_name(claimed.seq)], "the base is known"


def test_few_steps_need_no_base(storage: Storage):
    trained(storage, 20)
    assert bases(storage) == []
    assert all(RunLog(storage).read_header(seq).base == "" for seq in range(1, 22))


def test_one_entry_that_changes_more_than_fits(storage: Storage):
    """Adopting, or giving up, thousands of steps at once."""
    log = RunLog(storage)
    first = log.claim(lambda tail: claim_entry(tail, "w", "lm", range(3000)))
    assert len(first.live) == 3000
    rollback = following(first, 9999, *range(1, 3000))
    assert log.append(rollback).outcome == "ok"
    assert RunLog(storage).tail() == rollback
    assert (len(rollback.live), len(rollback.intents)) == (2, 3000)
    closed = following(rollback, 10_000)
    assert log.append(closed).outcome == "ok"
    assert RunLog(storage).tail() == closed
    assert [storage.stat(log_name(seq)).size <= entries.ENTRY_BYTES for seq in (1, 2, 3)] == [True] * 3


# ---------------------------------------------------------------- what is read is what was written


@pytest.mark.parametrize("seed", range(SEED, SEED + 20))
def test_any_sequence_of_entries_is_read_as_it_was_written(seed: int):
    """Commits, retirements, claims and closing entries, in one place and in another, with limits that need a new base often or seldom."""
    drawn = random.Random(seed)
    limit = drawn.choice([0, 300, 600, 2000, 10_000])
    previous: LogEntry | None = None
    base, kept = NO_BASE, {"": NO_BASE}
    for step in range(100):
        if previous is None or drawn.random() < 0.1:
            adopted = range(step * 1000, step * 1000 + drawn.choice([0, 0, 1, 30]))
            dead = range(drawn.choice([0, 0, 0 if previous is None else previous.attempt + 1]))
            entry = claim_entry(previous, f"w{step}", "lm", adopted, dead=dead)
        else:
            steps = [one.step for one in previous.live]
            gone = drawn.sample(steps, min(len(steps), drawn.choice([0, 0, 1, 2, 40])))
            carried = [key_of(one) for one in previous.intents if drawn.random() < 0.7]
            new = drawn.choice([None, live(10**6 + step), dataclasses.replace(live(10**6 + step), metrics={"loss": math.nan})])
            entry = next_entry(
                previous, attempt=previous.attempt, writer=previous.writer, carried=carried, dead=(), commit=new,
                retires=[(one, drawn.random() < 0.5, "r" * drawn.choice([0, 60])) for one in gone], reason="due",
            )  # fmt: skip
        planned = plan(entry, previous, base, entry_bytes=limit)
        assert planned == plan(entry, previous, base, entry_bytes=limit), "a second try writes the same"
        if planned.base_data is not None:
            kept[planned.base.name] = Base.parse(planned.base.name, planned.base_data)
            assert planned.base.before == base.name
        written = WrittenEntry.parse(planned.data)
        assert written.entry(kept[written.base]).to_json() == entry.to_json()  # NaN is not equal to itself
        assert LogEntry.from_json(entry.to_json()).to_json() == entry.to_json()
        assert (written.seq, written.attempt, written.writer, written.kind) == (entry.seq, entry.attempt, entry.writer, entry.kind)
        base, previous = planned.base, entry


@pytest.mark.parametrize("number", [entries.FORMAT - 1, entries.FORMAT + 1])
def test_an_entry_of_another_version_is_no_damage(storage: Storage, small_entries: None, number: int):
    """One of an older version was called damaged: its fields are others."""
    tail = trained(storage)
    header = unseal(storage.read(log_name(tail.seq)))
    storage.create(log_name(tail.seq + 1), seal({**header, "seq": tail.seq + 1, "format": number, "anything": "else"}))
    with pytest.raises(
        ConfigError, match=rf"another version of raystate \(log format {number}.*: go on with that version, or copy"
    ):
        RunLog(storage).tail()


# ---------------------------------------------------------------- who comes between


class Beside(StorageWrapper):
    """Lets somebody do something before the first operations of a kind on names of a kind."""

    def __init__(self, inner: Storage, operation: str, part: str, act: Callable[[], None], times: int = 1):
        super().__init__(inner)
        self.moment, self.act, self.times = (operation, part), act, times

    def before(self, operation: str, name: str) -> None:
        if operation == self.moment[0] and self.moment[1] in name and self.times > 0:
            self.times -= 1
            self.act()


def test_a_reader_between_the_tail_and_its_base(storage: Storage, small_entries: None):
    """Other processes write new bases, and remove the old ones, after it has read the tail: it reads the new tail."""
    log = RunLog(storage)
    tail = [claim(log)]
    tail.append(commit(log, tail[-1], *range(100, 130)))

    def go_on() -> None:
        begin = 1000 * len(tail)
        tail.append(commit(log, tail[-1], *range(begin, begin + 30)))

    beside = Beside(storage, "read", BASES, go_on, times=3)
    assert RunLog(beside).tail() == tail[-1]
    assert len(tail) == 5, "each time it came too late"


def test_a_base_is_kept_until_two_newer_ones_are_there(storage: Storage, small_entries: None):
    """So a reader has time, and the log outlives the loss of its very last entries."""
    log = RunLog(storage)
    tail = claim(log)
    for step in range(1, 60):
        tail = commit(log, tail, step)
        header = log.read_header(tail.seq)
        if header.base:
            base = Base.parse(header.base, storage.read(base_name(header.base)))
            assert bases(storage) == sorted(base_name(name) for name in (base.before, base.name) if name)
            collect_garbage(storage)
            assert bases(storage) == sorted(base_name(name) for name in (base.before, base.name) if name)
    assert len(bases(storage)) == 2


def test_the_log_goes_on_after_losing_entries_across_a_base(storage: Storage, small_entries: None):
    tail = trained(storage)
    newest = named_base(storage, tail.seq)
    while named_base(storage, tail.seq) == newest:
        storage.delete(log_name(tail.seq))
        tail = dataclasses.replace(tail, seq=tail.seq - 1)
    entry = claim(RunLog(storage))
    assert entry.seq == tail.seq + 1
    assert len(entry.live) == tail.seq - 1
    collect_garbage(storage)
    assert RunLog(storage).tail() == entry


def test_whoever_is_overtaken_leaves_a_base_that_is_garbage(storage: Storage, small_entries: None):
    old = RunLog(storage)
    mine = claim(old, "old")
    while named_base(storage, mine.seq) == base_name("") or old.append(following(mine, 500 + mine.seq)).outcome == "ok":
        mine = old.tail()
        assert mine is not None
        planned = plan(following(mine, 500 + mine.seq), mine, old.newest().base)  # pyright: ignore[reportOptionalMemberAccess]
        if planned.base_data is not None and planned.base.before:
            break
        mine = commit(old, mine, 500 + mine.seq)
    before = bases(storage)
    theirs: list[LogEntry] = []
    racing = RunLog(Beside(storage, "create", LOG, lambda: theirs.append(claim(RunLog(storage), "new"))))
    assert racing.tail() == mine
    assert racing.append(following(mine, 999)).outcome == "taken"
    assert RunLog(storage).tail() == theirs[0]
    left = set(bases(storage)) - set(before) - {named_base(storage, theirs[0].seq)}
    assert len(left) == 1
    assert {one.name for one in find_garbage(storage)} >= left
    collect_garbage(storage)
    assert not left & set(bases(storage))
    assert RunLog(storage).tail() == theirs[0]


def test_a_base_that_an_entry_to_come_may_name_is_no_garbage(storage: Storage, small_entries: None):
    """Garbage is collected between the base and its entry."""
    tail = trained(storage)
    log = RunLog(Beside(storage, "create", LOG, lambda: collect_garbage(storage), times=1000))
    assert log.tail() == tail
    tail = commit(log, tail, *range(1000, 1040))
    assert RunLog(storage).tail() == tail


@pytest.mark.parametrize("after", [False, True])
def test_dying_anywhere_in_an_append_with_a_new_base(storage: Storage, small_entries: None, after: bool):
    tail = trained(storage, 20)
    found = 0
    for nth in range(12):
        log = RunLog(DyingAt(storage, 10**6, after=after))
        assert log.tail() == tail
        log._storage.left = nth  # pyright: ignore
        try:
            while True:
                tail = commit(log, tail, 1000 + tail.seq)
        except DiedError:
            pass
        newest = RunLog(storage).tail()
        assert newest is not None and newest.seq >= tail.seq
        tail = claim(RunLog(storage), f"after{nth}")
        assert tail.live == newest.live
        collect_garbage(storage)
        assert RunLog(storage).tail() == tail
        assert len(bases(storage)) <= 2
        found += 1
    assert found == 12


def test_lost_answers_to_every_create(storage: Storage, small_entries: None):
    log = RunLog(LosingAnswers(storage, times=10**6))
    tail = commit(log, claim(log), *range(1, 40))
    assert RunLog(storage).tail() == tail
    assert log.append(tail).outcome == "ok", "and once more"


def test_a_failed_base_fails_the_append_and_the_same_append_settles_it(storage: Storage, small_entries: None):
    tail = trained(storage)
    failing = Failing(storage, "create")
    log = RunLog(failing)
    assert log.tail() == tail
    outcomes: list[str] = []
    for step in range(1000, 1030):
        entry = following(tail, step)
        failing.on = True
        outcomes.append(log.append(entry).outcome)
        failing.on = False
        assert log.append(entry).outcome == "ok"
        tail = entry
    assert outcomes == ["failed"] * 30
    assert RunLog(storage).tail() == tail


def test_a_second_try_when_the_log_has_gone_on(storage: Storage, small_entries: None):
    """Its answer was lost, and by now so many newer bases are there that its own predecessor's is gone."""
    log = RunLog(storage)
    tail = commit(log, claim(log), *range(1, 30))
    entry = following(tail, 30)
    failing = Failing(LosingAnswers(storage, only="log/"), "read")
    failing.before = lambda operation, name: Failing.before(failing, operation, name) if name == log_name(entry.seq) else None
    late = RunLog(failing)
    late._remember(log.newest())  # pyright: ignore
    assert late.append(entry).outcome == "failed"
    newest = claim(RunLog(storage), "next")
    newest = commit(RunLog(storage), newest, *range(100, 140))
    collect_garbage(storage)
    with pytest.raises(ObjectMissingError, match="base of log entry"):
        RunLog(storage).read(tail.seq)
    failing.on = False
    assert late.append(entry).outcome == "ok", "it is in the log"
    fresh = RunLog(storage).append(dataclasses.replace(entry, writer="another"))
    assert (fresh.outcome, fresh.tail) == ("taken", newest)


# ---------------------------------------------------------------- damage


@pytest.fixture
def damaged(storage: Storage, small_entries: None) -> tuple[Storage, str, bytes]:
    """A log, its newest entry's base, and the base's bytes."""
    tail = trained(storage)
    name = named_base(storage, tail.seq)
    return storage, name, storage.read(name)


def replace(storage: Storage, name: str, data: bytes | None) -> None:
    storage.delete(name)
    if data is not None:
        storage.create(name, data)


@pytest.mark.parametrize("kind", ["missing", "flip", "truncate", "empty", "append", "another base"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with the one before"])
def test_a_damaged_base_is_rebuilt_or_named(damaged: tuple[Storage, str, bytes], kind: str, alone: bool):
    """From the entry before it. If that one's base is damaged, too, nothing is appended."""
    storage, name, data = damaged
    flipped = bytearray(data)
    flipped[random.Random(SEED).randrange(len(data))] ^= 4
    (other,) = set(bases(storage)) - {name}
    instead = {
        "missing": None, "flip": bytes(flipped), "truncate": data[:-7], "empty": b"", "append": data + b"\n",
        "another base": storage.read(other),
    }[kind]  # fmt: skip
    tail = RunLog(storage).tail()
    replace(storage, name, instead)
    assert name in {one.name.removeprefix(f"{storage.url}/") for one in verify_log(storage)}
    if alone:
        assert RunLog(storage).tail() == tail
        goes_on = claim(RunLog(storage))
        goes_on = commit(RunLog(storage), goes_on, *range(1000, 1030))
        collect_garbage(storage)
        assert RunLog(storage).tail() == goes_on
        assert name not in bases(storage)
        return
    replace(storage, other, b"something else")
    before = [info.name for info in storage.list()]
    with pytest.raises(CorruptCheckpointError, match=name):
        RunLog(storage).tail()
    with pytest.raises(CorruptCheckpointError, match=name):
        claim(RunLog(storage))
    with pytest.raises(CorruptCheckpointError, match=name):
        find_garbage(storage)
    assert [info.name for info in storage.list()] == before


def test_the_first_base_is_rebuilt_from_an_entry_without_one(storage: Storage, small_entries: None):
    tail = trained(storage, 9)
    (only,) = bases(storage)
    storage.delete(only)
    assert RunLog(storage).tail() == tail


def test_damage_to_the_base_before_hurts_nobody(damaged: tuple[Storage, str, bytes]):
    storage, name, _ = damaged
    (other,) = set(bases(storage)) - {name}
    storage.delete(other)
    tail = claim(RunLog(storage))
    tail = commit(RunLog(storage), tail, *range(1000, 1030))
    assert RunLog(storage).tail() == tail


def test_a_base_out_of_service_is_no_damage(storage: Storage, small_entries: None):
    tail = trained(storage)

    class Down(StorageWrapper):
        def before(self, operation: str, name: str) -> None:
            if operation == "read" and base_number(name):
                raise StorageError("read failed: 503", operation=operation, path=name)

    with pytest.raises(StorageError, match="503"):
        RunLog(Down(storage)).tail()
    assert RunLog(storage).tail() == tail
