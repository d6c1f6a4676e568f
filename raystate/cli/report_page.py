"""The page of `raystate report`: what is drawn where. The template says how it looks, and escapes every text."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from raystate import __version__
from raystate.cli.console import figure, size
from raystate.cli.report_facts import ReportContent, ReportedSave
from raystate.core.formats.texts import counted, printable
from raystate.observe.ledger import LoggedRecovery

_LEFT, _BOTTOM, _TOP, _RIGHT = 70, 34, 14, 26
_WIDE, _SMALL = (940, 300), (460, 180)
_NARROW = (460, 260)  # the steps on a phone
_MOST_POINTS = 2_000  # in one drawing
_MOST_ROWS = 300  # of one table
_MOST_METRICS = 8
_TICKS = 5
_UNITS = ((60.0, "s"), (3600.0, "min"), (86400.0, "h"), (math.inf, "d"))


@dataclass(frozen=True, kw_only=True)
class Axis:
    """From values to places on the page, in a straight line."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """Where a value is drawn."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin), 1)

    def ticks(self) -> list[float]:
        """A few round values."""
        span = self.high - self.low
        rough = span / _TICKS
        if not sys.float_info.min < rough < math.inf:
            return [self.low]
        power = 10.0 ** math.floor(math.log10(rough))
        width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        first = math.ceil(self.low / width)
        return [number * width for number in range(first, math.floor(self.high / width) + 1)]


def render(report: ReportContent) -> str:
    """The page."""
    history = report.history
    attempts = [] if history is None else list(history.attempts.items())[::-1]
    metrics = report.metrics()
    newest = max((save.past.step for save in report.saves if save.past.fate == "live"), default=None)
    return _template().render(
        report=report,
        version=__version__,
        title=(history.run if history is not None else "") or report.url,
        newest=newest,
        kept=[save for save in report.saves if save.past.fate == "live"],
        removed=[save for save in report.saves if save.past.fate == "retired"],
        aside=[save for save in report.saves if save.past.fate == "set aside"],
        nbytes=sum(save.nbytes or 0 for save in report.saves),
        summary=_summary(report, newest),
        steps=[one for form, size in {"wide": _WIDE, "narrow": _NARROW}.items() if (one := _steps_drawing(report, form, size))],
        metrics=[_metric_drawing(name, points) for name, points in list(metrics.items())[:_MOST_METRICS]],
        metrics_left=max(0, len(metrics) - _MOST_METRICS),
        rows=list(reversed(report.saves))[:_MOST_ROWS],
        rows_left=max(0, len(report.saves) - _MOST_ROWS),
        recoveries=list(reversed(report.recoveries))[:_MOST_ROWS],
        recoveries_left=max(0, len(report.recoveries) - _MOST_ROWS),
        attempts=attempts[:_MOST_ROWS],
        attempts_left=max(0, len(attempts) - _MOST_ROWS),
    )


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "size": size,
        "figure": figure,
        "counted": counted,
        "seconds": _seconds,
        "moment": _moment,
        "plain": printable,
    }
    environment.finalize = lambda value: printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
    return environment.get_template("report.html.j2")


# ---------------------------------------------------------------- drawings


Point = tuple[float, float]  # wall clock, step


def _steps_drawing(report: ReportContent, form: str, size: tuple[int, int]) -> dict[str, Any] | None:
    """Steps over time; None: fewer than two durable steps have a time."""
    width, height = size
    timed = [(save.past.time_s, save) for save in report.saves if save.past.time_s is not None]
    if len(timed) < 2:
        return None
    timed.sort(key=lambda one: one[0])
    thinned = _thinned(timed)
    lines = _lines(thinned, report.recoveries)
    begin_s = min(timed[0][0], *(back_s - one.seconds for back_s, one in report.recoveries)) if report.recoveries else timed[0][0]
    end_s = max(timed[-1][0], *(back_s for back_s, _ in report.recoveries)) if report.recoveries else timed[-1][0]
    x = Axis(low=begin_s, high=end_s, begin=_LEFT, end=width - _RIGHT)
    top = max(step for line in lines for _, step in line)
    low = min(step for line in lines for _, step in line)
    y = Axis(low=min(low, top - 1), high=top, begin=height - _BOTTOM, end=_TOP)
    span_s = end_s - begin_s
    width_s, unit = _unit(span_s)
    elapsed = Axis(low=0.0, high=span_s / width_s, begin=x.begin, end=x.end)
    by_attempt = _by_attempt(timed)
    return {
        "form": form, "width": width, "height": height, "left": _LEFT, "right": width - _RIGHT, "top": _TOP, "bottom": height - _BOTTOM,
        "lines": [" ".join(f"{x.at(time_s)},{y.at(step)}" for time_s, step in line) for line in lines if len(line) > 1],
        "points": [{"x": x.at(time_s), "y": y.at(save.past.step), "save": save} for time_s, save in thinned],
        "bands": [
            {"x": x.at(back_s - one.seconds), "width": max(1.5, round(x.at(back_s) - x.at(back_s - one.seconds), 1)), "recovery": one}
            for back_s, one in report.recoveries[-_MOST_POINTS:]
        ],
        "attempts": [
            {"x": x.at(min(times)), "number": number}
            for number, times in sorted(by_attempt.items())[-_MOST_ROWS:]
            if number and len(by_attempt) > 1
        ],
        "x_ticks": [{"x": elapsed.at(tick), "text": _number(tick)} for tick in elapsed.ticks()],
        "unit": unit,
        "begin": begin_s,
        "y_ticks": [{"y": y.at(tick), "text": _number(tick)} for tick in y.ticks() if tick == int(tick)],
        "thinned": len(thinned) < len(timed),
    }  # fmt: skip


