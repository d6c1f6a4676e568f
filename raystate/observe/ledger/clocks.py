"""The clocks of a run's attempts, brought together: each attempt's Coordinator has the clock of its machine, and one may be wrong."""

from __future__ import annotations

from collections.abc import Iterable

from raystate.observe.ledger.lines import Noted, Sampled
from raystate.waits import CLOCKS_APART_S


def brought_together(lines: Iterable[Noted]) -> list[Noted]:
    """The lines with the times that the first attempt's clock would have had; in no attempt do they go back.

    A worker group that goes on under another Coordinator tells: its trainers measure themselves how long it has lived. Where none
    did, an attempt's own clock is believed.

    Args:
        lines: in the order of attempts and of their numbers there.
    """
    lines = _never_back(lines)
    ahead_s: dict[int, float] = {}
    newest: dict[str, tuple[float, float]] = {}  # group -> (when its newest sample was noted, how long it had lived)
    for attempt, _, t, what in lines:
        if not isinstance(what, Sampled):
            continue
        if attempt not in ahead_s and what.group in newest:
            then_s, lived_s = newest[what.group]
            apart_s = (t - then_s) - (what.lived - lived_s)
            ahead_s[attempt] = apart_s if abs(apart_s) > CLOCKS_APART_S else 0.0
        ahead_s.setdefault(attempt, 0.0)
        newest[what.group] = t - ahead_s[attempt], what.lived
    if not any(ahead_s.values()):
        return lines
    return [one._replace(t=one.t - ahead_s.get(one.attempt, 0.0)) for one in lines]


def _never_back(lines: Iterable[Noted]) -> list[Noted]:
    """No line is before the one before it in its attempt. A clock that was set back by hours goes on from there; by seconds, it stood."""
    found: list[Noted] = []
    before: Noted | None = None
    ahead_s = 0.0
    for line in lines:
        if line.n >= 0:  # else it stands alone, as an older raystate wrote it
            if before is None or before.attempt != line.attempt:
                before, ahead_s = line, 0.0
            elif line.t + ahead_s < before.t - CLOCKS_APART_S:
                ahead_s = before.t - line.t
            line = before = line._replace(t=max(before.t, line.t + ahead_s))
        found.append(line)
    return found
