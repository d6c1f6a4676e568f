"""The leaves of a checkpoint by their paths, and trees put together from them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

from raystate.arrays.paths import flatten, names
from raystate.core.formats.tree import LeafSpec, TreeSpec

EMPTY = frozenset({"none", "dict", "list"})  # kinds of empty nodes


class Stored:
    """A checkpoint's tree, to look up by path.

    Args:
        spec: the tree.
    """

    def __init__(self, spec: TreeSpec):
        self.spec = spec
        self._leaves = {names(leaf.path): index for index, leaf in enumerate(spec.leaves)}

    def find(self, path: Sequence[str | int]) -> int | None:
        """The leaf at exactly this path."""
        return self._leaves.get(names(tuple(path)))

    def below(self, path: Sequence[str | int]) -> list[int]:
        """The leaves of the subtree at this path, in order; the leaf itself is none of them."""
        return self._below.get(names(tuple(path)), [])

    def named(self, name: str) -> tuple[tuple[int, ...], int]:
        """(leaves, length of the path) at a path joined by "/": one leaf, or those of a subtree; none if nothing is there."""
        return self._named.get(name, ((), 0))

    def others(self, used: Collection[int]) -> list[LeafSpec]:
        """All leaves with a value but these."""
        taken = set(used)
        return [leaf for index, leaf in enumerate(self.spec.leaves) if leaf.kind not in EMPTY and index not in taken]

    @functools.cached_property
    def _named(self) -> dict[str, tuple[tuple[int, ...], int]]:
        found = {"/".join(path): (tuple(indices), len(path)) for path, indices in self._below.items()}
        found.update(("/".join(path), ((index,), len(path))) for path, index in self._leaves.items())
        return found

    @functools.cached_property
    def _below(self) -> dict[tuple[str, ...], list[int]]:
        found: dict[tuple[str, ...], list[int]] = {}
        for path, index in self._leaves.items():
            for depth in range(len(path)):
                found.setdefault(path[:depth], []).append(index)
        return found


def state_dict(tree: Any) -> Any:
    """A pytree in the form of `flax.serialization.to_state_dict`: dicts with str keys, lists and tuples as {"0": …}, empty nodes (None
    among them, which is how an empty optax state is stored) as {}."""
    nodes = flatten(tree)
    if len(nodes) == 1 and not nodes[0].path:
        return {} if nodes[0].empty else nodes[0].value
    root: dict[str, Any] = {}
    for path, value, empty in nodes:
        node = root
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        node[str(path[-1])] = {} if empty else value
    return root
