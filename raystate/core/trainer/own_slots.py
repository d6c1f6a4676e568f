"""The slots of one trainer, as it sees them: which are its to fill, which hold steps that it has promised, and what waits for one."""

from __future__ import annotations

from dataclasses import dataclass, field

from raystate.core.formats.reports import HostWord


@dataclass(slots=True)
class OwnSlots:
    """Its values are replaced and never changed, so that a shallow copy of it is a memento.

    Attributes:
        grants: per slot, the number of the grant that was used last.
        done: per slot, the number of the grant that was used up: the slot is staged, or handed back.
        staging: slots that are being filled, each with its step.
        promised: slot -> the promised step that was last put into it; until something else is.
        captured: (slot, step) of the newest capture, under way or whole.
        held: the promised step whose copy waits on the device.
        late: the newest step, if it was skipped: it may still be snapshotted until the next one is saved.
    """

    grants: tuple[int, ...]
    done: tuple[int, ...]
    staging: dict[int, int] = field(default_factory=dict[int, int])
    promised: dict[int, int] = field(default_factory=dict[int, int])
    captured: tuple[int, int] | None = None
    held: int | None = None
    late: int | None = None

    @classmethod
    def of(cls, slots: int, *, before: OwnSlots | None = None) -> OwnSlots:
        """So many, none of them granted. Those before leave what waits for a slot."""
        none = (0,) * slots
        return cls(none, none) if before is None else cls(none, none, held=before.held, late=before.late)

    def begin(self) -> None:
        """In a new lineage nothing is promised, captured or waited for."""
        self.promised, self.captured, self.held, self.late = {}, None, None, None

    def pending(self, *, late: bool) -> tuple[int, ...]:
        """Steps that may still come into a slot; `late`: the one that was skipped, too."""
        waiting = (self.held, self.late if late else None)
        return tuple(sorted({*self.staging.values(), *(step for step in waiting if step is not None)}))

    def take(self, word: HostWord | None) -> tuple[int, int] | None:
        """A free slot as (slot, step) for the held copy, else for the newest step if it was skipped; it is being filled then."""
        step = self.late if self.held is None else self.held
        slot = self.free(word)
        if word is None or step is None or slot is None:
            return None
        self.fill(slot, word, step, promised=self.held is not None)
        self.held, self.late = None, None if self.held is None else self.late
        return slot, step

    def _granted(self, word: HostWord | None) -> list[int]:
        grants = () if word is None else word.grants[: len(self.done)]
        return [slot for slot, grant in enumerate(grants) if grant > self.done[slot]]

    def free(self, word: HostWord | None) -> int | None:
        """A slot that may be filled now."""
        return next((slot for slot in self._granted(word) if slot not in self.staging), None)

    def capture_of(self, step: int, word: HostWord | None) -> int | None:
        """The slot that holds its capture, or is being filled with it; None: there is none, or the slot was granted anew."""
        slot, captured = self.captured or (-1, -1)
        return slot if captured == step and (slot in self.staging or slot not in self._granted(word)) else None

    def are_crowded(self, word: HostWord | None) -> bool:
        """None is free, and steps that were promised and are not durable hold all but one: that of the newest snapshot."""
        if word is None or self.free(word) is not None:
            return False
        granted = self._granted(word)
        waiting = [
            slot
            for slot, step in self.promised.items()
            if step > word.durable_step and (slot in self.staging or slot not in granted)
        ]
        return len(waiting) >= max(2, len(self.done) - 1)

    def fill(self, slot: int, word: HostWord, step: int, *, promised: bool) -> None:
        """A free slot is filled with this step from now on."""
        self.grants = _with(self.grants, slot, word.grants[slot])
        self.staging = {**self.staging, slot: step}
        others = {other: one for other, one in self.promised.items() if other != slot}
        self.promised = {**others, slot: step} if promised else others
        self.captured = (slot, step)

    def promise(self, slot: int, step: int) -> None:
        """The step in that slot is promised from now on."""
        self.promised = {**self.promised, slot: step}

    def staged(self, slot: int) -> None:
        """It is full: it is the host's again."""
        self.staging = {other: step for other, step in self.staging.items() if other != slot}
        self.done = _with(self.done, slot, max(self.done[slot], self.grants[slot]))

    def released(self, slot: int) -> None:
        """Nothing is in it: it is the host's again."""
        self.staged(slot)
        if self.captured is not None and self.captured[0] == slot:
            self.captured = None


def _with(numbers: tuple[int, ...], slot: int, number: int) -> tuple[int, ...]:
    return (*numbers[:slot], number, *numbers[slot + 1 :])
