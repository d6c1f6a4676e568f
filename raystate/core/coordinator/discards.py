"""A restore's choice reaches the hosts: everything that it gives up is discarded wherever it is held."""

from __future__ import annotations

from dataclasses import replace

from raystate.core.coordinator.context import Context
from raystate.core.coordinator.memory import HostView, Memory
from raystate.core.formats.messages import HostId, Invalidate
from raystate.waits import RETRY_FIRST_S

_NO_HOST = HostId("")


class Discards:
    """Tells every host the newest choice until the host says that it has discarded what the choice gives up."""

    def __init__(self, context: Context, memory: Memory):
        self._context = context
        self._memory = memory
        self._seq = 0
        self._told_s: dict[HostId, float] = {}  # when each host was told last

    def begin(self, by: str, lineage: str, step: int) -> None:
        """From now on only (lineage, <= step) counts, with what that came from, and what `by` and later lineages stage."""
        # Two restores may choose one step: a late word of the first doesn't count for the second.
        # (test_recovery.test_a_late_word_of_a_discard_does_not_count_for_the_next_of_the_same_step)
        self._seq += 1
        base = self._memory.base
        # With the past of that lineage: its promises still count after several restores in a row.
        # (test_recovery.test_what_was_promised_before_several_restores_in_a_row_becomes_durable)
        order = Invalidate(
            host=_NO_HOST,
            lineage=lineage,
            step=step,
            by=by,
            older=() if base is None else base.before(lineage),
            attempt=self._context.attempt,
            seq=self._seq,
        )
        self._memory.rebase(order)
        self._told_s = {}
        for view in self._memory.views:
            self.tell(view)

    def first_undone(self) -> HostView | None:
        """A host that has not yet discarded what the newest choice gives up. A host that is down is
        told when it is back: no restore waits for it.
        (test_deadlines.test_a_host_that_does_not_discard)"""
        return next((view for view in self._memory.views if view.up and not self.is_done(view)), None)

    def is_done(self, view: HostView) -> bool:
        """Whether the host has discarded what the newest choice gives up."""
        base = self._memory.base
        return base is None or view.base_order >= base.stamp

    def tell(self, view: HostView) -> None:
        """Give the host the order, if it has not carried it out and has not just been told."""
        base = self._memory.base
        if base is None or not view.up or self.is_done(view):
            return
        if self._context.now_s - self._told_s.get(view.host, -1e9) >= RETRY_FIRST_S:
            self._told_s[view.host] = self._context.now_s
            self._context.out.append(replace(base, host=view.host))
