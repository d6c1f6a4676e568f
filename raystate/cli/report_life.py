"""A run's life as its ledger tells it: its attempts and groups, what happened, what each start took, and who was slow."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raystate.cli.report_events import Incident, Points, event_of, outages, step_at, takeovers
from raystate.core.formats.texts import counted
from raystate.observe.ledger.lines import (
    AttemptBegan,
    GroupEnded,
    GroupJoined,
    GroupRestored,
    LoggedRecovery,
    LoggedSave,
    Noted,
    RunLeft,
    Sampled,
    Slowed,
)

# The phases of a start, in this order; each lasts until the next one that is known.
PHASES: Mapping[str, str] = {
    "noticed": "the end was noticed, and a new group asked for",
    "hosts": "waiting for hosts",
    "process": "processes started",
    "function": "libraries loaded, the training function entered",
    "manager": "until StateManager was constructed",
    "joined": "until all ranks had joined",
    "restored": "until each rank had the step that was read back, or a first state, with what that compiled",
    "first step": "the first new step, with its compilation",
}
WENT_WRONG = ("retries", "failures")  # of the requests to storage
REQUESTS: Mapping[str, str] = {
    "read": "objects, parts of them, and looks at whether they are there",
    "write": "objects written, copied, renamed or made to last",
    "list": "what lies in a folder",
    "delete": "objects and folders removed",
    "retries": "of all these, tries after the first",
    "failures": "of all these, those that failed for good",
}
_AGES = (("asked", "noticed"), ("placed", "hosts"), ("process", "process"), ("function", "function"), ("manager", "manager"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Something that lasts. Times are seconds since 1970. `brief`: its label where there is little room."""

    begin_s: float
    end_s: float
    label: str
    text: str = ""
    brief: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A worker group came to train, or did not.

    Attributes:
        at_s: when it made its first new step; else when it ended, or was heard of last.
        group: its name.
        world: ranks; 0: not known.
        why: how the group before it ended; "": it was the run's first one.
        step: it went on from this step; -1: none.
        tier: where that came from.
        repeated: steps that were done again; None: it is no restart.
        seconds: from the end before it to its first new step; for a first start: from the first that is known of it.
        phases: of `PHASES`, how long each took.
        back: it made a new step.
    """

    at_s: float
    group: str
    world: int = 0
    why: str = ""
    step: int = -1
    tier: str = ""
    repeated: int | None = None
    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict[str, float])
    back: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A rank that made the others wait. `end_s` None: it still does. `cost_s`: in all its steps; None: no sample tells how many."""

    rank: int
    host: str
    section: str
    by_s: float
    since_step: int
    begin_s: float
    end_s: float | None = None
    cost_s: float | None = None
    machine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """All that is drawn of a ledger, each in the order of time.

    Attributes:
        trained: the newest step that a sample tells of; -1: none does.
        trained_by: of each group (when, the newest step then).
        last_s: time of the last line; None: there is none.
        left: why the run ended; "": it goes on, or its end was not told.
        requests: to storage, by kind, of all attempts; empty: no line tells.
        requested: (newest step, how many requests there had been by then), also over all attempts.
    """

    attempts: tuple[Period, ...] = ()
    groups: tuple[Period, ...] = ()
    moments: tuple[Incident, ...] = ()
    starts: tuple[Start, ...] = ()
    slow: tuple[Slow, ...] = ()
    saves: tuple[tuple[float, LoggedSave], ...] = ()
    trained: int = -1
    trained_by: tuple[tuple[tuple[float, int], ...], ...] = ()
    last_s: float | None = None
    left: str = ""
    requests: Mapping[str, float] = field(default_factory=dict[str, float])
    requested: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, kw_only=True)
class _Group:
    name: str
    known: dict[str, float] = field(default_factory=dict[str, float])  # what a phase ends with -> when
    begin_s: float = 0.0
    end_s: float = 0.0
    world: int = 0
    restored: GroupRestored | None = None
    first_step_s: float | None = None
    ended_s: float | None = None
    ended: GroupEnded | None = None
    newest: int = -1  # step
    points: Points = field(default_factory=list[tuple[float, int]])
    has_left: bool = False  # the run ended with it


