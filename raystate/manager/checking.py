"""Whether this run could restore what its `save` takes: told at the first save, not at the restart."""

# JAX's own functions are only partly typed; everything of ours is checked strictly.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from raystate.arena import format_bytes
from raystate.arrays.checkpointables import is_checkpointable
from raystate.arrays.items import is_iterator
from raystate.arrays.paths import shown as shown_path
from raystate.arrays.tree import Described
from raystate.core.formats.errors import ConfigError, RaystateError, ReferenceMismatchError
from raystate.core.formats.texts import counted
from raystate.manager.staging import SaveArguments
from raystate.restored import ReadOptions, Restored, StepContent

logger = logging.getLogger("raystate")

_WAY_OUT = (
    "Give `restore_or_init` (or the reference of `restore`) the form that the training step gives: "
    "the same paths, shapes and dtypes. Steps in the other form are restored by "
    "manager.restore(reference) with a reference of that form. "
    'With StateConfig(check_saves="warn") they are saved all the same.'
)
_NO_RESTORE = (
    "this StateManager has restored nothing, and the next start of a script without restore_or_init(), or restore(), is refused. "
    "Call it before the loop, at each start, and begin the loop at restored.step"
)


@dataclass(frozen=True)
class _Array:
    """Stands for a jax.Array that has values: with `partial` they would be kept."""

    shape: tuple[int, ...]
    dtype: Any

    def __array__(self) -> Any:
        raise AssertionError(self)


# A local class has <locals> in its name.
AN_ADDRESS = re.compile(rb"<[^\n]{1,300}? at 0x[0-9a-fA-F]{5,16}[^<>\n]{0,80}>")
_A_NUMBER = re.compile(r"\d[\d.,]*( entr(y|ies)| [KMGT]?i?B)?")
_MOST_TEXT = 1 << 20
_ADDRESS = (
    "it differs in each process, so a restart can't go on from it, or goes on elsewhere. "
    "Give the class of that object a __repr__ that is the same in each process, with the values that matter"
)


class _Iterator:
    """Stands for an iterator, of which only the kind matters here."""

    def get_state(self) -> None: ...
    def set_state(self, state: Any) -> None: ...


class SaveCheck:
    """One trainer's. No collective, nothing of the state's size, one look at each form of a save, and at Python
    numbers that outgrow what they were.

    Args:
        mode: `StateConfig.check_saves`.
        rank: all processes save the same tree: process 0 warns.
    """

    def __init__(self, mode: Literal["warn", "error", "off"], rank: int):
        self._mode = mode
        self._rank = rank
        self._asked: tuple[Any, dict[str, Any], ReadOptions] | None = None
        self._looked_at: tuple[Any, Any] = (None, None)
        self._sizes: set[tuple[int, int, object]] = set()  # of Python numbers, as far as they were looked at in this form
        self.restores = mode == "off"  # the script calls a restore, or nothing is to be said of it
        self._told: set[str] = set()

    def asked(self, reference: object, items: Mapping[str, Any] | None, options: ReadOptions) -> None:
        """What this run has asked a restore for, as it will when it starts again."""
        self._looked_at = (None, None)
        self._asked = None
        # `transforms` take an older form, which is saved in the new one: the next start asks for another.
        if options.transforms is None and self._mode != "off":
            outlines = {name: _outline_of_item(item) for name, item in (items or {}).items()}
            self._asked = _outline(reference), outlines, options

    @property
    def has_looked(self) -> bool:
        """Whether a save was looked at since the last restore: one that keeps nothing need not be, then."""
        return self._looked_at[0] is not None or self._mode == "off"

    def saved(self, step: int) -> None:
        """A save was accepted."""
        if not self.restores:
            self.restores = True
            self._tell(f"save(step={step}): {_NO_RESTORE}")

    def got(self, restored: Restored) -> None:
        """What the restore gave."""
        if restored.left_out:
            self._tell(f"step {restored.step}: {_left_out_text(restored.left_out, 'this restore leaves out')}")

    def look(self, described: Described, given: SaveArguments) -> None:
        """Warn of what a restart would leave out, refuse or not understand.

        Raises:
            ReferenceMismatchError: it would be refused, and `check_saves` is "error".
            ConfigError: an iterator's state holds an object's address, and `check_saves` is "error".
        """
        items = given.items
        names = tuple(map(tuple, (items.trees, items.iterators, items.files, items.json_items)))
        plan, looked = self._looked_at
        is_known = plan is described.plan and looked == names
        sizes = set() if self._mode == "off" else _sizes(described)
        if self._mode == "off" or (is_known and sizes <= self._sizes):
            return
        for item, what, address in _addresses(described, given):
            text = f"save(step={given.step}): {what} holds an object's address, {address}: {_ADDRESS}"
            if self._mode == "error" and item in items.iterators:
                raise ConfigError(text, item=item)
            self._tell(text)
        if self._asked is not None:
            self._look_at_form(described, given, *self._asked)
        self._looked_at = described.plan, names
        self._sizes = (self._sizes if is_known else set()) | sizes

    def _look_at_form(
        self, described: Described, given: SaveArguments, reference: Any, asked: Mapping[str, Any], options: ReadOptions
    ) -> None:
        content = _content(described, given)
        if self._rank:  # only process 0 has the JSON items
            asked = {name: item for name, item in asked.items() if name in content.names()}
        try:
            left_out = content.left_out(asked, *content.check(reference, asked, options))
        except ReferenceMismatchError as error:
            told = f"a restart can't restore what is saved here, it would end with\n{error.message}"
            text = f"save(step={given.step}): {told}\n{_WAY_OUT}"
            if self._mode == "error":
                raise ReferenceMismatchError(text, **error.details) from None
            self._tell(text)
        except RaystateError:
            pass  # it is about this process's memory now, not about the form
        else:
            if left_out:
                self._tell(f"save(step={given.step}): {_left_out_text(left_out, 'a restart leaves out')}")

    def _tell(self, text: str) -> None:
        what = _A_NUMBER.sub("#", text)  # the step is another one, and what grows has another size each time
        if what not in self._told:
            self._told.add(what)
            logger.log(logging.DEBUG if self._rank else logging.WARNING, text)


