"""Lines of a run's ledger about its groups, hosts and ends: made from all that the Coordinator's machine takes and knows."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from raystate.core.coordinator.facts import remember
from raystate.core.coordinator.group import Group
from raystate.core.coordinator.machine import Coordinator
from raystate.core.formats.events import Claimed, HostDown, StopAsked, Tick, Written
from raystate.core.formats.messages import Event, HostId, Joined, ReleaseAsked
from raystate.core.formats.names import SnapshotId
from raystate.core.formats.reports import SECTION, TrainerWord
from raystate.machine.counts import counts
from raystate.observe.ends import Ends, cause_of, first_to_fail
from raystate.observe.ledger.lines import (
    ALL_CLOSED,
    AttemptBegan,
    GroupEnded,
    GroupJoined,
    GroupRestored,
    HostChanged,
    Hung,
    Line,
    Noticed,
    RunLeft,
    Sampled,
    SaveLost,
)
from raystate.observe.timeline import sampled_every_s

_MOST_HOSTS = 64  # named in one line
_MOST_CAUSES = 64  # of a group's time, as each rank may have names of its own; the others' time is of "other"
_REMEMBERED = 256  # notices, and hosts that are down
_SAVES = 8  # under way


@dataclass(frozen=True, slots=True)
class _Joining:
    """The worker group of which ranks join."""

    group: str
    came_s: dict[str, float] = field(default_factory=dict[str, float])  # what came before, by the names of `Joined.ages` -> when


class Happenings:
    """Compares what the machine knows with what was noted, after each event.

    Args:
        machine: whose events are followed.
        note: takes a line.
        ends_of: how the trainers of a group ended, as far as it is known.
    """

    def __init__(self, machine: Coordinator, note: Callable[[Line], None], ends_of: Callable[[str], Ends]):
        self._machine = machine
        self._note = note
        self._ends_of = ends_of
        self._group: Group | None = None  # the one that was noted last, in its newest lineage
        self._is_over = False  # its end was noted
        self._is_restored = False  # that it has restored in this lineage was noted
        self._joining = _Joining("")
        self._causes: set[str] = set()  # of the group's time: what a sample has once, those after it have too
        self._sampled: tuple[bool, float] = (False, 0.0)  # whether it had made a step, and when the next sample is due
        self._hung: frozenset[int] = frozenset()
        self._notices: dict[str, str] = {}
        self._down: dict[str, str] = {}  # host -> why
        self._incarnations: dict[str, str] = {}
        self._lost: frozenset[SnapshotId] = frozenset()
        self._writing: dict[str, tuple[float, int]] = {}  # save -> (when a host had written last, its bytes)
        self._leaving_s: float | None = None  # since when the group's ranks close
        self._why_left = ALL_CLOSED
        self._is_left = False

    def look(self, event: Event, now_s: float) -> None:
        """The machine has taken an event."""
        match event:
            case Claimed(entry=entry):
                self._note(AttemptBegan(reason=entry.reason, host=platform.node()))
                self._lost = frozenset(self._machine.journal.facts.given_up)
            case Joined():
                self._joins(event, now_s)
            case HostDown(host=host, reason=why):
                self._is_down(host, why)
            case StopAsked():
                self._stop_asked(event)
            case ReleaseAsked(reason=why):
                self._why_left = why
            case Written(save=save, error=""):
                remember(self._writing, save, (now_s, self._nbytes(save)), most=_SAVES)
            case Tick():
                self._look_at_hosts()
                self._look_at_lost()
            case _:
                pass
        self._look_at_group(now_s)
        self._look_at_end(now_s)

    def written(self, save: str) -> tuple[float | None, int]:
        """(when the last host had written its part, bytes) of a save; (None, 0): it isn't known."""
        return self._writing.get(save, (None, 0))

    # ------------------------------------------------------------ the worker group

    def _joins(self, event: Joined, now_s: float) -> None:
        if event.group != self._joining.group:
            self._joining = _Joining(event.group)
        came_s = self._joining.came_s
        for name, age_s in event.ages:
            came_s[name] = min(came_s.get(name, now_s), now_s - age_s)

    def _look_at_group(self, now_s: float) -> None:
        joins, known = self._machine.joins, self._group
        if known is not None and not self._is_over and known.name in joins.ended:
            self._sample(known)
            ends = self._ends_of(known.name).in_order
            first = first_to_fail(ends)
            why = cause_of(ends) or joins.ended[known.name]
            self._note(GroupEnded(group=known.name, how="ended" if first is None else first.kind, cause=why))
            self._is_over = True
        group = joins.group
        if group is None or not group.alive:
            return
        if known is None or known.name != group.name:
            if not group.adopted:
                self._joined(group, now_s)
            self._sampled, self._hung, self._is_over = (False, now_s), frozenset(), False
            self._causes = set()
        if known is not group:
            self._is_restored = False
        if group.restored is not None and not self._is_restored:
            self._note(GroupRestored(group=group.name, step=group.restored.step, tier=group.restored.tier))
            self._is_restored = True
        self._group = group
        if group.hanging - self._hung:
            sections = [group.seen[rank].section for rank in sorted(group.hanging) if rank in group.seen]
            where = next(filter(None, sections), "")
            self._note(Hung(group=group.name, ranks=tuple(sorted(group.hanging)), section=where))
            self._hung = group.hanging
        self._sample_when_due(group, now_s)

    def _joined(self, group: Group, now_s: float) -> None:
        came_s = self._joining.came_s if self._joining.group == group.name else {}
        ages = {name: max(0.0, now_s - at_s) for name, at_s in came_s.items()}
        hosts = tuple(sorted(set(group.hosts.values()))[:_MOST_HOSTS])
        self._note(GroupJoined(group=group.name, world=group.world or 0, hosts=hosts, ages=ages))

    def _sample_when_due(self, group: Group, now_s: float) -> None:
        had_stepped, due_s = self._sampled
        start = group.restored.step if group.restored is not None else -1
        has_stepped = had_stepped or group.newest > max(0, start)
        if (now_s >= due_s or has_stepped != had_stepped) and (lived_s := self._sample(group)) is not None:
            self._sampled = has_stepped, now_s + sampled_every_s(lived_s)

    def _sample(self, group: Group) -> float | None:
        """Note how far it is; how long it has lived. None: no rank has said a word."""
        words = list(group.seen.values())
        if not words:
            return None
        spent: dict[str, float] = {}
        for word in words:
            for cause, seconds in word.spent:
                if len(self._causes) < _MOST_CAUSES:
                    self._causes.add(cause)
                elif cause not in self._causes and cause.startswith(SECTION):
                    cause = f"{SECTION}other"
                spent[cause] = spent.get(cause, 0.0) + seconds / len(words)
        lived_s = statistics.fmean(word.lived_s for word in words)
        sample = Sampled(
            group=group.name,
            step=group.newest,
            steps=max(word.steps for word in words),
            step_s=_measured(words),
            lived=lived_s,
            spent=spent,
        )
        self._note(sample)
        return lived_s

    # ------------------------------------------------------------ hosts, saves, the end

    def _is_down(self, host: str, why: str) -> None:
        self._notices.pop(host, None)
        if host not in self._down:
            remember(self._down, host, why, most=_REMEMBERED)
            state = "left" if host in self._machine.notices.left else "down"
            self._note(HostChanged(host=host, state=state, why=why, machine=self._machine_of(host)))

    def _look_at_hosts(self) -> None:
        for view in self._machine.memory.views:
            before = self._incarnations.get(view.host)
            if before not in (None, view.incarnation):
                self._note(
                    HostChanged(host=view.host, state="new", why="its HostActor had ended", machine=self._machine_of(view.host))
                )
            if view.incarnation:
                self._incarnations[view.host] = view.incarnation
            if not view.up:
                self._is_down(view.host, view.why_down)
            elif view.host in self._down:
                del self._down[view.host]
                self._note(HostChanged(host=view.host, state="up", machine=self._machine_of(view.host)))

    def _machine_of(self, host: str | None) -> str:
        return self._machine.memory.machines.get(HostId(host or ""), "")

    def _look_at_lost(self) -> None:
        given_up = self._machine.journal.facts.given_up
        if given_up.keys() != self._lost:
            for key in given_up.keys() - self._lost:
                counts.add("saves_lost")
                self._note(SaveLost(step=key.step, why=given_up[key]))
            self._lost = frozenset(given_up)

    def _stop_asked(self, event: StopAsked) -> None:
        key = event.host or event.reason
        if key not in self._notices:
            remember(self._notices, key, event.reason, most=_REMEMBERED)
            within_s = -1.0 if event.within_s is None else event.within_s
            self._note(Noticed(host=event.host or "", reason=event.reason, within_s=within_s, machine=self._machine_of(event.host)))

    def _nbytes(self, save: str) -> int:
        job = self._machine.saves.running
        snap = self._machine.memory.snaps.get(job.key) if job is not None and job.save == save else None
        if snap is None:
            return self.written(save)[1]
        return sum(next(iter(copies.values())).nbytes for copies in snap.pieces.values() if copies)

    def _look_at_end(self, now_s: float) -> None:
        leaving = self._machine.leaving
        if leaving.phase == "open":
            self._leaving_s = None
            return
        if self._leaving_s is None:
            self._leaving_s = now_s
            if self._group is not None and not self._is_over:
                self._sample(self._group)
        if leaving.is_finished() and not self._is_left:
            self._is_left = True
            self._look_at_lost()  # no tick comes after that
            self._note(RunLeft(reason=self._why_left, closing_s=now_s - self._leaving_s))


def _measured(words: list[TrainerWord]) -> float:
    """Seconds of an undisturbed step, as the ranks have measured it; 0.0: none has."""
    return statistics.median([word.step_s for word in words if word.step_s > 0] or [0.0])
