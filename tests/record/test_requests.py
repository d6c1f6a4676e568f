"""Requests to storage in a run's ledger: the sums of what its processes say of themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from raystate.core.formats.events import Claimed, HostReported
from raystate.core.formats.log import claim_entry
from raystate.core.formats.messages import HostId
from raystate.machine.counts import DELETE, FAILURES, LIST, READ, RETRIES, WRITE, ProcessCounts
from raystate.observe.counted import requests_in
from raystate.observe.ledger import ledger, requests
from raystate.observe.ledger.lines import Line, RunLeft, Sampled
from raystate.observe.ledger.requests import Requests
from raystate.observe.observers import Observers
from raystate.storage.objects import ObjectStorage
from tests.core.driver import AB, Driver

_NAMES = {"read": READ, "write": WRITE, "list": LIST, "delete": DELETE, "retries": RETRIES, "failures": FAILURES}


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ProcessCounts:
    """The counts of the Coordinator's process."""
    found = ProcessCounts()
    monkeypatch.setattr(requests, "process_counts", found.sums)
    return found


class Counted(Driver):
    """Hosts that say what they have counted."""

    def counts(self, host: str, incarnation: str = "i1", **counts: float) -> None:
        said = tuple((_NAMES[name], float(value)) for name, value in counts.items())
        self.send(HostReported(summary=dataclasses.replace(self.summary(host, incarnation), counts=said)))

    def found(self, **earlier: Any) -> Requests:
        """That look at it from its claim on."""
        found = Requests(self.core)
        found.look(Claimed(**earlier))
        return found


def test_each_operation_is_of_a_kind() -> None:
    found = ProcessCounts()
    for operation in ("read", "stat", "create", "copy", "rename", "fsync", "list", "delete", "delete_tree", "sweep"):
        found.request(operation)
    found.add(RETRIES, 2)
    found.add("written_bytes", 7)
    assert requests_in(found.sums()) == {"read": 2, "write": 4, "list": 1, "delete": 3, "retries": 2}


def test_reports_that_get_lost_or_come_again_cost_nothing(own: ProcessCounts) -> None:
    run = Counted()
    found = run.found(entry=claim_entry(None, "w", "r"))
    for writes in (5, 5, 7, 9):
        run.counts("a", write=writes, retries=1)
        run.report("a")  # most reports have no news of it
        found.sums()
    assert found.sums() == {"write": 9, "retries": 1}
    run.host_up("a", "i2")  # its next process counts from 0
    assert found.sums() == {"write": 9, "retries": 1}
    run.counts("a", "i2", write=4)
    run.counts("b", write=3, failures=1)
    own.request("list")
    assert found.sums() == {"write": 16, "retries": 1, "failures": 1, "list": 1}


def test_what_an_earlier_attempt_has_noted_is_not_noted_again(own: ProcessCounts) -> None:
    own.request("create")
    run = Counted()
    second = claim_entry(claim_entry(None, "v", "r"), "w", "r")
    found = run.found(entry=second, hosts=(HostId("a"),))
    run.counts("a", write=100)
    run.counts("b", write=10)  # it came since
    assert found.sums() == {"write": 10}
    run.counts("a", write=104)
    assert found.sums() == {"write": 14}


def test_samples_and_the_end_of_a_run_have_the_sums(own: ProcessCounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `Observers`, as the Coordinator's loop has them; what ranks say comes with their restores."""
    lines: list[Line] = []
    write = ledger.line_of
    monkeypatch.setattr(ledger, "line_of", lambda noted: lines.append(noted.what) or write(noted))
    monkeypatch.setattr(ledger.LedgerWriter, "note", lambda _self, line: None)

    class Observed(Driver):
        def send(self, event: Any) -> list[Any]:
            if "observers" not in vars(self):
                self.observers = Observers(ObjectStorage("memory://requests"), self.core, None)
                self.observers.begin(1, self.now_s)
            commands = super().send(event)
            self.observers.look(event, self.now_s)
            return commands

        def try_of(self, choice: Any, rank: int, **more: Any) -> Any:
            return super().try_of(choice, rank, requests=(("read", 20.0),), **more)

    run = Observed()
    run.join(AB, "g1")
    run.restore()
    run.say(1)
    run.tick(1.0)
    assert [one.requests for one in lines if isinstance(one, Sampled)][-1] == {"read": 40}
    run.restore()
    own.request("create")
    run.stage(2, promised=True)
    run.leave(run.key(2))
    run.live(10.0)
    (left,) = [one for one in lines if isinstance(one, RunLeft)]
    assert left.requests == {"read": 80, "write": 1}
