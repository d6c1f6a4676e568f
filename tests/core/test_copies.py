"""Peer copies: what a host fetches and keeps, and when the Coordinator counts a snapshot as stable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest

from raystate.core.formats.host_messages import (
    CopyEnded,
    CopyMeasured,
    EndCopy,
    FetchCopy,
    FillCopy,
    SetFound,
    SlotAddress,
)
from raystate.core.formats.messages import (
    Advice,
    Copy,
    HostId,
    HostReported,
    HostSummary,
    Invalidate,
    Log,
    SnapshotId,
    Staged,
    StopAsked,
    Tick,
    TrainerWord,
)
from raystate.core.host.machine import Host
from tests.core.driver import Driver

C = TypeVar("C")
A, B = HostId("a"), HostId("b")
LINE = "1.1.n"


def piece(rank: int, step: int = 1, lineage: str = LINE) -> Staged:
    return Staged(rank=rank, world=2, lineage=lineage, step=step, layout="L", promised=False)


def order(step: int = 1, *, attempt: int = 1, seq: int = 1, ranks: tuple[int, ...] = (1,)) -> Copy:
    pieces = tuple((rank, B) for rank in ranks)
    return Copy(host=A, lineage=LINE, step=step, pieces=pieces, attempt=attempt, seq=seq)


def only(commands: list[Any], kind: type[C]) -> C:
    (found,) = [one for one in commands if isinstance(one, kind)]
    return found


def has(commands: list[Any], kind: type[Any]) -> bool:
    return any(isinstance(one, kind) for one in commands)


# ---------------------------------------------------------------- the host that keeps copies


def filling() -> tuple[Host, int]:
    """A host into which one transfer is under way, and its number."""
    host = Host(A, "i")
    number = only(host.handle(order(), 0.0), FetchCopy).transfer
    host.handle(SetFound(index=0, trainer="", word=None, contents=(None, None), copies_of=1), 0.0)
    assert only(host.handle(CopyMeasured(transfer=number, index=0), 0.0), FillCopy).address.index == 0
    return host, number


def reports(commands: list[Any]) -> list[HostSummary]:
    return [one.summary for one in commands if isinstance(one, HostReported)]


def test_a_copy_counts_from_its_header_on():
    host, number = filling()
    assert host.contents() == []
    assert only(host.handle(CopyEnded(transfer=number, content=piece(1)), 1.0), EndCopy).address == SlotAddress(
        rank=1, index=0, slot=0
    )
    assert [content for _, content in host.contents()] == [piece(1)]
    assert not has(host.handle(order(seq=2), 2.0), FetchCopy)  # it has it


def test_what_a_restore_gives_up_meanwhile_is_no_copy():
    host, number = filling()
    host.handle(Invalidate(host=A, lineage="", step=-1, by="1.2.n", attempt=1, seq=1), 0.5)
    assert "given it up" in only(host.handle(CopyEnded(transfer=number, content=piece(1)), 1.0), EndCopy).reason
    assert host.contents() == []
    assert not has(host.handle(order(seq=2), 2.0), FetchCopy)


def test_other_bytes_are_no_copy():
    host, number = filling()
    assert only(host.handle(CopyEnded(transfer=number, content=piece(1, step=2)), 1.0), EndCopy).address is None
    assert host.contents() == []


def test_one_transfer_at_a_time_from_a_host_and_the_newest_order_counts():
    host = Host(A, "i")
    number = only(host.handle(order(ranks=(1, 2)), 0.0), FetchCopy).transfer
    assert not has(host.handle(order(2, seq=2, ranks=(1, 2)), 0.0), FetchCopy)
    assert not has(host.handle(order(1, seq=1, ranks=(1, 2)), 0.0), FetchCopy)  # a late message
    after = host.handle(CopyEnded(transfer=number, error="gone"), 1.0)
    assert only(after, FetchCopy).snapshot == SnapshotId(LINE, 2)


def test_what_failed_is_tried_again_when_the_order_is_repeated():
    host = Host(A, "i")
    number = only(host.handle(order(), 0.0), FetchCopy).transfer
    after = host.handle(CopyEnded(transfer=number, error="no memory", no_memory=True), 0.1)
    assert not has(after, FetchCopy)
    assert reports(after)[-1].no_copies == "no memory"
    assert not has(host.handle(Tick(), 0.5), FetchCopy)
    assert has(host.handle(order(), 1.0), FetchCopy)


# ---------------------------------------------------------------- the Coordinator


class Copying(Driver):
    """Two ranks on two hosts that copy as they are told, unless a test says otherwise."""

    def __init__(self, *, hosts: tuple[str, ...] = (A, B), replicas: int = 1):
        super().__init__(replicas=replicas, copy_timeout_s=30.0)
        for host in hosts:
            self.host_up(host)
        self.lineage = self.join([A, B])
        for host in (A, B):
            self.report(host)

    def step(self, step: int) -> None:
        for rank, host in enumerate((A, B)):
            self.seen[host] = [TrainerWord(rank=rank, world=2, lineage=self.lineage, newest_step=step)]
            self.staged.setdefault(host, []).append(piece(rank, step, self.lineage))
            self.report(host)

    def copies(self) -> list[Copy]:
        return [one for one in self.out if isinstance(one, Copy)]

    def obey(self, one: Copy) -> None:
        self.staged.setdefault(one.host, []).extend(piece(rank, one.step, self.lineage) for rank, _ in one.pieces)
        self.report(one.host)

    def holders(self, home: HostId, step: int) -> list[HostId]:
        """Those of the piece of the rank there."""
        rank = (A, B).index(home)
        return [HostId(host) for host, held in self.staged.items() for one in held if (one.rank, one.step) == (rank, step)]

    @property
    def stable(self) -> int:
        return [one for one in self.out if isinstance(one, Advice)][-1].stable

    def logged(self, text: str) -> int:
        return sum(1 for one in self.out if isinstance(one, Log) and text in one.text)


def test_the_next_snapshot_to_copy_is_the_newest_by_then():
    driver = Copying()
    for step in (1, 2, 3):
        driver.step(step)
    for one in driver.copies():
        driver.obey(one)
    assert {one.step for one in driver.copies()} == {1, 3}


def test_copies_that_do_not_come_hold_nothing_up_for_ever():
    driver = Copying()
    driver.step(1)
    driver.obey(driver.copies()[0])
    driver.tick(29.0)
    assert driver.stable == -1
    assert len(driver.copies()) > 2  # the order is repeated
    driver.tick(2.0)
    assert driver.stable == 1
    assert driver.logged("have no copies of step 1") == 1
    driver.step(2)
    late = next(one for one in driver.copies() if one.step == 2 and one.host == driver.copies()[1].host)
    driver.obey(late)
    assert driver.logged("keeps copies again") == 1


def test_what_has_its_copies_stays_until_what_was_restored_has_them():
    driver = Copying()
    driver.step(1)
    for one in driver.copies():
        driver.obey(one)
    driver.step(2)
    driver.join([A, B], "next")
    assert driver.restore().step == 2
    assert {key.step for key in driver.advice().keep} == {1, 2}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_host_that_goes_away_gets_no_copies_and_what_it_alone_holds_moves(replicas: int):
    driver = Copying(hosts=("a", "b", "c", "d"), replicas=replicas)
    driver.step(1)
    while lacked := [one for one in driver.take(Copy) if one.snapshot.step == 1]:
        for one in lacked:
            driver.obey(one)
    leaving = next(peer for one in (A, B) for peer in driver.holders(one, 1) if peer not in (A, B))
    driver.send(StopAsked(host=leaving, within_s=20.0, reason="drained by Ray"))
    driver.tick(1.0)
    moved = driver.take(Copy)
    assert moved
    assert leaving not in {one.host for one in moved}
    for one in moved:
        driver.obey(one)
    assert all(len({*driver.holders(one, 1)} - {leaving}) == 1 + replicas for one in (A, B)), "as if it were gone already"
    driver.step(2)
    assert leaving not in {one.host for one in driver.take(Copy)}


def test_the_only_host_that_stays_has_all_and_the_one_that_goes_has_its_copies_till_then():
    driver = Copying()
    driver.send(StopAsked(host=B, within_s=20.0, reason="drained by Ray"))
    driver.step(1)
    assert {one.host for one in driver.take(Copy)} == {A, B}


def test_a_host_without_memory_for_copies_is_not_waited_for():
    driver = Copying()
    driver.step(1)
    first, second = driver.copies()
    driver.obey(first)
    driver.send(HostReported(summary=replace(driver.summary(second.host), no_copies="no room")))
    assert driver.stable == 1
    assert driver.logged(f"host {second.host} keeps no copies for other hosts: no room") == 1


def test_one_host_is_told_once_and_calmly():
    driver = Driver(replicas=1)
    lineage = driver.join([A])
    for step in (1, 2):
        driver.seen[A] = [TrainerWord(rank=0, world=1, lineage=lineage, newest_step=step)]
        driver.staged[A] = [replace(piece(0, step, lineage), world=1)]
        driver.report(A)
    assert [one for one in driver.out if isinstance(one, Advice)][-1].stable == 2
    assert [one.level for one in driver.out if isinstance(one, Log) and "need a second host" in one.text] == ["debug"]
    assert not [one for one in driver.out if isinstance(one, Copy)]
