"""Removing what is provably dead: work that no entry of the log can ever commit, and the rest of what was retired."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from raystate.core.formats.errors import ConfigError, CorruptCheckpointError, StorageError
from raystate.storage.base import ObjectInfo, ObjectMissingError, Storage
from raystate.storage.log_reader import LogReader, Tail
from raystate.storage.names import (
    ASIDE,
    BASES,
    DEAD,
    MARKER,
    PACKAGES,
    SELF_TEST,
    STATE,
    TRASH,
    WORK,
    attempt_of,
    base_name,
    base_number,
    is_trash,
    package_name,
    save_of,
    split_saved,
    step_of,
    work_name,
)
from raystate.storage.steps import find_package, marked_save, remove_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """One thing that can go: a folder (its name ends in "/") or an object."""

    name: str
    nbytes: int
    why: str
    generation: str = ""


def find_garbage(
    storage: Storage,
    live_saves: Collection[str] = (),
    *,
    given_up: Collection[str] = (),
    on_found: Callable[[int], None] = lambda _: None,
) -> list[Garbage]:
    """Work folders, packages and writers' objects of dead saves, unneeded bases of the log, and
    trash.

    A save is dead if its attempt is older than the log's tail, so that nothing can commit it any
    more, and if the tail neither holds it live nor has an intent on it. This is looked up here: so
    a caller who slept, or who saves meanwhile, harms nothing. Saves of the newest attempt are never
    touched, unless it names them itself. A dead save stays dead.

    Args:
        storage: of the run.
        live_saves: further saves to keep.
        given_up: saves that the caller, who alone could, will never commit.
        on_found: called with how many things have been found so far.
    """
    found: list[Garbage] = []
    for one in _garbage(storage, live_saves, given_up):
        found.append(one)
        on_found(len(found))
    return found


def _garbage(storage: Storage, live_saves: Collection[str], given_up: Collection[str]) -> Iterator[Garbage]:
    newest = LogReader(storage).newest()
    if newest is not None:
        tail = newest.entry
        yield from _bases(storage, newest)
        keep = {*live_saves, *(one.save for one in tail.live), *(one.save for one in tail.intents)}

        def is_dead(save: str | None) -> bool:
            attempt = None if save is None else attempt_of(save)
            return attempt is not None and (attempt < tail.attempt or save in given_up) and save not in keep

        yield from _work_folders(storage, is_dead)
        yield from _packages(storage, is_dead)
        if not storage.is_directory:
            yield from _strays(storage, is_dead)
    yield from _self_tests(storage)
    yield from (_folder(storage, info, "was retired") for info in storage.list(TRASH, recursive=False) if is_trash(info.name))


def remove_garbage(storage: Storage, garbage: Sequence[Garbage], *, on_bytes: Callable[[int], None] = lambda _: None) -> None:
    """Remove them. What fails doesn't keep the others.

    Args:
        storage: of the run.
        garbage: what `find_garbage` has found.
        on_bytes: called with the bytes that are done with so far.

    Raises:
        StorageError: the first failure; what could not be removed stays for the next time.
    """
    loose = [one for one in garbage if one.name[-1] != "/"]
    objects = [ObjectInfo(name=one.name, size=one.nbytes, generation=one.generation) for one in loose]
    removals: list[tuple[int, Callable[[], None]]] = [
        (one.nbytes, _remover(storage, one.name.rstrip("/"))) for one in garbage if one.name[-1] == "/"
    ]
    removals += [(sum(one.nbytes for one in loose), lambda: storage.delete_all(objects)), (0, lambda: _sweep(storage))]
    failed: list[StorageError] = []
    done = 0
    for nbytes, remove in removals:
        try:
            remove()
        except StorageError as error:
            failed.append(error)
        done += nbytes
        on_bytes(done)
    if failed:
        raise failed[0]


def collect_garbage(storage: Storage, live_saves: Collection[str] = (), *, given_up: Collection[str] = ()) -> None:
    """Find and remove. Raises StorageError; what could not be removed stays for the next time."""
    remove_garbage(storage, find_garbage(storage, live_saves, given_up=given_up))


def assume_dead(storage: Storage, attempt: int) -> None:
    """Note for all Coordinators of the run that an attempt's process is gone, so that what it left open can be closed.

    Raises:
        ConfigError: it is the newest attempt, or there was no such attempt.
    """
    tail = LogReader(storage).tail()
    newest = 0 if tail is None else tail.attempt
    if not 1 <= attempt < newest:
        older = f"the attempts 1 to {newest - 1} can be" if newest > 1 else "there is no older attempt"
        raise ConfigError(
            f"attempt {attempt} of {storage.url} can't be assumed dead: {older}; the newest one is superseded by starting the run",
            field="assume_dead", got=attempt,
        )  # fmt: skip
    storage.create_or_same(f"{DEAD}/{attempt}", b"assumed dead: raystate gc --assume-dead\n")


def assumed_dead(storage: Storage) -> tuple[int, ...]:
    """The attempts of which `assume_dead` was told."""
    names = [_base(info.name) for info in storage.list(DEAD, recursive=False)]
    return tuple(sorted(int(name) for name in names if name.isdigit()))


def _work_folders(storage: Storage, is_dead: Callable[[str | None], bool]) -> Iterator[Garbage]:
    for info in storage.list(WORK, recursive=False):
        found = split_saved(_base(info.name))
        if found is not None and info.name == f"{work_name(*found)}/" and is_dead(found[1]):
            yield _folder(storage, info, f"an unfinished save of step {found[0]} by attempt {attempt_of(found[1])}")


def _bases(storage: Storage, newest: Tail) -> Iterator[Garbage]:
    """Those of past entries, and of entries that were never appended. Bases that an entry yet to
    come may name are not touched."""
    keep = {base_name(newest.base.name), base_name(newest.base.before)}
    for info in storage.list(BASES, recursive=False):
        if 0 < base_number(info.name) <= newest.entry.seq and info.name not in keep:
            yield _object(info, "a base of old log entries")


def _packages(storage: Storage, is_dead: Callable[[str | None], bool]) -> Iterator[Garbage]:
    set_aside = {split_saved(_base(info.name)) for info in storage.list(ASIDE, recursive=False)}
    for info in storage.list(PACKAGES, recursive=False):
        found = split_saved(_base(info.name))
        ours = found is not None and info.name == package_name(*found)
        if (
            found is not None
            and ours
            and is_dead(found[1])
            and found not in set_aside
            and marked_save(storage, found[0]) != found[1]
        ):
            yield _object(info, f"the package of save {found[1]}, which is not live")


def _strays(storage: Storage, is_dead: Callable[[str | None], bool]) -> Iterator[Garbage]:
    for folder in storage.list(recursive=False):
        step = step_of(_base(folder.name)) if folder.is_folder else None
        if step is None:
            continue
        dead = [info for info in storage.list(_base(folder.name)) if is_dead(save_of(info.name))]
        if dead and storage.exists(folder.name + MARKER):
            # Beside a published step. One that was imported consists of such names, too: its package tells.
            try:
                package = find_package(storage, step)
            except CorruptCheckpointError:
                package = None
            if package is None:
                continue
            own = {f"{step}/{obj.name}" for obj in package.objects}
            dead = [info for info in dead if info.name not in own]
        for info in dead:
            yield _object(info, f"data of save {save_of(info.name)}, which was not committed")


def _self_tests(storage: Storage) -> Iterator[Garbage]:
    for info in storage.list(STATE, recursive=False):
        if info.is_folder and is_trash(f"{TRASH}/{_base(info.name)}"):
            yield _folder(storage, info, "of a start that died")


def _object(info: ObjectInfo, why: str) -> Garbage:
    return Garbage(name=info.name, nbytes=info.size, why=why, generation=info.generation)


def _folder(storage: Storage, info: ObjectInfo, why: str) -> Garbage:
    if not info.is_folder:  # a link, in the place of a step that was retired: it goes, and what it points to stays
        return _object(info, why)
    nbytes = sum(inside.size for inside in storage.list(info.name.rstrip("/")))
    return Garbage(name=info.name, nbytes=nbytes, why=why)


def _remover(storage: Storage, folder: str) -> Callable[[], None]:
    found = split_saved(_base(folder)) if folder.startswith(f"{WORK}/") else None
    if found is not None:
        return lambda: remove_work(storage, *found)
    if _base(folder).startswith(SELF_TEST):
        return lambda: _remove_self_test(storage, folder)
    return lambda: storage.delete_tree(folder)


def _remove_self_test(storage: Storage, folder: str) -> None:
    """In one rename: a start that is testing right now finds its folder whole or not at all, and makes another one."""
    trash = f"{TRASH}/{_base(folder)}"
    try:
        storage.rename_tree(folder, trash)
    except ObjectMissingError:
        return
    storage.delete_tree(trash)


def _sweep(storage: Storage) -> None:
    storage.sweep(STATE)


def _base(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
