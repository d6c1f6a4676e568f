"""A step that is promised and saved once more, by force: due again if the promised save is lost, which only the Coordinator knows.

A rank learns of a loss when it waits for durability, and each rank waits when it likes. If each decided by what it knows, some would
save the step again and some would not, and nobody could make it durable. So all ask here, and the first answer counts for all.
"""

from __future__ import annotations

from raystate.core.desk import Desk
from raystate.core.group import Joins
from raystate.core.messages import AgainAsked, AgainReply, SnapshotId
from raystate.core.promises import Promises

_REMEMBERED = 256  # ranks ask at the same call: the last one is never far behind


class Repeats:
    """Answers each question once for all ranks."""

    def __init__(self, desk: Desk, joins: Joins, promises: Promises):
        self._desk = desk
        self._joins = joins
        self._promises = promises
        self._told: dict[tuple[SnapshotId, int], bool] = {}  # by what the ranks ask

    def asked(self, event: AgainAsked) -> None:
        """A rank is in such a call of save()."""
        if not self._joins.check(event.ask, event.lineage, event.rank):
            return
        if event.broken:
            self._promises.copy_broke(event.save, event.rank, event.broken)
        key = (event.save, event.number)
        if key not in self._told:
            if len(self._told) >= _REMEMBERED:
                del self._told[next(iter(self._told))]
            self._told[key] = self._is_due(event.save)
        self._desk.answer(event.ask, AgainReply(due=self._told[key]))

    def _is_due(self, save: SnapshotId) -> bool:
        group = self._joins.group
        assert group is not None
        # A rank that goes on from it in its very step was told so by the Coordinator before this one.
        its = save.again if save.lineage == group.lineage else -1  # of a lineage before: it was restored
        if any(one.newest_step == save.step and one.again > its for one in group.seen.values()):
            return True
        if any(one.newest_step > save.step for one in group.seen.values()):  # and so was one that is past the step by now
            return self._promises.is_held_again(SnapshotId(group.lineage, save.step, its))
        return self._promises.is_lost(save)
