"""Power loss on a directory: record what a program really does to it, and rebuild each tree that a power cut may leave.

    recording = record([sys.executable, "-m", "my.program", str(folder)], folder)
    for replay in replays(recording):
        replay.write_to(empty_folder)
        …  # start the program again: what it had acknowledged, by `mark(…)` in `replay.marks`, must be there

**The model** is the weakest that POSIX allows and that keeps names and bytes apart:

- Bytes of a file survive for certain once that file was fsynced after the write (or `sync`). Before, each single write may be lost,
  kept, torn (its first half), or have left zeros of its length; later writes may survive earlier ones. So may changes of the size.
- A name (create, mkdir, link, unlink, rmdir) is there or gone for certain only once the folder that holds it was fsynced. fsync(2):
  "does not necessarily ensure that the entry in the directory containing the file has also reached disk". Until then each change
  has happened or not, independently of all others, of later ones and of the file's bytes; only changes of one and the same name keep
  their order. fsync of a file, or of a folder inside a folder, does not save its own name.
- A rename is atomic: the old name or the new one, between two folders perhaps both, never neither. But fsync of a folder saves only
  the half that lies in it: whoever fsyncs the old folder before the new one may be left with neither.
- Hardware and file system keep what fsync has acknowledged. Owners, modes and times are not modelled, bytes of a file that is
  mapped and shared can't be recorded.

No real file system is that weak: ext4, XFS and btrfs write names in order, or nearly so. But which one keeps what differs and changes
with mount options: Pillai et al., "All File Systems Are Not Created Equal: On the Complexity of Crafting Crash-Consistent
Applications", OSDI 2014, whose tool ALICE does as we do here. Code that passes this model relies on no particular one. The one thing
relied on is the atomic rename, which journaling and copy-on-write file systems have.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from raystate.core.formats.errors import RaystateError

Kind = Literal["create", "mkdir", "link", "unlink", "rmdir", "rename", "write", "resize", "fsync", "sync", "mark"]

Tree = dict[str, bytes | None]
"""Path relative to the recorded directory -> a file's bytes, None for a folder."""

ROOT = 1  # the inode of the recorded directory
MARKS = "/proc/raystate-mark/"  # below it nothing can be made, so `mark` changes nothing
_REPO = str(Path(__file__).parents[2])  # the tracer and what it traces import tests.power
UNAVAILABLE_STATUS, REFUSED_STATUS = 97, 98  # exit statuses of tests.power.trace


class RecordingError(RaystateError):
    """The command failed, or did what cannot be recorded."""


class RecordingUnavailableError(RecordingError):
    """This machine does not let us trace. A test may skip itself with this message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One operation that succeeded. Inodes are numbered by the recording and never used again; paths are for people and filters."""

    kind: Kind
    path: str = ""  # relative to the recorded directory, "." for itself; of a mark: its name
    inode: int = 0  # what the name stands for, what was written or fsynced
    folder: int = 0  # inode of the directory that holds the name
    target: str = ""  # rename: the new path
    target_folder: int = 0
    offset: int = 0  # write, bytes
    data: bytes = b""  # write
    size: int = 0  # resize, bytes

    def __str__(self) -> str:
        arrow = f" -> {self.target}" if self.target else ""
        much = f" ({len(self.data)} bytes)" if self.kind == "write" else ""
        return f"{self.kind} {self.path}{arrow}{much}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a program did to a directory, in order. The events before `start` are what it found there, durable."""

    events: tuple[Event, ...]
    start: int

    def without(self, drop: Callable[[Event], bool]) -> Recording:
        """The same run, had the program left out these events: to show that a test sees a missing fsync.

        Args:
            drop: called once for each event after the start, in order.
        """
        kept = tuple(event for event in self.events[self.start :] if not drop(event))
        return replace(self, events=(*self.events[: self.start], *kept))

    def tree(self) -> Tree:
        """What is there at the end if the power stays on."""
        disk = _Disk()
        for event in (*self.events, Event(kind="sync")):
            disk.apply(event)
        return disk.tree(())


def mark(name: str) -> None:
    """Note in the recording that the program has come to here. Without a recording it does nothing."""
    with contextlib.suppress(OSError):
        os.rmdir(MARKS + name)


def record(command: Sequence[str], root: str | os.PathLike[str], *, timeout_s: float = 120.0) -> Recording:
    """Run a command and record what it and all its children do to a directory.

    Args:
        command: program and arguments. Its exit status must be 0.
        root: an existing directory; nobody else may change it meanwhile.
        timeout_s: then the command is killed.

    Raises:
        RecordingUnavailableError: tracing is not possible here (Linux 5.3 on x86_64 or aarch64, ptrace and seccomp allowed).
        RecordingError: the command failed or took too long, or it did what cannot be recorded; with what it printed last.
    """
    with tempfile.TemporaryDirectory(prefix="raystate-power-") as scratch:
        file = Path(scratch) / "recording"
        tracer = [sys.executable, "-m", "tests.power.trace", str(file), os.fspath(root), *command]
        try:
            done = subprocess.run(
                tracer, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [_REPO, os.environ.get("PYTHONPATH")]))},
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RecordingError(f"recording {command[0]} took longer than {timeout_s} s", waited_s=timeout_s) from error
        said = done.stdout.decode(errors="replace").strip()[-4000:]
        if done.returncode == UNAVAILABLE_STATUS:
            raise RecordingUnavailableError(said)
        if done.returncode != 0:
            raise RecordingError(f"recording {command[0]} ended with status {done.returncode}:\n{said}", status=done.returncode)
        with file.open("rb") as stream:
            recording: Recording = pickle.load(stream)
    found, expected = _read_tree(os.fspath(root)), recording.tree()
    if missed := sorted(path for path in found.keys() | expected.keys() if found.get(path, 0) != expected.get(path, 0)):
        raise RecordingError(f"the recording missed what happened to {', '.join(missed[:5])}: did somebody else write there?")
    return recording


