"""The small files of a step: from its package, or from storage, and never more of one than a process should take into its memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from raystate.core.formats.errors import CorruptCheckpointError, RaystateError, StepNotFoundError, StorageError
from raystate.core.formats.own_files import MARKER
from raystate.core.formats.tree import Package
from raystate.machine.memory import MOST_READ_BYTES, TooLargeError
from raystate.orbax import kv

_MANIFEST = "manifest.ocdbt"

P = ParamSpec("P")
R = TypeVar("R")


class ReplacedError(StorageError):
    """Another checkpoint has taken the place of the one that was being read."""


class Listed(Protocol):
    """One object of a listing."""

    @property
    def name(self) -> str:
        """Relative to the storage."""
        ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...


class HasKvstore(Protocol):
    """The part of a Storage that is needed."""

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """The TensorStore kvstore spec of a folder, its path ending in "/"."""
        ...

    def list(self, prefix: str = "") -> Sequence[Listed]:
        """All objects in a folder; none if there is no such folder. Not TensorStore's list, which takes a refusal for an empty folder."""
        ...

    def find(self, name: str) -> bytes | None:
        """An object's bytes; None if there is none. Refuses one of more than MOST_READ_BYTES."""
        ...

    def size(self, name: str) -> int | None:
        """An object's bytes, counted; None if there is none."""
        ...

    def generation(self, name: str) -> str | None:
        """What tells an object from another one of its name; None if there is none."""
        ...


class StepFiles:
    """Of one step.

    Args:
        storage: where.
        prefix: the step's folder.
        package: what has the files instead.
        step: for errors.
    """

    def __init__(self, storage: HasKvstore, prefix: str, *, package: Package | None, step: int | str):
        self._objects = storage
        self.base = storage.kvstore(prefix)
        self._prefix = f"{prefix}/" if prefix else ""
        self._is_local = self.base["driver"] == "file"
        self._package = package
        self._step = step
        # The files that a writer replaces with a checkpoint: all at once in a directory; elsewhere
        # the marker goes first.
        self._telling = ("_CHECKPOINT_METADATA", "_METADATA") if self._is_local else (MARKER,)
        self._first: tuple[str | None, ...] | None = None
        self._lock = threading.Lock()

    def _generations(self) -> tuple[str | None, ...]:
        """Of the checkpoint that lies here now. With a package all that is read is the package's, or its save's alone."""
        if self._package is not None:
            return ()
        return tuple(self._objects.generation(self._prefix + name) for name in self._telling)

    def remember(self) -> None:
        """Note, before the first read, which checkpoint lies here: all is read of that one."""
        with self._lock:  # several threads may begin at once
            if self._first is None:
                self._first = self._generations()

    def is_replaced(self) -> bool:
        """Whether another checkpoint has taken the place of the one that is being read, or none is there any more."""
        return self._first is not None and self._first != self._generations()

    def refuse_replaced(self) -> None:
        """Raise if the files that were read may be of two checkpoints.

        Raises:
            StepNotFoundError: there is none any more. ReplacedError: another one has taken its place.
        """
        if self._first is None or (now := self._generations()) == self._first:
            return
        where = f"step {self._step} in {self.base.get('path', '')}"
        if not any(now):
            raise StepNotFoundError(f"{where} was removed while it was read", step=self._step)
        raise ReplacedError(f"{where} was replaced while it was read: read it again", operation="read", step=self._step)

    def refuse_unproven(self, error: RaystateError) -> None:
        """Raise if it may be storage that failed, not the step that is damaged: storage is asked once more.

        Raises:
            StorageError: it doesn't answer, or it lists all the objects of which it has just said that one is not there.
        """
        sizes = {info.name: info.size for info in self._objects.list(self._prefix.rstrip("/"))}
        objects = self._package.objects if self._package is not None and error.absent else ()
        if objects and all(sizes.get(self._prefix + one.name) == one.size for one in objects):
            text = f"{error.message}: storage says that an object is not there, and lists every object of the step"
            raise StorageError(text, **error.details) from error

    def read(self, name: str) -> bytes | None:
        """A file's bytes; None if there is none."""
        if self._package is not None:
            return self._package.files.get(name)
        kv.refuse_special(self.base, f"step {self._step}: {name}", name, step=self._step)
        try:
            return self._objects.find(self._prefix + name)
        except TooLargeError as error:
            raise CorruptCheckpointError(f"step {self._step}: {error}", step=self._step) from None

    def names(self, begin: str) -> list[str]:
        """Of the files whose names begin so; sorted."""
        if self._package is not None:
            names = list(self._package.files)
        else:
            folder = (self._prefix + begin).rpartition("/")[0]
            names = [info.name.removeprefix(self._prefix) for info in self._objects.list(folder)]
        return sorted(name for name in names if name.startswith(begin))

    def refuse_item(self, folder: str, what: str, **details: Any) -> None:
        """Refuse an item that TensorStore should not open.

        Args:
            folder: its own, ending in "/"; "": the step's.
            what: the error's beginning.
            **details: the error's facts.

        Raises:
            CorruptCheckpointError: it has what is neither a file nor a folder, or too large a manifest.
        """
        kv.refuse_special(kv.below(self.base, folder), what, **details)
        if self._is_local or self._package is not None:
            return
        name = f"{self._prefix}{folder}{_MANIFEST}"
        size = self._objects.size(name)
        if size is not None and size > MOST_READ_BYTES:
            raise CorruptCheckpointError(f"{what}: {name} has {size:,} bytes, at most {MOST_READ_BYTES:,} are read", **details)


class HasFiles(Protocol):
    """A reader of one step."""

    _files: StepFiles


S = TypeVar("S", bound=HasFiles)


def of_one_checkpoint(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that reads: what it gives, together with what was read before, is of one checkpoint, else it raises.

    Raises:
        StorageError: another one has taken its place, so that files of two would be mixed, or some are not there. Or storage does
            not answer any more (`StepFiles.refuse_unproven`).
        StepNotFoundError: it was removed meanwhile.
    """

    @functools.wraps(method)
    def read(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        self._files.remember()
        try:
            got = method(self, *args, **kwargs)
        except (CorruptCheckpointError, StepNotFoundError) as error:
            self._files.refuse_replaced()
            self._files.refuse_unproven(error)
            raise
        self._files.refuse_replaced()
        return got

    return read
