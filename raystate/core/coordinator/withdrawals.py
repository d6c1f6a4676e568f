"""Steps that leave the log because of a restore: newer ones that it goes back behind, and damaged ones."""

from __future__ import annotations

from collections.abc import Sequence

from raystate.core.coordinator.context import Context
from raystate.core.coordinator.journal import Change, Journal, Kind, Request, Retirement
from raystate.core.coordinator.saves import Saves
from raystate.core.formats.messages import LogEntry


class Withdrawals:
    """Asks the journal for these entries, and knows when they are written.

    Attributes:
        under_way: an entry was asked for and is not in the log yet.
    """

    def __init__(self, context: Context, journal: Journal, saves: Saves):
        self._context = context
        self._journal = journal
        self._saves = saves
        self.under_way = False

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
        """Steps after `want` that are retired and not removed yet. One that somebody has pinned is not waited for."""
        return [step for step in self._journal.retiring if step > want and step not in self._journal.pinned]

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

    # ---------------------------------------------------------------- its entries in the log

    def change(self, request: Request) -> Change | None:
        """What was asked for, without the steps that may not be retired by now."""
        left = self._journal.retirable(request.retires)
        return (None, left) if left else None

    def logged(self, request: Request, entry: LogEntry | None, refused: str = "") -> None:  # noqa: ARG002 - see journal.Editor
        """The restore that has waited for it goes on."""
        self.under_way = False
