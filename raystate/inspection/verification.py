"""Is what lies in storage what was written? For raystate's own steps object by object; for others as far as that can be known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from raystate.core.formats.errors import CorruptCheckpointError
from raystate.core.formats.messages import LogEntry
from raystate.core.formats.texts import counted
from raystate.core.formats.tree import DataObject, Package, TreeSpec
from raystate.inspection.boxes import boxes_of, total_bytes
from raystate.orbax.step_reader import ItemKind, StepReader
from raystate.storage import LogReader, ObjectInfo, ObjectMissingError, Storage, find_package, marked_save, visible_steps
from raystate.storage.names import GUARD, LOG, base_name, log_name, number_of, package_name
from raystate.storage.steps import other_bytes

READERS = 8  # objects that are read through at a time
TRIES = 10  # of a log that grows meanwhile


@dataclass(frozen=True, kw_only=True)
class BadObject:
    """One object, or array, that is not as it was written. `name` is relative to the storage."""

    name: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The outcome of a check.

    Attributes:
        step: number of completed steps.
        kind: "raystate": checked against its package; "orbax": no package tells what should be there.
        objects: number of objects (or arrays, of kind "orbax") that were checked.
        nbytes: their bytes.
        bad: the ones that are not right.
        unchecked: what could not be checked and why, one sentence each.
    """

    step: int
    kind: Literal["raystate", "orbax"]
    objects: int
    nbytes: int
    bad: tuple[BadObject, ...]
    unchecked: tuple[str, ...] = ()


def _ignore(_done: int, _total: int) -> None:
    """Show no progress."""


def verify_log(storage: Storage, *, on_entry: Callable[[int, int], None] = _ignore) -> tuple[BadObject, ...]:
    """Check the guard and every entry of the run's log, and that its newest one agrees with what is visible.

    Nothing can tell that the newest entries are lost, but for the steps that only they knew.

    Args:
        storage: of the run.
        on_entry: called with (entries checked so far, entries in all).
    """
    bad: list[BadObject] = []
    log = LogReader(storage)
    names = [info.name for info in storage.list(LOG)]
    if names and not storage.exists(GUARD):
        bad.append(BadObject(name=GUARD, problem="is missing: stock Orbax's cleanup would delete the log"))
    with ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="raystate-verify") as pool:
        count = _newest(names)
        whole: list[bool] = []
        for one in pool.map(lambda seq: _check_entry(log, seq, bad), range(1, count + 1)):
            whole.append(one)
            on_entry(len(whole), count)
    tail = _whole_entry(storage, log, count, bad) if whole and whole[-1] else None
    if tail is None:
        return tuple(bad)
    differing = _against_visible(storage, tail)
    for _ in range(TRIES):
        newest = _newest(info.name for info in storage.list(LOG)) if differing else 0
        if newest <= tail.seq or (newer := _whole_entry(storage, log, newest, bad)) is None:
            break
        tail, differing = newer, _against_visible(storage, newer)  # the run goes on: what is visible belongs to a newer entry
    return (*bad, *differing)


def _newest(names: Iterable[str]) -> int:
    """The number of the newest log entry among these; 0 if there is none."""
    return max(map(number_of, names), default=0)


def _against_visible(storage: Storage, tail: LogEntry) -> list[BadObject]:
    """Where the log's newest entry and what is visible differ."""
    bad: list[BadObject] = []
    visible, live = set(visible_steps(storage)), {one.step: one.save for one in tail.live}
    on_the_way = {one.step for one in tail.intents}
    for step in sorted(live):
        if step not in visible and step not in on_the_way:
            bad.append(BadObject(name=f"{step}/", problem=f"committed by log entry {tail.seq} and not visible"))
        save = live[step]
        if save is not None and not storage.exists(package_name(step, save)):
            bad.append(BadObject(name=package_name(step, save), problem="is missing"))
    for step in sorted(visible - set(live) - on_the_way):
        if (save := marked_save(storage, step)) is not None:
            bad.append(BadObject(name=f"{step}/", problem=f"visible, but the log's newest entry, {tail.seq}, knows no save {save}"))
    return bad


def _check_entry(log: LogReader, seq: int, bad: list[BadObject]) -> bool:
    try:
        log.read_header(seq)
    except ObjectMissingError:
        bad.append(BadObject(name=log_name(seq), problem="is missing"))
    except CorruptCheckpointError as error:
        bad.append(BadObject(name=log_name(seq), problem=error.message))
    else:
        return True
    return False


def _whole_entry(storage: Storage, log: LogReader, seq: int, bad: list[BadObject]) -> LogEntry | None:
    """An entry that is fine itself, with its base; a later one if its base is no longer kept."""
    base = log.read_header(seq).base
    try:
        if base:
            log.read_base(base)  # `read` would rebuild a damaged one
        return log.read(seq)
    except (ObjectMissingError, CorruptCheckpointError) as error:
        if isinstance(error, ObjectMissingError) and storage.exists(log_name(seq + 1)):
            return _whole_entry(storage, log, seq + 1, bad)
        problem = "is missing" if isinstance(error, ObjectMissingError) else error.message
        bad.append(BadObject(name=base_name(base) if base else log_name(seq), problem=problem))
    return None


