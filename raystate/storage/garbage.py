"""Removing what is provably dead: work that no entry of the log can ever commit, and the rest of what was retired."""

from __future__ import annotations

from collections.abc import Callable, Collection

from raystate.storage.base import Storage
from raystate.storage.log import RunLog
from raystate.storage.names import ASIDE, MARKER, PACKAGES, STATE, TRASH, WORK, attempt_of, save_of, split_saved, step_of
from raystate.storage.steps import remove_work


def collect_garbage(storage: Storage, live_saves: Collection[str] = ()) -> None:
    """Remove left-overs: work folders, packages and writers' objects of dead saves, trash, temporary files.

    A save is dead if its attempt is older than the log's tail (so nothing can commit it any more) and the tail neither holds it
    live nor has an intent on it. This is looked up here, so that a caller who slept, or who saves meanwhile, harms nothing: saves of
    the newest attempt are never touched.

    Args:
        storage: of the run.
        live_saves: further saves to keep.

    Raises:
        StorageError: what could not be removed stays for the next time.
    """
    tail = RunLog(storage).tail()
    if tail is not None:
        keep = {*live_saves, *(one.save for one in tail.live), *(one.save for one in tail.intents)}

        def is_dead(save: str | None) -> bool:
            attempt = None if save is None else attempt_of(save)
            return attempt is not None and attempt < tail.attempt and save not in keep

        _remove_work_folders(storage, is_dead)
        _remove_packages(storage, is_dead)
        if not storage.is_directory:
            _remove_strays(storage, is_dead)
    for info in storage.list(TRASH, recursive=False):
        storage.delete_tree(info.name.rstrip("/"))
    storage.sweep(STATE)


def _remove_work_folders(storage: Storage, is_dead: Callable[[str | None], bool]) -> None:
    for info in storage.list(WORK, recursive=False):
        found = split_saved(_base(info.name))
        if found is not None and is_dead(found[1]):
            remove_work(storage, *found)


def _remove_packages(storage: Storage, is_dead: Callable[[str | None], bool]) -> None:
    set_aside = {split_saved(_base(info.name)) for info in storage.list(ASIDE, recursive=False)}
    for info in storage.list(PACKAGES, recursive=False):
        found = split_saved(_base(info.name))
        if found is not None and is_dead(found[1]) and found not in set_aside:
            storage.delete(info.name)


def _remove_strays(storage: Storage, is_dead: Callable[[str | None], bool]) -> None:
    for folder in storage.list(recursive=False):
        if not folder.is_folder or step_of(_base(folder.name)) is None or storage.exists(folder.name + MARKER):
            continue  # what lies beside a published step goes when that is retired
        storage.delete_all([info for info in storage.list(_base(folder.name)) if is_dead(save_of(info.name))])


def _base(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
