"""The leaves of a checkpoint by their paths, and trees put together from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from raystate.arrays.paths import Path, flatten, names
from raystate.core.tree import LeafSpec, TreeSpec

EMPTY: Mapping[str, Callable[[], Any]] = {"none": lambda: None, "dict": dict, "list": list}  # kinds of empty nodes


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

    def others(self, used: Collection[int]) -> list[Path]:
        """The paths of all leaves with a value but these."""
        taken = set(used)
        return [leaf.path for index, leaf in enumerate(self.spec.leaves) if leaf.kind not in EMPTY and index not in taken]

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


def nest(leaves: Sequence[LeafSpec], values: Sequence[Any]) -> Any:
    """Nested dicts and lists by path; the list of a checkpoint with gaps (written by others) has None in them."""
    if len(leaves) == 1 and not leaves[0].path:
        return values[0]
    root = _Branch()
    for leaf, value in zip(leaves, values, strict=True):
        node = root
        for key in leaf.path[:-1]:
            node = node.setdefault(key, _Branch())
        node[leaf.path[-1]] = value
    return _settle(root)


class _Branch(dict[Any, Any]):
    """An inner node while the tree grows; a plain dict is an empty leaf."""


def _settle(node: Any) -> Any:
    if not isinstance(node, _Branch):
        return node
    children = {key: _settle(child) for key, child in node.items()}
    if children and all(isinstance(key, int) for key in children):
        return [children.get(index) for index in range(max(children) + 1)]
    return children


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
