"""The small files of a step: from its package, or from storage, and never more of one than a process should take into its memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import tensorstore as ts

from raystate.core.errors import CorruptCheckpointError, StepNotFoundError, StorageError
from raystate.core.own_files import MARKER
from raystate.core.tree import Package
from raystate.machine_memory import MOST_READ_BYTES, TooLargeError
from raystate.orbax import kv

_MANIFEST = "manifest.ocdbt"

P = ParamSpec("P")
R = TypeVar("R")


class ReplacedError(StorageError):
    """Another checkpoint has taken the place of the one that was being read."""


class HasKvstore(Protocol):
    """The part of a Storage that is needed."""

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """The TensorStore kvstore spec of a folder, its path ending in "/"."""
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
        storage: where; or a callable prefix -> kvstore spec, and then what is in a bucket has no bound.
        prefix: the step's folder.
        package: what has the files instead.
        named: makes errors out of what TensorStore raises, from what was done.
        step: for errors.
    """

    def __init__(
        self,
        storage: HasKvstore | Callable[[str], dict[str, Any]],
        prefix: str,
        *,
        package: Package | None,
        context: ts.Context,
        timeout_s: float,
        named: Callable[[str], AbstractContextManager[None]],
        step: int | str,
    ):
        self._objects = None if callable(storage) else storage
        self.base = storage(prefix) if callable(storage) else storage.kvstore(prefix)
        self._prefix = f"{prefix}/" if prefix else ""
        self._is_local = self.base["driver"] == "file"
        self._package = package
        self._context = context
        self._timeout_s = timeout_s
        self._named = named
        self._step = step
        # The files that whoever replaces a checkpoint replaces, too: all at once in a directory; elsewhere the marker goes first.
        self._telling = ("_CHECKPOINT_METADATA", "_METADATA") if self._is_local else (MARKER,)
        self._first: tuple[str | None, ...] | None = None
        self._lock = threading.Lock()

    def _generations(self) -> tuple[str | None, ...]:
        """Of the checkpoint that lies here now. With a package all that is read is the package's, or its save's alone."""
        if self._objects is None or self._package is not None:
            return ()
        return tuple(self._objects.generation(self._prefix + name) for name in self._telling)

    def remember(self) -> None:
        """Before the first of it is read: what lies here is what is read."""
        with self._lock:  # several threads may begin at once
            if self._first is None:
                self._first = self._generations()

    def is_replaced(self) -> bool:
        """Whether another checkpoint has taken the place of the one that is being read, or none is there any more."""
        return self._first is not None and self._first != self._generations()

    def refuse_replaced(self) -> None:
        """Raise if what was read may be of two checkpoints.

        Raises:
            StepNotFoundError: there is none any more. ReplacedError: another one has taken its place.
        """
        if self._first is None or (now := self._generations()) == self._first:
            return
        where = f"step {self._step} in {self.base.get('path', '')}"
        if not any(now):
            raise StepNotFoundError(f"{where} was removed while it was read", step=self._step)
        raise ReplacedError(f"{where} was replaced while it was read: read it again", operation="read", step=self._step)

    def read(self, name: str) -> bytes | None:
        """A file's bytes; None if there is none."""
        if self._package is not None:
            return self._package.files.get(name)
        if self._objects is not None and not self._is_local:
            try:
                return self._objects.find(self._prefix + name)
            except TooLargeError as error:
                raise CorruptCheckpointError(f"step {self._step}: {error}", step=self._step) from None
        kv.refuse_special(self.base, f"step {self._step}: {name}", name, step=self._step)
        with self._named(f"reading {name}"):
            return kv.read_key(self._store(), name, timeout_s=self._timeout_s)

    def names(self, begin: str) -> list[str]:
        """Of the files whose names begin so; sorted, if they are the package's."""
        if self._package is not None:
            return sorted(name for name in self._package.files if name.startswith(begin))
        with self._named(f"listing {begin}"):
            return kv.list_keys(self._store(), begin, timeout_s=self._timeout_s)

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
        if self._objects is None or self._is_local or self._package is not None:
            return
        name = f"{self._prefix}{folder}{_MANIFEST}"
        size = self._objects.size(name)
        if size is not None and size > MOST_READ_BYTES:
            raise CorruptCheckpointError(f"{what}: {name} has {size:,} bytes, at most {MOST_READ_BYTES:,} are read", **details)

    def _store(self) -> ts.KvStore:
        return kv.open_store(self.base, timeout_s=self._timeout_s, ctx=self._context)


class HasFiles(Protocol):
    """Whoever reads one step."""

    _files: StepFiles


S = TypeVar("S", bound=HasFiles)


def of_one_checkpoint(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that reads: what it gives, together with what was read before, is of one checkpoint, else it raises.

    Raises:
        StorageError: another one has taken its place, so that files of two would be mixed, or some are not there.
        StepNotFoundError: it was removed meanwhile.
    """

    @functools.wraps(method)
    def read(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        self._files.remember()
        try:
            got = method(self, *args, **kwargs)
        except (CorruptCheckpointError, StepNotFoundError):
            self._files.refuse_replaced()
            raise
        self._files.refuse_replaced()
        return got

    return read
