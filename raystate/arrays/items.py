"""Items of a save: what a user gives beside the state, sorted by how it is kept and serialized inside save()."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from raystate.arrays.checkpointables import is_checkpointable, saved_files
from raystate.arrays.checks import check_text, of_a_class, plain_json, shown
from raystate.arrays.leaves import is_abstract
from raystate.arrays.names import MOST_ITEM_CHARACTERS
from raystate.core.formats.errors import ConfigError, ItemTopologyError, ReferenceMismatchError, callers_code
from raystate.items.value import read, written

logger = logging.getLogger("raystate")

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MOST_ITEM_CHARACTERS - 1}}}")  # a folder of the step
# Orbax takes a step that has a "default" for one with nothing else, and means other things by the last two.
_RESERVED = ("state", "metrics", "default", "commit_success.txt", "AUTO", "orbax.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedItems:
    """Attributes:
    trees: name -> pytree with arrays; saved like the state: `describe({"state": state, **packed.trees})`.
    iterators: name -> this process's state.
    files: name -> what this process's checkpointable wrote: name relative to the item's folder -> bytes.
    json_items: name -> value, a copy; empty on all processes but 0.
    unread: name -> the iterator or checkpointable itself, whose state was not asked for; it is empty above.
    """

    trees: dict[str, Any] = field(default_factory=dict)
    iterators: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    json_items: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, Any] = field(default_factory=dict)

    def read(self) -> PackedItems:
        """The same, with what was not asked for as it is now."""
        now = pack_items(self.unread, process_index=0)
        return replace(self, iterators={**self.iterators, **now.iterators}, files={**self.files, **now.files}, unread={})


def is_iterator(value: Any) -> bool:
    return callable(getattr(value, "get_state", None)) and callable(getattr(value, "set_state", None))


def pack_items(items: Mapping[str, Any] | None, *, process_index: int, leave: Collection[str] = ()) -> PackedItems:
    """Serialize the items of one save; nothing in the answer changes when the caller goes on, except for arrays in `trees`.

    Args:
        leave: iterators and checkpointables that are not read, by name.

    Raises:
        ConfigError: a name that can't be a folder, or a value that is neither iterator nor checkpointable nor tree nor
            JSON; names item and path.
    """
    if items is not None and not isinstance(items, Mapping):
        raise ConfigError(f"items must be a dict, {{name: item}}, not {shown(items)}", field="items", got=shown(items))
    packed = PackedItems()
    for name, value in (items or {}).items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
            if name == "state":
                text = "an item can't be called 'state': that name is reserved for save()'s second argument; choose another"
                raise ConfigError(text, field="items", item=name)
            rule = f"at most {MOST_ITEM_CHARACTERS} of a to z, A to Z, 0 to 9, '_', '-' and '.', and none of {', '.join(_RESERVED)}"
            raise ConfigError(
                f"an item can't be called {shown(name)}: it is a folder's name: {rule}", field="items", item=shown(name)
            )
        if isinstance(value, type):
            raise ConfigError(f"item {name!r}: {of_a_class(value)}", field="items", item=name)
        if name in leave and (is_iterator(value) or is_checkpointable(value)):
            packed.unread[name] = value
        if is_iterator(value):
            packed.iterators[name] = iterator_state(name, value) if name not in leave else b""
        elif is_checkpointable(value):
            packed.files[name] = saved_files(name, value) if name not in leave else {}
        elif _has_arrays(value):
            packed.trees[name] = value
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            text = f"a {type(value).__name__} has state_dict and load_state_dict, as torchdata's loaders: give "
            text += f"raystate.Value(x.state_dict, x.load_state_dict) as the item {name!r}, in save and in restore"
            raise ConfigError(text, field="items", item=name)
        else:
            # On every process, so that a mistake shows on all.
            plain = plain_json("items", value, where=f"item {name!r}", item=name)
            if process_index == 0:
                packed.json_items[name] = plain
    return packed


def real_items(asked: Mapping[str, Any], got: Mapping[str, Any]) -> dict[str, Any]:
    """The items of a restore as they would be saved: what it gave, without those that are references still."""
    items = {name: got.get(name, value) for name, value in asked.items()}
    return {name: value for name, value in items.items() if not _is_reference(value)}


def _is_reference(value: Any) -> bool:
    return any(leaf is ... or is_abstract(leaf) for leaf in _leaves(value))


def holds_arrays(reference: Any) -> bool:
    """Whether there are arrays among its leaves, or what stands for them, so that it can't be meant for a JSON item."""
    return _has_arrays(reference) or any(is_abstract(leaf) for leaf in _leaves(reference))


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in _leaves(value))


