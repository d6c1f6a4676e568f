"""Straight axes, and how numbers and times are written on a page."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from datetime import UTC, datetime

_TICKS = 5
_APART = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)  # between times of day


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


def clock(begin_s: float, end_s: float, zoom: int = 1) -> list[tuple[float, str]]:
    """A few round times (UTC) between these, as (when, what to write), for each of `zoom` parts. The same times on all axes of a run."""
    rough_s = (end_s - begin_s) / _TICKS / zoom
    if not sys.float_info.min < rough_s < math.inf:
        return []
    step_s = float(next((one for one in _APART if one >= rough_s), 0))
    if rough_s <= 0.5 or not step_s:  # below a second, or of days
        unit_s = 1.0 if rough_s <= 0.5 else 86_400.0
        power = 10.0 ** math.floor(math.log10(rough_s / unit_s))
        step_s = unit_s * next(power * factor for factor in (1, 2, 5, 10) if power * factor * unit_s >= rough_s)
    count = math.floor(end_s / step_s) - (first := math.ceil(begin_s / step_s)) + 1
    times = [(first + index) * step_s for index in range(count)]
    return [(one, _clock(one, step_s)) for one in times]


def _clock(time_s: float, step_s: float) -> str:
    try:
        told = datetime.fromtimestamp(time_s, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{time_s:.4g}"
    if step_s >= 86_400:
        return told.strftime("%m-%d")
    if step_s >= 60:
        return told.strftime("%m-%d %H:%M" if step_s >= 21_600 else "%H:%M")
    digits = max(0, -math.floor(math.log10(step_s))) if step_s < 1 else 0
    return told.strftime("%H:%M:%S") + (f"{time_s % 1:.{min(6, digits)}f}"[1:] if digits else "")


def number(value: float) -> str:
    """At a tick."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def moment(time_s: float | None) -> str:
    """UTC."""
    if time_s is None:
        return "not known"
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{time_s:.4g} s since 1970"
