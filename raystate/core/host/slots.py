"""Which slots of an arena a HostActor may hand to a trainer again."""

from __future__ import annotations

from raystate.core.formats.names import SnapshotId, lineage_order
from raystate.core.formats.orders import Advice
from raystate.core.formats.reports import Staged


def why_free(snapshot: SnapshotId, advice: Advice, *, promised: bool = False) -> str | None:
    """Why a slot that holds a piece of `snapshot` may be overwritten, or None if it may not.

    A newer step of this host alone is no reason: after a death only a step counts that all hold.
    (test_simulator.test_planted_bug_is_found, "slot reused before stable")
    """
    if not advice.lineage or snapshot in advice.keep:
        return None
    lineage = snapshot.lineage
    if lineage != advice.lineage:
        # A newer lineage than the advice knows about: the advice is old, and says nothing about these bytes. And while it is open
        # what the current lineage restores, this may be it, although the report of it is still on its way.
        if not advice.decided or lineage_order(lineage) > lineage_order(advice.lineage):
            return None
        return f"lineage {lineage} has been replaced by {advice.lineage}"
    # A host that has skipped a step may still get it by force, and then the promised pieces of the others count.
    if snapshot.step in (advice.lost if promised else advice.dead):
        return f"step {snapshot.step} was skipped by another host"
    if snapshot.step < advice.stable:
        return f"step {advice.stable} is stable"
    return None


def why_reusable(content: Staged | None, advice: Advice | None) -> str | None:
    """Why a slot that is neither granted nor held may be granted now, or None if it may not: nothing with content before any advice."""
    if content is None:
        return "empty"
    return None if advice is None else why_free(content.id, advice, promised=content.promised)
