"""The files that a user's own checkpointable wrote: what of them a step can keep."""

from __future__ import annotations

from collections.abc import Mapping

from raystate.core.formats.errors import ConfigError

MOST_FILES = 1_000  # of one item
MOST_BYTES = 16 << 20  # of one item: they are kept in host memory with every snapshot, and in the step's package
MOST_NAME_BYTES = 500  # of one file's name below the item: an object store has 1024 for all of it
MARKER = "commit_success.txt"  # Orbax's own file in an item's folder
INSTEAD = "Give large values as an item of arrays, or what the object must remember by get_state() and set_state(state)"


def why_no_name(name: str) -> str:
    """Why no storage keeps a file of this name below the item's folder; "": each does.

    A step is committed before its files are published, so a name that a bucket refuses would hold the run up for ever.
    """
    if name == MARKER:
        return "is Orbax's own name for a file of it"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "is no text in UTF-8"
    if not name.isprintable():
        return "has a character that cannot be printed"
    return f"has {size} bytes, and {MOST_NAME_BYTES} are possible" if size > MOST_NAME_BYTES else ""


def common_files(item: str, by_rank: Mapping[int, Mapping[str, bytes]]) -> dict[str, bytes]:
    """What all processes of a save wrote, as one folder.

    Raises:
        ConfigError: two wrote different bytes under the same name, or all together too much.
    """
    files: dict[str, bytes] = {}
    wrote: dict[str, int] = {}
    for rank, mine in sorted(by_rank.items()):
        for name, data in mine.items():
            if files.setdefault(name, data) != data:
                text = (
                    f"item {item!r}: ranks {wrote[name]} and {rank} wrote different bytes to its file {name!r}. In its save(), let process "
                    "0 alone write a file, or give each process a name of its own"
                )
                raise ConfigError(text, field="items", item=item, path=name, rank=rank)
            wrote.setdefault(name, rank)
    if len(files) > MOST_FILES or sum(map(len, files.values())) > MOST_BYTES:
        raise too_much(item, len(files), sum(map(len, files.values())))
    return files


def too_much(item: str, number: int, total: int) -> ConfigError:
    """The error for an item with so many files and bytes."""
    text = (
        f"item {item!r}: its save() wrote {number:,} files, {total:,} bytes; a checkpointable's own files are kept with every snapshot, so "
        f"they may be at most {MOST_FILES:,} with {MOST_BYTES >> 20} MiB. {INSTEAD}"
    )
    return ConfigError(text, field="items", item=item, expected=MOST_BYTES, got=total)
