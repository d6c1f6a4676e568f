from __future__ import annotations

import dataclasses
import math
import threading

import pytest

from raystate.core.formats.entries import NO_BASE
from raystate.core.formats.errors import CorruptCheckpointError, StorageError
from raystate.core.formats.log import claim_entry
from raystate.core.formats.messages import LiveStep, LogEntry
from raystate.storage import RunLog, Storage
from raystate.storage.log_reader import Tail
from raystate.storage.names import GUARD, log_name
from raystate.testing.storage import DiedError, DyingAt, Failing, LosingAnswers, Recording
from tests.patience import PATIENCE_S


def claim(log: RunLog, writer: str) -> LogEntry:
    return log.claim(lambda tail: claim_entry(tail, writer, "lm"), timeout_s=PATIENCE_S)


def following(tail: LogEntry, step: int = 1) -> LogEntry:
    live = (*tail.live, LiveStep(step=step, save=f"a{tail.attempt}k{step}", metrics={"loss": math.nan}))
    return dataclasses.replace(tail, seq=tail.seq + 1, kind="commit", live=live)


def entries(storage: Storage) -> list[LogEntry]:
    found = [LogEntry.from_json(storage.read(info.name)) for info in storage.list(".raystate/log")]
    assert [entry.seq for entry in found] == list(range(1, len(found) + 1)), "no hole, nothing twice"
    return found


def written(storage: Storage, count: int) -> LogEntry:
    """A log of `count` claims, created without the log's own help."""
    tail = None
    for _ in range(count):
        tail = claim_entry(tail, f"w{count}", "lm")
        storage.create(log_name(tail.seq), tail.to_json())
    assert tail is not None
    return tail


def test_an_empty_log(storage: Storage):
    assert RunLog(storage).tail() is None
    assert storage.list() == []


def test_claims_and_entries(storage: Storage):
    log = RunLog(storage)
    first = claim(log, "one")
    assert (first.seq, first.attempt) == (1, 1)
    commit = following(first)
    assert log.append(commit).outcome == "ok"
    assert RunLog(storage).tail() is not None
    tail = RunLog(storage).tail()
    assert tail is not None
    assert tail.to_json() == commit.to_json()
    assert [info.name for info in storage.list()] == [GUARD, log_name(1), log_name(2)]
    assert log_name(42) == ".raystate/log/000000000042.json"


def test_the_guard_comes_first(storage: Storage):
    recording = Recording(storage)
    claim(RunLog(recording), "one")
    assert [name for operation, name in recording.operations if operation == "create"] == [GUARD, log_name(1)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 600])
def test_the_tail_is_found_by_galloping(storage: Storage, count: int):
    tail = written(storage, count)
    recording = Recording(storage)
    log = RunLog(recording)
    assert log.tail() == tail
    assert recording.count("exists") <= 2 * math.log2(count) + 4
    assert (recording.count("read"), recording.count("list")) == (1, 0)

    recording.operations.clear()
    assert log.tail() == tail
    assert (recording.count("exists"), recording.count("read")) == (1, 0), "an unchanged log costs one look"

    later = claim(RunLog(storage), "later")
    recording.operations.clear()
    assert log.tail() == later
    assert recording.count("exists") <= 3
    assert recording.count("read") == 1


