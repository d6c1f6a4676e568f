"""What a HostActor decides: what its report says, which slots it grants, whose orders it follows, and when a slot's bytes may go.

`handle` is the only mutator, deterministic, without clock or I/O. The shell feeds it what it reads: a set's word always before the
headers of its slots. A trainer writes a slot's header before the word that no longer lists the step as pending, so a report never
shows a step as neither pending nor held while it is being finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from raystate.core.errors import InvalidTransitionError
from raystate.core.host_messages import (
    AlreadyExecuted,
    Connected,
    Disconnected,
    Empty,
    Execute,
    Hold,
    HoldAsked,
    HoldEnded,
    HostCommand,
    HostEvent,
    HostMemory,
    Kill,
    Look,
    Place,
    Refuse,
    Remember,
    RemoveSet,
    SaidBye,
    SetFound,
    SetRead,
    SetRemoved,
    Speak,
    Tell,
    Unlocked,
    WriteEnded,
)
from raystate.core.messages import (
    Advice,
    EndTrainers,
    HostId,
    HostReported,
    HostSummary,
    HostUp,
    HostWord,
    Invalidate,
    Invalidated,
    SnapshotId,
    Staged,
    TrainerExited,
    TrainerSeen,
    TrainerWord,
    Write,
    group_of,
    lineage_order,
    save_order,
)
from raystate.core.slots import why_free, why_reusable

REPORT_INTERVAL_S = 0.05  # reports are coalesced to at most one per interval
HEARTBEAT_S = 1.0
REMEMBERED_EXITS = 64
REMEMBERED_SAVES = 4


@dataclass(slots=True)
class _Slot:
    granted: int = 0  # grant number; the trainer's while it is greater than the word's `done`
    content: Staged | None = None
    holds: int = 0
    doomed: bool = False  # to be emptied when the last hold is gone; it holds nothing any more for everybody else


@dataclass(slots=True)
class _Set:
    index: int
    trainer: str
    slots: list[_Slot]
    word: TrainerWord | None = None
    said: HostWord | None = None  # the host's word
    told: Advice | None = None  # what it was made of
    exited: bool = False  # its trainer's end has been told, or was none

    def done(self, slot: int) -> int:
        return self.word.done[slot] if self.word is not None and slot < len(self.word.done) else 0

    def is_granted(self, slot: int) -> bool:
        """True while the slot is its trainer's: granted, and not used up or handed back. Without a word it is nobody's."""
        return self.word is not None and self.slots[slot].granted > self.done(slot)

    def held(self) -> list[tuple[int, Staged]]:
        """(slot, content) of what may be read."""
        return [
            (number, slot.content)
            for number, slot in enumerate(self.slots)
            if slot.content is not None and not self.is_granted(number)
        ]


@dataclass(slots=True)
class _Trainer:
    hello: Connected
    said_bye: bool = False
    ended: str = ""  # why this host killed it


@dataclass(slots=True)
class _Save:
    places: tuple[Place, ...] = ()
    running: bool = True


@dataclass(slots=True)
class _Reports:
    """When the next report is due."""

    seq: int = 0
    last: HostSummary | None = None
    last_s: float = float("-inf")
    changed: bool = True
    at_once: bool = False


class Host:
    """One incarnation of a HostActor.

    Args:
        host: its node.
        incarnation: of this process, unique.
        memory: what its predecessor remembered.
        report_interval_s: at most one report per interval, unless somebody waits for one.
        heartbeat_s: a report at least so often.
    """

    def __init__(
        self,
        host: HostId,
        incarnation: str,
        memory: HostMemory | None = None,
        *,
        report_interval_s: float = REPORT_INTERVAL_S,
        heartbeat_s: float = HEARTBEAT_S,
    ):
        self.host = host
        self.incarnation = incarnation
        self._report_interval_s = report_interval_s
        self._heartbeat_s = heartbeat_s
        memory = memory or HostMemory()
        self._base = memory.base
        self._advice = memory.advice
        self._attempt: int | None = None  # the newest that was heard of; older ones are ignored
        self._sets: dict[int, _Set] = {}
        self._trainers: dict[int, _Trainer] = {}  # by connection
        self._readers: dict[str, tuple[Place, ...]] = {}
        self._saves: dict[str, _Save] = {}
        self._newest_save = (0, 0)
        self._exits: list[TrainerExited] = []
        self._reports = _Reports()
        self._up_said = False
        self._out: list[HostCommand] = []
        self._now_s = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            SetFound: self._set_found,
            SetRemoved: self._set_removed,
            SetRead: self._set_read,
            Connected: self._connected,
            SaidBye: self._said_bye,
            Disconnected: self._disconnected,
            Unlocked: self._unlocked,
            HoldAsked: self._hold_asked,
            HoldEnded: self._hold_ended,
            WriteEnded: self._write_ended,
            Look: lambda _: None,
            Advice: self._advised,
            Invalidate: self._invalidate,
            EndTrainers: self._end_trainers,
            Write: self._write,
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
        held = ", ".join(f"set {place.index} slot {place.slot}: step {content.step}" for place, content in self.contents())
        trainers = ", ".join(f"rank {one.hello.rank} with set {one.hello.set_index}" for one in self._trainers.values())
        return (
            f"incarnation {self.incarnation}; attempt {self._attempt}; sets {sorted(self._sets)}; trainers: {trainers or 'none'}; "
            f"holds {held or 'nothing'}; saves {sorted(self._saves)}"
        )

    def _handle(self, event: HostEvent, now_s: float) -> list[HostCommand]:
        self._now_s = now_s
        out: list[HostCommand] = []
        self._out = out
        if not self._up_said:
            self._up_said = True
            out.append(Tell(event=HostUp(host=self.host, incarnation=self.incarnation)))
        self._handlers[type(event)](event)
        if type(event) is not Look:  # time alone frees nothing
            self._grant()
            if len(self._sets) > 1:
                self._drop_replaced()
        self._report()
        return out

    @property
    def next_report_s(self) -> float:
        """When `Look` will bring a report, if nothing happens before."""
        reports = self._reports
        return reports.last_s + (self._report_interval_s if reports.changed else self._heartbeat_s)

    @property
    def suspects(self) -> tuple[int, ...]:
        """Sets whose trainer is not connected, and may still have slots of it: is their lock free?"""
        connected = {trainer.hello.set_index for trainer in self._trainers.values()}
        return tuple(
            one.index
            for one in self._sets.values()
            if one.index not in connected
            and one.word is not None
            and (not one.exited or any(map(one.is_granted, range(len(one.slots)))))
        )

    def contents(self) -> list[tuple[Place, Staged]]:
        """What is held here and may be read."""
        return [
            (Place(rank=content.rank, index=one.index, slot=number), content)
            for one in self._sets.values()
            for number, content in one.held()
        ]

    def is_needed(self, index: int) -> bool:
        """Whether a set without a trainer holds anything that a recovery or a save may need: else it may be removed."""
        one = self._sets.get(index)
        if one is None:
            return False
        if any(slot.holds for slot in one.slots):
            return True
        advice = self._advice
        kept = [slot.content.id for slot in one.slots if slot.content is not None]
        return bool(kept) and (advice is None or any(why_free(snapshot, advice) is None for snapshot in kept))

    # ---------------------------------------------------------------- slot sets

    def _set_found(self, event: SetFound) -> None:
        old = self._sets.get(event.index)
        count = len(event.contents)
        one = _Set(index=event.index, trainer=event.trainer, slots=[_Slot() for _ in range(count)], word=event.word)
        if old is not None:  # handed on: what is being read stays held
            for new, was in zip(one.slots, old.slots, strict=True):
                new.holds, new.doomed = was.holds, was.doomed
        if event.host_word is not None:
            one.said = event.host_word
            for slot, number in zip(one.slots, event.host_word.grants, strict=False):
                slot.granted = number
        self._sets[event.index] = one
        for replaced in self._sets.values():
            if replaced is not one and replaced.trainer == one.trainer and one.trainer:
                replaced.exited = True  # its trainer lives, with other slots
        self._take_contents(one, event.contents)
        self._changed()

    def _set_removed(self, event: SetRemoved) -> None:
        self._sets.pop(event.index, None)
        self._changed()

    def _set_read(self, event: SetRead) -> None:
        one = self._sets.get(event.index)
        if one is None:
            return
        one.word = event.word
        self._take_contents(one, event.contents)
        self._changed()

    def _take_contents(self, one: _Set, contents: Iterable[Staged | None]) -> None:
        """A granted slot holds nothing for anybody: its trainer may overwrite it at any moment."""
        for number, found in enumerate(contents):
            slot = one.slots[number]
            if slot.doomed or one.is_granted(number):
                slot.content = None
                continue
            slot.content = found
            if found is not None and self._base is not None and is_discarded(self._base, found.lineage, found.step):
                # Staged in a past that a restore has given up meanwhile.
                self._discard(one, number, "a restore has given it up")

    def _discard(self, one: _Set, number: int, reason: str) -> None:
        slot = one.slots[number]
        slot.content = None
        if slot.holds:
            slot.doomed = True
        else:
            self._out.append(Empty(index=one.index, slot=number, reason=reason))

    def _drop_replaced(self) -> None:
        """A trainer whose state has grown has other slots: the old ones go once nobody needs what they hold."""
        for one in list(self._sets.values()):
            newer = any(
                other.index != one.index and other.trainer == one.trainer and other.index > one.index
                for other in self._sets.values()
            )
            if one.trainer and newer and not self._is_connected(one) and not self.is_needed(one.index):
                del self._sets[one.index]
                self._out.append(RemoveSet(index=one.index, reason=f"trainer {one.trainer} has larger slots"))

    # ---------------------------------------------------------------- trainers come and go

    def _is_connected(self, one: _Set) -> bool:
        return any(trainer.hello.set_index == one.index for trainer in self._trainers.values())

    def _connected(self, event: Connected) -> None:
        old = self._trainers.get(event.connection)
        self._trainers[event.connection] = _Trainer(event) if old is None else replace(old, hello=event)
        self._changed()

    def _said_bye(self, event: SaidBye) -> None:
        if event.connection in self._trainers:
            self._trainers[event.connection].said_bye = True

    def _disconnected(self, event: Disconnected) -> None:
        trainer = self._trainers.pop(event.connection, None)
        if trainer is None:
            return
        self._changed()
        hello = trainer.hello
        if any(other.hello.trainer == hello.trainer for other in self._trainers.values()):
            return  # it has reconnected already
        one = self._sets.get(hello.set_index)
        word = one.word if one is not None else None
        if event.alive and word is not None and not trainer.said_bye:
            return
        if one is not None:
            one.exited = True
        clean = not trainer.ended and (trainer.said_bye or (word is not None and word.phase == "closing"))
        if clean:
            reason = "left"
        elif trainer.ended:
            reason = f"trainer rank {hello.rank} (pid {hello.pid}) was ended: {trainer.ended}"
        elif word is not None and word.phase == "failed":
            reason = word.error or f"trainer rank {hello.rank} (pid {hello.pid}) failed"
        else:
            reason = f"trainer rank {hello.rank} (pid {hello.pid}) died"
        self._say_exit(hello.lineage, hello.rank, clean=clean, reason=reason, ended=bool(trainer.ended))

    def _unlocked(self, event: Unlocked) -> None:
        one = self._sets.get(event.index)
        if one is None or self._is_connected(one):
            return
        for number, slot in enumerate(one.slots):
            slot.granted = min(slot.granted, one.done(number))
        self._take_contents(one, event.contents)
        self._changed()
        word = one.word
        if word is None or one.exited:
            return
        # Its connection had ended before, or it died while no HostActor looked: it never rang.
        one.exited = True
        reason = word.error if word.phase == "failed" and word.error else f"trainer rank {word.rank} died"
        self._say_exit(word.lineage, word.rank, clean=word.phase == "closing", reason=reason)

    def _say_exit(self, lineage: str, rank: int, *, clean: bool, reason: str, ended: bool = False) -> None:
        event = TrainerExited(host=self.host, lineage=lineage, rank=rank, clean=clean, reason=reason, ended=ended)
        if not clean:
            self._exits = [*self._exits[-(REMEMBERED_EXITS - 1) :], event]  # told again to a Coordinator that comes later
        self._out.append(Tell(event=event))

    def _end_trainers(self, order: EndTrainers) -> None:
        if self._is_stale(order.attempt):
            return
        for trainer in self._trainers.values():
            hello = trainer.hello
            one = self._sets.get(hello.set_index)
            leaving = trainer.said_bye or (one is not None and one.word is not None and one.word.phase in ("closing", "failed"))
            if group_of(hello.lineage) == group_of(order.lineage) and not leaving:
                trainer.ended = trainer.ended or order.reason
                self._out.append(Kill(pid=hello.pid, rank=hello.rank, reason=order.reason))

    # ---------------------------------------------------------------- the Coordinator's orders

    def _is_stale(self, attempt: int) -> bool:
        """Whether an order comes from an attempt that has been superseded, as far as this host knows."""
        if self._attempt is not None and attempt < self._attempt:
            return True
        if self._attempt is None or attempt > self._attempt:
            self._attempt = attempt
            self._out += [Tell(event=event) for event in self._exits]
            self._changed()
        return False

    def _advised(self, advice: Advice) -> None:
        old = self._advice
        if self._is_stale(advice.attempt) or not (old is None or (advice.attempt, advice.seq) > (old.attempt, old.seq)):
            return
        if advice.proposal is None and old is not None and old.proposal is not None:
            # A new Coordinator knows of a proposal only through the hosts: it must not be lost before all of them have reported it.
            advice = replace(advice, proposal=old.proposal)
        self._advice = advice
        if advice.proposal != (old.proposal if old is not None else None):
            self._remember()
        self._changed()

    def _invalidate(self, order: Invalidate) -> None:
        """Discard what a recovery has given up, then say so. One that is not newer than the last changes nothing."""
        if self._is_stale(order.attempt):
            return
        if applies(order, self._base):
            self._base = order
            self._remember()
            for one in self._sets.values():
                for number, slot in enumerate(one.slots):
                    if slot.content is not None and is_discarded(order, slot.content.lineage, slot.content.step):
                        self._discard(one, number, "a restore has given it up")
        self._reports.at_once = True
        self._out.append(Tell(event=Invalidated(host=self.host, lineage=order.lineage, step=order.step)))

    def _remember(self) -> None:
        self._out.append(Remember(memory=HostMemory(base=self._base, advice=self._advice)))

    # ---------------------------------------------------------------- reading and writing what is held

    def _find(self, snapshot: SnapshotId, ranks: Iterable[int]) -> tuple[Place, ...]:
        wanted = set(ranks)
        found: dict[int, Place] = {}
        for one in self._sets.values():
            for number, content in one.held():
                if content.rank in wanted and content.id == snapshot:
                    found.setdefault(content.rank, Place(rank=content.rank, index=one.index, slot=number))
        return tuple(found[rank] for rank in sorted(found))

    def _hold(self, places: Iterable[Place]) -> None:
        for place in places:
            self._sets[place.index].slots[place.slot].holds += 1

    def _let_go(self, places: Iterable[Place]) -> None:
        for place in places:
            one = self._sets.get(place.index)
            if one is None:
                continue
            slot = one.slots[place.slot]
            slot.holds -= 1
            if slot.doomed and not slot.holds:
                slot.doomed = False
                self._out.append(Empty(index=one.index, slot=place.slot, reason="a restore has given it up"))
        self._changed()

    def _hold_asked(self, event: HoldAsked) -> None:
        places = self._find(event.snapshot, event.ranks)
        self._hold(places)
        self._readers[event.reader] = places
        self._out.append(Hold(reader=event.reader, places=places))

    def _hold_ended(self, event: HoldEnded) -> None:
        self._let_go(self._readers.pop(event.reader, ()))

    def _write(self, order: Write) -> None:
        """A save id is executed once: the same order again gets the same outcome."""
        number = save_order(order.save)
        if self._is_stale(number[0]):
            self._refuse(order, "StaleAttemptError", f"save {order.save} is of a superseded attempt")
            return
        if order.save in self._saves:
            self._out.append(AlreadyExecuted(order=order))
            return
        if number <= self._newest_save:
            self._refuse(order, "StepNotFoundError", f"save {order.save} was executed before on host {self.host[:8]}")
            return
        self._newest_save = number
        places = self._find(order.snapshot, order.ranks)
        missing = sorted(set(order.ranks) - {place.rank for place in places})
        if missing:
            self._refuse(order, "StepNotFoundError", f"host {self.host[:8]} does not hold ranks {missing} of step {order.step}")
            return
        for old in [save for save, one in self._saves.items() if not one.running][:-REMEMBERED_SAVES]:
            del self._saves[old]
        self._hold(places)
        self._saves[order.save] = _Save(places)
        self._out.append(Execute(order=order, places=places))

    def _refuse(self, order: Write, error: str, message: str) -> None:
        self._out.append(Refuse(order=order, error=error, message=message))

    def _write_ended(self, event: WriteEnded) -> None:
        save = self._saves.get(event.save)
        if save is not None and save.running:
            save.running = False
            self._let_go(save.places)

    def remembers(self, save: str) -> bool:
        """Whether the outcome of that save may still be asked for."""
        return save in self._saves

    # ---------------------------------------------------------------- grants and the host's words

    def _grant(self) -> None:
        """Hand out what may be reused, and tell every connected trainer what it has to know."""
        advice = self._advice
        for trainer in self._trainers.values():
            one = self._sets.get(trainer.hello.set_index)
            if one is None or one.word is None or group_of(one.word.lineage) != group_of(trainer.hello.lineage):
                continue
            # Advice about another lineage is not for this trainer, but it must learn that its run has failed.
            told = advice if advice is not None and (one.word.lineage == advice.lineage or advice.failure is not None) else None
            if told is not None and one.word.lineage == told.lineage:
                self._grant_slots(one, told)
            grants = tuple([slot.granted for slot in one.slots])
            if one.told is told and one.said is not None and one.said.grants == grants:
                continue
            one.told = told
            word = host_word(grants, told)
            if word != one.said:
                one.said = word
                self._out.append(Speak(index=one.index, word=word))

    def _grant_slots(self, one: _Set, advice: Advice) -> None:
        for number, slot in enumerate(one.slots):
            if slot.holds or one.is_granted(number):
                continue
            reason = why_reusable(slot.content, advice)
            if reason is not None:
                slot.granted += 1
                slot.content = None
                self._out.append(Empty(index=one.index, slot=number, reason=reason))
                self._changed()

    # ---------------------------------------------------------------- the report

    def _changed(self) -> None:
        self._reports.changed = True

    def _report(self) -> None:
        reports = self._reports
        since_s = self._now_s - reports.last_s
        if not (reports.at_once or (reports.changed and since_s >= self._report_interval_s) or since_s >= self._heartbeat_s):
            return
        reports.seq += 1
        reports.last_s = self._now_s
        reports.changed = reports.at_once = False
        reports.last = self.summary(reports.seq)
        self._out.append(Tell(event=HostReported(summary=reports.last)))

    def summary(self, seq: int) -> HostSummary:
        """The report as of now. A granted slot is left out whatever it holds."""
        held: dict[tuple[int, str, int, int], Staged] = {}
        for one in self._sets.values():
            for _, content in one.held():
                held[content.rank, content.lineage, content.step, content.again] = content
        advice = self._advice
        return HostSummary(
            host=self.host,
            incarnation=self.incarnation,
            seq=seq,
            staged=tuple(held.values()),
            trainers=tuple(self._seen()),
            base=self._base,
            advised=None if advice is None else (advice.attempt, advice.seq),
            proposal=None if advice is None else advice.proposal,
            attempt=self._attempt,
        )

    def _seen(self) -> Iterator[TrainerSeen]:
        """The words of the trainers that are connected; of those that have no slots yet, what they said of themselves."""
        told: set[str] = set()
        for trainer in self._trainers.values():
            hello = trainer.hello
            one = self._sets.get(hello.set_index)
            if hello.rank < 0 or hello.trainer in told:
                continue
            told.add(hello.trainer)
            if one is not None and one.word is not None:
                yield seen_of(one.word)
            else:
                yield TrainerSeen(rank=hello.rank, world=hello.world, lineage=hello.lineage, newest_step=-1)


def seen_of(word: TrainerWord) -> TrainerSeen:
    """What a report says of a trainer's word."""
    return TrainerSeen(
        rank=word.rank,
        world=word.world,
        lineage=word.lineage,
        newest_step=word.newest_step,
        again=word.again,
        number=word.number,
        pending=word.pending,
        ack_id=word.ack_id,
        ack_ok=word.ack_ok,
        ack_step=word.ack_step,
    )


def host_word(grants: tuple[int, ...], advice: Advice | None) -> HostWord:
    """What the host tells a trainer."""
    if advice is None:
        return HostWord(grants=grants)
    return HostWord(
        grants=grants,
        interval=advice.interval,
        proposal=advice.proposal,
        failure=advice.failure,
        durable_step=advice.durable_step,
        save_errors=advice.save_errors,
        advice=(advice.attempt, advice.seq),
    )


def applies(order: Invalidate, base: Invalidate | None) -> bool:
    """False for an Invalidate that was applied already or has been overtaken: it is only acknowledged."""
    return base is None or (order.attempt, order.seq) > (base.attempt, base.seq) or (order.attempt, order.seq) == (0, 0)


def is_discarded(order: Invalidate, lineage: str, step: int) -> bool:
    """True if a slot that holds (lineage, step) goes with this Invalidate."""
    if lineage == order.lineage:
        return step > order.step
    return not order.by or lineage_order(lineage) < lineage_order(order.by)
