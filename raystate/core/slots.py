"""Which slots of an arena a HostActor may hand to a trainer again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from raystate.core.messages import Advice, Lineage, Staged


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot as its host sees it. `holds` counts the writes, transfers and readers that use its bytes right now."""

    set_index: int
    slot_index: int
    granted: bool = False
    content: Staged | None = None
    holds: int = 0


@lru_cache(maxsize=1024)
def lineage_order(text: str) -> tuple[int, int, str]:
    """A lineage's place in time; "" is before all."""
    if not text:
        return (0, 0, "")
    lineage = Lineage.parse(text)
    return (lineage.attempt, lineage.counter, lineage.nonce)


def why_free(lineage: str, step: int, advice: Advice) -> str | None:
    """Why a slot that holds (lineage, step) may be overwritten, or None if it may not."""
    if not advice.lineage or (lineage, step) in advice.keep:
        return None
    if lineage != advice.lineage:
        # A newer lineage than the advice knows about: the advice is old, and says nothing about these bytes. And while it is open
        # what the current lineage restores, this may be it, although the report of it is still on its way.
        if not advice.decided or lineage_order(lineage) > lineage_order(advice.lineage):
            return None
        return f"lineage {lineage} has been replaced by {advice.lineage}"
    if step in advice.dead:
        return f"step {step} was skipped by another host"
    if step < advice.stable:
        return f"step {advice.stable} is stable"
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
            reason = why_free(content.lineage, content.step, advice)
            if reason is not None:
                free.append((slot.set_index, slot.slot_index, reason))
    return free
