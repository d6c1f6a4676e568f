"""How long an undisturbed step of a run takes: from the samples in its ledger."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

from raystate.core.formats.reports import SECTION
from raystate.observe.ledger.lines import Noted, Sampled

_RATED = 8  # steps, for their rate: over fewer, the time to the next sample says little


def step_seconds(lines: Iterable[Noted]) -> dict[str, float]:
    """By group, and "" for the run: as it was measured, without the sections that are in it. What is measured may be disturbed, too: it is
    no more than the median of what the samples say."""
    measured: dict[str, list[tuple[float, int]]] = {}  # (seconds, of so many steps)
    sections: dict[str, list[tuple[float, int]]] = {}
    rates: dict[str, list[tuple[float, int]]] = {}
    told: dict[str, int] = {}  # steps, by the sample before
    begun: dict[str, tuple[float, Sampled]] = {}
    short: dict[str, list[tuple[float, int]]] = {}  # over so few steps as there are
    for line in lines:
        if not isinstance(now := line.what, Sampled):
            continue
        if now.step_s > 0 and (steps := now.steps - told.get(now.group, 0)) > 0:
            measured.setdefault(now.group, []).append((now.step_s, steps))
        told[now.group] = max(now.steps, told.get(now.group, 0))
        since_s, then = begun.setdefault(now.group, (line.t, now))
        if now.steps < then.steps or then.steps <= 0 or line.t < since_s:  # its first step compiles
            begun[now.group] = line.t, now
        elif (step_s := _rate(then, now, line.t - since_s)) > 0:
            steps = now.steps - then.steps
            short[now.group] = [(step_s, steps)]
            if steps >= _RATED:
                rates.setdefault(now.group, []).append((step_s, steps))
                sections.setdefault(now.group, []).append((_spent_s(then, now, SECTION) / steps, steps))
                begun[now.group] = line.t, now
    for group, those in measured.items():  # from call to call
        beside_s = _median(sections.get(group, [(0.0, 1)]))
        measured[group] = [(step_s - beside_s, steps) for step_s, steps in those if step_s > beside_s] or those
    found = {group: _median(those) for group, those in (short | rates).items()}
    for group, those in measured.items():
        found[group] = min(_median(those), found.get(group, math.inf))
    return found | ({"": statistics.median(found.values())} if found else {})


def _median(those: Sequence[tuple[float, int]]) -> float:
    """Half of all steps take at most so long: samples come by the clock, and slow steps would count more often."""
    ordered = sorted(those)
    sums = list(itertools.accumulate(steps for _, steps in ordered))
    return ordered[bisect.bisect_left(sums, sums[-1] / 2)][0]


def _rate(then: Sampled, now: Sampled, took_s: float) -> float:
    """Seconds of a step between two samples; not above 0: they do not say."""
    steps = now.steps - then.steps
    return (took_s - _spent_s(then, now)) / steps if steps > 0 else 0.0


def _spent_s(then: Sampled, now: Sampled, causes: str = "") -> float:
    """Between two samples, on what begins with `causes`."""
    return sum(max(0.0, spent_s - then.spent.get(cause, 0.0)) for cause, spent_s in now.spent.items() if cause.startswith(causes))
