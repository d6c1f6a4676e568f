"""The storage side of one step, from its first byte to its removal, on directories and on object stores.

A directory assembles the step in a work folder and renames it into its place. An object store has the data in place from the start,
under unique names, and creates the fixed-name files one by one, the marker last. Everything here may be repeated, by anybody and
from any point: it ends in the same tree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable

from raystate.core.formats.errors import CorruptCheckpointError, StorageError
from raystate.core.formats.tree import DataObject, Package
from raystate.storage.base import ObjectExistsError, ObjectInfo, ObjectMissingError, Storage
from raystate.storage.foreign import is_marked, is_run, refuse_foreign, refuse_place
from raystate.storage.names import (
    ASIDE,
    MARKER,
    PACKAGES,
    TRASH,
    is_trash,
    marker_last,
    package_name,
    save_of,
    split_saved,
    step_name,
    step_of,
    trash_name,
    work_name,
)

_SAVED = re.compile(rb"save (a\d+k[0-9A-Za-z]+)")  # in a marker of ours


class StepFolder:
    """One save of one step.

    Args:
        storage: of the run.
        step: number of completed steps.
        save: the save id; None for a step that stock Orbax wrote, which can only be retired.
    """

    def __init__(self, storage: Storage, step: int, save: str | None):
        self.storage = storage
        self.step = step
        self.save = save
        self.name = step_name(step)  # where the published step lies

    @property
    def write_prefix(self) -> str:
        """The folder below which hosts write array data, under names that carry their writer (`names.writer_name`)."""
        return work_name(self.step, self._save()) if self.storage.is_directory else self.name

    # ------------------------------------------------------------ before the commit

    def assemble(self, package: Package) -> None:
        """Last check before the commit; on a directory, also the whole step, durable in its work folder.

        Raises:
            StorageError: the package is not of this save or has no marker, a data object is missing or of another size, or
                something else lies where the step would be published.
        """
        self._check_mine(package)
        if MARKER not in package.files:
            raise self._error("assemble", f"its package has no {MARKER}: no reader would ever list it")
        if self.storage.is_directory:
            place = self.storage.local_path(self.name)
            other = os.path.islink(place) or (os.path.exists(place) and not os.path.isdir(place))
            if other or self.storage.list(self.name, recursive=False):
                of_a_run = is_run(self.storage, f"{self.name}/")
                what = "the storage of a run: give your run another" if of_a_run else "move it away"
                raise self._error("assemble", f"{self.name} is there already: {what}")
            for name, data in package.files.items():
                self.storage.create_or_same(f"{self.write_prefix}/{name}", data)
        found = self.storage.list(self.write_prefix)
        if not self.storage.is_directory:  # unique names, of any save, are in no save's way
            for info in found:
                if save_of(info.name) is None:
                    raise self._error("assemble", f"{info.name} is there already")
        if (missing := _missing_object(found, self.write_prefix, package)) is not None:
            raise self._error("assemble", missing)
        self.storage.sweep(self.write_prefix)
        self.storage.fsync_tree(self.write_prefix)

    def put_package(self, package: Package) -> None:
        """Create the package object. Idempotent.

        Raises:
            ObjectExistsError: this save has another package.
        """
        self._check_mine(package)
        self.storage.create_or_same(package_name(self.step, self._save()), package.to_bytes())

    def read_package(self) -> Package:
        """Raises ObjectMissingError, StorageError, CorruptCheckpointError."""
        name = package_name(self.step, self._save())
        data = self.storage.read(name)
        path = f"{self.storage.url}/{name}"
        try:
            package = Package.from_bytes(data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{path} is not a package: {error}", step=self.step, path=name) from error
        if (package.step, package.save) != (self.step, self.save):
            what = f"is the package of step {package.step}, save {package.save}"
            raise CorruptCheckpointError(f"{path} {what}", step=self.step, path=name)
        return package

    # ------------------------------------------------------------ after the commit

    def publish(self, package: Package) -> None:
        """Make the committed step visible. Idempotent, and two may do it at once.

        Raises:
            StorageError: something else lies at the step's place, or its data is gone. Nothing was changed: stop and report.
        """
        self._check_mine(package)
        if self.storage.is_directory:
            self._publish_directory(package)
        else:
            self._publish_objects(package)

    def retire(self, *, aside: bool = False) -> None:
        """Make the step invisible, then remove it with its package, or keep its data below aside/. Idempotent; absent is fine.

        A step of the same number that another save has published is not touched: this one is gone already.
        """
        found = self.storage.list(self.name)
        if not self._is_anothers(found):
            if self.storage.is_directory:
                self._retire_directory(aside)
            else:
                self._retire_objects(found, aside)
        if not aside:
            _empty_trash(self.storage, self.step)
            if self.save is not None:
                self.storage.delete(package_name(self.step, self.save))

    def discard(self) -> None:
        """Remove what a save that was not committed left: its work folder or its writers' objects, and its package. Idempotent."""
        if self.storage.is_directory:
            remove_work(self.storage, self.step, self._save())
        else:
            self.storage.delete_all([info for info in self.storage.list(self.name) if save_of(info.name) == self._save()])
        self.storage.delete(package_name(self.step, self._save()))

    # ------------------------------------------------------------ inside

    def _publish_directory(self, package: Package) -> None:
        work, why = self.write_prefix, ""
        for _ in range(2):  # when the work folder goes away under us, somebody else has just published: look again
            if self.storage.list(self.name, recursive=False):
                self._check_equal(package)
                # The process that renamed it may have died before it was durable.
                self.storage.fsync_tree(self.name)
                return
            missing = _missing_object(self.storage.list(work), work, package) or self._differing_file(work, package)
            if missing is None:
                try:
                    self.storage.rename_tree(work, self.name)
                    return
                except ObjectMissingError as error:
                    missing = error.message
                except ObjectExistsError:
                    missing = f"{self.name} is there and is no checkpoint: move it away"
            why = missing
        raise self._error("publish", f"it is neither published nor complete in {work}: {why}")

    def _publish_objects(self, package: Package) -> None:
        if (missing := _missing_object(self.storage.list(self.name), self.name, package)) is not None:
            raise self._error("publish", missing)
        for name in sorted(package.files, key=marker_last):
            try:
                self.storage.create_or_same(f"{self.name}/{name}", package.files[name])
            except ObjectExistsError as error:
                raise self._error("publish", f"{self.name}/{name} exists with other bytes; nothing was overwritten") from error

    def _retire_directory(self, aside: bool) -> None:
        target = trash_name(self.step, self.save, above=ASIDE if aside else TRASH)
        try:
            self.storage.rename_tree(self.name, target)
        except ObjectMissingError:
            # It was renamed before; that may not be durable yet. The new folder first, then the old one, which is the root.
            self.storage.fsync_tree(target)

    def _retire_objects(self, found: list[ObjectInfo], aside: bool) -> None:
        kept = f"{ASIDE}/{self.name}.{self.save or 'orbax'}"
        marker = f"{self.name}/{MARKER}"
        first = [info for info in found if info.name == marker]
        rest = [info for info in found if info.name != marker]
        for infos in (first, rest):  # the marker first: a step that goes is not listed
            if aside:  # every object is copied before any goes, so a repetition finds each either here or there
                for info in infos:
                    self.storage.copy(info.name, f"{kept}/{info.name.removeprefix(f'{self.name}/')}")
            self.storage.delete_all(infos)

    def _is_anothers(self, found: Iterable[ObjectInfo]) -> bool:
        names = {info.name for info in found}
        writers = {save_of(name) for name in names} - {None}
        if self.save is None or not writers or self.save in writers:
            return False
        # Writers of other saves only. A step that was imported has them too, so its package decides.
        try:
            package = self.read_package()
        except ObjectMissingError:
            return True
        return not any(f"{self.name}/{obj.name}" in names for obj in package.objects)

    def _differing_file(self, prefix: str, package: Package) -> str | None:
        for name, data in package.files.items():
            try:
                if self.storage.read(f"{prefix}/{name}") != data:
                    return f"{prefix}/{name} differs from the package"
            except ObjectMissingError:
                return f"{prefix}/{name} is missing"
        return None

    def _check_equal(self, package: Package) -> None:
        if (differing := self._differing_file(self.name, package)) is not None:
            raise self._error("publish", f"something else is there: {differing}; nothing was overwritten")

    def _check_mine(self, package: Package) -> None:
        if (package.step, package.save) != (self.step, self.save):
            raise self._error("package", f"it is the package of step {package.step}, save {package.save}")

    def _save(self) -> str:
        if self.save is None:
            raise self._error("save", "stock Orbax wrote it: it has no save id")
        return self.save

    def _error(self, operation: str, why: str) -> StorageError:
        where = f"{self.storage.url}/{self.name}"
        return StorageError(
            f"{operation} step {self.step} (save {self.save}) at {where} failed: {why}",
            operation=operation, path=where, step=self.step, save=self.save,
        )  # fmt: skip


