"""The page's drawings of a run's time: where it went, in all and over time, and the lanes of its timeline.

Places on the time axis are percents of its width: the page zooms by making a drawing wider, without a script.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raystate.cli.console import span
from raystate.cli.report_axes import clock, moment
from raystate.cli.report_events import Incident
from raystate.cli.report_life import PHASES, Life, Period, Start
from raystate.core.formats.texts import counted
from raystate.observe.goodput import CAUSES, Goodput, over_time
from raystate.observe.timeline import Timeline

_WINDOWS = 48  # columns of what went where over time
_STRIP = 1_000  # pieces of the timeline's first lane
_MOST = 1_000  # marks in a lane
_MARK = 2.0  # percent of the width that a mark covers on a large screen, not zoomed
_ROWS = 5  # of marks in a lane
_NAMED = 0.07  # of the bar: a narrower part has no room for its share
ZOOMS = (1, 4, 16, 64)

# Kinds of moments -> (letter in its mark, what they are). A letter tells them apart without colours.
KINDS: Mapping[str, tuple[str, str]] = {
    "death": ("D", "death"),
    "hang": ("H", "hang"),
    "host": ("N", "host"),
    "notice": ("!", "notice"),
    "growth": ("G", "growth"),
    "slow": ("S", "slow rank"),
    "storage": ("O", "storage out"),
    "works": ("W", "storage works"),
    "lost": ("X", "save given up"),
    "coordinator": ("C", "Coordinator lost"),
    "attempt": ("A", "new attempt"),
    "end": ("E", "end"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """One cause in a bar. `at` and `width` in percent."""

    cause: str
    seconds: float
    share: float
    at: float
    width: float

    @property
    def label(self) -> str:
        """The share, where there is room for it."""
        return f"{100 * self.share:.0f}%" if self.share >= _NAMED else ""


def parts_of(goodput: Goodput, *, at: float = 0.0, width: float = 100.0) -> list[Portion]:
    """The causes that took time, side by side."""
    found: list[Portion] = []
    for cause, one in goodput.seconds_by_cause.items():
        if one > 0 and goodput.wall_s > 0:
            share = one / goodput.wall_s
            found.append(Portion(cause=cause, seconds=one, share=share, at=at, width=share * width))
            at += share * width
    return found


def goodput_section(goodput: Goodput, timeline: Timeline | None) -> dict[str, Any]:
    """The stacked bar, its table, and the same over time."""
    rows = [
        {"cause": cause, "seconds": one, "share": one / goodput.wall_s} | CAUSES[cause]._asdict()
        for cause, one in goodput.seconds_by_cause.items()
    ]
    return {
        "bar": parts_of(goodput),
        "rows": [row for row in rows if row["seconds"] > 0],
        "never": [row["name"] for row in rows if row["seconds"] <= 0],
        "waiting": sorted(goodput.waiting.items(), key=lambda one: -one[1]),
        "columns": _columns(over_time(timeline, _WINDOWS)) if timeline is not None else [],
        "begin_s": goodput.begin_s,
        "ticks": clock_ticks(goodput.begin_s, goodput.end_s),
    }


def _columns(windows: Sequence[Goodput]) -> list[dict[str, Any]]:
    width = 100.0 / max(1, len(windows))
    found: list[dict[str, Any]] = []
    for index, one in enumerate(windows):
        parts = parts_of(one)
        told = ", ".join(
            f"{CAUSES[part.cause].name} {100 * part.share:.0f}%" for part in sorted(parts, key=lambda part: -part.share)[:4]
        )
        found.append({
            "x": round(index * width, 3), "width": round(width * 0.9, 3), "begin_s": one.begin_s, "end_s": one.end_s,
            "ratio": one.ratio, "parts": parts, "told": told,
        })  # fmt: skip
    return found


def clock_ticks(begin_s: float, end_s: float, zoom: int = 1) -> list[dict[str, Any]]:
    """Round times of day, in percent of the width."""
    return [
        {"at": round(100.0 * (at_s - begin_s) / (end_s - begin_s), 4), "text": text} for at_s, text in clock(begin_s, end_s, zoom)
    ]


# ---------------------------------------------------------------- the timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point or a piece of a lane. `at` and `width` in percent of the time; width 0: a point. `row`: of its lane, from the top."""

    at: float
    width: float = 0.0
    look: str = ""  # CSS class
    text: str = ""  # in it
    title: str = ""
    row: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Marks of one kind, in as many rows as they need. `left`: marks that are not drawn."""

    name: str
    marks: tuple[Mark, ...]
    left: int = 0

    @property
    def rows(self) -> int:
        return 1 + max((one.row for one in self.marks), default=0)


def timeline_section(life: Life, timeline: Timeline | None, saves: Sequence[tuple[float, int, str]]) -> dict[str, Any] | None:
    """The lanes; None: nothing has a length.

    Args:
        life: of the run.
        timeline: for the causes; None: not known.
        saves: (when it was durable, step, fate): as the log has them.
    """
    times = [
        *(one.begin_s for one in (*life.attempts, *life.groups)), *(one.end_s for one in (*life.attempts, *life.groups)),
        *(one.at_s for one in (*life.moments, *life.starts)), *(at_s for at_s, _, _ in saves),
    ]  # fmt: skip
    if timeline is not None and timeline.stretches:
        times += [timeline.begin_s, timeline.end_s]
    if not times or max(times) <= min(times):
        return None
    begin_s, end_s = min(times), max(times)
    x = _Scale(begin_s, end_s)
    lanes = [
        _strip(timeline, x) if timeline is not None else None,
        _lane("attempts", (_span(one, x, f"attempt{index % 2}") for index, one in enumerate(life.attempts))),
        _lane("ranks", (_span(one, x, f"group{index % 2}") for index, one in enumerate(life.groups))),
        _lane("events", (_moment(one, x) for one in life.moments)),
        _lane("restores", (_restore(one, x) for one in life.starts if one.tier)),
        _lane("saves", (_save(at_s, step, fate, x) for at_s, step, fate in saves)),
    ]
    return {
        "lanes": [one for one in lanes if one is not None and one.marks],
        "ticks": {zoom: clock_ticks(begin_s, end_s, zoom) for zoom in ZOOMS},
        "begin_s": begin_s,
        "zooms": ZOOMS,
        "kinds": [(letter, name, kind) for kind, (letter, name) in KINDS.items() if any(one.kind == kind for one in life.moments)],
    }


@dataclass(frozen=True, slots=True)
class _Scale:
    begin_s: float
    end_s: float

    def at(self, time_s: float) -> float:
        return round(100.0 * min(1.0, max(0.0, (time_s - self.begin_s) / (self.end_s - self.begin_s))), 4)


def _lane(name: str, marks: Iterable[Mark]) -> Lane:
    every = list(marks)
    stride = -(-len(every) // _MOST) or 1
    kept = every[::stride]
    return Lane(name=name, marks=tuple(_beside(kept)), left=len(every) - len(kept))


def _beside(marks: Iterable[Mark]) -> Iterator[Mark]:
    """A point with a letter goes into the first row where no other covers it, or, where all are full, where it covers the least."""
    ends: list[float] = []
    for one in marks:
        if one.width or not one.text:
            yield one
            continue
        row = next((row for row, end in enumerate(ends) if end <= one.at), len(ends))
        if row == _ROWS:
            row = min(range(_ROWS), key=ends.__getitem__)
        ends[row : row + 1] = [one.at + _MARK]
        yield dataclasses.replace(one, row=row)


def _strip(timeline: Timeline, x: _Scale) -> Lane:
    """The cause that took most of the time, piece by piece; neighbours of one cause are one piece."""
    marks: list[Mark] = []
    pieces = over_time(timeline, _STRIP) if len(timeline.stretches) > _STRIP else None
    told = (
        [(one.begin_s, one.end_s, _most(one.seconds_by_cause)) for one in pieces]
        if pieces is not None
        else [(one.begin_s, one.end_s, _most(one.seconds)) for one in timeline.stretches]
    )
    for cause, group in itertools.groupby(told, key=lambda one: one[2]):
        some = list(group)
        begin_s, end_s = some[0][0], some[-1][1]
        at, width = x.at(begin_s), x.at(end_s) - x.at(begin_s)
        title = f"mostly {CAUSES[cause].name}, {span(end_s - begin_s)} from {moment(begin_s)}"
        marks.append(Mark(at=at, width=round(width, 4), look=f"c-{cause}", title=title))
    return Lane(name="time went to", marks=tuple(marks))


def _most(by_cause: Mapping[str, float]) -> str:
    return max(by_cause, key=lambda cause: by_cause[cause], default="unknown")


def _span(one: Period, x: _Scale, look: str) -> Mark:
    title = f"{one.label}, {span(one.end_s - one.begin_s)} from {moment(one.begin_s)}{f': {one.text}' if one.text else ''}"
    return Mark(at=x.at(one.begin_s), width=round(x.at(one.end_s) - x.at(one.begin_s), 4), look=look, text=one.brief, title=title)


def _moment(one: Incident, x: _Scale) -> Mark:
    title = f"{moment(one.at_s)}: {one.what}{f': {one.text}' if one.text else ''}"
    return Mark(at=x.at(one.at_s), look=f"k-{one.kind}", text=KINDS[one.kind][0], title=title)


def _restore(one: Start, x: _Scale) -> Mark:
    return Mark(at=x.at(one.at_s), look=f"t-{one.tier}", text=one.tier[:1].upper(), title=f"{moment(one.at_s)}: {told_start(one)}")


def _save(at_s: float, step: int, fate: str, x: _Scale) -> Mark:
    look = {"live": "s-kept", "retired": "s-gone"}.get(fate, "s-aside")
    return Mark(at=x.at(at_s), look=look, title=f"{moment(at_s)}: step {step} was durable; {'kept' if fate == 'live' else fate}")


def told_start(one: Start) -> str:
    """A start in a line."""
    origin = f"from step {one.step} ({one.tier})" if one.tier and one.step >= 0 else "without a step"
    again = f", {counted(one.repeated, 'step')} repeated" if one.repeated else ""
    return f"{one.why or 'first start'}: {origin}{again}, {span(one.seconds)}"


def phases_of(start: Start) -> list[dict[str, Any]]:
    """Its phases, side by side."""
    whole = sum(start.phases.values())
    found: list[dict[str, Any]] = []
    at = 0.0
    for index, name in enumerate(PHASES):
        if (took_s := start.phases.get(name)) is not None:
            width = 100.0 * took_s / whole if whole > 0 else 0.0
            found.append(
                {
                    "name": name,
                    "means": PHASES[name],
                    "seconds": took_s,
                    "at": round(at, 3),
                    "width": round(width, 3),
                    "look": f"p{index}",
                }
            )
            at += width
    return found
