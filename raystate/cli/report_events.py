"""The events of a run, a line each, from its ledger."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from raystate.cli.console import span
from raystate.core.coordinator.context import NAMED, named
from raystate.core.coordinator.slow_ranks import place
from raystate.core.formats.texts import counted, duration, with_machine
from raystate.observe.ledger.lines import (
    AttemptBegan,
    CoordinatorStood,
    GroupEnded,
    HostChanged,
    Hung,
    Line,
    Noted,
    Noticed,
    RunLeft,
    Sampled,
    SaveLost,
    Slowed,
    StorageChanged,
)

RUN_ENDED = "the run ended"
Points = list[tuple[float, int]]  # (when, the newest step), in the order of time


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that happened. `kind`: one of `report_time.KINDS`. `step`: that it is about; -1: none."""

    at_s: float
    kind: str
    what: str
    text: str = ""
    step: int = -1


def event_of(what: Line, at_s: float) -> Incident | None:
    """The event that a line tells; None: it is worth no mark."""
    match what:
        case GroupEnded(how=how, cause=cause) if how not in ("ended", "interrupted"):
            return Incident(at_s=at_s, kind="hang" if how == "hung" else "death", what=f"a group ended: {how}", text=cause)
        case GroupEnded(how=how, cause=cause):
            told = "stopped, as was asked" if how == "interrupted" else "ended"
            return Incident(at_s=at_s, kind="end", what=f"a group {told}", text=cause)
        case HostChanged(host=host, state=state, why=why, machine=machine):
            told = {"down": "went down", "left": "left as announced", "up": "is up again", "new": "has a new HostActor"}.get(
                state, state
            )
            return Incident(at_s=at_s, kind="host", what=f"host {with_machine(host, machine)} {told}", text=why)
        case Noticed(host=host, reason=reason, within_s=within_s, machine=machine):
            where = f"for host {with_machine(host, machine)}" if host else "for the run"
            within = f", within {within_s:.0f} s" if within_s >= 0 else ""
            return Incident(at_s=at_s, kind="notice", what=f"notice {where}{within}", text=reason)
        case Hung(ranks=ranks, section=section):
            which = ", ".join(map(str, ranks[:8]))
            return Incident(at_s=at_s, kind="hang", what=f"rank {which} hung", text=f"in section {section}" if section else "")
        case Slowed(rank=rank, host=host, section=section, by_s=by_s, ends=ends, machine=machine):
            text = "" if ends else f"by {duration(by_s)} a step {place(section)}"
            told = f"rank {rank} is {'no longer slow' if ends else 'slow'} (host {with_machine(host, machine)})"
            return Incident(at_s=at_s, kind="slow", what=told, text=text)
        case CoordinatorStood(seconds=seconds):
            return Incident(at_s=at_s, kind="host", what=f"the Coordinator stood still for {seconds:.1f} s")
        case StorageChanged(works=True, why=why):
            return Incident(at_s=at_s, kind="works", what="storage works again", text=why)
        case StorageChanged(why=why):
            return Incident(at_s=at_s, kind="storage", what="storage fails", text=why)
        case SaveLost(step=step, why=why):
            return Incident(at_s=at_s, kind="lost", what=f"step {step} was given up", text=why, step=step)
        case RunLeft(reason=reason):
            return Incident(at_s=at_s, kind="end", what=RUN_ENDED, text=reason)
        case _:
            return None


def takeovers(ordered: Iterable[Noted]) -> dict[int, Incident]:
    """By attempt, but for the first: how it began, after a Coordinator that was lost, or in a run that had ended.

    Its group goes on if it is heard of again; that comes later, so it is told once all lines are known.
    """
    lines = list(ordered)
    heard: dict[int, set[str]] = {}  # attempt -> its groups
    for line in lines:
        if isinstance(line.what, Sampled):
            heard.setdefault(line.attempt, set()).add(line.what.group)
    found: dict[int, Incident] = {}
    before: Noted | None = None
    has_left, group = False, ""
    for line in lines:
        if isinstance(line.what, AttemptBegan):
            if before is not None and before.attempt != line.attempt:
                found[line.attempt] = _taken_over(before, line, has_left, group in heard.get(line.attempt, ()))
            has_left = False
        elif isinstance(line.what, RunLeft):
            has_left = True
        group = line.what.group if isinstance(line.what, Sampled) else group
        before = line
    return found


