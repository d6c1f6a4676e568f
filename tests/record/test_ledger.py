"""The ledger in storage: lines in batches, few and small objects, and readers that pass over what they can't read."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ledger import lines_of_steps
from raystate.core.formats.errors import StorageError
from raystate.observe.goodput import goodput
from raystate.observe.ledger import writer as writer_module
from raystate.observe.ledger.clocks import brought_together
from raystate.observe.ledger.lines import (
    EVENTS,
    KINDS,
    AttemptBegan,
    Dropped,
    GroupEnded,
    GroupJoined,
    HostChanged,
    Line,
    LoggedRecovery,
    LoggedSave,
    NewerError,
    Noted,
    Noticed,
    Sampled,
    Slowed,
    batch_in,
    batch_name,
    batch_of,
    line_of,
    noted_in,
)
from raystate.observe.ledger.reader import read_ledger
from raystate.observe.ledger.thinning import thinned
from raystate.observe.ledger.writer import MOST_OBJECTS, LedgerWriter
from raystate.observe.timeline import timeline_of
from raystate.storage import (
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    Storage,
    StorageWrapper,
    collect_garbage,
    open_storage,
)
from raystate.storage.base import Listing
from tests.patience import PATIENCE_S


class Counting(StorageWrapper):
    """Counts requests; it may fail, and it may wait."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.requests: Counter[str] = Counter()
        self.fails: Callable[[str, str], bool] = lambda operation, name: False
        self.goes_on = threading.Event()
        self.goes_on.set()

    def before(self, operation: str, name: str) -> None:
        self.goes_on.wait(PATIENCE_S)
        self.requests[operation] += 1
        if self.fails(operation, name):
            raise StorageError(f"{operation} {name} failed", operation=operation, path=name)


class Memory(Counting):
    """Objects in a dictionary: as far as a ledger goes."""

    def __init__(self) -> None:
        super().__init__(open_storage("/nowhere"))
        self.objects: dict[str, bytes] = {}

    def create(self, name: str, data: bytes) -> None:
        self.before("create", name)
        if name in self.objects:
            raise ObjectExistsError(f"{name} is there", operation="create", path=name)
        self.objects[name] = data

    def read(self, name: str) -> bytes:
        self.before("read", name)
        try:
            return self.objects[name]
        except KeyError:
            raise ObjectMissingError(f"{name} is not there", operation="read", path=name) from None

    def list(self, prefix: str = "", recursive: bool = True) -> Listing:
        self.before("list", prefix)
        return [ObjectInfo(name=name, size=len(data)) for name, data in sorted(self.objects.items()) if name.startswith(prefix)]

    def delete(self, name: str, generation: str | None = None) -> bool:
        self.before("delete", name)
        return self.objects.pop(name, None) is not None


@pytest.fixture
def storage() -> Memory:
    return Memory()


@pytest.fixture
def folder(tmp_path: Path) -> Counting:
    return Counting(open_storage(tmp_path / "run"))


def noted(n: int, what: Line | None = None, *, attempt: int = 1, t: float | None = None) -> Noted:
    return Noted(attempt, n, float(n) if t is None else t, what or AttemptBegan(reason=f"r{n}"))


def sample(step: int, group: str = "g") -> Sampled:
    spent = {"saves": step / 100, "restore": 1.0, "compilation": 2.0, "section:data": step / 50}
    return Sampled(group=group, step=step, steps=step, step_s=0.5, lived=step / 2, spent=spent)


def save(step: int) -> LoggedSave:
    return LoggedSave(attempt=1, step=step, save=f"a1k{step}", seconds=2.5, writing_s=2.0, nbytes=1 << 30)


def written(storage: Storage, batches: Sequence[Sequence[Noted]], attempt: int = 1) -> LedgerWriter:
    """Each batch as one object, by the writer's own code, on this thread."""
    writer = LedgerWriter(storage, pause_s=0.0)
    writer.begin(attempt)
    for batch in batches:
        writer.put([line_of(one) for one in batch])
    return writer


