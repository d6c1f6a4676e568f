"""What a HostActor decides, and which slots it may hand out again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest

from raystate.core.formats.errors import InvalidTransitionError
from raystate.core.formats.host_messages import (
    Connected,
    Disconnected,
    Empty,
    Hold,
    HoldAsked,
    HoldEnded,
    HostCommand,
    HostEvent,
    Kill,
    Remember,
    RemoveSet,
    SetFound,
    SetRead,
    SlotAddress,
    Speak,
)
from raystate.core.formats.messages import (
    Advice,
    EndTrainers,
    Failure,
    HostId,
    HostReported,
    HostSummary,
    Invalidate,
    Proposal,
    SaveId,
    SnapshotId,
    Staged,
    Tick,
    TrainerExited,
    TrainerWord,
    Write,
)
from raystate.core.host.machine import Host
from raystate.core.host.slot_sets import applies
from raystate.core.host.slots import why_reusable
from raystate.waits import HEARTBEAT_S


def slot(lineage: str = "", step: int = 0) -> Staged | None:
    return Staged(rank=0, world=1, lineage=lineage, step=step, layout="L", promised=False) if lineage else None


def free(slots: list[Staged | None], advice: Advice | None) -> list[int]:
    return [index for index, content in enumerate(slots) if why_reusable(content, advice) is not None]


def test_slots_are_free_by_stable_dead_and_lineage():
    slots = [slot("1.2.x", 4), slot("1.2.x", 5), slot("1.2.x", 6), slot("1.1.x", 9), slot(), slot("1.3.x", 1)]
    advice = Advice(attempt=1, seq=1, lineage="1.2.x", decided=True, stable=5)
    assert free(slots, None) == [4]
    assert free(slots, Advice(attempt=1, seq=1, lineage="")) == [4]
    assert free(slots, advice) == [0, 3, 4]
    skipped = Advice(attempt=1, seq=1, lineage="1.2.x", decided=True, dead=(6,), keep=(SnapshotId("1.1.x", 9),))
    assert free(slots, skipped) == [2, 4]
    promised = [one and replace(one, promised=True) for one in slots]
    assert free(promised, skipped) == [4], "who has skipped it may still get it by force"
    assert free(promised, replace(skipped, stable=7)) == [0, 1, 2, 4]


# ---------------------------------------------------------------- the machine


A = HostId("a")
C = TypeVar("C")


def test_older_lineages_stay_until_it_is_decided_what_the_new_one_restores():
    """Schedule 92980: a host gave up step 2, which it had not reported yet, because the new group's advice kept only step 1."""
    slots = [slot("1.1.x", 1), slot("1.1.x", 2), slot()]
    undecided = Advice(attempt=1, seq=1, lineage="1.2.x", keep=(SnapshotId("1.1.x", 1),))
    assert free(slots, undecided) == [2]
    assert free(slots, replace(undecided, decided=True)) == [1, 2]


def piece(step: int, *, lineage: str = "1.2.x", rank: int = 0) -> Staged:
    return Staged(rank=rank, world=1, lineage=lineage, step=step, layout="L", promised=False)


def word(newest: int = -1, *, lineage: str = "1.2.x", done: tuple[int, ...] = (), **more: Any) -> TrainerWord:
    return TrainerWord(lineage=lineage, rank=0, world=1, newest_step=newest, done=done, **more)


class Node:
    """A Host, told what its shell would have read."""

    def __init__(self, memory: Remember | None = None):
        self.host = Host(A, "i", memory)
        self.now_s = 0.0
        self.out: list[HostCommand] = []

    def send(self, event: HostEvent) -> list[HostCommand]:
        out = self.host.handle(event, self.now_s)
        self.out += out
        return out

    def connect(self, index: int = 0, *, slots: int = 3, trainer: str = "t", lineage: str = "1.2.x") -> None:
        self.send(SetFound(index=index, trainer=trainer, word=None, contents=(None,) * slots))
        self.send(Connected(connection=1, pid=7, rank=0, world=1, lineage=lineage, trainer=trainer, set_index=index))

    def read(self, said: TrainerWord, *contents: Staged | None, index: int = 0) -> list[HostCommand]:
        return self.send(SetRead(index=index, word=said, contents=contents))

    def advise(self, seq: int = 1, *, attempt: int = 1, lineage: str = "1.2.x", **more: Any) -> list[HostCommand]:
        return self.send(Advice(attempt=attempt, seq=seq, lineage=lineage, decided=True, **more))

    def grants(self, index: int = 0) -> tuple[int, ...]:
        """What the trainer was told last."""
        return [one.word.grants for one in self.out if isinstance(one, Speak) and one.index == index][-1]

    def report(self) -> HostSummary:
        """A fresh one."""
        self.now_s += HEARTBEAT_S
        told = [one for one in self.send(Tick()) if isinstance(one, HostReported | TrainerExited)]
        return [one.summary for one in told if isinstance(one, HostReported)][-1]

    def refusals(self) -> list[Failure]:
        return [one.refused for one in self.took(Hold) if one.refused is not None]

    def took(self, kind: type[C]) -> list[C]:
        """The commands of this kind so far; they are forgotten."""
        found = [one for one in self.out if isinstance(one, kind)]
        self.out = [one for one in self.out if not isinstance(one, kind)]
        return found


