"""What a HostActor decides: what its report says, which slots it grants, and whose orders it follows.

The order of reading matters: first all trainers' words, then the slots. A trainer writes a slot's header before the word that no
longer lists the step as pending, so a report never shows a step as neither pending nor held while it is being finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from raystate.core.messages import (
    Advice,
    HostId,
    HostSummary,
    HostWord,
    Invalidate,
    Staged,
    TrainerSeen,
    TrainerWord,
)
from raystate.core.slots import SlotView, lineage_order, reusable


def is_granted(grants: Sequence[int], word: TrainerWord | None, slot: int) -> bool:
    """True while the slot is its trainer's: granted, and not used up or handed back. Without a word it is nobody's."""
    if word is None or slot >= len(grants):
        return False
    return grants[slot] > (word.done[slot] if slot < len(word.done) else 0)


def seen_of(word: TrainerWord) -> TrainerSeen:
    return TrainerSeen(
        rank=word.rank,
        world=word.world,
        lineage=word.lineage,
        newest_step=word.newest_step,
        pending=word.pending,
        durable_due=word.durable_due,
        ack_id=word.ack_id,
        ack_ok=word.ack_ok,
        ack_step=word.ack_step,
    )


def summarize(
    host: HostId,
    incarnation: str,
    seq: int,
    slots: Iterable[SlotView],
    words: Iterable[TrainerWord],
    *,
    base: Invalidate | None = None,
    advice: Advice | None = None,
    attempt: int | None = None,
) -> HostSummary:
    """The report. A granted slot is left out whatever it holds: its trainer may overwrite it at any moment.

    Args:
        slots: of all sets, read after the words.
        words: of the trainers that are alive.
        base: the newest Invalidate that was applied.
        advice: the newest advice.
        attempt: newest attempt that the host has heard of; from then on it ignores older ones.
    """
    best: dict[tuple[int, str, int], Staged] = {}
    for slot in slots:
        content = slot.content
        if content is None or slot.granted:
            continue
        key = (content.rank, content.lineage, content.step)
        # A step that was forced after its snapshot is there twice; the promise counts.
        if key not in best or content.durable:
            best[key] = content
    return HostSummary(
        host=host,
        incarnation=incarnation,
        seq=seq,
        staged=tuple(best.values()),
        trainers=tuple(seen_of(word) for word in words),
        base=base,
        advised=None if advice is None else (advice.attempt, advice.seq),
        proposal=None if advice is None else advice.proposal,
        attempt=attempt,
    )


def grant(
    grants: Mapping[int, Sequence[int]], slots: Sequence[SlotView], advice: Advice | None, alive: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    """New grant numbers of the sets whose trainer is alive: each slot that may be reused goes to its trainer.

    Args:
        grants: set index -> grant number per slot.
        slots: all slots.
        alive: sets with a living trainer.

    Returns:
        Only the sets that change.
    """
    changed: dict[int, list[int]] = {}
    sets = set(alive)
    for set_index, slot_index, _ in reusable(slots, advice):
        if set_index in sets:
            changed.setdefault(set_index, list(grants[set_index]))[slot_index] += 1
    return {index: tuple(numbers) for index, numbers in changed.items()}


def host_word(grants: Sequence[int], advice: Advice | None) -> HostWord:
    """What the host tells a trainer."""
    if advice is None:
        return HostWord(grants=tuple(grants))
    return HostWord(
        grants=tuple(grants),
        interval=advice.interval,
        proposal=advice.proposal,
        failure=advice.failure,
        durable_step=advice.durable_step,
        save_errors=advice.save_errors,
    )


def is_newer_advice(new: Advice, old: Advice | None) -> bool:
    return old is None or (new.attempt, new.seq) > (old.attempt, old.seq)


def carried_on(new: Advice, old: Advice | None) -> Advice:
    """The new advice, with the old one's proposal if it says nothing about any.

    A new Coordinator knows of a proposal only through the hosts: it must not be lost before all of them have reported it.
    """
    if new.proposal is None and old is not None and old.proposal is not None:
        return replace(new, proposal=old.proposal)
    return new


def applies(order: Invalidate, base: Invalidate | None) -> bool:
    """False for an Invalidate that was applied already or has been overtaken: it is only acknowledged."""
    return base is None or (order.attempt, order.seq) > (base.attempt, base.seq) or (order.attempt, order.seq) == (0, 0)


def is_discarded(order: Invalidate, lineage: str, step: int) -> bool:
    """True if a slot that holds (lineage, step) goes with this Invalidate."""
    if lineage == order.lineage:
        return step > order.step
    return not order.by or lineage_order(lineage) < lineage_order(order.by)