def names(storage: Storage) -> list[str]:
    return [info.name.removeprefix(f"{EVENTS}/") for info in storage.list(EVENTS)]


# ---------------------------------------------------------------- lines


def example(kind: type[Line]) -> Line:
    """Some value of it."""
    of: dict[str, Any] = {
        "str": "text \n \u2028 \"quoted\"", "int": 7, "float": 1.25, "bool": True, "tuple[str, ...]": ("a", "b"), "tuple[int, ...]": (1, 2),
        "dict[str, float]": {"saves": 1.5},
    }  # fmt: skip
    return kind(**{one.name: of[str(one.type)] for one in dataclasses.fields(kind)})


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_comes_back_as_it_was(kind: str) -> None:
    one = Noted(7, 3, 1.25, example(KINDS[kind]))
    line = line_of(one)
    assert b"\n" not in line and noted_in(line) == one
    for name in {"attempt", "n", "t"} | {name for name in json.loads(line) if name not in ("kind", "attempt", "n", "t")}:
        raw = json.loads(line)
        raw[name] = [None]
        with pytest.raises(ValueError):
            noted_in(json.dumps(raw).encode())


def test_an_attempt_whose_clock_is_wrong_goes_on_where_the_one_before_was() -> None:
    """A group lives through the Coordinator's death, and how long it has lived it measures itself."""

    def sample(attempt: int, n: int, t: float, group: str, lived: float) -> Noted:
        return Noted(attempt, n, t, Sampled(group=group, step=1, lived=lived))

    for ahead_s in (-86_400.0, -600.0, 600.0, 86_400.0):
        lines = [
            sample(1, 1, 100.0, "g1", 10.0),
            Noted(2, 1, 107.0 + ahead_s, AttemptBegan(reason="claimed after attempt 1")),
            sample(2, 2, 108.0 + ahead_s, "g1", 18.0),
            sample(2, 3, 120.0 + ahead_s, "g2", 1.0),
            sample(3, 1, 125.0, "g2", 6.0),  # by a clock that is right again
        ]
        assert [one.t for one in brought_together(lines)] == [100.0, 107.0, 108.0, 120.0, 125.0]
    told_late = [sample(1, 1, 100.0, "g1", 10.0), sample(2, 1, 110.0, "g1", 12.0), sample(3, 1, 9000.0, "g3", 1.0)]
    assert brought_together(told_late) == told_late, "a word that is some seconds old, and a run that had stopped"


def test_a_clock_that_is_set_back_in_an_attempt_goes_on_from_there() -> None:
    """A process's clock goes on steadily. One that was stored and woken elsewhere may have another."""
    times_s = [100.0, 101.0, 100.5, 102.0, 102.0 - 86_400.0, 112.0 - 86_400.0, 113.0]
    lines = [Noted(1, number, t, AttemptBegan(reason="")) for number, t in enumerate(times_s)]
    lines.append(Noted(2, 1, 50.0, AttemptBegan(reason="")))
    assert [one.t for one in brought_together(lines)][:6] == [100.0, 101.0, 101.0, 102.0, 102.0, 112.0]
    assert brought_together(lines)[-1].t == 50.0, "another attempt's own clock is believed"
    alone = Noted(1, -1, 105.0, AttemptBegan(reason=""))
    assert [one.t for one in brought_together([alone, *lines])][:3] == [105.0, 100.0, 101.0], "an older raystate's own object"


def test_a_text_of_any_length_is_a_short_line() -> None:
    line = line_of(noted(1, GroupEnded(group="g", how="raised", cause="x" * 100_000)))
    assert len(line) < 1200 and noted_in(line).what != AttemptBegan(reason="")


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b'"x"', b'{"kind":"left"}', b"\xff\xfe", b'{"a":' * 100_000]
    + [
        f'{{"kind":"left","attempt":1,"n":1,"t":{number},"reason":""}}'.encode()
        for number in ("NaN", "Infinity", "1e999", "1" * 400)
    ],
)
def test_a_line_that_nobody_wrote_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError) as caught:
        noted_in(line)
    assert not isinstance(caught.value, NewerError)


