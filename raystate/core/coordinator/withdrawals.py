"""Steps that leave the log because somebody wants it: those that a restore goes back behind, damaged ones, and those that a user
deletes, who hears when they are gone."""

from __future__ import annotations

from collections.abc import Sequence

from raystate.core.coordinator.context import Context
from raystate.core.coordinator.joins import Joins
from raystate.core.coordinator.journal import Change, Journal, Kind, Request, Retirement
from raystate.core.coordinator.memory import Memory
from raystate.core.coordinator.saves import Saves
from raystate.core.formats.entries import DELETE, LogEntry
from raystate.core.formats.names import Ask, lineage_order
from raystate.core.formats.questions import DeleteAsked
from raystate.core.formats.replies import FlushReply


class Withdrawals:
    """Asks the journal for these entries, and knows when they are written.

    Attributes:
        under_way: a restore has asked for an entry that is not in the log yet.
    """

    def __init__(self, context: Context, memory: Memory, joins: Joins, journal: Journal, saves: Saves):
        self._context = context
        self._memory = memory
        self._joins = joins
        self._journal = journal
        self._saves = saves
        self.under_way = False
        self._waiting: list[tuple[DeleteAsked, float]] = []  # with the time when it was asked
        self._logged: set[Ask] = set()  # those that stand in the log

    # ---------------------------------------------------------------- what a restore asks for

    def refuse_rollback(self, want: int) -> str | None:
        """Why the steps after `want` can't be retired now, or None."""
        return next((text for step in self._newer(want) if (text := self._journal.refuse_retire(step)) is not None), None)

    def give_up_saves(self, want: int) -> None:
        """No step after `want` is made durable any more."""
        self._saves.abort_after(want, f"rolled back to step {want}")

    def roll_back(self, want: int) -> bool:
        """Retire the steps after `want`. False: there are none."""
        why = f"rollback to step {want}"
        newer = self._newer(want)
        if newer:
            self._ask("rollback", [(step, why) for step in newer], why)
        return bool(newer)

    def still_visible(self, want: int) -> list[int]:
        """Steps after `want` that are retired and not removed yet."""
        return [step for step in self._journal.retiring if step > want]

    def set_aside(self, damaged: Sequence[tuple[int, str]]) -> bool:
        """Damaged stored steps, as (step, why), leave the log; their data stays. False if none of them can."""
        wanted = [(step, f"damaged: {why}") for step, why in damaged if step in self._journal.live and self._may_retire(step)]
        if not wanted:
            return False
        self._ask("set aside", wanted, f"steps {[one[0] for one in wanted]} are damaged and are set aside")
        return True

    def _newer(self, want: int) -> list[int]:
        return [step for step in sorted(self._journal.live) if step > want]

    def _may_retire(self, step: int) -> bool:
        refused = self._journal.refuse_retire(step)
        if refused is not None:
            self._context.log("warning", refused)
        return refused is None

    def _ask(self, kind: Kind, retires: list[Retirement], why: str) -> None:
        self.under_way = True
        self._journal.request(Request(kind=kind, why=why, retires=tuple(retires)))

    # ---------------------------------------------------------------- what a user deletes

    def delete_asked(self, event: DeleteAsked) -> None:
        """Somebody wants a step deleted: refuse, or ask the journal to retire it."""
        step = event.step
        if any(waiting.ask == event.ask for waiting, _ in self._waiting):
            return  # who asks again, because the answer may be lost, waits no longer
        if step not in self._journal.live and self._was_deleted(step) and not self._saves.owes(step):
            # Every process of a loop that deletes asks; the first one's call does it.
            self._logged.add(event.ask)
            self._waiting.append((event, self._context.now_s))
            return
        why = self._journal.refuse_retire(step)
        if why is not None:
            kind = "StorageError" if step in self._journal.live else "StepNotFoundError"
            self._context.fail([event.ask], kind, why, step=step, available=sorted(self._journal.live))
            return
        if step == self._journal.newest or step == self._saves.restoring:
            what = "the newest durable step" if step == self._journal.newest else "in use"
            self._context.fail([event.ask], "StorageError", f"step {step} is {what} and is not deleted", step=step)
            return
        self._waiting.append((event, self._context.now_s))
        self._journal.request(Request(kind="delete", why=f"delete of step {step}", retires=((step, DELETE),)))

    def _was_deleted(self, step: int) -> bool:
        """In this line of training: one that a restore has given up since may be saved again."""
        gone, restore = self._journal.facts.deleted.get(step), self._memory.restore
        if gone is None or restore is None:
            return gone is not None
        return step <= restore.step or lineage_order(gone) >= lineage_order(restore.by)

    def turn(self) -> None:
        """Answer those who delete: their step is gone, or won't go in time."""
        if not self._waiting:
            return
        context, journal = self._context, self._journal
        left: list[tuple[DeleteAsked, float]] = []
        for event, since_s in self._waiting:
            waited_s = context.now_s - since_s
            logged = event.ask in self._logged
            if logged and event.step in journal.live:
                context.fail(
                    [event.ask], "StorageError", f"step {event.step} is not deleted any more: it is in use", step=event.step
                )
            elif logged and event.step not in journal.retiring:
                context.answer(event.ask, FlushReply(durable_step=journal.durable_step))
            elif waited_s >= context.settings.save_timeout_s:
                text = f"step {event.step} is not removed after {waited_s:.1f} s: {'; '.join(journal.troubles[-1:])}"
                context.fail([event.ask], "StorageError", text, step=event.step, waited_s=waited_s)
            else:
                left.append((event, since_s))
                continue
            self._logged.discard(event.ask)
        self._waiting = left

    # ---------------------------------------------------------------- its entries in the log

    def change(self, request: Request) -> Change | None:
        """What was asked for, without the steps that may not be retired by now, and without a delete of what has become the newest."""
        left = self._journal.retirable(request.retires)
        if request.kind == "delete":
            left = [(step, why) for step, why in left if step != self._journal.newest]
        return (None, left) if left else None

    def logged(self, request: Request, entry: LogEntry | None, refused: str = "") -> None:  # noqa: ARG002 - see journal.Editor
        """The restore that has waited for it goes on; all who delete this step have their entry."""
        if request.kind != "delete":
            self.under_way = False
            return
        group = self._joins.group
        for step, _ in request.retires:
            if entry is not None and step not in self._journal.live:
                self._journal.facts.delete(step, "" if group is None else group.lineage)
            self._logged.update(waiting.ask for waiting, _ in self._waiting if waiting.step == step)
