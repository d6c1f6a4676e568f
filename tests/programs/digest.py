"""What a training came to, as something that can be compared bit for bit."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np


def digests(tree: Any) -> dict[str, str]:
    """A hash of each leaf of a pytree: path -> type, shape, and the bytes of what of it this process holds."""
    found: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        found[jax.tree_util.keystr(path)] = _digest(leaf)
    return found


def _digest(leaf: Any) -> str:
    if isinstance(leaf, jax.Array):
        kind = f"{leaf.dtype}{list(leaf.shape)}"
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        # Equal pieces count once: how many copies there are is the sharding's matter, not the value's.
        pieces = {str(shard.index): np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
    else:
        kind = f"{type(leaf).__name__}{list(np.shape(leaf))}"
        pieces = {"": np.asarray(leaf).tobytes()}
    found = hashlib.sha256(kind.encode())
    for index in sorted(pieces):
        found.update(index.encode() + pieces[index])
    return found.hexdigest()[:16]
