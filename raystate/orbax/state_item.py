"""Which item of a step is the state, where the caller names none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from raystate.core.formats.errors import CorruptCheckpointError, ReferenceMismatchError

METRICS = "metrics"  # Orbax v0's item of them; a tree of arrays may be called so, too
STATE_ITEMS = ("state", "default")  # raystate's and Orbax v1's name, Orbax v0's


def choose_state(
    step: int | str, kinds: Mapping[str, str], *, has_lost_its_tree: Callable[[str], bool], has_arrays: Callable[[str], bool]
) -> str:
    """The item "state" or "default", else the only one with arrays, else the only tree; "metrics" only if there is no other.

    Args:
        step: for errors.
        kinds: item -> what it is stored as (`step_reader.ItemKind`).
        has_lost_its_tree: of an item of kind "other": whether it was a tree of arrays once.
        has_arrays: of a tree: whether there is an array among its leaves.

    Raises:
        ReferenceMismatchError: the step was written with other items, and there are several with arrays, or none; says which.
            Nothing is wrong with it.
        CorruptCheckpointError: an item has lost the file that describes its tree: it may be the one that is meant.
    """
    for name in STATE_ITEMS:
        if kinds.get(name) == "arrays":
            return name
    lost = [item for item, kind in kinds.items() if kind == "other" and (item in STATE_ITEMS or has_lost_its_tree(item))]
    if lost:
        message = f"step {step} has lost the metadata of its item {lost[0]!r}, of {list(kinds)}"
        raise CorruptCheckpointError(message, step=step, item=lost[0])
    trees = [item for item, kind in kinds.items() if kind == "arrays"]
    arrays = [item for item in trees if has_arrays(item)] or trees
    arrays = [item for item in arrays if item != METRICS] or arrays
    if len(arrays) == 1:
        return arrays[0]
    message = f"step {step} has no item 'state' or 'default'"
    if arrays:
        named = ", ".join(repr(item) for item in arrays)
        message += f": its arrays are in {named}. raystate.load(…, item={arrays[0]!r}) reads one item, and a "
        message += f"new run begins with it after `raystate import SRC DST --item {arrays[0]}` or by restore_or_init(…, "
        message += f"source='SRC/{step}/{arrays[0]}'), with several by source={{'{arrays[0]}': 'SRC/{step}/{arrays[0]}', …}}"
    else:
        there = ", ".join(f"{item!r} ({kind})" for item, kind in kinds.items() if "/" not in item)
        message += f" and no other item of arrays; there is {there or 'no item at all'}"
    raise ReferenceMismatchError(message, step=step, expected=STATE_ITEMS, got=arrays)