def test_a_line_with_more_than_this_raystate_knows_is_a_newer_ones() -> None:
    with pytest.raises(NewerError, match="mood"):
        noted_in(line_of(noted(1)).replace(b'"host"', b'"mood":"good","host"'))


@pytest.mark.parametrize(
    "what",
    [
        HostChanged(host="h", state="up"),
        Noticed(host="h", reason="r"),
        Slowed(rank=0, host="h", section="s", by_s=1.0, since_step=1),
    ],
)
def test_a_line_from_before_machines_had_names_is_read(what: Line) -> None:
    line = line_of(noted(1, what))
    assert b',"machine":""' in line and noted_in(line.replace(b',"machine":""', b"")).what == what


# ---------------------------------------------------------------- reading


def test_damaged_truncated_and_newer_ones_are_left_out_and_counted(storage: Counting, caplog: pytest.LogCaptureFixture) -> None:
    good = [noted(n) for n in range(1, 6)]
    lines = [line_of(one) for one in good]
    of = [
        batch_of(1, [lines[0], b'{"kind":"left","attempt":1,"n":9', line_of(noted(8)).replace(b"coordinator", b"telepathy")]),
        batch_of(1, lines[1:3])[:-20],
        batch_of(2, [line_of(noted(7))]).replace(b'"raystate_ledger":1', b'"raystate_ledger":2'),
        b"",
        b"no ledger\n",
        batch_of(1, lines[3:]).replace(b'"n":4', b'"n":4.5'),
    ]
    for number, data in enumerate(of, 1):
        storage.create(batch_name(1, number), data)
    storage.create(f"{EVENTS}/notes.txt", b"of somebody")
    found = read_ledger(storage)
    assert list(found.lines) == [good[0], good[1], good[4]]
    assert found.damaged == tuple(batch_name(1, number) for number in (4, 5, 1, 2, 6))
    assert (found.damaged_lines, found.newer_lines, found.newer) == (3, 1, (batch_name(1, 3),))
    assert found.left_out == (
        "2 objects and 3 lines of the ledger can't be read, left out here: 000001-000004.jsonl, 000001-000005.jsonl, "
        "000001-000001.jsonl, 000001-000002.jsonl, 000001-000006.jsonl",
        "1 object and 1 line of the ledger were written by a newer raystate, left out here: 000001-000003.jsonl",
    )
    assert caplog.text.count("is left out") == 6


def test_objects_of_older_raystates_are_read_beside_batches(storage: Counting) -> None:
    old = {"kind": "save", "time_s": 5.0, "attempt": 1, "step": 3, "save": "a1k1", "seconds": 1.5}
    storage.create(f"{EVENTS}/000001-save-a1k1.json", json.dumps(old).encode())
    recovery = LoggedRecovery(attempt=2, group="g", cause="c", step=3, tier="memory", seconds=1.0, steps_repeated=0)
    written(storage, [[noted(1, recovery, attempt=2, t=9.0)]], attempt=2)
    found = read_ledger(storage)
    assert found.saves == {"a1k1": LoggedSave(attempt=1, step=3, save="a1k1", seconds=1.5)}
    assert found.recoveries == ((9.0, recovery),) and len(found.lines) == 2
    assert [one.what for one in read_ledger(storage, kinds=("recovery",)).lines] == [recovery]


def test_a_ledger_that_is_merged_while_it_is_read_is_read_whole(storage: Counting) -> None:
    writer = written(storage, [[noted(n)] for n in range(1, MOST_OBJECTS + 1)])

    def merges_now(operation: str, name: str) -> bool:
        if operation == "read" and len(writer._objects or ()) == MOST_OBJECTS:
            storage.fails = lambda *_: False
            writer.put([line_of(noted(MOST_OBJECTS + 1))])
        return False

    storage.fails = merges_now
    assert [one.n for one in read_ledger(storage).lines] == list(range(1, MOST_OBJECTS + 2))


# ---------------------------------------------------------------- writing