def _leaves(value: Any) -> list[Any]:
    """None of what JAX can't flatten, keys that can't be sorted or containers without end: that is said when it is taken as JSON."""
    try:
        return jax.tree_util.tree_leaves(value)
    except (ValueError, TypeError, SystemError):
        return []


@contextlib.contextmanager
def _named(method: str, name: str) -> Generator[None, None, None]:
    """Whose own code has raised: a run may have many iterators."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {method} of item {name!r}")
        raise


def iterator_state(name: str, iterator: Any) -> bytes:
    """The bytes that grain's own checkpoint handler would write for this iterator, as far as its state is JSON.

    Raises:
        ConfigError: its state has something in it that would not come back as it is.
    """
    with _named("get_state", name):
        state = iterator.get_state()
    if isinstance(state, bytes):
        return state
    where = f"the state of iterator {name!r}"
    if isinstance(state, str):
        check_text("items", (), "it", state, empty=True, where=where, item=name)
        return state.encode()
    return json.dumps(written(state, where, name), indent=4).encode()


def is_state_of(value: Any, iterator: Any) -> bool:
    """Whether a JSON value can be what this iterator's `get_state` gave: an object with the same keys."""
    with callers_code():
        now = iterator.get_state()
    return isinstance(value, dict) and isinstance(now, dict) and now.keys() == value.keys()


def set_iterators(
    items: Mapping[str, Any], states: Mapping[str, Mapping[int, bytes]], *, old_world: int, world: int, process_index: int
) -> Callable[[], None]:
    """Set iterators in place from the states that `old_world` processes saved.

    With the same number of processes each gets its own back; with another, only states that are equal on all can be dealt out.
    All are checked before any is set. If one raises, all stand where they stood.

    Args:
        items: name -> iterator.
        states: name -> {old process index: bytes}.

    Returns:
        What puts them back where they stood.

    Raises:
        ItemTopologyError: names the item and both counts.
        ReferenceMismatchError: another kind of iterator has saved this state.
    """
    chosen = {name: _deal(name, states.get(name, {}), old_world, world, process_index) for name in items}
    like: dict[str, Any] = {}
    before: dict[str, Any] = {}
    for name, iterator in items.items():
        with _named("get_state", name), callers_code():
            before[name] = copy.deepcopy(iterator.get_state())  # it may be the iterator's own dict
        like[name] = _like(name, before[name], chosen[name])
    moved: list[str] = []

    def put_back() -> None:
        for name in moved:
            try:
                items[name].set_state(before[name])
            except Exception as error:  # the caller's code
                why = f"{type(error).__name__}: {error}"
                logger.warning("item %r may not stand where it stood before the restore: %s", name, why)

    for name, iterator in items.items():
        moved.append(name)
        try:
            with _named("set_state", name), callers_code():
                iterator.set_state(like[name])
        except BaseException:
            put_back()
            raise
    return put_back


def _deal(name: str, by_process: Mapping[int, bytes], old_world: int, world: int, process_index: int) -> bytes:
    counts = {"item": name, "saved_processes": old_world, "processes": world}
    lacking = sorted(set(range(old_world)) - set(by_process))
    if old_world == world:
        if process_index not in by_process:
            raise ItemTopologyError(f"item {name!r}: no state of process {process_index} of {world} was saved", **counts)
        return by_process[process_index]
    if not lacking and len(set(by_process.values())) == 1:
        return by_process[0]
    why = f"process {lacking[0]} saved none" if lacking else "they differ"
    raise ItemTopologyError(
        f"item {name!r}: the states of {old_world} processes can't be dealt out to {world}: {why}. Restore with {old_world} processes, "
        "or leave this item out and set the iterator yourself",
        **counts,
    )


def _like(name: str, current: Any, state: bytes) -> Any:
    """In the form that this iterator's own get_state() gives: bytes, text, or what JSON holds."""
    if isinstance(current, bytes):
        return state
    is_text = isinstance(current, str)
    try:
        with _named("the saved state", name):
            return state.decode() if is_text else read(json.loads(state))
    except (ValueError, RecursionError) as error:
        # Not CorruptCheckpointError, which sets the step aside: a run's own step has had its checksums compared by now.
        form = "text" if is_text else "JSON"
        raise ReferenceMismatchError(
            f"item {name!r}: its saved state is no {form}, which this iterator's get_state() gives ({error}): another kind of iterator "
            "saved it, or, in a step without checksums, it is damaged. Give an iterator of that kind, or leave the item out and set the "
            "iterator yourself",
            item=name,
        ) from error
