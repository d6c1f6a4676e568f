"""One attempt of a run as storage sees it, without actors: it claims, commits, publishes and retires."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raystate.core.formats.log import claim_entry, key_of, live_steps, next_entry
from raystate.core.formats.messages import Intent, LiveStep, LogEntry
from raystate.core.formats.tree import Package
from raystate.storage import RunLog, StepFolder, Storage, foreign_steps

RUN = "lm"

Mark = Callable[[str], None]
MakePackage = Callable[[StepFolder], Package]
Retire = tuple[int, bool, str]  # step, aside, reason


def appended(
    log: RunLog, tail: LogEntry, *, commit: LiveStep | None = None, retires: Sequence[Retire] = (), reason: str = "due"
) -> LogEntry:
    """The attempt's next entry; everything that was open before is carried out by now."""
    entry = next_entry(
        tail, attempt=tail.attempt, writer=tail.writer, carried=[key_of(intent) for intent in tail.intents],
        dead=range(1, tail.attempt), commit=commit, retires=retires, reason=reason,
    )  # fmt: skip
    done = log.append(entry)
    assert done.outcome == "ok", done
    return entry


class Attempt:
    """What a Coordinator does to storage from its claim on.

    Args:
        storage, writer: of the run.
        make_package: writes a step's data into its folder.
        mark: hears what is acknowledged.
    """

    def __init__(self, storage: Storage, writer: str, make_package: MakePackage, mark: Mark = lambda _: None):
        self._storage = storage
        self._log = RunLog(storage)
        self._make_package = make_package
        self._mark = mark

        def claim(tail: LogEntry | None) -> LogEntry:
            dead = [] if tail is None else range(1, tail.attempt + 1)
            return claim_entry(tail, writer, RUN, foreign_steps(storage, live_steps(tail)), dead=dead)

        self.tail = self._log.claim(claim)
        self._mark(f"appended {self.tail.seq}")
        self._carry_out(self.tail.intents)

    def save(self, step: int, retires: Sequence[Retire] = ()) -> None:
        """Write, commit and publish a step, then carry out the retirements that its commit decided."""
        folder = StepFolder(self._storage, step, f"a{self.tail.attempt}k{step}")
        package = self._make_package(folder)
        folder.assemble(package)
        folder.put_package(package)
        self.append(commit=LiveStep(step=step, save=folder.save), retires=retires, reason="due")
        self._mark(f"committed {step}")
        self._carry_out([intent for intent in self.tail.intents if intent.seq == self.tail.seq])

    def append(self, *, commit: LiveStep | None = None, retires: Sequence[Retire] = (), reason: str) -> None:
        """The next entry; everything that was open before is carried out by now."""
        for step, _, _ in retires:
            self._mark(f"retires {step}")
        self.tail = appended(self._log, self.tail, commit=commit, retires=retires, reason=reason)
        self._mark(f"appended {self.tail.seq}")

    def _carry_out(self, intents: Sequence[Intent]) -> None:
        for intent in sorted(intents, key=lambda one: one.kind):  # commits before retirements
            folder = StepFolder(self._storage, intent.step, intent.save)
            if intent.kind == "commit":
                folder.publish(folder.read_package())
                self._mark(f"published {intent.step}")
            else:
                folder.retire(aside=intent.aside)
                self._mark(f"{'set-aside' if intent.aside else 'retired'} {intent.step}")