def _taken_over(before: Noted, line: Noted, has_left: bool, goes_on: bool) -> Incident:
    if has_left:
        return Incident(
            at_s=line.t, kind="attempt", what=f"attempt {line.attempt} began", text="the run is used again, after its end"
        )
    went_on = "its worker group lived on" if goes_on else "its worker group did not go on"
    gap_s = line.t - before.t  # below 0: the one before slept, and noted more when it woke up
    text = f"nothing was coordinated for {span(gap_s) if gap_s >= 1 else 'less than 1 s'}; {went_on}"
    what = f"the Coordinator was lost and replaced: attempt {line.attempt} began"
    return Incident(at_s=line.t, kind="coordinator", what=what, text=text)


def outages(moments: Sequence[Incident], durable: Sequence[tuple[float, int]], points: Points) -> Iterable[Incident]:
    """Each outage of storage with how long nothing became durable, and how many steps that put at risk; at its end how long it was.

    Args:
        moments: in the order of time.
        durable: (when, step), in the order of time.
        points: of the run.
    """
    lasted_s = {id(end): end.at_s - begin_s for begin_s, end in without_storage(moments) if end is not None}
    for one in moments:
        if one.kind == "storage":
            told = [part for part in (one.text, _undurable(one.at_s, durable, points)) if part]
            yield dataclasses.replace(one, text="; ".join(told))
        elif one.kind == "works" and id(one) in lasted_s:
            yield dataclasses.replace(one, what=f"{one.what}, after {span(lasted_s[id(one)])}")
        else:
            yield one


def without_storage(moments: Iterable[Incident]) -> Iterator[tuple[float, Incident | None]]:
    """(begin, end) of each outage, in the order of time; None: it goes on. What another Coordinator, and a run that has ended, find of
    storage, they tell anew."""
    begin_s: float | None = None
    for one in moments:
        if one.kind == "storage" and begin_s is None:
            begin_s = one.at_s
        elif begin_s is not None and (one.kind in ("works", "coordinator", "attempt") or one.what == RUN_ENDED):
            yield begin_s, one
            begin_s = None
    if begin_s is not None:
        yield begin_s, None


def _undurable(at_s: float, durable: Sequence[tuple[float, int]], points: Points) -> str:
    before = max((one for one in durable if one[0] <= at_s), default=None)
    after = min((one for one in durable if one[0] > at_s), default=None)
    if before is None:
        return ""
    until_s = after[0] if after is not None else max([at_s, *(point_s for point_s, _ in points)])
    still = "" if after is not None else " so far"
    told = f"nothing became durable for {span(until_s - before[0])}{still}, after step {before[1]}"
    risk = max((step for point_s, step in points if before[0] <= point_s <= until_s), default=-1) - before[1]
    return f"{told}; up to {counted(risk, 'step')} at risk" if risk > 0 else told


def step_at(at_s: float, points: Points) -> float | None:
    """By the samples beside that time; None: there is none before it."""
    for (now_s, step), later in zip(reversed(points), [None, *reversed(points)], strict=False):
        if now_s <= at_s:
            if later is None or later[1] <= step or later[0] <= now_s:
                return float(step)
            return step + (later[1] - step) * (at_s - now_s) / (later[0] - now_s)
    return None


def gathered(moments: Iterable[Incident]) -> list[Incident]:
    """Saves that were given up one after another, for the same reason but for their steps, are one."""
    found: list[Incident] = []
    steps: dict[int, set[int]] = {}  # place in `found` -> its steps
    last: tuple[str, int] | None = None
    for one in moments:
        if one.kind != "lost":
            last = last if one.kind in ("host", "slow", "notice") else None  # these don't change why
            found.append(one)
            continue
        reason = re.sub(r"\bstep \d+", "step", one.text)
        if last is None or last[0] != reason:
            last = reason, len(found)
            found.append(one)
        steps.setdefault(last[1], set()).add(one.step)
    for first, those in steps.items():
        if len(many := sorted(those)) > 1:
            told = named([str(step) for step in many])
            what = f"{len(many)} steps were given up: {told}{f', the last {many[-1]}' if len(many) > NAMED else ''}"
            text = re.sub(r"\bstep \d+", "each step", found[first].text)
            found[first] = dataclasses.replace(found[first], what=what, text=text)
    return found
