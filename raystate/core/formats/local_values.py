"""What each process holds for itself in a run of several: numpy arrays, jax.Arrays on its own devices alone, numbers and strings.

A step has one value of each. So they must be equal on all ranks, which their checksums tell: compared at the first save and before every
commit. No rank gets another rank's value in silence.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

from raystate.core.formats.tree import Layout, SlotTable

_SHOWN_LEAVES = 5
_SHOWN_GROUPS = 3
_SHOWN_RANKS = 4

WAYS_OUT = (
    "A step has one value of each. Make it a global array (such as jax.make_array_from_process_local_data with a sharding over all "
    "processes), equal on all ranks, or an item with get_state and set_state, which has one state per process"
)


def local_checksums(layout: Layout, table: SlotTable) -> dict[str, int]:
    """A checksum of each leaf that this rank holds for itself.

    Args:
        layout: the rank's.
        table: of one of its slots.

    Returns:
        "item/path" -> 32-bit checksum of the value. Equal values of leaves of the same layout have equal checksums.
    """
    boxes: dict[tuple[int, int], list[tuple[tuple[int, ...], tuple[int, ...], int]]] = {}
    for piece, crc32c in zip(layout.pieces, table.crc32c, strict=True):
        boxes.setdefault((piece.tree, piece.leaf), []).append((piece.start, piece.shape, crc32c))
    found: dict[str, int] = {}
    for number, (tree, row) in enumerate(zip(layout.trees, table.values, strict=True)):
        values = iter(row)
        for index, leaf in enumerate(tree.leaves):
            if leaf.kind in ("scalar", "string"):
                found[_name(tree.item, leaf.path)] = zlib.crc32(json.dumps(next(values)).encode())  # 1, 1.0 and true differ
            elif leaf.array is not None and leaf.array.local:
                found[_name(tree.item, leaf.path)] = zlib.crc32(repr(sorted(boxes.get((number, index), []))).encode())
    return found


def digest(checksums: Mapping[str, int]) -> int:
    """One number for all of a rank's `local_checksums`: different where any leaf is (except once in 4 billion)."""
    return zlib.crc32(repr(sorted(checksums.items())).encode())


def disagreement(by_rank: Mapping[int, Mapping[str, int]]) -> str:
    """Which leaves differ between ranks, and what to do about it.

    Args:
        by_rank: rank -> its `local_checksums`.

    Returns:
        "" if all are equal, else a text that names a few leaves and counts the rest, the ranks of each grouped by value.
    """
    names = sorted({name for checksums in by_rank.values() for name in checksums})
    differing = {name: groups for name in names if len(groups := _groups(name, by_rank)) > 1}
    if not differing:
        return ""
    shown = "; ".join(f"{name} ({_shown_groups(groups)})" for name, groups in list(differing.items())[:_SHOWN_LEAVES])
    more = f"; and {len(differing) - _SHOWN_LEAVES} more" if len(differing) > _SHOWN_LEAVES else ""
    count = "A leaf" if len(differing) == 1 else f"{len(differing)} leaves"
    verb = "differs" if len(differing) == 1 else "differ"
    return f"{count} that each process holds for itself {verb} between ranks: {shown}{more}. {WAYS_OUT}"


def _groups(name: str, by_rank: Mapping[int, Mapping[str, int]]) -> list[list[int]]:
    """The ranks that have the same value, largest group first."""
    groups: dict[int | None, list[int]] = {}
    for rank in sorted(by_rank):
        groups.setdefault(by_rank[rank].get(name), []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))


def _shown_groups(groups: list[list[int]]) -> str:
    shown = " | ".join(map(_shown_ranks, groups[:_SHOWN_GROUPS]))
    return shown + (f" | and {len(groups) - _SHOWN_GROUPS} more values" if len(groups) > _SHOWN_GROUPS else "")


def _shown_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


def _name(item: str, path: tuple[str | int, ...]) -> str:
    return "/".join((item, *map(str, path)))
