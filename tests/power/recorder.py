"""Power loss on a directory: record what a program really does to it, and rebuild each tree that a power cut may leave.

    with Recorder(folder) as recorder:
        …  # the program; it says by `recorder.mark(…)` what it acknowledges
    for replay in replays(recorder.recording()):
        replay.write_to(empty_folder)
        …  # start the program again: what it had acknowledged (`replay.marks`) must be there

**The model** is the weakest that POSIX allows and that keeps names and bytes apart:

- Bytes of a file survive for certain once that file was fsynced after the write (or `sync`). Before, each single write may be lost,
  kept, torn (its first half), or have left zeros of its length; later writes may survive earlier ones. So may changes of the size.
- A name (create, mkdir, link, unlink, rmdir) is there or gone for certain only once the folder that holds it was fsynced. fsync(2):
  "does not necessarily ensure that the entry in the directory containing the file has also reached disk". Until then each change
  has happened or not, independently of all others, of later ones and of the file's bytes; only changes of one and the same name keep
  their order. fsync of a file, or of a folder inside a folder, does not save its own name.
- A rename is atomic: the old name or the new one, between two folders perhaps both, never neither. But fsync of a folder saves only
  the half that lies in it: whoever fsyncs the old folder before the new one may be left with neither.
- Hardware and file system keep what fsync has acknowledged. Owners, modes and times are not modelled.

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
import random
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest

Kind = Literal["create", "mkdir", "link", "unlink", "rmdir", "rename", "write", "resize", "fsync", "sync", "mark"]

Tree = dict[str, bytes | None]
"""Path relative to the recorded directory -> a file's bytes, None for a folder."""

ROOT = 1  # the inode of the recorded directory


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


class Recorder:
    """Notes what this process does to a directory while it is entered.

    The calls of `os` that make names and bytes durable, or move them, are noted as they come. Whatever else has changed by then,
    by whom and by whichever call (TensorStore writes below Python), is found by a look, and nothing of it is durable yet.

    Args:
        root: an existing directory.
    """

    def __init__(self, root: str | os.PathLike[str]):
        self._root = os.path.realpath(root)
        self._events: list[Event] = []
        self._start = 0
        self._numbers = itertools.count(ROOT + 1)
        self._known: dict[str, tuple[int, os.stat_result]] = {"": (ROOT, os.lstat(root))}  # path -> inode, as it was last seen
        self._lock = threading.RLock()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Recorder:
        self._look()
        self._events.append(Event(kind="sync"))
        self._start = len(self._events)
        for name in ("fsync", "rename", "link", "unlink", "mkdir", "rmdir"):
            self._patch.setattr(os, name, self._noting(name, getattr(os, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        self._look()

    def recording(self) -> Recording:
        """What was noted so far."""
        return Recording(events=tuple(self._events), start=self._start)

    def mark(self, name: str) -> None:
        """Note that the program has come to here."""
        with self._lock:
            self._look()
            self._events.append(Event(kind="mark", path=name))

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **rest: Any) -> Any:
            with self._lock:
                self._look()
                result = call(*arguments, **rest)
                if name == "fsync":
                    self._fsynced(self._relative(os.readlink(f"/proc/self/fd/{arguments[0]}")))
                elif name == "rename":
                    self._renamed(*(self._relative(os.fspath(path)) for path in arguments[:2]))
                else:
                    self._look()
                return result

        return noted

    def _relative(self, path: str) -> str | None:
        """ "" for the root itself, None for what lies elsewhere."""
        inside = path == self._root or path.startswith(f"{self._root}/")
        return path[len(self._root) + 1 :] if inside else None

    def _fsynced(self, path: str | None) -> None:
        if path is not None:
            self._events.append(Event(kind="fsync", path=path or ".", inode=self._known[path][0]))

    def _renamed(self, path: str | None, target: str | None) -> None:
        if path is None and target is None:
            return
        assert path and target, "a rename from or to elsewhere"
        to = {"target": target, "target_folder": self._folder(target)}
        self._events.append(Event(kind="rename", path=path, inode=self._known[path][0], folder=self._folder(path), **to))
        moved = {one: entry for one, entry in self._known.items() if f"{one}/".startswith(f"{path}/")}
        for one in moved:
            del self._known[one]
        self._known |= {target + one[len(path) :]: entry for one, entry in moved.items()}

    def _look(self) -> None:
        """Note what differs from the last look."""
        found = dict(self._found())
        for path in sorted(self._known.keys() - found.keys() - {""}, reverse=True):
            self._lost(path)
        for path, status in found.items():
            if path in self._known and not os.path.samestat(self._known[path][1], status):
                self._lost(path)
            if path not in self._known:
                self._appeared(path, status)
            inode, before = self._known[path]
            if stat.S_ISREG(status.st_mode) and (before.st_size, before.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
                self._written(path, inode, before.st_size)

    def _found(self) -> Iterator[tuple[str, os.stat_result]]:
        """Folders come before what is in them."""
        for folder, folders, files in os.walk(self._root):
            for name in sorted([*folders, *files]):
                real = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):  # somebody else is at work
                    yield real[len(self._root) + 1 :], os.lstat(real)

    def _folder(self, path: str) -> int:
        return self._known[os.path.dirname(path)][0]

    def _lost(self, path: str) -> None:
        _, status = self._known.pop(path)
        kind: Kind = "rmdir" if stat.S_ISDIR(status.st_mode) else "unlink"
        self._events.append(Event(kind=kind, path=path, folder=self._folder(path)))

    def _appeared(self, path: str, status: os.stat_result) -> None:
        same = (one for one in self._known.values() if os.path.samestat(one[1], status))
        if (known := next(same, None)) is not None:
            kind: Kind = "link"
        else:
            kind = "mkdir" if stat.S_ISDIR(status.st_mode) else "create"
            empty = os.stat_result((*status[:6], 0, *status[7:]))  # its bytes are noted apart
            known = (next(self._numbers), status if kind == "mkdir" else empty)
        self._events.append(Event(kind=kind, path=path, inode=known[0], folder=self._folder(path)))
        self._known[path] = known

    def _written(self, path: str, inode: int, size: int) -> None:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self._root, path), "rb") as file:
            data, status = file.read(), os.fstat(file.fileno())
            if data:
                self._events.append(Event(kind="write", path=path, inode=inode, data=data))
            if len(data) < size:
                self._events.append(Event(kind="resize", path=path, inode=inode, size=len(data)))
            names = [one for one, (number, _) in self._known.items() if number == inode]
            self._known |= dict.fromkeys(names, (inode, status))


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
