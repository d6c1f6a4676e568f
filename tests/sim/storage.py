"""Simulated storage: the create-once log, unique parts, packages, and steps that become visible file by file or by one rename."""

from __future__ import annotations

from collections.abc import Callable

from raystate.core.formats.messages import Intent, LiveStep, LogEntry, SnapshotId

Saved = str
"""The line that gave the bytes: what a script does from one restore to the next; core knows of none."""

Promised = tuple[SnapshotId, tuple[Saved, ...]]
"""What save() has returned True for, and whose bytes keep that promise: its own line's are the last."""

Token = tuple[Saved, int, int]
"""(saved, step, rank): stands for the bytes of one rank's piece; two pieces are equal iff their tokens are."""

BEFORE: Saved = "before"
TORN: Saved = "torn"  # a dead trainer's device has written over it

FILES = ("_METADATA", "manifest.ocdbt")
MARKER = "commit_success.txt"


class Violation(AssertionError):  # noqa: N818 - it is a finding
    """An invariant does not hold."""


class Package:
    """What a save wants to publish: by rank the piece's token."""

    def __init__(self, step: int, save: str, world: int, pieces: dict[int, Token]):
        self.step = step
        self.save = save
        self.world = world
        self.pieces = pieces


class Shown:
    """A step at its fixed names: which files are there, and of which save."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}


class Storage:
    """All that outlives every process. `checks` counts how often an invariant was looked at."""

    def __init__(self, *, is_directory: bool):
        self.is_directory = is_directory
        self.log: list[LogEntry] = []
        self.parts: dict[str, dict[str, dict[int, Token]]] = {}  # save -> host -> rank -> token
        self.packages: dict[str, Package] = {}
        self.work: set[str] = set()  # directory: assembled steps that are not renamed yet, by save
        self.shown: dict[int, Shown] = {}
        self.committed: dict[tuple[int, str], bool] = {}
        self.ever_visible: set[int] = set()
        self.ever_shown: set[tuple[Saved, int]] = set()
        self.aside: set[int] = set()
        self.newest = -1
        self.outage = False
        self.last_commit: tuple[int, str | None] = (-1, None)  # (step, save) of the newest commit entry
        self.is_given_up: Callable[[Saved, int], bool] = lambda saved, step: False

    def before(self, every: int) -> None:
        """An earlier attempt has trained: two steps are durable."""
        live: list[LiveStep] = []
        self.create(LogEntry(seq=1, attempt=1, writer="w0", kind="claim", run="run"))
        for number, step in enumerate((every, 2 * every)):
            save = f"a1k{number}"
            pieces: dict[int, Token] = {rank: (BEFORE, step, rank) for rank in range(3)}
            self.packages[save] = Package(step, save, 3, pieces)
            live.append(LiveStep(step=step, save=save))
            intent = Intent(kind="commit", step=step, save=save, attempt=1, seq=2 + number)
            self.create(
                LogEntry(seq=2 + number, attempt=1, writer="w0", kind="commit", run="run", live=tuple(live), intents=(intent,))
            )
            for name in (*FILES, MARKER):
                self.put(step, name, save)
        self.create(LogEntry(seq=4, attempt=1, writer="w0", kind="close", run="run", live=tuple(live)))

    # ---------------------------------------------------------------- the log

    def create(self, entry: LogEntry) -> bool:
        """Create-once of the entry's number. Checks: one writer, forward only."""
        if entry.seq != len(self.log) + 1:
            return False
        if self.log:
            tail = self.log[-1]
            if entry.attempt < tail.attempt or (entry.kind != "claim" and entry.attempt != tail.attempt):
                raise Violation(f"one writer: entry {entry.seq} of attempt {entry.attempt} after one of attempt {tail.attempt}")
            if entry.kind != "claim" and entry.writer != tail.writer:
                raise Violation(f"one writer: entry {entry.seq} by {entry.writer} after {tail.writer}")
        newest = entry.live[-1].step if entry.live else -1
        if newest < self.newest and not any(
            one.kind == "retire" and one.seq == entry.seq and (one.aside or "rollback" in one.reason) for one in entry.intents
        ):
            raise Violation(f"forward only: newest committed step {self.newest} -> {newest} by entry {entry.seq}")
        self.newest = newest
        self.log.append(entry)
        new = [one for one in entry.intents if one.seq == entry.seq]
        for one in new:
            if one.kind == "commit" and one.save is not None:
                self._check_commit(entry, one.step, one.save)
        for one in new:
            if one.kind == "retire" and one.reason.startswith("retention") and (one.step, one.save) == self.last_commit:
                raise Violation(f"retention is safe: step {one.step} of {one.save} is removed, the one that was committed last")
        return True

    def _check_commit(self, entry: LogEntry, step: int, save: str) -> None:
        package = self.packages.get(save)
        if package is None:
            raise Violation(f"entry {entry.seq} commits {save}, which has no package")
        for saved, _, _ in package.pieces.values():
            if self.is_given_up(saved, step):
                raise Violation(f"given up: step {step} of {saved} is committed by {save}, after a restore that has given it up")
        self.committed[step, save] = True
        self.last_commit = (step, save)

    def forget_uncommitted(self) -> None:
        """What was written last lay in another folder."""
        committed = {save for _, save in self.committed}
        self.work &= committed
        self.packages = {save: package for save, package in self.packages.items() if save in committed}
        self.parts = {save: parts for save, parts in self.parts.items() if save in committed}

    @property
    def tail(self) -> LogEntry:
        return self.log[-1]

    # ---------------------------------------------------------------- steps

    def visible(self) -> list[int]:
        """What a reader lists."""
        return [step for step, shown in self.shown.items() if MARKER in shown.files]

    def shown_save(self, step: int) -> str | None:
        """The save that is visible at that step."""
        shown = self.shown.get(step)
        return None if shown is None else shown.files.get(MARKER)

    def shown_bytes(self, step: int) -> Saved:
        """Whose bytes the visible step has."""
        save = self.shown_save(step)
        assert save is not None
        return self.packages[save].pieces[0][0]

    def durable(self) -> int:
        """Newest step that is live and visible, -1: none."""
        live = self.log[-1].live if self.log else ()
        for one in reversed(live):
            shown = self.shown.get(one.step)
            if shown is not None and MARKER in shown.files:
                return one.step
        return -1

    def check_step(self, step: int) -> None:
        """Visible means complete."""
        shown = self.shown.get(step)
        if shown is None or MARKER not in shown.files:
            return
        save = shown.files[MARKER]
        for name in FILES:
            if shown.files.get(name) != save:
                raise Violation(f"visible means complete: step {step} of {save} is visible with {name} of {shown.files.get(name)}")
        if (step, save) not in self.committed:
            raise Violation(f"visible means complete: step {step} of {save} is visible and not committed")
        package = self.packages[save]
        first: Saved | None = None
        for rank in range(package.world):
            token = package.pieces.get(rank)
            if token is None or token[2] != rank:
                raise Violation(f"visible means complete: step {step} of {save} lacks the piece of rank {rank} (has {token})")
            if token[1] != step or (first is not None and token[0] != first):
                raise Violation(f"visible means complete: step {step} of {save} mixes pieces: {package.pieces}")
            first = token[0]
        self.ever_visible.add(step)
        if first is not None:
            self.ever_shown.add((first, step))

    def put(self, step: int, name: str, save: str) -> bool:
        """Create-once of one fixed name; True if it is there with these bytes."""
        shown = self.shown.get(step)
        if shown is None:
            shown = self.shown[step] = Shown()
        held = shown.files.setdefault(name, save)
        self.check_step(step)
        return held == save

    def rename(self, step: int, save: str) -> bool:
        """Directory: the assembled step to its name; True if it is visible afterwards."""
        shown = self.shown.get(step)
        if shown is None and save in self.work:
            self.work.discard(save)
            shown = self.shown[step] = Shown()
            for name in (*FILES, MARKER):
                shown.files[name] = save
            self.check_step(step)
        return shown is not None and shown.files.get(MARKER) == save

    def remove(self, step: int, save: str | None, names: tuple[str, ...], *, aside: bool) -> None:
        """Take fixed names away. Objects go only if they are of that save; a directory has no such condition."""
        shown = self.shown.get(step)
        if shown is None:
            return
        gone = [name for name in names if name in shown.files and (self.is_directory or shown.files[name] == save)]
        if MARKER in gone:
            self._check_removal(step, shown.files[MARKER], aside)
        for name in gone:
            del shown.files[name]
        if not shown.files:
            del self.shown[step]
        elif gone:
            self.check_step(step)

    def _check_removal(self, step: int, save: str, aside: bool) -> None:
        tail = self.log[-1]
        for one in tail.live:
            if one.step == step and one.save == save:
                raise Violation(f"retention is safe: step {step} of {save} is live and is being removed")
        others = [other for other in self.visible() if other != step]
        newest = max(others, default=-1)
        rolled_back = any(one.step == step and "rollback" in one.reason for one in tail.intents) or step in self.aside
        if newest < step and not aside and not rolled_back:
            raise Violation(f"retention is safe: step {step} is removed, the newest other visible one is {newest}")
