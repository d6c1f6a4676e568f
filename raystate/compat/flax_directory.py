"""The checkpoints of a directory by flax's rules: which are there, which a save removes, which it refuses."""

from __future__ import annotations

import contextlib
import functools
import os

from raystate.compat.flax_errors import OutdatedCheckpointError
from raystate.core.formats.errors import ConfigError, StorageError
from raystate.legacy.names import GDA, is_temporary, last_number, natural_sort, safe_normpath
from raystate.storage import ObjectInfo, ObjectMissingError, Storage, StorageUrl, open_storage
from raystate.storage.names import MARKER
from raystate.storage.placing import TEMPORARY, new_save

_GOING = "-going"  # ends the name of what is being removed


class FlaxDirectory:
    """Checkpoints `<prefix><step>` in a directory.

    Args:
        ckpt_dir: gs://…, file://…, a directory or a PathLike.
        prefix: what the names begin with.

    Attributes:
        path: the directory as flax spells it: normalized, relative if `ckpt_dir` is.

    Raises:
        ConfigError: the prefix has a backslash in it.
    """

    def __init__(self, ckpt_dir: StorageUrl, prefix: str = "checkpoint_"):
        if "\\" in prefix:  # as in storage.url, which sees no prefix
            raise ConfigError(
                f"prefix: {prefix!r} has a backslash in it, which TensorStore takes for '/'", field="prefix", got=prefix
            )
        above, _, self.prefix = prefix.rpartition("/")
        self.path = safe_normpath(os.path.join(os.fspath(ckpt_dir), above) if above else os.fspath(ckpt_dir))

    @functools.cached_property
    def storage(self) -> Storage:
        """What the checkpoints lie in."""
        return open_storage(self.path)

    def name(self, step: object) -> str:
        """The name of a step's checkpoint."""
        return f"{self.prefix}{step}"

    def path_of(self, name: str) -> str:
        """A checkpoint's path, as flax spells it."""
        return os.path.join(self.path, name)

    def names(self) -> list[str]:
        """Of all complete checkpoints, in natural order."""
        return natural_sort(info.name.rstrip("/") for info in self.storage.list(recursive=False) if self._is_complete(info))

    def _is_complete(self, info: ObjectInfo) -> bool:
        name = info.name.rstrip("/")
        if not name.startswith(self.prefix) or name.startswith(".raystate") or name.endswith(GDA) or is_temporary(name):
            return False
        # Where nothing can be renamed a folder is complete when its marker is there.
        return not info.is_folder or self.storage.is_directory or self.storage.exists(f"{info.name}{MARKER}")

    def check_order(self, name: str, *, overwrite: bool, strict: bool, keep: int, keep_every_n_steps: int | None) -> list[str]:
        """Refuse what flax refuses.

        Args:
            name: of the checkpoint that is to be saved.
            overwrite, keep, keep_every_n_steps: see `save_checkpoint`.
            strict: nothing may be saved before what is there.

        Returns:
            What is there, for `clean`.

        Raises:
            OutdatedCheckpointError: it is there; or it would be removed at once, since newer ones are kept and it is not.
        """
        names, path = self.names(), self.path_of(name)
        if overwrite:
            return names
        ways_out = "save with overwrite=True, which also removes what is newer, or to another directory"
        if name in names:
            raise OutdatedCheckpointError(f"{path} already exists: {ways_out}", path=path)
        after = natural_sort([*names, name])
        if strict and after[-1] != name:
            raise OutdatedCheckpointError(f"{path} is older than {after[-1]}, which is there: {ways_out}", path=path)
        if name in removed([*names, name], name, overwrite=False, keep=keep, keep_every_n_steps=keep_every_n_steps):
            text = f"{path} is older than {after[-1]}, and only {keep} are kept: it would be removed at once"
            raise OutdatedCheckpointError(f"{text}; {ways_out}, or with a larger keep", path=path)
        return names

    def clean(self, name: str, there: list[str], *, overwrite: bool, keep: int, keep_every_n_steps: int | None) -> None:
        """Remove what this save replaces and what is not kept. What a process that died left of a step that goes, goes with it.

        Args:
            there: what `check_order` found: what came later (a signal's handler saved, or another process) was not meant by `overwrite`.
        """
        names = [found for found in self.names() if not overwrite or found == name or found in there]
        for old in removed(names, name, overwrite=overwrite, keep=keep, keep_every_n_steps=keep_every_n_steps):
            self.remove(old)
        self._remove_going()

    def _remove_going(self) -> None:
        """What a process that was killed was removing."""
        if self.storage.is_directory:
            names = [info.name.rstrip("/") for info in self.storage.list(recursive=False)]
            for name in names:
                if name.startswith(self.prefix) and TEMPORARY in name and name.endswith(_GOING):
                    with contextlib.suppress(StorageError):  # the next save tries again
                        self.storage.delete_tree(name)

    def remove(self, name: str) -> None:
        """Remove a checkpoint in any form; first what makes it complete."""
        gda = f"{name}{GDA}"
        if not self.storage.delete(name):
            for folder in (gda, name):
                self.storage.delete(f"{folder}/{MARKER}")
            self._remove_folder(name)
        self._remove_folder(gda)

    def _remove_folder(self, name: str) -> None:
        """In a directory it loses its name first: so no reader finds half of it, even if this
        process is killed."""
        if self.storage.is_directory and self.storage.list(name, recursive=False):
            going = f"{name}{TEMPORARY}{new_save()}{_GOING}"
            try:
                self.storage.rename_tree(name, going)
            except ObjectMissingError:  # somebody else has removed it
                return
            name = going
        self.storage.delete_tree(name)


def removed(names: list[str], new: str, *, overwrite: bool, keep: int, keep_every_n_steps: int | None) -> list[str]:
    """Which checkpoints a save removes.

    Args:
        names: of all that are there, the new one among them.
        new: the one that was saved.
        overwrite: newer checkpoints go.
        keep: so many of the newest stay; 0: all.
        keep_every_n_steps: of the others those stay that are so far from the last one that stayed. Step 0 is not counted, as in flax.
    """
    names = natural_sort(names)
    gone: list[str] = []
    if overwrite and new in names:
        names, gone = names[: names.index(new) + 1], names[names.index(new) + 1 :]
    last_kept = -float("inf")
    for name in names[:-keep] if keep else []:
        number = last_number(name)
        if keep_every_n_steps and number and number - last_kept >= keep_every_n_steps:
            last_kept = number
        else:
            gone.append(name)
    return gone