def life_of(lines: Iterable[Noted]) -> Life:
    """From the lines of a ledger, in any order."""
    ordered = sorted(lines, key=lambda one: one[:3])
    groups: dict[str, _Group] = {}
    moments: list[Incident] = []
    attempts: list[tuple[float, AttemptBegan, int]] = []
    recoveries: dict[str, tuple[float, LoggedRecovery]] = {}
    slow: dict[tuple[int, str, str], Slow] = {}
    spells: list[Slow] = []
    points: Points = []
    ends: list[tuple[str, int]] = []  # (group, the place of its end among the moments)
    world, left = 0, ""
    for attempt, _, at_s, what in ordered:
        if (name := getattr(what, "group", "")) and not isinstance(what, LoggedRecovery):
            group = groups.setdefault(name, _Group(name=name, begin_s=at_s))
            group.end_s = max(group.end_s, at_s)
            _grow(group, what, at_s)
        if isinstance(what, Sampled):
            points.append((at_s, what.step))
        match what:
            case AttemptBegan():
                attempts.append((at_s, what, attempt))
                left = ""
            case GroupJoined():
                if world and what.world and what.world != world:
                    change = "grew" if what.world > world else "shrank"
                    text = f"from {counted(world, 'rank')} to {what.world}"
                    moments.append(Incident(at_s=at_s, kind="growth", what=f"the run {change}", text=text))
                world = what.world or world
            case RunLeft():
                left = what.reason
                if groups:
                    groups[next(reversed(groups))].has_left = True
            case LoggedRecovery():
                recoveries[what.group] = (at_s, what)
            case Slowed():
                _slowed(slow, spells, what, at_s, points)
            case _:
                pass
        if (moment := event_of(what, at_s)) is not None:
            if isinstance(what, GroupEnded):
                ends.append((what.group, len(moments)))
            moments.append(moment)
    _date_ends(list(groups.values()), recoveries)
    for name, place in ends:  # the ledger may hear of an end only when the next group joins
        moments[place] = dataclasses.replace(moments[place], at_s=groups[name].ended_s or moments[place].at_s)
    saves = tuple((one.t, one.what) for one in ordered if isinstance(one.what, LoggedSave))
    replaced = takeovers(ordered)
    moments = sorted([*moments, *replaced.values()], key=lambda one: one.at_s)
    end_s = max((one.t for one in ordered), default=0.0)
    known = list(groups.values())
    requests, requested = _requests(ordered)
    return Life(
        requests=requests,
        requested=tuple(requested),
        trained=max((step for _, step in points), default=-1),
        trained_by=tuple(tuple(one.points) for one in known if one.points),
        last_s=ordered[-1].t if ordered else None,
        left=left,
        attempts=tuple(
            dataclasses.replace(one, text=f"{one.text}: {replaced[number].text}") if number in replaced else one
            for one, (_, _, number) in zip(_attempts(attempts, end_s), attempts, strict=True)
        ),
        groups=tuple(
            Period(
                begin_s=one.begin_s,
                end_s=one.end_s,
                label=counted(one.world, "rank") if one.world else "group",
                text=_ending(one),
                brief=str(one.world or "?"),
            )
            for one in known
        ),
        moments=tuple(outages(moments, [(at_s, save.step) for at_s, save in saves], points)),
        starts=tuple(_starts(known, recoveries)),
        slow=tuple(_counted_up(one, points) for one in sorted([*spells, *slow.values()], key=lambda one: one.begin_s)),
        saves=saves,
    )


def _requests(ordered: Iterable[Noted]) -> tuple[dict[str, float], list[tuple[int, float]]]:
    """Each attempt counts from 0, and the last of its lines has its sums."""
    earlier = dict[str, float]()
    now, attempt, newest = earlier, -1, 0
    points: list[tuple[int, float]] = []
    for line in ordered:
        what = line.what
        if not isinstance(what, Sampled | RunLeft) or not what.requests:
            continue
        if line.attempt != attempt:
            earlier, attempt = now, line.attempt
        now = earlier | {kind: earlier.get(kind, 0.0) + many for kind, many in what.requests.items()}
        newest = max(newest, what.step) if isinstance(what, Sampled) else newest
        points.append((newest, sum(many for kind, many in now.items() if kind not in WENT_WRONG)))
    return now, points


def _grow(group: _Group, what: object, at_s: float) -> None:
    match what:
        case GroupJoined(world=world, ages=ages):
            group.world = world
            group.known |= {phase: at_s - max(0.0, ages[age]) for age, phase in _AGES if age in ages}
            group.known["joined"] = at_s
            group.begin_s = min(group.begin_s, *group.known.values())
        case GroupRestored():
            group.restored = what
            group.known.setdefault("restored", at_s)
        case Sampled(steps=steps, step=step):
            group.newest = max(group.newest, step)
            if steps > 0:
                group.points.append((at_s, step))
            if steps > 0 and group.first_step_s is None:
                group.first_step_s = at_s
        case GroupEnded():
            group.ended, group.ended_s = what, at_s
        case _:
            pass