def find_package(storage: Storage, step: int) -> Package | None:
    """The package of a visible step; None if there is none: stock Orbax wrote the step, or it was copied without its `.raystate`.

    Raises:
        CorruptCheckpointError: the package is damaged, or nothing tells which of several is the
            step's.
        StorageError: storage failed.
    """
    try:
        save = marked_save(storage, step)
        if save is not None:
            return StepFolder(storage, step, save).read_package()
    except ObjectMissingError:
        pass
    # The marker is Orbax's own, or damaged. A run's log knows, but a Reader takes no part in it, and most steps have one package.
    found = [split_saved(info.name.rpartition("/")[2]) for info in storage.list(PACKAGES, recursive=False)]
    saves = [one[1] for one in found if one is not None and one[0] == step]
    if not saves:
        return None
    names = {info.name for info in storage.list(step_name(step))}
    packages = [StepFolder(storage, step, save).read_package() for save in saves]
    whole = [one for one in packages if any(f"{step}/{obj.name}" in names for obj in one.objects)]
    if len(whole) > 1:
        raise CorruptCheckpointError(f"{storage.url}: step {step} has objects of the saves {saves}", step=step)
    return whole[0] if whole else None


def marked_save(storage: Storage, step: int) -> str | None:
    """The save that the marker of a visible step names; None without a marker of ours."""
    try:
        found = _SAVED.search(storage.read(f"{step}/{MARKER}"))
    except ObjectMissingError:
        return None
    return found[1].decode() if found is not None else None