def verify_step(
    storage: Storage, step: int, *, folder: str | None = None, on_bytes: Callable[[int, int], None] = _ignore
) -> StepReport:
    """Check everything of one visible step.

    Args:
        storage: of the run.
        step: number of completed steps.
        folder: where it lies, if Orbax named it otherwise; "": the storage is its folder.
        on_bytes: called with (bytes checked so far, bytes in all), from any thread.

    Raises:
        StepNotFoundError: it was removed meanwhile. StorageError: storage failed, which says nothing about the step.
    """
    bad: list[BadObject] = []
    folder = str(step) if folder is None else folder
    try:
        package = find_package(storage, step) if folder == str(step) else None
    except CorruptCheckpointError as error:
        bad.append(BadObject(name=str(error.path or f"{step}/"), problem=error.message))
        package = None
    if package is not None:
        return _against_package(storage, package, on_bytes)
    return _by_reading(storage, step, folder, bad, on_bytes)


def _against_package(storage: Storage, package: Package, on_bytes: Callable[[int, int], None]) -> StepReport:
    folder = str(package.step)
    found = {info.name: info for info in storage.list(folder)}
    total = sum(obj.size for obj in package.objects) + sum(len(data) for data in package.files.values())
    done = 0

    def checked(name: str, size: int, check: Callable[[ObjectInfo], str]) -> BadObject | None:
        nonlocal done
        info = found.get(f"{folder}/{name}")
        try:
            if info is None:
                problem = "is missing"
            elif info.size != size:
                problem = f"has {info.size} bytes instead of {size}"
            else:
                problem = check(info)
        except ObjectMissingError:
            problem = "is missing"
        done += size  # several threads: a progress bar, not an account
        on_bytes(done, total)
        return BadObject(name=f"{folder}/{name}", problem=problem) if problem else None

    def data_object(obj: DataObject) -> BadObject | None:
        return checked(obj.name, obj.size, lambda info: other_bytes(storage.with_checksums(info), obj))

    def small_file(name: str, data: bytes) -> BadObject | None:
        return checked(name, len(data), lambda info: "" if storage.read(info.name) == data else "differs from the package")

    with ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="raystate-verify") as pool:
        futures = [pool.submit(data_object, obj) for obj in package.objects]
        futures += [pool.submit(small_file, name, data) for name, data in sorted(package.files.items())]
        bad = tuple(one for future in futures if (one := future.result()) is not None)
    return StepReport(step=package.step, kind="raystate", objects=len(futures), nbytes=total, bad=bad)


def _by_reading(storage: Storage, step: int, folder: str, bad: list[BadObject], on_bytes: Callable[[int, int], None]) -> StepReport:
    """Nothing says what should be there: read everything that the step's own metadata names."""
    reader, begin = StepReader(storage, folder, step=step), f"{folder}/" if folder else ""
    unchecked = ["its small files: no package tells their bytes"]
    arrays = done = 0
    trees: list[TreeSpec] = []

    def parse(name: str, read: Callable[[], object]) -> None:
        try:
            read()
        except CorruptCheckpointError as error:
            bad.append(BadObject(name=f"{begin}{name}", problem=error.message))

    kinds: dict[str, ItemKind] = {}
    parse("", lambda: kinds.update(reader.items()))
    parse("metrics", reader.metrics)
    for item, kind in kinds.items():
        match kind:
            case "arrays":
                parse(item, lambda item=item: trees.append(reader.tree(item)))
            case "json":
                parse(item, lambda item=item: reader.json(item))
            case "iterator":
                parse(item, lambda item=item: reader.iterator_states(item))
            case "files" | "other":
                if not storage.list(f"{begin}{item}"):
                    problem = "is named by the step's metadata, and nothing of it is there"
                    bad.append(BadObject(name=f"{begin}{item}", problem=problem))
    total = sum(map(total_bytes, trees))
    plain: list[str] = []
    for tree in trees:
        for index, leaf in enumerate(tree.leaves):
            if leaf.array is None:
                continue
            arrays += 1
            name = f"{begin}{tree.item}: {leaf.name}"
            if not reader.has_checksums(tree.item, leaf.name):
                plain.append(leaf.name)
            try:
                for start, shape in boxes_of(leaf.array):
                    done += sum(part.nbytes for part in reader.read(tree.item, [(index, start, shape)]))
                    on_bytes(done, total)
            except CorruptCheckpointError as error:
                bad.append(BadObject(name=name, problem=error.message))
    if plain:
        shown = ", ".join(plain[:3]) + (f" and {len(plain) - 3} more" if len(plain) > 3 else "")
        unchecked.append(
            f"flipped bits in {counted(len(plain), 'array')} without checksums ({shown}): only missing or unreadable chunks show"
        )
    return StepReport(step=step, kind="orbax", objects=arrays, nbytes=done, bad=tuple(bad), unchecked=tuple(unchecked))