def _sizes(described: Described) -> set[tuple[int, int, object]]:
    """(tree, number of the leaf, what decides which dtypes hold it) of each Python number."""

    def size(value: int | float) -> object:
        if isinstance(value, int):
            return value < 0, value.bit_length()
        return (value.is_integer(), max(math.frexp(value)[1], 2)) if math.isfinite(value) else repr(value)

    return {
        (tree, number, size(value))
        for tree, values in enumerate(described.values)
        for number, value in enumerate(values)
        if isinstance(value, int | float)
    }


def _addresses(described: Described, given: SaveArguments) -> Iterator[tuple[str, str, str]]:
    """(item, where, the address) of each part that holds the text of an object as Python shows it."""
    items = given.items
    texts: list[tuple[str, str, bytes]] = [
        *((name, f"the state of iterator {name!r}", state) for name, state in items.iterators.items()),
        *((name, f"item {name!r}", json.dumps(value).encode()) for name, value in items.json_items.items()),
        *((name, f"file {file!r} of item {name!r}", data) for name, files in items.files.items() for file, data in files.items()),
        ("custom", "custom", json.dumps(given.custom).encode()),
    ]
    for tree, values in zip(described.layout.trees, described.values, strict=True):
        strings = ((leaf.path, leaf.value) for leaf in tree.with_values(values).leaves if leaf.kind == "string")
        texts += ((tree.item, f"{tree.item}/{shown_path(path)}", str(value).encode()) for path, value in strings)
    for item, where, text in texts:
        if found := AN_ADDRESS.search(text[:_MOST_TEXT]):
            yield item, where, found[0].decode(errors="replace")


def _left_out_text(left_out: Sequence[tuple[str, int]], leaves_out: str) -> str:
    """One line for the entries of a step that a restore does not give back.

    Args:
        left_out: of `Restored`.
        leaves_out: who leaves it out, with the verb.
    """
    count, size = len(left_out), sum(nbytes for _, nbytes in left_out)
    some = ", ".join(path for path, _ in left_out[:3]) + (", …" if count > 3 else "")
    what = counted(count, "entry", "entries")
    return (
        f"{leaves_out} {what} of the step ({format_bytes(size)}), which neither the reference nor items names: {some}. "
        "Name it to get it back; `...` in its place says that it is left out on purpose"
    )


def _content(described: Described, given: SaveArguments) -> StepContent:
    """A save as the step that it becomes, as far as `check` looks at it."""
    items = given.items
    trees = zip(described.layout.trees, described.values, strict=True)
    return StepContent(
        step=given.step,
        tier="memory",
        trees={tree.item: tree.with_values(values) for tree, values in trees},
        source=_nothing_is_read,
        iterator_states=_nothing_is_read,
        iterators=tuple(items.iterators),
        file_items=tuple(items.files),
        json_items=items.json_items,
        metrics={},
        custom=None,
        used_tier=lambda: "memory",
        bytes_from=dict,
    )


def _nothing_is_read(item: str) -> Any:
    raise AssertionError(item)


def _outline(reference: Any) -> Any:
    """The same reference without the bytes of its arrays."""

    def leaf(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return np.broadcast_to(np.zeros((), value.dtype), value.shape)
        return _Array(value.shape, value.dtype) if isinstance(value, jax.Array) else value

    return jax.tree_util.tree_map(leaf, reference)


def _outline_of_item(item: Any) -> Any:
    if is_iterator(item):
        return _Iterator()
    return item if is_checkpointable(item) else _outline(item)
