"""Which slots of an arena a HostActor may hand to a trainer again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raystate.core.messages import Advice, SnapshotId, Staged, lineage_order


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot as its host sees it. `holds` counts the writes, transfers and readers that use its bytes right now."""

    set_index: int
    slot_index: int
    granted: bool = False
    content: Staged | None = None
    holds: int = 0


def why_free(snapshot: SnapshotId, advice: Advice) -> str | None:
    """Why a slot that holds a piece of `snapshot` may be overwritten, or None if it may not."""
    if not advice.lineage or snapshot in advice.keep:
        return None
    lineage = snapshot.lineage
    if lineage != advice.lineage:
        # A newer lineage than the advice knows about: the advice is old, and says nothing about these bytes. And while it is open
        # what the current lineage restores, this may be it, although the report of it is still on its way.
        if not advice.decided or lineage_order(lineage) > lineage_order(advice.lineage):
            return None
        return f"lineage {lineage} has been replaced by {advice.lineage}"
    if snapshot.place in advice.dead:
        return f"step {snapshot.step} was skipped by another host"
    if snapshot.place < advice.stable:
        return f"step {advice.stable[0]} is stable"
    return None


def reusable(slots: Sequence[SlotView], advice: Advice | None) -> list[tuple[int, int, str]]:
    """The slots that may be granted now.

    Returns:
        (set index, slot index, reason) for each, in the order given. Never one that is granted, held or kept; nothing that has
        content before any advice.
    """
    free: list[tuple[int, int, str]] = []
    for slot in slots:
        if slot.granted or slot.holds:
            continue
        content = slot.content
        if content is None:
            free.append((slot.set_index, slot.slot_index, "empty"))
        elif advice is not None:
            reason = why_free(content.id, advice)
            if reason is not None:
                free.append((slot.set_index, slot.slot_index, reason))
    return free
