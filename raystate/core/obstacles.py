"""What keeps saves from storage and is not storage's doing: a host that is away, or a Coordinator that has only just started.

A loop that makes steps durable faster than storage takes them waits, but not for storage that fails or stands still. From one trainer a
HostActor that starts again looks the same. So a trainer that has waited for seconds asks here.
"""

from __future__ import annotations

from raystate.core.desk import Desk, brief, named
from raystate.core.group import Joins
from raystate.core.messages import PaceAsked, PaceReply
from raystate.core.saves import FIRST_GIVES_WAY_S, GIVES_WAY_S, Saves


class Obstacles:
    """Tells a trainer what saves wait for."""

    def __init__(self, desk: Desk, joins: Joins, saves: Saves):
        self._desk = desk
        self._joins = joins
        self._saves = saves

    def asked(self, event: PaceAsked) -> None:
        """A promised step of a rank has had no slot for seconds. It is answered at once."""
        if self._joins.check(event.ask, event.lineage, event.rank):
            self._desk.answer(event.ask, PaceReply(obstacle=brief(self._now())))

    def _now(self) -> str:
        """For people; "": storage is what saves wait for."""
        saves, group, now_s = self._saves, self._joins.group, self._desk.now_s
        if saves.journal.fails:
            return ""
        if group is None or not group.all_seen:
            return "the Coordinator has not heard of all ranks yet"
        if away := saves.absence.hosts():
            return f"{named([f'host {host}' for host in away])} away"
        if now_s - saves.absence.changed_s < GIVES_WAY_S:
            return "the Coordinator or a host has just started"
        job = saves.running
        if job is not None and job.phase == "packaging" and not saves.saved and now_s - job.started_s < FIRST_GIVES_WAY_S:
            return f"the first package, of step {job.key.step}, is being built"
        return ""