def _slowed(slow: dict[tuple[int, str, str], Slow], spells: list[Slow], what: Slowed, at_s: float, points: Points) -> None:
    key = (what.rank, what.host, what.section)
    before = slow.pop(key, None)
    if what.ends:
        if before is not None:
            spells.append(dataclasses.replace(before, end_s=at_s))
        return
    slow[key] = Slow(
        rank=what.rank, host=what.host, section=what.section, by_s=what.by_s, since_step=what.since_step,
        begin_s=before.begin_s if before is not None else _done_s(what.since_step, points, at_s), machine=what.machine,
    )  # fmt: skip


def _counted_up(one: Slow, points: Points) -> Slow:
    until = step_at(one.end_s, points) if one.end_s is not None else points[-1][1] if points else None
    return one if until is None else dataclasses.replace(one, cost_s=one.by_s * max(0.0, until - one.since_step))


def _done_s(step: int, points: Points, at_s: float) -> float:
    """When the step was done last, by the samples before that time; between two of them steps take as long. Not known: that time."""
    later_s, later = at_s, -1
    for now_s, newest in reversed(points):
        if newest <= step:
            return now_s + (later_s - now_s) * (step - newest) / (later - newest) if later > step else now_s
        later_s, later = now_s, newest
    return at_s


def _attempts(found: Sequence[tuple[float, AttemptBegan, int]], end_s: float) -> Iterable[Period]:
    for number, (at_s, what, attempt) in enumerate(found):
        until_s = found[number + 1][0] if number + 1 < len(found) else end_s
        text = f"{what.reason}{f', on {what.host}' if what.host else ''}"
        yield Period(begin_s=at_s, end_s=max(at_s, until_s), label=f"attempt {attempt}", text=text, brief=str(attempt))


def _date_ends(groups: Sequence[_Group], recoveries: Mapping[str, tuple[float, LoggedRecovery]]) -> None:
    """A group ends when its restart begins, at the latest: its end may be noted after that."""
    for before, after in itertools.pairwise(groups):
        begins_s = after.begin_s
        if (recovery := recoveries.get(after.name)) is not None:
            begins_s = min(begins_s, recovery[0] - recovery[1].seconds)
        before.end_s = max(before.begin_s, min(before.end_s, begins_s))
        if before.ended_s is not None:
            before.ended_s = min(before.ended_s, before.end_s)


def _ending(group: _Group) -> str:
    if group.ended is None:
        return ""
    return f"{group.ended.how}: {group.ended.cause}" if group.ended.cause else group.ended.how


def _starts(groups: Sequence[_Group], recoveries: Mapping[str, tuple[float, LoggedRecovery]]) -> Iterable[Start]:
    told = set[str]()
    before: _Group | None = None
    for group in groups:
        told.add(group.name)
        yield _start(group, before, recoveries.get(group.name))
        before = None if group.has_left else group
    for name, (at_s, one) in recoveries.items():  # of older raystates, and of groups that never joined
        if name not in told:
            yield Start(
                at_s=at_s, group=name, why=one.cause or "not known", step=one.step, tier=one.tier, repeated=one.steps_repeated,
                seconds=one.seconds, back=one.back,
            )  # fmt: skip


def _start(group: _Group, before: _Group | None, recovery: tuple[float, LoggedRecovery] | None) -> Start:
    back_s = recovery[0] if recovery is not None and recovery[1].back else group.first_step_s
    moments = [(name, group.known[name]) for name in PHASES if name in group.known]
    if back_s is not None:
        moments.append(("first step", back_s))
    since_s = before.ended_s if before is not None else None
    if recovery is not None:  # the ledger may hear of an end only when the next group joins
        since_s = recovery[0] - recovery[1].seconds
    if since_s is not None:
        moments.insert(0, ("", since_s))
    phases: dict[str, float] = {}
    earlier_s = moments[0][1] if moments else 0.0
    for name, later_s in moments[1:]:  # what was there before the phase began took none of its time
        phases[name] = max(0.0, later_s - earlier_s)
        earlier_s = max(earlier_s, later_s)
    at_s = back_s if back_s is not None else group.end_s
    first_s = moments[0][1] if moments else at_s
    step = recovery[1].step if recovery is not None else group.restored.step if group.restored is not None else -1
    repeated = recovery[1].steps_repeated if recovery is not None else None
    why = ""
    if recovery is not None:
        why = recovery[1].cause or "not known"
    elif before is not None:  # a restart under another Coordinator
        why = before.ended.cause if before.ended is not None and before.ended.cause else "not known"
        repeated = max(0, before.newest - max(0, step))
    return Start(
        at_s=at_s,
        group=group.name,
        world=group.world,
        why=why,
        step=step,
        tier=recovery[1].tier if recovery is not None else group.restored.tier if group.restored is not None else "",
        repeated=repeated,
        seconds=recovery[1].seconds if recovery is not None else max(0.0, at_s - first_s),
        phases=phases,
        back=recovery[1].back if recovery is not None else back_s is not None,
    )
