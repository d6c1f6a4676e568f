"""A digest of one process's part of the state, to compare runs to the last bit."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jax
import numpy as np


def local_digest(state: Any, iterator_state: Any) -> str:
    """sha256 over paths, dtypes, positions and bytes of this process's shards, and over the iterator's state."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(state):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}\n".encode())
        for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device.id):
            start = [part.start or 0 for part in shard.index]
            digest.update(f"{start}\n".encode())
            digest.update(np.ascontiguousarray(shard.data).tobytes())
    if isinstance(iterator_state, bytes):
        digest.update(iterator_state)
    else:
        digest.update(json.dumps(iterator_state, sort_keys=True).encode())
    return digest.hexdigest()
