"""What a HostActor decides: what its report says, which slots it grants, whose orders it follows, and when a slot's bytes may go.

`handle` is the only mutator, deterministic, without clock or I/O. The shell feeds it what it reads: a set's word always before the
headers of its slots. A trainer writes a slot's header before the word that no longer lists the step
as pending. So no report shows a step that is being finished as neither pending nor held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raystate.core.formats.commands import Write
from raystate.core.formats.declared import Failure
from raystate.core.formats.errors import InvalidTransitionError
from raystate.core.formats.events import HostReported, Tick
from raystate.core.formats.host_messages import (
    Connected,
    CopyEnded,
    CopyMeasured,
    Disconnected,
    Examined,
    Hold,
    HoldAsked,
    HoldEnded,
    HostCommand,
    HostEvent,
    Remember,
    SetFound,
    SetRead,
    SetRemoved,
    SlotAddress,
    Speak,
)
from raystate.core.formats.names import HostId, group_of, save_order
from raystate.core.formats.orders import Advice, Copy, EndTrainers, Invalidate
from raystate.core.formats.reports import HostSummary, HostWord, Staged
from raystate.core.host.connections import Connections
from raystate.core.host.copies import Copies
from raystate.core.host.reporting import Reporting
from raystate.core.host.slot_sets import SlotSets, applies
from raystate.waits import HEARTBEAT_S, REPORT_EVERY_S

REMEMBERED_SAVES = 4


class Host:
    """One incarnation of a HostActor.

    Args:
        host: its node.
        incarnation: of this process, unique.
        memory: what its predecessor remembered.
        report_interval_s: at most one report per interval, unless somebody waits for one.
        heartbeat_s: a report at least so often.
        domain: what the host is lost together with; "": nothing else.
        machine: name of its machine, for people.
    """

    def __init__(
        self,
        host: HostId,
        incarnation: str,
        memory: Remember | None = None,
        *,
        report_interval_s: float = REPORT_EVERY_S,
        heartbeat_s: float = HEARTBEAT_S,
        domain: str = "",
        machine: str = "",
    ):
        self.host = host
        self.incarnation = incarnation
        self._domain = domain
        self._machine = machine
        self._counts: tuple[tuple[str, float], ...] = ()  # news for the next report
        memory = memory or Remember()
        self._slot_sets = SlotSets(memory.restore)
        self._connections = Connections(host, self._slot_sets)
        self._copies = Copies(self._slot_sets)
        self._advice = memory.advice
        self._attempt: int | None = None  # the newest that was heard of; older ones are ignored
        self._readers: dict[str, tuple[SlotAddress, ...]] = {}  # by name; of a save, its id
        self._saves: dict[str, None] = {}  # whose outcome may be asked for
        self._newest_save = (0, 0)
        self._reports = Reporting(report_interval_s, heartbeat_s)
        self._knows_all = False  # until then a report would say that the rest is gone
        self._out: list[HostCommand] = []
        self._now_s = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            SetFound: self._set_found,
            SetRemoved: self._set_removed,
            SetRead: self._set_read,
            Connected: self._connected,
            Disconnected: self._disconnected,
            Examined: self._connections.examined,
            HoldAsked: self._hold_asked,
            HoldEnded: self._hold_ended,
            CopyMeasured: lambda event: self._copies.measured(event, self._advice),
            CopyEnded: self._copy_ended,
            Tick: self._tick,
            Advice: self._advised,
            Invalidate: self._invalidate,
            EndTrainers: self._end_trainers,
            Write: self._write,
            Copy: self._copy,
        }

    # ---------------------------------------------------------------- the one entrance

    def handle(self, event: HostEvent, now_s: float) -> list[HostCommand]:
        """Take one event.

        Args:
            event: what has happened, or an order of the Coordinator.
            now_s: monotonic seconds of this process; only differences matter.

        Returns:
            What is to be done, in order, at once.

        Raises:
            InvalidTransitionError: a bug in raystate; it tells the event and the state that did not fit.
        """
        try:
            return self._handle(event, now_s)
        except Exception as error:
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise InvalidTransitionError(f"the Host of node {self.host} cannot take {event!r} ({text}); {self.story()}") from error

    def story(self) -> str:
        """The state in one line, for people."""
        held = ", ".join(f"set {address.index} slot {address.slot}: step {content.step}" for address, content in self.contents())
        trainers = ", ".join(f"rank {one.hello.rank} with set {one.hello.set_index}" for one in self._connections.trainers.values())
        return (
            f"incarnation {self.incarnation}; attempt {self._attempt}; sets {sorted(self._slot_sets.sets)}; "
            f"trainers: {trainers or 'none'}; "
            f"holds {held or 'nothing'}; saves {sorted(self._saves)}"
        )

    def _handle(self, event: HostEvent, now_s: float) -> list[HostCommand]:
        self._now_s = now_s
        out: list[HostCommand] = []
        self._out = self._slot_sets.out = self._connections.out = self._copies.out = out
        # The shell tells first of all sets that it finds: a report before would call the rest lost.
        # (test_host.test_the_first_report_says_all_that_lies_there)
        self._knows_all = self._knows_all or type(event) is not SetFound
        self._handlers[type(event)](event)
        if type(event) is not Tick:  # time alone frees nothing
            self._grant()
            if len(self._slot_sets.sets) > 1:
                self._slot_sets.drop_replaced(self._advice, self._connections.is_connected)
            self._copies.turn(self._advice)
        self._report()
        return out

    @property
    def next_report_s(self) -> float:
        """When a `Tick` will bring a report, if nothing happens before."""
        return self._reports.next_s

    @property
    def suspects(self) -> tuple[int, ...]:
        """Sets whose trainer is not connected, and may still have slots of it: is their lock free?"""
        return self._connections.suspects

    def contents(self) -> list[tuple[SlotAddress, Staged]]:
        """What is held here and may be read."""
        return self._slot_sets.contents()

    def is_needed(self, index: int) -> bool:
        """Whether a set without a trainer holds anything that a recovery or a save may need: else it may be removed."""
        return self._slot_sets.is_needed(index, self._advice)

    # ---------------------------------------------------------------- slot sets

    def _set_found(self, event: SetFound) -> None:
        self._slot_sets.found(event)
        self._changed()

    def _set_removed(self, event: SetRemoved) -> None:
        self._slot_sets.sets.pop(event.index, None)
        self._changed()

    def _set_read(self, event: SetRead) -> None:
        one = self._slot_sets.sets.get(event.index)
        if one is None:
            return
        if event.word is not None:
            one.word = event.word
        elif self._connections.is_connected(one):
            return
        else:
            one.take_back()
        self._slot_sets.take(one, event.contents)
        self._changed()
        if event.word is None:
            self._connections.unlocked(one)

    # ---------------------------------------------------------------- trainers come and go

    def _connected(self, event: Connected) -> None:
        self._connections.connected(event)
        self._changed()

    def _disconnected(self, event: Disconnected) -> None:
        if self._connections.disconnected(event):
            self._changed()

    def _end_trainers(self, order: EndTrainers) -> None:
        # A superseded Coordinator that wakes up must not end the trainers of its successor.
        # (test_simulator.test_planted_bug_is_found, "ends are not fenced")
        if not self._is_stale(order.attempt):
            self._connections.end(order)

    # ---------------------------------------------------------------- the Coordinator's orders

    def _is_stale(self, attempt: int) -> bool:
        """Whether an order comes from an attempt that has been superseded, as far as this host knows."""
        if self._attempt is not None and attempt < self._attempt:
            return True
        if self._attempt is None or attempt > self._attempt:
            self._attempt = attempt
            self._connections.tell_exits_again()
            self._changed()
        return False

    def _advised(self, advice: Advice) -> None:
        old = self._advice
        if self._is_stale(advice.attempt) or not (old is None or advice.stamp > old.stamp):
            return
        if advice.proposal is None and old is not None and old.proposal is not None:
            # A new Coordinator knows of a proposal only through the hosts: it must not be lost
            # before all have reported it.
            # (test_host.test_a_proposal_is_not_forgotten_with_new_advice)
            advice = replace(advice, proposal=old.proposal)
        self._advice = advice
        if advice.proposal != (old.proposal if old is not None else None):
            self._remember()
        self._changed()

    def _invalidate(self, order: Invalidate) -> None:
        """Discard what a recovery has given up, then report. One that is not newer than the last changes nothing."""
        if self._is_stale(order.attempt):
            return
        if applies(order, self._slot_sets.restore):
            self._slot_sets.give_up(order)
            self._remember()
        self._reports.at_once = True

    def _remember(self) -> None:
        self._out.append(Remember(restore=self._slot_sets.restore, advice=self._advice))

    # ---------------------------------------------------------------- reading and writing what is held

    def _hold_asked(self, event: HoldAsked) -> None:
        addresses = self._slot_sets.find(event.snapshot, event.ranks)
        self._slot_sets.hold(addresses)
        self._readers[event.reader] = addresses
        self._out.append(Hold(addresses=addresses))

    def _hold_ended(self, event: HoldEnded) -> None:
        self._slot_sets.let_go(self._readers.pop(event.reader, ()))
        self._changed()

    def _write(self, order: Write) -> None:
        """A save id is executed once: the same order again gets the same outcome.
        (test_host.test_a_save_is_executed_once)"""
        number = save_order(order.save)
        if self._is_stale(number[0]):
            self._refuse(order, "StaleAttemptError", f"save {order.save} is of a superseded attempt")
            return
        if order.save in self._saves:
            return
        if number <= self._newest_save:
            self._refuse(order, "StepNotFoundError", f"save {order.save} was executed before on host {self.host[:8]}")
            return
        self._newest_save = number
        addresses = self._slot_sets.find(order.snapshot, order.ranks)
        missing = sorted(set(order.ranks) - {address.rank for address in addresses})
        if missing:
            self._refuse(order, "StepNotFoundError", f"host {self.host[:8]} does not hold ranks {missing} of step {order.step}")
            return
        for old in [save for save in self._saves if save not in self._readers][:-REMEMBERED_SAVES]:
            del self._saves[old]
        self._slot_sets.hold(addresses)
        self._readers[order.save] = addresses
        self._saves[order.save] = None
        self._out.append(Hold(addresses=addresses, order=order))

    def _refuse(self, order: Write, error: str, message: str) -> None:
        failure = Failure(error=error, message=message, details={"step": order.step, "host": self.host})
        self._out.append(Hold(addresses=(), order=order, refused=failure))

    def is_connected(self, connection: int) -> bool:
        """Whether a trainer is there."""
        return connection in self._connections.trainers

    def remembers(self, save: str) -> bool:
        """Whether the outcome of that save may still be asked for."""
        return save in self._saves

    # ---------------------------------------------------------------- copies of other hosts' pieces

    def _copy(self, order: Copy) -> None:
        if not self._is_stale(order.attempt):
            self._copies.ordered(order)

    def _copy_ended(self, event: CopyEnded) -> None:
        self._copies.ended(event)
        self._changed()

    # ---------------------------------------------------------------- grants and the host's words

    def _grant(self) -> None:
        """Hand out what may be reused, and tell every connected trainer what it has to know."""
        advice = self._advice
        for trainer in self._connections.trainers.values():
            one = self._slot_sets.sets.get(trainer.hello.set_index)
            if one is None or one.word is None or group_of(one.word.lineage) != group_of(trainer.hello.lineage):
                continue
            # Advice about another lineage is not for this trainer, but it must learn that its run has failed.
            told = advice if advice is not None and (one.word.lineage == advice.lineage or advice.failure is not None) else None
            if told is not None and one.word.lineage == told.lineage:
                self._reports.changed |= self._slot_sets.grant(one, told)
            grants = tuple([slot.granted for slot in one.slots])
            if one.told is told and one.said is not None and one.said.grants == grants:
                continue
            one.told = told
            word = HostWord.saying(grants, told)
            if word != one.said:
                one.said = word
                self._out.append(Speak(index=one.index, word=word))

    # ---------------------------------------------------------------- the report

    def _tick(self, event: Tick) -> None:
        self._counts = event.counts or self._counts

    def _changed(self) -> None:
        self._reports.changed = True

    def _report(self) -> None:
        if self._knows_all and self._reports.is_due(self._now_s):
            self._out.append(HostReported(summary=self.summary(self._reports.seq)))
            self._counts = ()  # once is enough: a record keeps every report, and what gets lost comes again

    def summary(self, seq: int) -> HostSummary:
        """The report as of now."""
        advice = self._advice
        return HostSummary(
            host=self.host,
            incarnation=self.incarnation,
            seq=seq,
            staged=self._slot_sets.reported(),
            trainers=tuple(self._connections.seen()),
            restore=self._slot_sets.restore,
            advised=None if advice is None else advice.stamp,
            proposal=None if advice is None else advice.proposal,
            attempt=self._attempt,
            domain=self._domain,
            machine=self._machine,
            no_copies=self._copies.no_memory,
            clock_s=self._now_s,
            counts=self._counts,
        )
