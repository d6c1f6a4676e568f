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
from raystate.core.formats.texts import printable

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 940, 300, 70, 34, 14, 26
_SMALL = (460, 180)
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
        steps=_steps_drawing(report),
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
    environment.filters |= {"size": size, "figure": figure, "seconds": _seconds, "moment": _moment, "plain": printable}
    environment.finalize = lambda value: printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
    return environment.get_template("report.html.j2")


# ---------------------------------------------------------------- drawings


def _steps_drawing(report: ReportContent) -> dict[str, Any] | None:
    """Steps over time; None: fewer than two durable steps have a time."""
    timed = [(save.past.time_s, save) for save in report.saves if save.past.time_s is not None]
    if len(timed) < 2:
        return None
    timed.sort(key=lambda one: one[0])
    begin_s = min(timed[0][0], *(back_s - one.seconds for back_s, one in report.recoveries)) if report.recoveries else timed[0][0]
    end_s = max(timed[-1][0], *(back_s for back_s, _ in report.recoveries)) if report.recoveries else timed[-1][0]
    x = Axis(low=begin_s, high=end_s, begin=_LEFT, end=_WIDTH - _RIGHT)
    top = max(save.past.step for _, save in timed)
    low = min(save.past.step for _, save in timed)
    y = Axis(low=min(low, top - 1), high=top, begin=_HEIGHT - _BOTTOM, end=_TOP)
    lines: list[list[str]] = []
    before: ReportedSave | None = None
    points: list[dict[str, Any]] = []
    for time_s, save in _thinned(timed):
        place = (x.at(time_s), y.at(save.past.step))
        if before is None or (before.past.attempt, before.past.lineage) != (save.past.attempt, save.past.lineage):
            lines.append([])
        lines[-1].append(f"{place[0]},{place[1]}")
        points.append({"x": place[0], "y": place[1], "save": save})
        before = save
    span_s = end_s - begin_s
    width_s, unit = _unit(span_s)
    elapsed = Axis(low=0.0, high=span_s / width_s, begin=x.begin, end=x.end)
    by_attempt = _by_attempt(timed)
    return {
        "width": _WIDTH, "height": _HEIGHT, "left": _LEFT, "right": _WIDTH - _RIGHT, "top": _TOP, "bottom": _HEIGHT - _BOTTOM,
        "lines": [" ".join(line) for line in lines if len(line) > 1],
        "points": points,
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
        "thinned": len(points) < len(timed),
    }  # fmt: skip


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
