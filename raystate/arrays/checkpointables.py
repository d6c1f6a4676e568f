"""A user's own checkpointable, Orbax v1's `StatefulCheckpointable`: an object that writes its own files, and reads them.

Orbax lets it write into the checkpoint's folder, later and in the background. A step of raystate is
immutable and committed at once. So here it writes into a private folder of its process, to the end,
within `save()`. Its files travel with the step from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import fcntl
import functools
import inspect
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from raystate.core.formats.errors import ConfigError, callers_code
from raystate.core.formats.own_files import INSTEAD, MOST_BYTES, MOST_FILES, too_much, why_no_name
from raystate.waits import ABANDONED_S, LONGEST_S

_FOLDERS = "raystate-item-"


class _Created:
    """Orbax's `PathAwaitingCreation` of a folder that is there."""

    def __init__(self, path: Any):
        self._path = path

    def __truediv__(self, other: Any) -> _Created:
        return _Created(self._path / other)

    @property
    def path(self) -> Any:
        """The folder, an `epath.Path`."""
        return self._path

    async def await_creation(self) -> Any:
        """The folder."""
        return self._path


def is_checkpointable(value: Any) -> bool:
    """Whether this is an object with Orbax v1's `async def save(directory)` and `async def load(directory)`."""
    if isinstance(value, type):
        return False
    return all(inspect.iscoroutinefunction(getattr(value, name, None)) for name in ("save", "load"))


def saved_files(item: str, value: Any) -> dict[str, bytes]:
    """Let the object save itself, in full, and take what it wrote: name relative to the item's folder -> bytes.

    Raises:
        ConfigError: what it wrote can't be an item of a step; says why and what to do. Errors of
            the object's own code pass as they are.
    """

    async def save(folder: Any) -> None:
        await _awaited(item, "save", await value.save(_Created(folder)))

    with _private_folder() as folder:
        _run(item, "save", lambda: save(_epath(folder)))
        return _read(item, folder)


def load_files(item: str, value: Any, files: Mapping[str, bytes]) -> None:
    """Let the object load itself from a private folder with these files, which is gone when this returns.

    Raises:
        ConfigError: it did not end in time. Errors of the object's own code pass as they are.
    """

    async def load(folder: Any) -> None:
        await _awaited(item, "load", await value.load(folder))

    with _private_folder() as folder:
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        with callers_code():
            _run(item, "load", lambda: load(_epath(folder)))


def _read(item: str, folder: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    total = 0
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            text = f"item {item!r}: its save() made {name!r}, which is neither a file nor a folder: a step can't keep it"
            raise ConfigError(text, field="items", item=item, path=name)
        if path.is_dir():
            continue
        if why := why_no_name(name):
            text = f"item {item!r}: its save() wrote {name!r}, which {why}: use another name"
            raise ConfigError(text, field="items", item=item, path=name)
        total += path.stat().st_size
        if len(files) >= MOST_FILES or total > MOST_BYTES:
            raise too_much(item, len(files) + 1, total)
        files[name] = path.read_bytes()
    return files


async def _awaited(item: str, method: str, background: Any) -> None:
    if not inspect.isawaitable(background):
        text = (
            f"item {item!r}: its {method}() gave {type(background).__name__}, no awaitable: Orbax's StatefulCheckpointable returns the "
            "rest of its work as an awaitable, such as the call of another `async def`"
        )
        raise ConfigError(text, field="items", item=item)
    await background


def _run(item: str, method: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def in_time() -> None:
        try:
            async with asyncio.timeout(LONGEST_S) as limit:
                await work()
        except TimeoutError:
            if not limit.expired():  # the object's own
                raise
            text = f"item {item!r}: its {method}() did not end in {LONGEST_S:.0f} s. {INSTEAD}"
            raise ConfigError(text, field="items", item=item, waited_s=LONGEST_S) from None

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(in_time())
        return
    context = contextvars.copy_context()  # a notebook's thread has a loop of its own
    with ThreadPoolExecutor(1) as pool:
        pool.submit(context.run, asyncio.run, in_time()).result()


def _epath(folder: Path) -> Any:
    from etils import epath  # comes with Orbax, whose protocol speaks of these paths

    return epath.Path(folder)


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    _sweep()
    with tempfile.TemporaryDirectory(prefix=_FOLDERS, ignore_cleanup_errors=True) as name:
        held = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = Path(name) / "item"
            folder.mkdir()
            yield folder
        finally:
            os.close(held)


@functools.cache
def _sweep() -> None:
    """Remove what processes left that were killed meanwhile; once per process."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        with contextlib.suppress(OSError):
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(held)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > ABANDONED_S:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error while its process lives
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(held)
