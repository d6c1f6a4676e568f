"""The ledger is told of the events that the Coordinator's machine takes: each thing once, and all that goodput needs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from raystate.core.coordinator.leaving import UNFINISHED
from raystate.core.formats.messages import Append, Appended, BuildPackage, CarriedOut, HostId, Joined, StopAsked
from raystate.machine.counts import counts
from raystate.observe.ends import Ends
from raystate.observe.goodput import Goodput, goodput
from raystate.observe.ledger import ledger
from raystate.observe.ledger.happenings import Happenings
from raystate.observe.ledger.lines import (
    AttemptBegan,
    CoordinatorStood,
    GroupEnded,
    GroupJoined,
    GroupRestored,
    HostChanged,
    Hung,
    Line,
    LoggedSave,
    Noted,
    Noticed,
    RunLeft,
    Sampled,
    SaveLost,
    StorageChanged,
)
from raystate.observe.ledger.troubles import TroubleLines
from raystate.observe.observers import Observers
from raystate.observe.timeline import timeline_of
from raystate.storage.objects import ObjectStorage
from tests.core.driver import AB, Driver

L = TypeVar("L", bound=Line)


class Watched(Driver):
    """A machine, and what was noted of it."""

    def __init__(self, **settings: Any) -> None:
        self.noted: list[Noted] = []
        self.ages: tuple[tuple[str, float], ...] = ()
        self.last: dict[str, Any] = {}  # what the ranks have told of themselves
        super().__init__(**settings)

    def send(self, event: Any) -> list[Any]:
        if "happenings" not in vars(self):
            self.happenings = Happenings(self.core, self._note, lambda group: Ends())
        if isinstance(event, Joined):
            event = Joined(ask=event.ask, group=event.group, rank=event.rank, world=event.world, host=event.host, ages=self.ages)
        commands = super().send(event)
        self.happenings.look(event, self.now_s)
        return commands

    def _note(self, what: Line) -> None:
        self.noted.append(Noted(1, len(self.noted) + 1, self.now_s, what))

    def of(self, kind: type[L]) -> list[L]:
        return [one.what for one in self.noted if isinstance(one.what, kind)]

    def trains(self, first: int, last: int, step_s: float = 0.5, **spent: float) -> None:
        """Steps, each of which both ranks tell of."""
        for step in range(first, last + 1):
            self.now_s += step_s
            self.tells(step, step - first + 1, **spent)
            self.tick()

    def tells(self, step: int, steps: int, lived_s: float = 0.0, **spent: float) -> None:
        self.last = {"steps": steps, "lived_s": lived_s, "spent": tuple(spent.items()), "step_s": 0.5}
        self.say(step)

    def word(self, rank: int, newest: int, *, report: bool = True, **more: Any) -> None:
        super().word(rank, newest, report=report, **{**self.last, **more})

    @property
    def goodput(self) -> Goodput:
        return goodput(timeline_of(self.noted))


def trained() -> Watched:
    """Asked for at 92 s, joined at 100 s, restored at 101 s, and at step 40 at 121 s."""
    run = Watched()
    run.ages = (("asked", 8.0), ("placed", 5.0), ("process", 4.0))
    run.join(AB, "g1")
    run.now_s = 101.0
    run.last = {"spent": (("restore", 0.75),)}
    run.restore()
    run.trains(1, 40, restore=0.75)
    return run


def test_a_run_from_its_start_to_its_end_is_told_in_order() -> None:
    run = trained()
    run.stage(41, promised=True)
    run.leave(run.key(41))
    run.now_s += 2.0
    run.tick()
    run.live(10.0)
    kinds = [type(one.what) for one in run.noted]
    assert [kind for kind in kinds if kind is not Sampled] == [AttemptBegan, GroupJoined, GroupRestored, RunLeft]
    assert kinds[-2] is Sampled, "the last words are not lost"
    assert run.of(GroupJoined) == [
        GroupJoined(group="g1", world=2, hosts=("a", "b"), ages={"asked": 8.0, "placed": 5.0, "process": 4.0})
    ]
    assert [(one.group, one.step) for one in run.of(GroupRestored)] == [("g1", -1)]
    assert not run.of(GroupEnded)
    told = run.goodput.seconds_by_cause
    assert (told["hosts"], told["restore"], told["steps"]) == (3.0, 0.75, 20.0)
    assert told["unknown"] == 0


def test_a_death_is_told_with_the_last_words_of_its_group() -> None:
    run = trained()
    run.now_s += 0.25
    run.tells(43, 43, saves=1.5)  # no sample was due
    before = len(run.of(Sampled))
    run.exits(1)
    assert len(run.of(Sampled)) == before + 1 and run.of(Sampled)[-1].spent["saves"] == 1.5
    (ended,) = run.of(GroupEnded)
    assert (ended.group, ended.how) == ("g1", "ended") and "rank 1" in ended.cause
    for _ in range(3):
        run.tick(1.0)
    assert len(run.of(GroupEnded)) == 1
    run.ages = ()
    run.join(AB, "g2")
    assert [one.group for one in run.of(GroupJoined)] == ["g1", "g2"]


def test_samples_come_oftener_from_a_young_group_and_once_at_its_first_step() -> None:
    run = trained()
    steps = [one.steps for one in run.of(Sampled)]
    assert steps[:3] == [0, 0, 1] or steps[:2] == [0, 1]
    assert len(steps) <= 2 + 21, "one a second"
    for number in range(41, 4041):
        run.now_s += 0.5
        run.tells(number, number, lived_s=run.now_s - 100.0)
    since_s = [one.t for one in run.noted if isinstance(one.what, Sampled) and one.t > 800.0]
    assert all(after - before == pytest.approx(30.0) for before, after in itertools.pairwise(since_s))
    assert run.goodput.seconds_by_cause["unknown"] == 0


def test_a_sample_stays_small_however_many_names_the_ranks_have() -> None:
    run = trained()
    for turn in (1, 2):
        for rank in (0, 1):
            names = [f"section:{rank}-{number}" for number in range(60)][::turn]
            spent = (*((name, turn * 0.25) for name in names), ("saves", turn * 1.0))
            run.last = {"steps": 40 + turn, "lived_s": 60.0 * turn, "spent": spent}
            run.word(rank, 40 + turn)
        run.now_s += 60.0
        run.tick()
        last = run.of(Sampled)[-1].spent
        assert len(last) < 70 and last["saves"] == turn * 1.0
        assert sum(last.values()) == pytest.approx(turn * 1.0 + turn * 0.25 * len(names))
    run.join(AB, "g2")
    run.now_s += 1.0
    run.restore()
    run.trains(42, 50, section=0.5)
    assert "section" in run.of(Sampled)[-1].spent


def test_a_group_that_an_attempt_adopts_did_not_join_again() -> None:
    run = Watched()
    run.host_of, run.world, run.lineage = dict(enumerate(AB)), 2, "1.1.g1"
    run.tells(5, 5)
    run.tick()
    assert not run.of(GroupJoined) and run.of(Sampled)[0].step == 5


def test_hosts_notices_and_lost_saves_are_told_once() -> None:
    run = trained()
    for _ in range(3):
        run.send(StopAsked(reason="the spot instance ends", within_s=30.0, host=HostId("b")))
    run.lose("b")
    run.tick()
    run.lose("b")
    run.tick(1.0)
    run.host_up("b", "i2")
    run.tick(1.0)
    assert run.of(Noticed) == [Noticed(host="b", reason="the spot instance ends", within_s=30.0, machine="machine-b")]
    assert [(one.host, one.state) for one in run.of(HostChanged)] == [("b", "left"), ("b", "new"), ("b", "up")]
    assert {one.machine for one in run.of(HostChanged)} == {"machine-b"}
    run.core.journal.facts.give_up(run.key(7), "storage failed")
    run.tick(1.0)
    run.tick(1.0)
    assert run.of(SaveLost) == [SaveLost(step=7, why="storage failed")]


def test_storage_that_fails_and_a_coordinator_that_stood_still_are_told_once() -> None:
    run = trained()
    noted: list[Line] = []
    times = iter((0.0, 1.0, 2.0, 3.0, 7.5, 8.5))
    lines = TroubleLines(run.core, noted.append, clock=lambda: next(times))
    journal = run.core.journal
    for fails in (False, True, True, False, False, False):
        if fails:
            journal.trouble("step 5 could not be published: disk full", cause="disk full")
        else:
            journal.fails, journal.cause = False, ""
        lines.look()
    assert noted == [StorageChanged(works=False, why="disk full"), StorageChanged(works=True), CoordinatorStood(seconds=4.5)]


def test_a_hang_is_told_with_its_section() -> None:
    run = Watched(hang_timeout_s=60.0)
    run.join(AB, "g1")
    run.restore()
    run.trains(1, 5)
    run.say(6, steps=6)
    run.word(1, 5, steps=5, section="data", section_s=1.0)
    for _ in range(200):
        run.tick(1.0)
        run.report_both()
    assert [(one.group, one.ranks, one.section) for one in run.of(Hung)] == [("g1", (1,), "data")]


def test_the_end_says_how_long_the_ranks_have_closed() -> None:
    run = trained()
    run.auto = False  # the hosts say nothing for a while
    run.release("the driver has returned")
    run.now_s += 3.0
    run.auto = True
    run.live(30.0)
    assert [(one.reason, one.closing_s >= 3.0) for one in run.of(RunLeft)] == [("the driver has returned", True)]


def test_what_a_release_gives_up_is_told_and_counted_before_the_end() -> None:
    """No tick comes between the two: `raystate report` named no such step, and the metric counted it."""
    run = trained()
    run.stage(41, promised=True)
    run.hold(0, 42, promised=True)
    run.all_die()
    counted = dict(counts.sums()).get("saves_lost", 0)
    run.release("gave up")
    assert [type(one.what) for one in run.noted[-2:]] == [SaveLost, RunLeft]
    assert run.of(SaveLost) == [SaveLost(step=42, why=UNFINISHED)]
    assert dict(counts.sums())["saves_lost"] == counted + 1


def test_a_save_says_how_long_its_hosts_wrote_and_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `Observers`, as the Coordinator's loop has them."""
    lines: list[Line] = []
    monkeypatch.setattr(ledger.Ledger, "_note", lambda _self, what: lines.append(what))

    class Observed(Driver):
        def send(self, event: Any) -> list[Any]:
            if "observers" not in vars(self):
                self.observers = Observers(ObjectStorage("memory://happenings"), self.core, None)
                self.observers.begin(1, self.now_s)
            commands = super().send(event)
            self.observers.look(event, self.now_s)
            return commands

    run = Observed()
    run.join(AB, "g1")
    run.restore()
    run.auto = False
    run.stage(1, promised=True)
    run.now_s += 4.0
    run.write()
    run.now_s += 2.0
    run.send(run.packaged(run.take(BuildPackage)[-1]))
    run.send(Appended(seq=run.take(Append)[-1].entry.seq, outcome="ok"))
    (intent,) = run.orders("commit")
    counts.take_durations()
    run.observers.look(CarriedOut(intent=replace(intent, attempt=0)), run.now_s)  # it began under another Coordinator
    run.send(CarriedOut(intent=intent))
    assert counts.take_durations() == [("durable_seconds", 6.0)]
    saves = [one for one in lines if isinstance(one, LoggedSave)]
    assert saves == [LoggedSave(attempt=1, step=1, save="a1k1", seconds=6.0, writing_s=4.0, nbytes=0)]
