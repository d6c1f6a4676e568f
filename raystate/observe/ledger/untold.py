"""Restarts that no Coordinator has noted: one has ended together with the trainers, and the next one knows only the group that came."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from raystate.observe.ledger.lines import GroupJoined, GroupRestored, LoggedRecovery, Noted, Sampled


def untold_recoveries(lines: Iterable[Noted]) -> dict[str, LoggedRecovery]:
    """By the group that it led to; of those that were noted, too. `cause` is "", `seconds` those from the training function to the first
    new step.

    Args:
        lines: of a run's ledger, in the order of attempts and of their numbers there.
    """
    found: dict[str, LoggedRecovery] = {}
    newest: dict[str, int] = {}  # group -> step, in the order of groups
    began_s: dict[str, float] = {}
    for attempt, _, at_s, what in lines:
        match what:
            case GroupJoined(group=group, ages=ages):
                began_s[group] = at_s - ages.get("function", 0.0)
            case GroupRestored(group=group, step=step, tier=tier) if before := [one for one in newest if one != group]:
                found.setdefault(
                    group,
                    LoggedRecovery(
                        attempt=attempt,
                        group=group,
                        cause="",
                        step=max(0, step),
                        tier=tier,
                        seconds=0.0,
                        steps_repeated=max(0, newest[before[-1]] - max(0, step)),
                        back=False,
                    ),
                )
            case Sampled(group=group) as sample:
                newest[group] = max(newest.get(group, -1), sample.step)
                if sample.steps > 0 and (one := found.get(group)) is not None and not one.back:
                    found[group] = dataclasses.replace(one, seconds=max(0.0, at_s - began_s.get(group, at_s)), back=True)
            case _:
                pass
    return found