def test_what_is_noted_is_there_when_the_writer_is_closed(storage: Counting) -> None:
    before = set(threading.enumerate())
    writer = LedgerWriter(storage, pause_s=PATIENCE_S)
    writer.begin(3)
    for n in range(1, 101):
        writer.note(line_of(noted(n, attempt=3)))
    writer.close(PATIENCE_S)
    assert [one.n for one in read_ledger(storage).lines] == list(range(1, 101))
    assert len(names(storage)) <= 2, "the first lines alone, and the others when it was closed: no pause is waited for"
    assert not [one for one in set(threading.enumerate()) - before if one.name == "raystate-ledger"]


def test_the_restarts_of_earlier_attempts_are_counted_once(storage: Counting) -> None:
    def recovery(n: int, attempt: int) -> Noted:
        what = LoggedRecovery(attempt=attempt, group="g", cause="c", step=3, tier="peer", seconds=1.0, steps_repeated=0)
        return noted(n, what, attempt=attempt)

    first = LedgerWriter(storage, pause_s=0.0)
    first.begin(1)
    assert first.earlier_restarts == 0
    first.put([line_of(recovery(1, 1)), line_of(recovery(2, 1)), line_of(noted(3))])
    second = LedgerWriter(storage, pause_s=0.0)
    second.begin(2)
    assert second.earlier_restarts is None, "storage has not said yet"
    second.note(line_of(recovery(1, 2)))
    second.close(PATIENCE_S)
    assert second.earlier_restarts == 2, "its own are counted by the Ledger"
    third = LedgerWriter(storage, pause_s=0.0)
    third.begin(3)
    storage.fails = lambda operation, name: operation == "read"
    third.note(line_of(noted(1, attempt=3)))
    third.close(PATIENCE_S)
    storage.fails = lambda *_: False
    assert third.earlier_restarts is None and len(read_ledger(storage).lines) == 5, "a line is written all the same"


def test_a_storage_that_hangs_holds_nobody_up_and_loses_no_line(storage: Counting) -> None:
    storage.goes_on.clear()
    writer = LedgerWriter(storage, pause_s=0.0)
    writer.begin(1)
    for n in range(1, 1001):
        writer.note(line_of(noted(n)))  # on this thread, which storage would stop
    writer.close(0.0)
    storage.goes_on.set()
    writer.close(PATIENCE_S)
    assert [one.n for one in read_ledger(storage).lines] == list(range(1, 1001))


def test_a_storage_that_fails_is_one_warning_and_what_is_kept_is_bounded(
    storage: Counting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "RETRY_FIRST_S", 0.001)
    monkeypatch.setattr(writer_module, "RETRY_LAST_S", 0.001)
    monkeypatch.setattr(writer_module, "_MOST_WAITING", 50)
    caplog.set_level(logging.WARNING)
    storage.fails = lambda operation, name: True
    writer = LedgerWriter(storage, pause_s=0.0)
    writer.begin(1)
    for n in range(1, 301):
        writer.note(line_of(noted(n)))
    until_s = time.monotonic() + PATIENCE_S
    while storage.requests["list"] < 5 and time.monotonic() < until_s:
        time.sleep(0.001)
    assert len(writer._waiting) <= 50
    storage.fails = lambda operation, name: False
    while not names(storage) and time.monotonic() < until_s:
        time.sleep(0.001)
    writer.close(PATIENCE_S)
    found = [one.n for one in read_ledger(storage).lines]
    assert found == list(range(1, len(found) + 1)), "the oldest are kept: they say how all began"
    texts, lost = [record.getMessage() for record in caplog.records], 300 - len(found)
    assert len([text for text in texts if "could not be written" in text]) == 1
    assert [text for text in texts if "are lost" in text] == [
        f"{lost} lines of the ledger are lost: storage took none for too long"
    ]


