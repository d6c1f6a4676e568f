"""Names, modes and small file habits of an arena: everything private to its user, every small file replaced in one step."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any, TypeVar

from raystate.core.formats.codec import decode, plain
from raystate.core.formats.errors import ConfigError, RaystateError

FORMAT = 14  # of everything in an arena; another number is never adopted
PREFIX = "raystate-"
PAGE_BYTES = 4096

META = "meta.json"
HOST_LOCK = "host.lock"
LAYOUTS = "layouts"
SET_META = "set.json"
SET_PREFIX = "set-"
SLOT_PREFIX = "slot-"
TRAINER_LOCK_PREFIX = "trainer.lock."
TRAINER_CELL = "trainer.cell"
HOST_CELL = "host.cell"

_MAX_NAME_BYTES = 255  # Linux' limits, of a name and of a path
MAX_ARENA_DIR_BYTES = 4095 - 255
_OTHER_NAMES = 100  # of the folder of a user's arenas, where others have taken the first ones

_Form = TypeVar("_Form")

_NAME = re.compile(r"^[A-Za-z0-9_.-]+$")


def check_arena_dir(arena_dir: str) -> None:
    """Whether files with the names of an arena's can lie below that directory, on any node.

    Raises:
        ConfigError: its path, or a name in it, is longer than Linux allows, or it has a NUL character.
    """
    path = os.fsencode(arena_dir)
    name = max(path.split(b"/"), key=len)
    if len(path) > MAX_ARENA_DIR_BYTES:
        limit = f"its path has {len(path)} bytes; {MAX_ARENA_DIR_BYTES} leave room for the names below it"
    elif len(name) > _MAX_NAME_BYTES:
        limit = f"the name {os.fsdecode(name[:20])}… in it has {len(name)} bytes; the limit is {_MAX_NAME_BYTES}"
    elif b"\0" in path:
        limit = "a path has no NUL character"
    else:
        return
    raise ConfigError(f"arena_dir: {limit}", field="arena_dir", got=arena_dir)


def default_root(arena_dir: str | None = None) -> Path:
    """Where this node's arenas of this user live: a folder of its own, since anybody may write beside it, and hold locks there.

    Args:
        arena_dir: the setting of that name; None: the system's shared memory.

    Returns:
        A directory that `lock_arena` makes, if it is not there.

    Raises:
        ConfigError: arena_dir is too long, or it is not a directory that this process may use.
    """
    above = Path(arena_dir) if arena_dir is not None else Path("/dev/shm")
    check_arena_dir(str(above))
    if not os.path.isdir(above) or not os.access(above, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"arena_dir: {above} is not a writable directory; set arena_dir to a memory-backed directory (tmpfs) of this node",
            field="arena_dir",
            got=str(above),
        )
    # Another user may have taken the name. A folder of this user is looked for first: it must be
    # found again. Each name is looked at once: another run may remove or make the folder meanwhile.
    names = [above / f"{PREFIX}{os.geteuid()}{more}" for more in ("", *(f".{number}" for number in range(1, _OTHER_NAMES)))]
    entries = {path: _lstat(path) for path in names}
    mine = next((path for path, found in entries.items() if found is not None and _is_private(found)), None)
    mine = mine or next((path for path, found in entries.items() if found is None), None)
    if mine is None:
        raise ConfigError(
            f"arena_dir: {names[0]} and {len(names) - 1} names like it are taken by others; set another arena_dir",
            field="arena_dir",
            got=str(above),
        )
    return mine


def leave_root(root: Path) -> None:
    """Remove what `default_root` has given, if nothing is left in it."""
    if re.fullmatch(rf"{PREFIX}{os.geteuid()}(\.\d+)?", root.name) and is_private_dir(root):
        with contextlib.suppress(OSError):
            root.rmdir()


def arena_path(root: Path, run_hash: str, node_id: str) -> Path:
    """The arena of one run on one Ray node: several runs and several simulated nodes can share a file system."""
    if not _NAME.match(run_hash) or not _NAME.match(node_id):
        raise RaystateError(f"arena names are made of letters, digits, '.', '_' and '-': run {run_hash!r}, node {node_id!r}")
    return Path(root) / f"{PREFIX}{run_hash}-{node_id[:12]}"


def is_private_dir(path: Path) -> bool:
    """Whether `path` is a real directory (no link) that only this user can enter, as arenas are."""
    found = _lstat(path)
    return found is not None and _is_private(found)


def _lstat(path: Path) -> os.stat_result | None:
    """What lies there, not followed; None: nothing that this process can see."""
    try:
        return os.lstat(path)
    except OSError:
        return None


def _is_private(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


def make_private_dir(path: Path) -> None:
    """Create `path` with mode 0700, or check that a real directory is there that only this user can
    enter.

    Raises:
        RaystateError: somebody else's, or a link: shared memory is writable by everybody, so a name proves nothing. Or it can't be
            created.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not is_private_dir(path):
            raise RaystateError(
                f"{path} exists and is not a private directory of user {os.geteuid()} ({_looks_like(path)}); "
                f"remove it or set another arena_dir",
                path=str(path),
            ) from None
    except OSError as error:
        raise RaystateError(f"{path} cannot be created: {error.strerror}; set another arena_dir", path=str(path)) from None


def create_file(path: Path, size_bytes: int = 0) -> int:
    """Create a file of mode 0600 that must not exist yet; returns its descriptor (read and write). Not reserved yet, only sized."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if size_bytes:
        os.ftruncate(fd, size_bytes)
    return fd


def replace_file(path: Path, data: bytes) -> None:
    """Write `path` so that a reader sees the old bytes, the new bytes, or (if it was absent) nothing; never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = create_file(temporary)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    replace_file(path, json.dumps(value, sort_keys=True, default=plain).encode())


def open_regular(path: Path, flags: int) -> int:
    """Open what must be a file of its own: no link is followed, and nothing that would wait (a FIFO, a device) is opened.

    Raises:
        FileNotFoundError: there is nothing.
        RaystateError: there is something else, which raystate did not put there.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV):
            raise _foreign(path) from None
        if error.errno == errno.ENOTDIR:
            raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _foreign(path)
    return fd


def read_bytes(path: Path) -> bytes | None:
    """The file's bytes; None if there is no file that this process can read."""
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            return file.read()
    except (OSError, RaystateError):
        return None


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None if it is absent or is not a JSON object."""
    try:
        value = json.loads(read_bytes(path) or b"")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_form(form: type[_Form], path: Path) -> _Form | None:
    """What `write_json` wrote; None if the file is absent or says anything else."""
    try:
        return decode(form, read_json(path))
    except ValueError:
        return None


def _foreign(path: Path) -> RaystateError:
    return RaystateError(
        f"{path} is no ordinary file ({_looks_like(path)}) and not raystate's; remove it or set another arena_dir", path=str(path)
    )


def _looks_like(path: Path) -> str:
    found = _lstat(path)
    return "gone by now" if found is None else f"owner {found.st_uid}, mode {stat.filemode(found.st_mode)}"


def remove_entry(path: Path) -> None:
    """Remove what lies at `path`, and of a link the link alone; a missing entry is fine."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def remove_tree(path: Path, *, last: str = "") -> None:
    """Remove a directory; missing entries are fine. `last` names the direct entry that goes
    last."""
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name == last)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            Path(entry.path).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.rmdir()


def page_ceil(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