def data_objects(storage: Storage, step_folder: str, folder: str, *, writer: str, begin: str = "") -> list[DataObject]:
    """What lies in a folder of a step now, for its package.

    Args:
        storage: of the run.
        step_folder: where the step is written (`StepFolder.write_prefix`).
        folder: relative to it.
        writer: whose objects these are.
        begin: only names that begin so, within the folder.
    """
    found = storage.inventory(f"{step_folder}/{folder}")
    names = {info.name.removeprefix(f"{step_folder}/"): info for info in found}
    objects = [
        DataObject(name=name, size=info.size, crc32c=info.crc32c or 0, writer=writer, digest=info.digest)
        for name, info in names.items()
        if name.startswith(f"{folder}/{begin}")
    ]
    return objects


def top_folders(storage: Storage) -> list[str]:
    """The names of a storage's own folders, without what lies in them."""
    return [info.name.rstrip("/") for info in storage.list(recursive=False) if info.is_folder]


def visible_steps(storage: Storage, folders: Collection[str] | None = None) -> tuple[int, ...]:
    """Steps that stock Orbax would list, ascending: folders named by a number that are complete (`foreign.is_marked`).

    Args:
        folders: `top_folders` of just now, if the caller has them.
    """
    before: tuple[set[int], tuple[int, ...]] | None = None
    while True:
        folders = top_folders(storage) if folders is None else folders
        steps = {step for folder in folders if (step := step_of(folder)) is not None}
        visible = tuple(sorted(step for step in steps if is_marked(storage, str(step))))
        # The newest folder has no marker: a save that goes on, or it was retired since the listing, for one that came after it.
        if not steps or visible[-1:] == (max(steps),) or before == (steps, visible):
            return visible
        before, folders = (steps, visible), None


def foreign_steps(storage: Storage, live: Iterable[int]) -> tuple[int, ...]:
    """Visible steps that the log doesn't know: stock Orbax wrote them, and a claim adopts them.

    Args:
        storage: of the run.
        live: live steps of the log's tail. Steps with an open intent are left out by `core.formats.log.claim_entry`.

    Raises:
        ConfigError: the run would begin afresh beside checkpoints that are named in another way (`foreign.refuse_foreign`), or in
            somebody else's folder (`foreign.refuse_place`).
        StorageError: storage failed.
    """
    known, visible = set(live), visible_steps(storage)
    if not known and not visible:
        refuse_foreign(storage)
        refuse_place(storage)
    return tuple(step for step in visible if step not in known)


def remove_work(storage: Storage, step: int, save: str) -> None:
    """Remove a work folder. It leaves its place in one rename, so that a work folder is whole or absent."""
    try:
        storage.rename_tree(work_name(step, save), trash_name(step, save))
    except ObjectMissingError:
        pass
    _empty_trash(storage, step)


def _empty_trash(storage: Storage, step: int) -> None:
    for info in storage.list(TRASH, recursive=False):
        if is_trash(info.name, step):
            storage.delete_tree(info.name.rstrip("/"))


def _missing_object(found: Iterable[ObjectInfo], prefix: str, package: Package) -> str | None:
    """What the listing of a step's folder lacks of its package; also what has another size, or another checksum where it has one."""
    infos = {info.name: info for info in found}
    for obj in package.objects:
        info = infos.get(f"{prefix}/{obj.name}")
        if info is None:
            got = "is missing"
        elif info.size != obj.size:
            got = f"has {info.size} bytes instead of {obj.size}"
        elif not (got := other_bytes(info, obj)):
            continue
        return f"{prefix}/{obj.name} (writer {obj.writer}) {got}"
    return None


def other_bytes(info: ObjectInfo, obj: DataObject) -> str:
    """How an object's checksums, as far as both are known, differ from its package's; "" if they don't."""
    if info.crc32c not in (None, obj.crc32c):
        return f"has crc32c {info.crc32c:08x} instead of {obj.crc32c:08x}"
    kinds = info.digest.partition(":")[0], obj.digest.partition(":")[0]
    return f"has {info.digest} instead of {obj.digest}" if kinds[0] == kinds[1] and info.digest != obj.digest else ""