def test_of_many_objects_the_smallest_are_merged_and_no_line_is_lost(storage: Counting) -> None:
    most = 0
    writer = written(storage, [])
    for n in range(1, 1001):
        writer.put([line_of(noted(n))])
        most = max(most, len(names(storage)))
    assert most <= MOST_OBJECTS + 1
    assert [one.n for one in read_ledger(storage).lines] == list(range(1, 1001))
    # One create for each batch and one for each merge; what is remembered is not read; deletes cost nothing.
    assert storage.requests["create"] <= 1000 + 1000 // 60
    assert storage.requests["read"] <= 1000 // 60 + 1 + len(names(storage))


def test_the_next_attempt_merges_what_those_before_it_have_left(storage: Counting) -> None:
    for attempt in range(1, 41):
        written(storage, [[noted(n, attempt=attempt)] for n in range(1, 6)], attempt=attempt)
        assert len(names(storage)) <= MOST_OBJECTS + 1
    found = read_ledger(storage)
    assert [(one.attempt, one.n) for one in found.lines] == [(a, n) for a in range(1, 41) for n in range(1, 6)]


@pytest.mark.parametrize("dies_at", ["create", "delete"])
def test_a_death_in_a_merge_costs_no_line(storage: Counting, dies_at: str) -> None:
    writer = written(storage, [[noted(n)] for n in range(1, MOST_OBJECTS + 1)])
    writer._write([line_of(noted(MOST_OBJECTS + 1))])
    storage.fails = lambda operation, name: operation == dies_at
    with pytest.raises(StorageError):
        writer._tidy()
    storage.fails = lambda operation, name: False
    expected = list(range(1, MOST_OBJECTS + 2))
    assert [one.n for one in read_ledger(storage).lines] == expected
    written(storage, [[noted(1, attempt=2)]] * 3, attempt=2)
    assert len(names(storage)) <= MOST_OBJECTS + 4
    assert [one.n for one in read_ledger(storage).lines if one.attempt == 1] == expected


def test_an_attempt_that_was_superseded_and_goes_on_does_no_harm(storage: Counting) -> None:
    late = written(storage, [[noted(n)] for n in range(1, MOST_OBJECTS)])
    new = written(storage, [[noted(n, attempt=2)] for n in range(1, 10)], attempt=2)
    for n in range(MOST_OBJECTS, MOST_OBJECTS + 80):  # it merges, too, what is not there any more
        late.put([line_of(noted(n))])
        new.put([line_of(noted(n, attempt=2))])
    found = read_ledger(storage)
    assert [one.n for one in found.lines if one.attempt == 1] == list(range(1, MOST_OBJECTS + 80))
    assert len([one for one in found.lines if one.attempt == 2]) == 89 and not found.damaged


def test_what_is_not_ours_or_not_whole_is_neither_merged_nor_removed(folder: Counting) -> None:
    others = {
        f"{EVENTS}/000001-0001.json": b'{"kind":"recovery"}',
        f"{EVENTS}/notes.txt": b"of somebody",
        batch_name(1, 900_001): b"no ledger\n",
        batch_name(1, 900_002): batch_of(1, [line_of(noted(900_002))])[:-9],
        batch_name(1, 900_003): batch_of(1, []).replace(b'"raystate_ledger":1', b'"raystate_ledger":2'),
    }
    for name, data in others.items():
        folder.create(name, data)
    written(folder, [[noted(n)] for n in range(1, 300)])
    collect_garbage(folder)
    assert {name: folder.read(name) for name in others} == others
    assert [one.n for one in read_ledger(folder).lines] == list(range(1, 300))


# ---------------------------------------------------------------- what gives way


