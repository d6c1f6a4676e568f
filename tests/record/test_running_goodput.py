"""Where the time of an attempt went, told while it goes on: from made-up lines, with clocks of their own."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from raystate.observe import running_goodput
from raystate.observe.goodput import CAUSES, goodput
from raystate.observe.ledger.lines import (
    AttemptBegan,
    GroupEnded,
    GroupJoined,
    GroupRestored,
    Line,
    LoggedSave,
    Noted,
    Sampled,
)
from raystate.observe.metrics import samples
from raystate.observe.running_goodput import MOST_LINES, RunningGoodput
from raystate.observe.timeline import timeline_of
from raystate.waits import GOODPUT_EVERY_S
from tests.record.test_metrics import BEGINS


class Attempt:
    """The lines of one, and its clocks: seconds since 1970 are those since it began."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lines: list[Noted] = []
        self.running = RunningGoodput(lambda: self.now_s, lambda: self.now_s)

    def note(self, t: float, what: Line) -> None:
        self.now_s = t
        self.lines.append(Noted(3, len(self.lines) + 1, t, what))
        self.running.note(self.lines[-1])

    def trains(self, group: str, at_s: float, steps: int, step: int = 0) -> None:
        """A group joins, and makes steps of half a second, of which each second one is told."""
        self.note(at_s, GroupJoined(group=group, world=1))
        self.note(at_s + 1, GroupRestored(group=group, step=step))
        for done in range(2, steps + 1, 2):
            spent = {"compilation": 2.0, "saves": 0.01 * done}
            took_s = 3 + done / 2 + spent["saves"]
            self.note(at_s + took_s, Sampled(group=group, step=step + done, steps=done, step_s=0.5, lived=took_s, spent=spent))

    def seconds(self) -> dict[str, Any]:
        """By cause, of those that there are."""
        self.now_s += GOODPUT_EVERY_S
        shares, whole_s = dict(self.running.shares()), self.told_s
        assert not shares or (set(shares) == set(CAUSES) and sum(shares.values()) == pytest.approx(1))
        return {cause: pytest.approx(share * whole_s) for cause, share in shares.items() if share > 1e-9}

    @property
    def told_s(self) -> float:
        return self.lines[-1].t if isinstance(self.lines[-1].what, Sampled) else self.now_s


def begun() -> Attempt:
    attempt = Attempt()
    attempt.note(0.0, AttemptBegan(reason="the run starts"))
    return attempt


def test_nothing_is_known_before_the_claim() -> None:
    assert Attempt().running.shares() == ()


def test_it_is_what_the_ledger_will_tell() -> None:
    attempt = begun()
    attempt.trains("g1", 5.0, 100)
    attempt.note(60.0, LoggedSave(attempt=3, step=50, save="s", seconds=1.0))  # of no interest
    attempt.note(61.0, GroupEnded(group="g1", how="died", cause="rank 1 died"))
    attempt.trains("g2", 71.0, 20, step=90)
    assert len(attempt.running._lines) == len(attempt.lines) - 1
    found = dict(attempt.running.shares())
    told = goodput(timeline_of(attempt.lines))
    assert found == {cause: pytest.approx(seconds / told.wall_s) for cause, seconds in told.seconds_by_cause.items()}
    assert found["repeated"] > 0 and found["steps"] > 0.5 and found["compilation"] > 0
    shown = {
        one.labels["cause"]: one.value
        for one in samples(dataclasses.replace(BEGINS, goodput=attempt.running.shares()))
        if one.labels
    }
    assert shown == found


def test_time_goes_on_where_nobody_trains_and_not_after_a_sample() -> None:
    """The steps since a sample come with the next one. What the time without a group was, its join tells."""
    attempt = begun()
    assert attempt.seconds() == {"unknown": 10.0}
    attempt.note(10.0, GroupJoined(group="g1", world=1))
    assert attempt.seconds() == {"start": 20.0}
    attempt = begun()
    attempt.trains("g1", 0.0, 10)
    before = attempt.seconds()
    assert attempt.seconds() == before
    attempt.note(attempt.now_s, GroupEnded(group="g1", how="died", cause=""))
    assert attempt.seconds()["unknown"] == 10.0
    attempt.note(attempt.now_s, GroupJoined(group="g2", world=1, ages={"asked": 4.0, "placed": 1.0}))
    found = attempt.seconds()
    assert (found["stopped"], found["hosts"], found.get("unknown")) == (6.0, 3.0, None)


def test_of_a_group_that_is_older_than_the_attempt_only_its_part_counts() -> None:
    """The Coordinator has died, its trainers have not."""
    attempt = begun()
    for at_s in (1.0, 11.0, 21.0):
        steps = int(1000 + 2 * at_s)
        spent = {"saves": 500.0}
        attempt.note(at_s, Sampled(group="g1", step=steps, steps=steps, step_s=0.5, lived=1000 + at_s, spent=spent))
    found = dict(attempt.running.shares())
    assert found["steps"] + found["saves"] == pytest.approx(1)
    assert found["saves"] * 21 < 0.6, "of the attempt's first second it is not known"


def test_it_is_computed_every_ten_seconds_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    real = running_goodput.timeline_of

    def counted(lines: list[Noted], *, until_s: float | None) -> object:
        computed.append(len(lines))
        return real(lines, until_s=until_s)

    monkeypatch.setattr(running_goodput, "timeline_of", counted)
    attempt = begun()
    for tenth in range(300):
        attempt.now_s = tenth / 10
        attempt.running.shares()
    assert len(computed) == 3


def test_a_line_never_waits_for_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def waits(*_: object, **__: object) -> object:
        began.set()
        assert goes_on.wait(60)
        return real(attempt.lines[:1])

    real = running_goodput.timeline_of
    monkeypatch.setattr(running_goodput, "timeline_of", waits)
    attempt = begun()
    asks = threading.Thread(target=attempt.running.shares)
    asks.start()
    assert began.wait(60)
    notes = threading.Thread(target=attempt.note, args=(1.0, GroupJoined(group="g1", world=1)))
    notes.start()
    notes.join(30)
    waited = notes.is_alive()
    goes_on.set()
    asks.join(60)
    notes.join(60)
    assert not waited


def test_a_month_of_samples_is_as_good_as_all_of_them_and_bounded() -> None:
    attempt = begun()
    attempt.trains("g1", 0.0, 8 * MOST_LINES)
    kept = attempt.running._lines
    assert MOST_LINES / 2 <= len(kept) <= MOST_LINES and kept[0] is attempt.lines[0]
    told = goodput(timeline_of(attempt.lines))
    assert dict(attempt.running.shares()) == {
        cause: pytest.approx(seconds / told.wall_s, abs=1e-6) for cause, seconds in told.seconds_by_cause.items()
    }


def test_hundreds_of_groups_are_bounded_too() -> None:
    attempt = begun()
    for number in range(MOST_LINES):
        attempt.note(2.0 * number, GroupJoined(group=f"g{number}", world=1))
        attempt.note(2.0 * number + 1, GroupEnded(group=f"g{number}", how="died", cause=""))
    assert MOST_LINES / 2 <= len(attempt.running._lines) <= MOST_LINES
    assert attempt.running.shares()
