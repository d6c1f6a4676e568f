"""A step that is promised and saved once more, by force: due again if the promised save is lost, which only the Coordinator knows.

A rank learns of a loss when it waits for durability, and each rank waits when it likes. If each
decided by what it knows, some would save the step again and some would not: it could never become
complete. So all ask here, and the first answer counts for all.
"""

from __future__ import annotations

from raystate.core.desk import Desk, remember
from raystate.core.group import Joins
from raystate.core.memory import Memory
from raystate.core.messages import AgainAsked, AgainReply, Ask, SnapshotId
from raystate.core.promises import Promises
from raystate.core.snapshots import Snapshots

_REMEMBERED = 256  # ranks ask at the same call: the last one is never far behind


class Repeats:
    """Answers each question once for all ranks."""

    def __init__(self, desk: Desk, memory: Memory, joins: Joins, snapshots: Snapshots, promises: Promises):
        self._desk = desk
        self._memory = memory
        self._joins = joins
        self._snapshots = snapshots
        self._promises = promises
        self._told: dict[tuple[SnapshotId, int], bool] = {}  # by what the ranks ask
        self._waiting: dict[Ask, AgainAsked] = {}

    def asked(self, event: AgainAsked) -> None:
        """A rank is in such a call of save()."""
        self._waiting[event.ask] = event
        self.turn()

    def turn(self) -> None:
        """Answer, once all hosts have said what they hold: that shows a new Coordinator what the
        one before has answered.
        (test_saves.test_a_new_coordinator_answers_when_the_hosts_have_reported)"""
        if self._snapshots.gathering:
            return
        waiting, self._waiting = self._waiting, {}
        for event in waiting.values():
            if self._joins.check(event.ask, event.lineage, event.rank):
                self._answer(event)

    def _answer(self, event: AgainAsked) -> None:
        if event.broken:
            self._snapshots.saves.copy_broke(event.save, event.rank, event.broken)
        key = (event.save, event.number)
        # The first answer stands for all ranks, even if more is known by now.
        # (test_saves.test_a_promised_step_is_due_again_on_all_ranks_or_on_none)
        if key not in self._told:
            remember(self._told, key, self._is_due(event.save, event.number), most=_REMEMBERED)
        self._desk.answer(event.ask, AgainReply(due=self._told[key]))

    def _is_due(self, save: SnapshotId, number: int) -> bool:
        group = self._joins.group
        assert group is not None
        again = save.again if save.lineage == group.lineage else -1  # of a lineage before: it was restored
        asked = SnapshotId(group.lineage, save.step, again + 1 + number)  # what this very call would save
        seen = [one for one in group.seen.values() if one.newest_step >= save.step]
        if any((one.newest_step, one.again) > (save.step, again) for one in seen):
            # The Coordinator before has answered another rank. Whether with yes, its save tells, if
            # there is one. (test_saves.test_a_new_coordinator_gives_the_answer_of_the_one_before)
            return asked in self._memory.snaps or any((one.newest_step, one.again) == asked.place for one in seen)
        return self._promises.is_lost(save)