def test_samples_give_way_before_saves_and_saves_before_the_rest() -> None:
    first = [noted(1, GroupJoined(group="g", world=2)), *(noted(n, sample(n)) for n in range(2, 102)), noted(102, save(1))]
    once = [noted_in(line) for line in thinned([line_of(one) for one in first])]
    steps = [one.what.step for one in once if isinstance(one.what, Sampled)]
    assert steps[:3] == [2, 4, 6] and steps[-2:] == [100, 101] and len(steps) == 51
    assert [one.what for one in once if isinstance(one.what, Dropped)] == [Dropped(lines=49)]
    assert {type(one.what) for one in once} == {GroupJoined, Sampled, LoggedSave, Dropped}
    saves = [noted(n, save(n)) for n in range(1, 101)]
    twice = saves
    for _ in range(2):
        twice = [noted_in(line) for line in thinned([line_of(one) for one in twice])]
    assert [one.what.step for one in twice if isinstance(one.what, LoggedSave)] == list(range(76, 101))
    (dropped,) = (one.what for one in twice if isinstance(one.what, Dropped))
    assert dropped == Dropped(lines=75, saves=75, seconds=187.5, nbytes=75 << 30)
    rest = [noted_in(line) for line in thinned([line_of(noted(n)) for n in range(1, 101)])]
    assert sorted(one.n for one in rest) == list(range(50, 101))


def test_a_ledger_above_its_budget_gets_smaller_and_a_death_meanwhile_counts_nothing_twice(
    storage: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MOST_BYTES", 20_000)
    writer = written(storage, [])
    batches = [[noted(10 * number + n, save(10 * number + n)) for n in range(10)] for number in range(1, 60)]
    for batch in batches:
        writer.put([line_of(one) for one in batch])
        assert sum(info.size for info in storage.list(EVENTS)) < 20_000 + 3_000
    storage.fails = lambda operation, name: operation == "delete"
    number = 600
    while sum(one.info.size for one in (writer._objects or {}).values()) <= 20_000:
        number += 1
        writer._write([line_of(noted(number, save(number)))])
    before = saves_told(storage)
    with pytest.raises(StorageError):
        writer._tidy()
    assert any(batch_in(storage.read(info.name)).replaces for info in storage.list(EVENTS))
    assert saves_told(storage) == before == 590 + number - 600


def saves_told(storage: Storage) -> int:
    """Those with a line of their own, and those that a line sums up."""
    lines = [one.what for one in read_ledger(storage).lines]
    return sum(one.saves if isinstance(one, Dropped) else 1 for one in lines if isinstance(one, Dropped | LoggedSave))


@pytest.mark.more
def test_ten_million_steps_are_few_objects_and_bytes() -> None:
    """As `benchmarks/ledger.py` has them, of 0.1 s each: 11.6 days, with 500 restarts and 20,000 durable saves."""
    storage = Memory()
    writer = written(storage, [])
    batches = 0
    for batch in lines_of_steps(10_000_000, 0.1):
        batches += 1
        writer.put([line_of(one) for one in batch])
    infos = storage.list(EVENTS)
    assert len(infos) <= MOST_OBJECTS + 1 and sum(info.size for info in infos) <= 50 << 20
    found = read_ledger(storage)
    assert not found.damaged and len(found.saves) == 20_000
    told = goodput(timeline_of(found.lines))
    assert told.steps == 10_000_000 + 3 * 500 and told.seconds_by_cause["unknown"] == 0
    assert storage.requests["create"] <= batches * (1 + 1 / 60) and storage.requests["list"] == 3, "one of the writer's"


def test_the_requests_of_an_hour_are_those_that_the_page_on_storage_names() -> None:
    """In a steady state: one object each 30 s, one more where 64 are merged, and the removal of those, which costs nothing."""
    storage = Memory()
    of_one_group = itertools.islice(lines_of_steps(20_000, 1.0), 200, None)  # it is older than ten minutes
    writer = written(storage, [])
    first: float | None = None
    last = 0.0
    for batch in of_one_group:
        batch = [one for one in batch if isinstance(one.what, Sampled)]
        if batch:
            first, last = first or batch[0].t, batch[0].t
            writer.put([line_of(one) for one in batch])
    assert first is not None
    hours = (last - first) / 3600
    assert hours > 4
    (told,) = re.findall(r"ledger took\s+(\d+)\s+class A requests an hour", Path("docs/storage.md").read_text())
    assert storage.requests["create"] / hours <= int(told) <= storage.requests["create"] / hours + 3
    assert storage.requests["read"] / hours < 2
