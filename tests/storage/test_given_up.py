"""What is written for a save that was given up goes, however late it comes."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from raystate.core.formats.errors import StorageError
from raystate.core.formats.messages import Failure, LeaveReply, ReleaseAsked, SaveId, Write
from raystate.core.formats.tree import Package
from raystate.storage import Storage
from raystate.testing.storage.contract import tree
from tests.storage.harness import Process

FIRST, SECOND = "a1k1", "a1k2"


def left(storage: Storage) -> list[str]:
    """The saves of which something is there, in any folder."""
    return [save for save in (FIRST, SECOND) if any(save in name for name in tree(storage))]


def start(process: Process) -> None:
    process.claim()
    process.join()
    process.restore()


def end(process: Process) -> None:
    process._answer(process._ask(ReleaseAsked, reason="done"), LeaveReply)
    assert process.loop.ended


class Nobody:
    """Hears of everything, and has nothing to say to it."""

    def heard_durable(self, step: int, save: str | None) -> None: ...
    def heard_gone(self, step: int, save: str | None) -> None: ...


@pytest.mark.parametrize("ends", [False, True], ids=["in the run", "as it ends"])
def test_what_a_host_writes_after_another_has_failed(storage: Storage, ends: bool) -> None:
    """It is removed when the host has written it; or at the end of the run, if the host is ended before it can say so."""
    process = Process(storage, name="p", witness=Nobody())
    hosts, late = process.hosts, list[tuple[Write, Future[Any]]]()
    at_once = hosts.write

    def write(order: Write) -> Future[Any]:
        if order.save != FIRST:
            return at_once(order)
        part: Future[Any] = Future()
        if order.host == hosts.ids[0]:
            part.set_exception(StorageError("the disk is full"))
        else:
            late.append((order, part))
        return part

    def close_all(*, remove_arena: bool) -> None:
        del remove_arena
        hosts._write(late[0][0])

    hosts.write = write
    start(process)
    assert process.save(1), "by a second try"
    if ends:
        hosts.close_all = close_all
        end(process)
    else:
        order, part = late[0]
        part.set_result(hosts._write(order))
        process._run()
    assert left(storage) == [SECOND]


def test_a_package_that_is_made_too_late(storage: Storage) -> None:
    process = Process(storage, name="p", witness=Nobody())
    packager = process.loop._storing._packager
    build = packager.build

    def slow(storage: Storage, run: str, step: int, save: str, parts: Any) -> Package:
        if save == FIRST:
            process.now_s += 61.0
            process._run()  # the save is given up, its files are removed, and the next try is durable
        return build(storage, run, step, save, parts)

    packager.build = slow
    start(process)
    assert process.save(1)
    process.settle()
    assert left(storage) == [SECOND]


def test_what_a_host_writes_for_an_attempt_that_died_is_removed_at_the_end(storage: Storage) -> None:
    """Its Coordinator was killed; the hosts live on, and so does what they were told."""
    dead = Process(storage, name="p", witness=Nobody())
    start(dead)
    heir = Process(storage, name="q", witness=Nobody(), known_hosts=tuple(dead.hosts.ids))
    heir.claim()
    for host in dead.hosts.ids:
        heir.hosts.ensure(host, pytest.fail)
    heir.settle()
    assert left(storage) == []
    dead.hosts._write(Write(host=dead.hosts.ids[0], save=SaveId(FIRST), lineage="", step=1, ranks=(0,)))
    end(heir)
    assert left(storage) == []


@pytest.mark.parametrize("how", ["released", "a bug"])
def test_who_looks_at_a_coordinator_that_has_ended_is_answered(storage: Storage, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A process that asked to enter waited without end, and was not told why the run had failed."""
    process = Process(storage, name="p", witness=Nobody())
    start(process)
    early = process.loop.look(lambda machine, _: machine.attempt)
    if how == "released":
        end(process)
    else:
        monkeypatch.setattr(process.loop.machine, "handle", lambda *_, **__: 1 / 0)
        process.loop._run()
        assert process.loop.ended and process.loop.failed is not None
    late = process.loop.look(lambda machine, _: machine.attempt)
    assert (early.result(timeout=0.0), late.result(timeout=0.0)) == (1, 1)


def test_what_is_asked_of_a_coordinator_that_has_ended_is_not_done(storage: Storage) -> None:
    """Only who looks is answered then: another end would take back a run that is released."""
    process = Process(storage, name="p", witness=Nobody())
    start(process)
    end(process)
    before = tree(storage)
    process.loop.refuse(Failure(error="ConfigError", message="too late"))
    process.loop.give_up("too late")
    assert process.loop.look(lambda machine, _: machine.finished).result(timeout=0.0)
    assert process.loop.failed is None and tree(storage) == before
