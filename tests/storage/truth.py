"""The invariants of DESIGN.md, looked up in a storage itself: by nobody's word, with a raw listing and the bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

from raystate.core.formats.entries import NO_BASE, Base, LogEntry, WrittenEntry
from raystate.core.formats.log import live_steps, published_steps
from raystate.core.formats.tree import Package
from raystate.machine.checksum import crc32c
from raystate.storage import Storage, visible_steps
from raystate.storage.base import TEMPORARY_PREFIX, ObjectInfo
from raystate.storage.names import (
    ASIDE,
    BASES,
    DEAD,
    GUARD,
    MARKER,
    TRASH,
    WORK,
    base_name,
    base_number,
    log_name,
    package_name,
    step_of,
)
from tests.sim.storage import Violation
from tests.storage.contents import fixed_files, payload

Saved = tuple[int, str | None]
"""(step, save)"""

_SAVED = re.compile(rb"step (\d+), save (a\d+k\w+)\n")
_SHORT_LOG = 40
_EMPTY = (".raystate", WORK, TRASH, ASIDE, BASES, ".raystate/steps", ".raystate/log")  # folders that may have nothing in them


class Truth:
    """Knows what processes were told, reads what there is, and compares. `check` may be called at any moment, `check_clean` at rest.

    Args:
        storage: the storage itself, as no process sees it.
    """

    def __init__(self, storage: Storage):
        self.storage = storage
        self.entries: list[LogEntry] = []
        self.reported: set[Saved] = set()  # somebody was told that it is durable
        self.gone: set[Saved] = set()  # somebody has carried out its retirement
        self.retired: dict[Saved, bool] = {}  # the log has retired it; whether it was set aside
        self.committed: set[Saved] = set()
        self.emptied = False  # the last step was set aside: nothing need be visible until the next
        self.checks = 0
        self._seen: dict[int, str] = {}
        self._packages: dict[Saved, Package] = {}
        self._bases: dict[str, Base] = {"": NO_BASE}
        self._tail_base = NO_BASE
        self._tail_bytes = b""
        self._see_bases()

    # ---------------------------------------------------------------- what processes believe

    def heard_durable(self, step: int, save: str | None) -> None:
        self.reported.add((step, save))

    def heard_gone(self, step: int, save: str | None) -> None:
        self.gone.add((step, save))

    @property
    def tail(self) -> LogEntry | None:
        return self.entries[-1] if self.entries else None

    # ---------------------------------------------------------------- at any moment

    def check(self) -> None:
        """Raises Violation."""
        self.checks += 1
        self._read_log()
        found = self._steps()
        self._seen = seen = self._visible(found)
        if (listed := set(visible_steps(self.storage))) - seen.keys():
            raise Violation(f"visible means complete: steps {sorted(listed)} are listed, {sorted(seen)} have a marker")
        tail = self.tail
        if tail is None:
            if seen:
                raise Violation(f"steps {sorted(seen)} are visible, and the log is empty")
            return
        live: dict[int, str | None] = {one.step: one.save for one in tail.live}
        for step, save in live.items():
            self.package(step, save)
        retiring = {(one.step, one.save) for one in tail.intents if one.kind == "retire"}
        for step, save in seen.items():
            self._check_complete(found, step, save)
            if (step, save) in self.gone:
                raise Violation(f"resurrected: step {step} of save {save} is visible, and its retirement was carried out")
            if live.get(step) != save and (step, save) not in retiring:
                raise Violation(f"step {step} of save {save} is visible, the log has {live.get(step)} and retires {retiring}")
        for step in published_steps(tail):
            if seen.get(step) != live[step]:
                raise Violation(f"lost: step {step} of save {live[step]} is published in the log; visible: {seen}")
        for step, save in self.reported:
            if live.get(step) == save:
                if seen.get(step) != save:
                    raise Violation(f"lost: step {step} of save {save} was reported durable and is live; visible: {seen}")
            elif (step, save) not in self.retired:
                raise Violation(f"lost: step {step} of save {save} was reported durable, and the log knows of no retirement")
        if self.reported and not seen and not self.emptied:
            raise Violation("retention is safe: steps were durable, and none is visible")

    def _steps(self) -> dict[str, ObjectInfo]:
        """The objects of all steps, published or not."""
        if len(self.entries) < _SHORT_LOG:
            return {info.name: info for info in self.storage.list()}  # with the rest, in one request
        folders = [info.name.rstrip("/") for info in self.storage.list(recursive=False) if info.is_folder]
        infos = [info for folder in folders if step_of(folder) is not None for info in self.storage.list(folder)]
        return {info.name: info for info in infos}

    def _visible(self, found: dict[str, ObjectInfo]) -> dict[int, str]:
        """What anybody would list: any folder named by a number in a directory, one with a marker in a bucket; with its save."""
        if self.storage.is_directory:
            folders = [info.name.rstrip("/") for info in self.storage.list(recursive=False) if info.is_folder]
        else:
            folders = [name.removesuffix(f"/{MARKER}") for name in found if name.count("/") == 1 and name.endswith(f"/{MARKER}")]
        seen: dict[int, str] = {}
        for folder in folders:
            if (step := step_of(folder)) is None:
                continue
            if f"{folder}/{MARKER}" not in found:
                raise Violation(f"visible means complete: the folder {folder} has no marker")
            seen[step] = self._save_of_marker(step, found[f"{folder}/{MARKER}"])
        return seen

    def _save_of_marker(self, step: int, marker: ObjectInfo) -> str:
        for other, save in self.committed:
            if other == step and marker.crc32c == crc32c(fixed_files(step, str(save))[MARKER]):
                return str(save)
        data = self.storage.read(marker.name)
        text = _SAVED.fullmatch(data)
        if text is None or int(text[1]) != step:
            raise Violation(f"visible means complete: the marker of step {step} is {data}")
        return text[2].decode()

    def _check_complete(self, found: dict[str, ObjectInfo], step: int, save: str) -> None:
        package = self.package(step, save)
        wanted = step_tree(package)
        for name, data in wanted.items():
            info = found.get(name)
            if info is None:
                raise Violation(f"visible means complete: {name} of save {save} is missing")
            crc = self.storage.checksum(name) if info.crc32c is None else info.crc32c
            if (info.size, crc) != (len(data), crc32c(data)):
                raise Violation(f"visible means complete: {name} of save {save} has other bytes")
        if self.storage.is_directory and (more := _below(found, f"{step}/") - wanted.keys()):
            raise Violation(f"mixed: step {step} of save {save} has {sorted(more)}, too")

    def package(self, step: int, save: str | None) -> Package:
        """The package of a commit, which must be there when it is first looked at; it must be what its save wrote."""
        if (step, save) not in self._packages:
            assert save is not None
            try:
                package = Package.from_bytes(self.storage.read(package_name(step, save)))
            except Exception as error:
                raise Violation(f"step {step} of save {save} is committed and has no package: {error}") from error
            if package.files != fixed_files(step, save):
                raise Violation(f"the package of step {step} of save {save} holds {package.files}")
            for obj in package.objects:
                data = payload(step, save, obj.name)
                if (obj.size, obj.crc32c) != (len(data), crc32c(data)):
                    raise Violation(f"mixed: {obj.name} in the package of step {step} of save {save} was not written by it")
            self._packages[step, save] = package
        return self._packages[step, save]

    # ---------------------------------------------------------------- the log

    def _see_bases(self) -> None:
        """Remember every base that is created: an old one may be gone before anybody looks at the entries that name it."""
        create = self.storage.create

        def seen(name: str, data: bytes) -> None:
            if base_number(name):
                base = Base.parse(name.removeprefix(f"{BASES}/"), data)
                self._bases[base.name] = base
            create(name, data)

        setattr(self.storage, "create", seen)  # noqa: B010 - of this storage alone

    def _read_log(self) -> None:
        while self.storage.exists(name := log_name(len(self.entries) + 1)):
            self._tail_bytes = self.storage.read(name)
            written = WrittenEntry.parse(self._tail_bytes)
            if written.base not in self._bases:
                raise Violation(f"log entry {written.seq} names the base {written.base}, which nobody has written")
            self._tail_base = self._bases[written.base]
            entry = written.entry(self._tail_base)
            self._follow(self.tail, entry)
            self.entries.append(entry)
        tail, base = self.tail, self._tail_base
        if tail is None:
            return
        if self.storage.read(log_name(tail.seq)) != self._tail_bytes:
            raise Violation(f"create-once: log entry {tail.seq} of attempt {tail.attempt} was overwritten")
        if base.name:
            if not self.storage.exists(base_name(base.name)):
                raise Violation(f"the log can't be read: {base.name}, the base of its newest entry {tail.seq}, is missing")
            if Base.parse(base.name, self.storage.read(base_name(base.name))) != base:
                raise Violation(f"the log can't be read: {base.name}, the base of its newest entry {tail.seq}, has changed")

    def _follow(self, tail: LogEntry | None, entry: LogEntry) -> None:
        what = f"entry {entry.seq} ({entry.kind}, attempt {entry.attempt}, by {entry.writer})"
        if entry.seq != len(self.entries) + 1:
            raise Violation(f"the log: {what} lies in the place of {len(self.entries) + 1}")
        if tail is not None:
            if entry.attempt != tail.attempt + (entry.kind == "claim"):
                raise Violation(f"one writer: {what} follows one of attempt {tail.attempt}")
            if entry.kind != "claim" and entry.writer != tail.writer:
                raise Violation(f"one writer: {what} follows one by {tail.writer}")
        before = {(one.step, one.save) for one in tail.live} if tail is not None else set()
        now = {(one.step, one.save) for one in entry.live}
        new = {(one.step, one.save): one for one in entry.intents if one.seq == entry.seq}
        newest, newest_before = max(live_steps(entry), default=-1), max(live_steps(tail), default=-1)
        if newest < newest_before and not all(one.aside or "rollback" in one.reason for one in new.values()):
            raise Violation(f"forward only: {what} goes from step {newest_before} to {newest}")
        for step, save in now - before:
            intent = new.get((step, save))
            if intent is None or intent.kind != "commit":
                raise Violation(f"{what} makes step {step} of save {save} live and does not say so")
            if (step, save) in self.committed:
                raise Violation(f"resurrected: {what} commits step {step} of save {save} again")
            self.committed.add((step, save))
        for step, save in before - now:
            intent = new.get((step, save))
            if intent is None or intent.kind != "retire":
                raise Violation(f"lost: {what} drops step {step} of save {save} and does not say so")
            self.retired[step, save] = intent.aside
        self.emptied = self.emptied or (bool(before) and not now)

    # ---------------------------------------------------------------- at rest, after a restart

    def check_clean(self) -> None:
        """All that is decided is carried out, and there is nothing but what live steps, what was set aside, and the log own."""
        self.check()
        tail = self.tail
        assert tail is not None
        found = {info.name: info for info in self.storage.list()}
        wanted = {GUARD, *(log_name(entry.seq) for entry in self.entries), *_below(found, f"{DEAD}/")}
        wanted |= {base_name(base) for base in (self._tail_base.name, self._tail_base.before) if base}
        live = {(one.step, one.save) for one in tail.live}
        if set(self._seen.items()) != live:
            raise Violation(f"visible: {self._seen}, live: {sorted(live, key=str)}")
        for step, save in live:
            wanted |= {package_name(step, str(save)), *step_tree(self.package(step, save))}
        kept = {one: prefix for one in self.committed for prefix in self._aside_folders(found, one)}
        for (step, save), prefix in kept.items():
            if not self.retired.get((step, save)):
                raise Violation(f"{prefix} was not set aside by the log")
            moved = {prefix + name.partition("/")[2] for name in step_tree(self.package(step, save))}
            if missing := moved - found.keys():
                raise Violation(f"set aside: {sorted(missing)} are missing")
            wanted |= {*moved, package_name(step, str(save))}
        for one, aside in self.retired.items():
            if aside and one not in kept:
                raise Violation(f"set aside: the data of step {one[0]} of save {one[1]} is nowhere")
        if left := found.keys() - wanted:
            raise Violation(f"left behind: {sorted(left)}")
        if missing := wanted - found.keys():
            raise Violation(f"missing: {sorted(missing)}")
        if self.storage.is_directory and (strange := sorted(self._strange_paths(wanted))):
            raise Violation(f"left behind: {strange}")

    def _aside_folders(self, found: Iterable[str], one: Saved) -> set[str]:
        begin = f"{ASIDE}/{one[0]}.{one[1]}"
        folders = {"/".join(name.split("/")[:3]) + "/" for name in found if name.startswith(f"{ASIDE}/")}
        return {folder for folder in folders if folder == f"{begin}/" or folder.startswith(f"{begin}.")}

    def _strange_paths(self, wanted: Iterable[str]) -> Iterator[str]:
        """Temporary files, which no listing shows, and empty folders."""
        root = self.storage.local_path("")
        folders = {*_EMPTY, *(str(parent) for name in wanted for parent in _parents(name))}
        for path, inside, files in os.walk(root):
            for folder in inside:
                relative = os.path.relpath(os.path.join(path, folder), root)
                if relative not in folders:
                    yield f"{relative}/"
            yield from (os.path.join(path, file) for file in files if file.startswith(TEMPORARY_PREFIX))


def step_tree(package: Package) -> dict[str, bytes]:
    """What a published step consists of, by name."""
    objects = {obj.name: payload(package.step, package.save, obj.name) for obj in package.objects}
    return {f"{package.step}/{name}": data for name, data in {**package.files, **objects}.items()}


def _below(names: Iterable[str], prefix: str) -> set[str]:
    return {name for name in names if name.startswith(prefix)}


def _parents(name: str) -> Iterator[str]:
    parts = name.split("/")[:-1]
    return ("/".join(parts[:count]) for count in range(1, len(parts) + 1))