def test_a_granted_slot_is_not_reported():
    node = Node()
    node.connect()
    node.read(word(), None, None, None)
    node.advise()
    assert node.grants() == (1, 1, 1)
    node.read(word(5, done=(1, 0, 0)), piece(5), piece(4), None)
    summary = node.report()
    assert [one.step for one in summary.staged] == [5]
    assert summary.trainers[0].newest_step == 5


def test_granted_and_held_slots_are_never_granted_again():
    node = Node()
    node.connect()
    node.read(word(), None, None, None)
    node.advise()
    node.read(word(5, done=(1, 1, 0)), piece(5), piece(4), None)
    node.send(HoldAsked(reader="r", snapshot=piece(4).id, ranks=(0,)))
    node.advise(2, stable=50)
    assert node.grants() == (2, 1, 1)


def test_discarding_spares_the_choice_and_what_comes_after():
    order = Invalidate(host=A, lineage="1.1.x", step=5, by="1.3.x", attempt=1, seq=2)
    kept = [("1.1.x", 5), ("1.1.x", 4), ("1.3.x", 9), ("1.4.x", 1)]
    assert all(order.spares(*one) for one in kept)
    assert not any(order.spares(*one) for one in [("1.1.x", 6), ("1.2.x", 5), ("1.2.x", 3)])
    assert applies(order, None)
    assert not applies(order, order)


def invalidate(seq: int = 1, *, lineage: str = "", step: int = -1, by: str = "1.3.x", attempt: int = 1) -> Invalidate:
    return Invalidate(host=A, lineage=lineage, step=step, by=by, attempt=attempt, seq=seq)


def adopted(*contents: Staged, memory: Remember | None = None) -> Node:
    """A set that an earlier HostActor has left, with what it holds."""
    node = Node(memory)
    node.send(SetFound(index=0, trainer="", word=word(9, done=(0,) * len(contents)), contents=contents))
    return node


def test_what_is_read_outlives_a_restore_that_gives_it_up():
    node = adopted(piece(5), piece(6))
    node.send(HoldAsked(reader="r", snapshot=piece(5).id, ranks=(0,)))
    assert [one.addresses for one in node.took(Hold)] == [(SlotAddress(rank=0, index=0, slot=0),)]
    node.send(invalidate())
    assert [one.slot for one in node.took(Empty)] == [1]
    assert node.report().staged == (), "nobody else may count on it"
    node.send(HoldEnded(reader="r"))
    assert [one.slot for one in node.took(Empty)] == [0]


def test_what_is_staged_late_in_a_past_that_was_given_up_is_discarded():
    node = Node()
    node.connect()
    node.read(word(), None, None, None)
    node.advise()
    node.send(invalidate())
    node.read(word(5, done=(1, 0, 0)), piece(5), None, None)
    assert [one.slot for one in node.took(Empty) if one.reason == "a restore has given it up"] == [0]
    assert node.report().staged == ()


def test_a_restarted_host_still_knows_what_was_given_up_and_what_was_proposed():
    node = adopted(piece(5))
    agreed = Proposal(id=3, kind="stop", step=9, state="confirmed")
    node.advise(proposal=agreed)
    node.send(invalidate())
    memory = node.took(Remember)[-1]
    heir = adopted(piece(6), memory=memory)
    assert [one.slot for one in heir.took(Empty)] == [0]
    summary = heir.report()
    assert (summary.restore, summary.proposal, summary.staged) == (invalidate(), agreed, ())