def _read_tree(root: str) -> Tree:
    tree: Tree = {}
    for folder, folders, files in os.walk(root):
        tree |= {os.path.relpath(os.path.join(folder, name), root): None for name in folders}
        tree |= {os.path.relpath(path, root): Path(path).read_bytes() for name in files for path in [os.path.join(folder, name)]}
    return tree


# ---------------------------------------------------------------- the disk


@dataclass(frozen=True, slots=True)
class _Name:
    """In this folder, the name stands for this inode from now on; None: for nothing."""

    folder: int
    name: str
    inode: int | None


@dataclass(frozen=True, slots=True)
class _Bytes:
    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Size:
    inode: int
    size: int


_Effect = _Name | _Bytes | _Size
_Outcome = tuple[str, tuple[_Effect, ...]]  # what became of a change, for people; what is left of it


@dataclass(frozen=True, slots=True)
class _Change:
    """A change that is not durable yet. The first outcome is that it is lost, the last that it has happened in full."""

    what: Event
    outcomes: tuple[_Outcome, ...]


def _change(event: Event) -> _Change:
    name = event.path.rpartition("/")[2]
    outcomes: list[_Outcome] = [("lost", ())]
    match event.kind:
        case "create" | "mkdir" | "link":
            outcomes.append(("kept", (_Name(event.folder, name, event.inode),)))
        case "unlink" | "rmdir":
            outcomes.append(("kept", (_Name(event.folder, name, None),)))
        case "rename":
            new = _Name(event.target_folder, event.target.rpartition("/")[2], event.inode)
            if event.target_folder != event.folder:
                outcomes.append(("both names", (new,)))
            outcomes.append(("kept", (new, _Name(event.folder, name, None))))
        case "write":
            half = event.data[: len(event.data) // 2]
            outcomes.append(("torn", (_Bytes(event.inode, event.offset, half),)))
            outcomes.append(("zeros", (_Bytes(event.inode, event.offset, bytes(len(event.data))),)))
            outcomes.append(("kept", (_Bytes(event.inode, event.offset, event.data),)))
        case _:
            outcomes.append(("kept", (_Size(event.inode, event.size),)))
    return _Change(event, tuple(outcomes))


class _Disk:
    """What is durable, and the changes that are not, in order."""

    def __init__(self) -> None:
        self.folders: dict[int, dict[str, int]] = {ROOT: {}}
        self.files: dict[int, bytes] = {}
        self.pending: list[_Change] = []

    def apply(self, event: Event) -> None:
        if event.kind in ("fsync", "sync"):
            self._flush(None if event.kind == "sync" else event.inode)
            return
        # A new inode itself is nothing that could be lost: without a name it can't be reached.
        if event.kind == "mkdir":
            self.folders[event.inode] = {}
        elif event.kind == "create":
            self.files[event.inode] = b""
        self.pending.append(_change(event))

    def _flush(self, inode: int | None) -> None:
        """Make everything durable that belongs to this inode; None: everything."""
        left: list[_Change] = []
        for change in self.pending:
            effects = change.outcomes[-1][1]
            saved = tuple(effect for effect in effects if inode in (None, _owner(effect)))
            _carry_out(saved, self.folders, self.files)
            if not saved:
                left.append(change)
            elif len(saved) < len(effects):  # a rename, of which one folder was fsynced
                rest = tuple(effect for effect in effects if effect not in saved)
                left.append(_Change(change.what, (("half lost", ()), ("kept", rest))))
        self.pending = left

    def tree(self, outcomes: Sequence[int]) -> Tree:
        """What is on the disk, if of the pending changes these are the outcomes."""
        folders, files = dict(self.folders), dict(self.files)
        effects = [one for change, which in zip(self.pending, outcomes, strict=True) for one in change.outcomes[which][1]]
        for effect in effects:
            if isinstance(effect, _Name) and folders[effect.folder] is self.folders[effect.folder]:
                folders[effect.folder] = dict(folders[effect.folder])
        _carry_out(effects, folders, files)
        tree: Tree = {}
        _collect(ROOT, "", folders, files, tree)
        return tree


def _owner(effect: _Effect) -> int:
    return effect.folder if isinstance(effect, _Name) else effect.inode


def _carry_out(effects: Iterable[_Effect], folders: dict[int, dict[str, int]], files: dict[int, bytes]) -> None:
    for effect in effects:
        match effect:
            case _Name(folder, name, inode):
                if inode is None:
                    folders[folder].pop(name, None)
                else:
                    folders[folder][name] = inode
            case _Bytes(inode, offset, data):
                old = files.get(inode, b"").ljust(offset, b"\0")
                files[inode] = old[:offset] + data + old[offset + len(data) :]
            case _Size(inode, size):
                files[inode] = files.get(inode, b"")[:size].ljust(size, b"\0")


def _collect(
    folder: int, prefix: str, folders: dict[int, dict[str, int]], files: dict[int, bytes], tree: Tree, above: tuple[int, ...] = ()
) -> None:
    for name, inode in folders[folder].items():
        if inode not in folders:
            tree[prefix + name] = files.get(inode, b"")
        elif inode not in above:  # two renames, of which only the later was kept, can put a folder into itself
            tree[prefix + name] = None
            _collect(inode, f"{prefix}{name}/", folders, files, tree, (*above, folder, inode))


# ---------------------------------------------------------------- replays


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One tree that a power cut may leave.

    Attributes:
        number: so many events after the start had happened.
        marks: names of the marks among them, in order.
        tree: what is on the disk.
    """

    number: int
    marks: tuple[str, ...]
    tree: Tree
    _pending: tuple[_Change, ...] = field(repr=False)
    _outcomes: tuple[int, ...] = field(repr=False)

    def __str__(self) -> str:
        """What happened, for a failed assertion."""
        pairs = [(change, change.outcomes[which][0]) for change, which in zip(self._pending, self._outcomes, strict=True)]
        told = [f"  {outcome}: {change.what}" for change, outcome in pairs]
        at = f"the power fails after {self.number} events, the last mark is {self.marks[-1]!r}" if self.marks else "no mark yet"
        return "\n".join([f"{at}; of what was not fsynced:", *(told or ["  nothing"])])

    def write_to(self, folder: str | os.PathLike[str]) -> None:
        """Make the tree in an empty or new folder."""
        base = os.fspath(folder)
        os.makedirs(base, exist_ok=True)
        for path, data in self.tree.items():  # folders come before what is in them
            if data is None:
                os.mkdir(f"{base}/{path}")
            else:
                with open(f"{base}/{path}", "wb", buffering=0) as file:
                    file.write(data)


def replays(
    recording: Recording, *, after: str = "", exhaustive_up_to: int = 256, random_subsets: int = 8, seed: int = 0
) -> Iterator[Replay]:
    """Every tree that a power cut may leave, or a fair choice of them. A tree comes once for the same marks.

    The power fails before each fsync and mark and at the end. That covers all moments: until the next fsync, whatever may have been
    lost at one moment may still be lost at the next, together with all that happened in between.

    Args:
        recording: what to replay.
        after: the power fails only after this mark.
        exhaustive_up_to: with no more combinations of outcomes than that at one moment, all are tried. With more: nothing kept,
            everything kept, each single change with each outcome among otherwise nothing and among otherwise everything, the
            changes up to each one, the changes from each one on, and random ones.
        random_subsets: number of random combinations at such a moment.
        seed: of these.
    """
    disk, chance = _Disk(), random.Random(seed)
    for event in recording.events[: recording.start]:
        disk.apply(event)
    marks: tuple[str, ...] = ()
    seen: set[tuple[int, int]] = set()
    is_new = True
    for number, event in enumerate([*recording.events[recording.start :], None]):
        if is_new and (not after or after in marks) and (event is None or event.kind in ("fsync", "sync", "mark")):
            is_new = False
            for outcomes in _combinations(
                [len(change.outcomes) for change in disk.pending], exhaustive_up_to, random_subsets, chance
            ):
                tree = disk.tree(outcomes)
                key = (hash(frozenset(tree.items())), len(marks))
                if key not in seen:
                    seen.add(key)
                    yield Replay(number=number, marks=marks, tree=tree, _pending=tuple(disk.pending), _outcomes=outcomes)
        if event is None:
            return
        if event.kind == "mark":
            marks = (*marks, event.path)
        else:
            disk.apply(event)
        is_new = is_new or event.kind not in ("fsync", "sync")


def _combinations(sizes: list[int], exhaustive_up_to: int, random_subsets: int, chance: random.Random) -> Iterator[tuple[int, ...]]:
    """One outcome for each change; 0 is the loss, size - 1 the whole change."""
    if math.prod(sizes) <= exhaustive_up_to:
        yield from itertools.product(*map(range, sizes))
        return
    nothing, everything = (0,) * len(sizes), tuple(size - 1 for size in sizes)
    yield everything
    yield nothing
    for at, size in enumerate(sizes):
        for base in (nothing, everything):
            yield from ((*base[:at], outcome, *base[at + 1 :]) for outcome in range(size) if outcome != base[at])
        yield (*everything[:at], *nothing[at:])
        yield (*nothing[:at], *everything[at:])
    for _ in range(random_subsets):
        share = chance.random()
        yield tuple(size - 1 if chance.random() < share else chance.randrange(size) for size in sizes)