def _lines(timed: Sequence[tuple[float, ReportedSave]], recoveries: Sequence[tuple[float, LoggedRecovery]]) -> list[list[Point]]:
    """The saves of each lineage; before a recovery also the step that it had reached, after it the one from which it went on."""
    by_lineage: dict[tuple[int, str], list[Point]] = {}
    for time_s, save in timed:
        by_lineage.setdefault((save.past.attempt, save.past.lineage), []).append((time_s, float(save.past.step)))
    lines = list(by_lineage.values())
    for back_s, one in recoveries:
        died_s = back_s - one.seconds
        if one.step < 0 or not one.back:
            continue
        before = max((line for line in lines if line[-1][0] <= died_s), key=lambda line: line[-1][0], default=[])
        after = min((line for line in lines if line[0][0] >= back_s), key=lambda line: line[0][0], default=[])
        if before:
            before.append((died_s, float(one.step + one.steps_repeated)))
        if after:
            after.insert(0, (back_s, float(one.step)))
    return lines


def _metric_drawing(name: str, points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    width, height = _SMALL
    steps, values = [step for step, _ in points], [value for _, value in points]
    x = Axis(low=min(steps), high=max(steps), begin=_LEFT, end=width - _RIGHT)
    y = Axis(low=min(values), high=max(values), begin=height - _BOTTOM, end=_TOP)
    smallest, largest = min(points, key=lambda one: one[1]), max(points, key=lambda one: one[1])
    thinned = _thinned(list(points))
    return {
        "name": name, "width": width, "height": height, "left": _LEFT, "right": width - _RIGHT, "top": _TOP, "bottom": height - _BOTTOM,
        "line": " ".join(f"{x.at(step)},{y.at(value)}" for step, value in thinned),
        "dots": [(x.at(step), y.at(value)) for step, value in thinned] if len(thinned) <= 60 else [],
        "smallest": smallest, "largest": largest, "last": points[-1],
        "marks": [(x.at(step), y.at(value)) for step, value in (smallest, largest)],
        "x_ticks": [{"x": x.at(tick), "text": _number(tick)} for tick in x.ticks() if tick == int(tick)],
        "y_ticks": [{"y": y.at(tick), "text": _number(tick)} for tick in y.ticks()],
    }  # fmt: skip


def _thinned(points: list[Any]) -> list[Any]:
    """Of very many every so-many-th, and the last."""
    stride = max(1, math.ceil(len(points) / _MOST_POINTS))
    kept = points[::stride]
    return kept if not points or kept[-1] is points[-1] else [*kept, points[-1]]


def _by_attempt(timed: Sequence[tuple[float, ReportedSave]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for time_s, save in timed:
        found.setdefault(save.past.attempt, []).append(time_s)
    return found


# ---------------------------------------------------------------- words


def _summary(report: ReportContent, newest: int | None) -> str:
    """The run's story in one sentence."""
    begins = f"Step {newest:,} is the newest durable step" if newest is not None else "No step is durable"
    damaged = counted(len(report.problems), "thing that lies there is", "things that lie there are")
    ends = f"; {damaged} damaged" if report.problems else ""
    if report.history is None:
        return f"{begins}{ends}."
    if not report.recoveries:
        return f"{begins}, and no restart was needed{ends}."
    took_s = sum(one.seconds for _, one in report.recoveries)
    repeated = sum(max(0, one.steps_repeated) for _, one in report.recoveries)
    last = report.recoveries[-1][1]
    origin = f", the last from step {last.step:,} ({last.tier})" if last.tier and last.step >= 0 else ""
    restarts = counted(len(report.recoveries), "restart")
    return f"{begins}; {restarts} took {_seconds(took_s)} and repeated {counted(repeated, 'step')}{origin}{ends}."


def _unit(span_s: float) -> tuple[float, str]:
    """(seconds of it, its name) of the unit in which a span is told."""
    below = 1.0
    for limit, name in _UNITS:
        if span_s < 3 * limit:
            return below, name
        below = limit
    raise AssertionError("unreachable")


def _seconds(value: float) -> str:
    width_s, unit = _unit(value)
    return f"{value / width_s:.1f} {unit}" if value >= 0.1 else f"{value * 1000:.0f} ms"


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def _moment(time_s: float | None) -> str:
    if time_s is None:
        return "not known"
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{time_s:.4g} s since 1970"