def test_the_first_report_says_all_that_lies_there():
    """A restore that waits for it takes what it leaves out for gone."""
    node = adopted(piece(5))
    assert not node.took(HostReported), "there may be more"
    node.send(SetFound(index=1, trainer="", word=word(9, done=(0,)), contents=(piece(5, rank=1),)))
    node.send(Tick())
    (told,) = node.took(HostReported)
    assert [one.rank for one in told.summary.staged] == [0, 1]


def test_a_proposal_is_not_forgotten_with_new_advice():
    node = Node()
    agreed = Proposal(id=3, kind="stop", step=9, state="confirmed")
    node.advise(9, proposal=agreed)
    node.advise(1, attempt=2)
    assert node.report().proposal == agreed


def test_orders_of_a_superseded_attempt_are_ignored():
    node = Node()
    node.connect()
    node.read(word(), None, None, None)
    node.advise(attempt=2)
    node.send(EndTrainers(host=A, lineage="1.2.x", reason="late", attempt=1))
    assert node.took(Kill) == []
    node.send(invalidate(attempt=1))
    assert node.took(Remember) == []
    node.send(Write(host=A, save=SaveId("a1k1"), lineage="1.2.x", step=5, ranks=(0,)))
    assert [one.error for one in node.refusals()] == ["StaleAttemptError"]
    node.send(EndTrainers(host=A, lineage="1.2.x", reason="now", attempt=2))
    assert [(one.pid, one.reason) for one in node.took(Kill)] == [(7, "now")]


def test_a_save_is_executed_once():
    node = adopted(piece(5))
    order = Write(host=A, save=SaveId("a1k2"), lineage="1.2.x", step=5, ranks=(0,))
    assert [one.addresses for one in node.send(order) if isinstance(one, Hold)] == [(SlotAddress(rank=0, index=0, slot=0),)]
    assert [type(one) for one in node.send(order) if not isinstance(one, HostReported)] == []
    assert node.host.is_needed(0), "its bytes are being written"
    node.send(HoldEnded(reader=order.save))
    assert [type(one) for one in node.send(order) if not isinstance(one, HostReported)] == []
    node.send(replace(order, save=SaveId("a1k1")))
    assert [one.error for one in node.refusals()] == ["StepNotFoundError"], "an older one has come late"
    node.send(replace(order, save=SaveId("a1k3"), step=6))
    assert "does not hold ranks [0] of step 6" in node.refusals()[0].message


def test_a_trainer_that_has_grown_keeps_its_old_slots_until_no_step_needs_them():
    node = Node()
    node.connect()
    node.read(word(), None, None, None)
    node.advise()
    node.read(word(5, done=(1, 1, 1)), piece(5), None, None)
    node.connect(1)
    assert node.took(RemoveSet) == [], "step 5 is not stable yet"
    node.read(word(6, done=(0, 0, 0)), None, None, None, index=1)
    assert [one.step for one in node.report().staged] == [5]
    node.send(HoldAsked(reader="r", snapshot=piece(5).id, ranks=(0,)))
    node.advise(2, stable=6)
    assert node.took(RemoveSet) == [], "it is being read"
    node.send(HoldEnded(reader="r"))
    assert [one.index for one in node.took(RemoveSet)] == [0]


def test_slots_of_a_lower_number_that_a_trainer_was_handed_are_not_its_old_ones():
    node = Node()
    node.send(SetFound(index=0, trainer="dead", word=None, contents=(None,) * 3))
    node.connect(1)
    node.send(SetFound(index=0, trainer="t", word=None, contents=(None,) * 3))
    node.advise()
    assert node.took(RemoveSet) == [], "it has not come for them yet"
    node.connect(0)
    assert [one.index for one in node.took(RemoveSet)] == [1]


def test_the_end_of_a_trainer_is_told_once_with_its_cause():
    node = Node()
    node.connect()
    node.read(word(), None, None, None)
    node.advise()
    node.send(EndTrainers(host=A, lineage="1.2.x", reason="rank 1 is dead", attempt=1))
    node.send(Disconnected(connection=1))
    [exited] = node.took(TrainerExited)
    assert (exited.clean, exited.ended, exited.rank) == (False, True, 0)
    assert "rank 1 is dead" in exited.reason
    node.send(SetRead(index=0, word=None, contents=(None, None, None)))
    assert node.took(TrainerExited) == []


def test_an_event_that_does_not_fit_is_an_error_with_its_story():
    node = adopted(piece(5))
    with pytest.raises(
        InvalidTransitionError, match=r"Host of node a cannot take 'nonsense'.*sets \[0\].*holds set 0 slot 0: step 5"
    ):
        node.host.handle("nonsense", 0.0)  # type: ignore[arg-type]