def test_racing_claims_leave_no_hole_and_no_tie(storage: Storage):
    start = threading.Barrier(6)
    won: list[LogEntry] = []

    def run(name: str) -> None:
        log = RunLog(storage)
        start.wait(timeout=PATIENCE_S)
        won.extend(claim(log, name) for _ in range(5))

    threads = [threading.Thread(target=run, args=(f"w{index}",)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    assert sorted(won, key=lambda entry: entry.seq) == entries(storage)
    assert [entry.attempt for entry in entries(storage)] == list(range(1, 31))


def test_one_of_many_appenders_wins_each_number(storage: Storage):
    tail = claim(RunLog(storage), "one")
    start = threading.Barrier(8)
    outcomes: list[tuple[str, str]] = []

    def run(writer: str) -> None:
        log = RunLog(storage)
        entry = dataclasses.replace(following(tail), writer=writer)
        start.wait(timeout=PATIENCE_S)
        appended = log.append(entry)
        assert appended.seq == 2
        if appended.outcome == "taken":
            assert appended.tail == entries(storage)[1]
        outcomes.append((appended.outcome, writer))

    threads = [threading.Thread(target=run, args=(f"w{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    winners = [writer for outcome, writer in outcomes if outcome == "ok"]
    assert sorted(outcome for outcome, _ in outcomes) == ["ok", *["taken"] * 7]
    assert winners == [entries(storage)[1].writer]


def test_a_superseded_attempt_appends_nothing(storage: Storage):
    old = RunLog(storage)
    mine = claim(old, "old")
    theirs = claim(RunLog(storage), "new")
    appended = old.append(following(mine))
    assert (appended.outcome, appended.tail) == ("taken", theirs)
    # Nor at the number that is free, which an attempt that reads the tail carelessly would choose.
    careless = dataclasses.replace(following(mine), seq=theirs.seq + 1)
    appended = old.append(careless)
    assert (appended.outcome, appended.tail) == ("taken", theirs)
    assert "attempt 2, writer new" in appended.error
    assert len(entries(storage)) == 2


def test_an_entry_that_would_leave_a_hole_is_refused(storage: Storage):
    tail = claim(RunLog(storage), "one")
    appended = RunLog(storage).append(dataclasses.replace(following(tail), seq=4))
    assert appended.outcome == "failed"
    assert "000000000003.json is missing" in appended.error
    assert len(entries(storage)) == 1


def test_a_lost_answer_is_read_back(storage: Storage):
    losing = LosingAnswers(storage, only="log/")
    log = RunLog(losing)
    tail = claim(log, "one")
    losing.times = 1
    assert log.append(following(tail)).outcome == "ok"
    assert losing.times == 0
    assert log.append(following(tail)).outcome == "ok", "and appending it again is no second entry"
    assert [entry.attempt for entry in entries(storage)] == [1, 1]


def test_a_lost_answer_to_somebody_elses_win(storage: Storage):
    tail = claim(RunLog(storage), "one")
    theirs = dataclasses.replace(following(tail), writer="other")

    class Race(LosingAnswers):
        def before(self, operation: str, name: str) -> None:
            if operation == "create" and name == log_name(2):
                storage.create(name, theirs.to_json())

    appended = RunLog(Race(storage)).append(following(tail))
    assert appended.outcome == "taken"
    assert appended.tail is not None
    assert appended.tail.writer == "other"


def test_failed_means_unknown_and_the_same_append_again_settles_it(storage: Storage):
    log = RunLog(storage)
    tail = claim(log, "one")
    down = Failing(LosingAnswers(storage, only="log/"), "read")
    half_dead = RunLog(down)
    half_dead._remember(Tail(entry=tail, base=NO_BASE))
    appended = half_dead.append(following(tail))
    assert appended.outcome == "failed"
    assert "out of service" in appended.error
    down.on = False
    assert half_dead.append(following(tail)).outcome == "ok"
    assert len(entries(storage)) == 2


def test_a_claim_whose_answers_are_lost_is_claimed_once(storage: Storage):
    class Deaf(LosingAnswers):
        """Its first create works, and neither it nor the read after it says so."""

        def before(self, operation: str, name: str) -> None:
            if operation == "read" and self.times == 0:
                self.times = -1
                raise StorageError("read failed", operation="read", path=name)

    entry = claim(RunLog(Deaf(storage, only="log/")), "one")
    assert entries(storage) == [entry]


def test_claim_outlives_an_outage_and_gives_up_at_its_deadline(storage: Storage):
    failing = Failing(storage, "exists", "create", "read")
    with pytest.raises(StorageError, match="out of service") as caught:
        RunLog(failing).claim(lambda tail: claim_entry(tail, "one", "lm"), timeout_s=0.2)
    assert caught.value.operation == "claim"
    assert caught.value.waited_s is not None

    def recover(tail: LogEntry | None) -> LogEntry:
        failing.operations = ("create",) if not calls else ()
        calls.append(tail)
        return claim_entry(tail, "one", "lm")

    calls: list[LogEntry | None] = []
    failing.operations = ()
    assert RunLog(failing).claim(recover, timeout_s=PATIENCE_S).seq == 1
    assert len(calls) == 2


@pytest.mark.parametrize("after", [False, True])
def test_dying_anywhere_in_a_claim_leaves_a_log_that_can_be_claimed(storage: Storage, after: bool):
    for nth in range(20):
        try:
            claim(RunLog(DyingAt(storage, nth, after=after)), f"dying{nth}")
        except DiedError:
            pass
        else:
            break
        found = entries(storage)
        entry = claim(RunLog(storage), "next")
        assert entry.seq == entry.attempt == len(found) + 1
    else:
        pytest.fail("a claim takes fewer operations")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"format":1}', b'{"format":1,"seq":2,"live":[],"intents":[],"surprise":0}', b"\xff", b"7"]
)
def test_an_entry_that_is_none(storage: Storage, data: bytes):
    storage.create(log_name(1), data)
    with pytest.raises(CorruptCheckpointError, match="000000000001"):
        RunLog(storage).tail()
    assert RunLog(storage).append(LogEntry(seq=2, attempt=1, writer="w", kind="close", run="lm")).outcome == "failed"


def test_an_entry_of_another_number(storage: Storage):
    tail = written(storage, 1)
    storage.create(log_name(2), tail.to_json())
    with pytest.raises(CorruptCheckpointError, match="holds entry 1"):
        RunLog(storage).tail()
