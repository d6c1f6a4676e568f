"""One checkpoint at a path of its own: no run, no step, no Ray."""

from __future__ import annotations

from raystate.core.errors import StorageError
from raystate.restored import STATE
from raystate.storage import StorageUrl, open_storage


def save(path: StorageUrl, tree: object) -> None:
    """Write one pytree as a plain Orbax checkpoint at `path`, which must not exist yet. No run, no step, no Ray.

    Args:
        path: gs://…, file://…, a directory or a PathLike.
        tree: as the state of `StateManager.save`; a single array or number, too.

    Raises:
        ConfigError: a leaf can't be kept, or a name can't be written; names its path and type.
        StorageError: there is something at `path`, or storage failed.
    """
    import jax
    from orbax.checkpoint import v1 as ocp

    from raystate.arrays import describe

    if not jax.tree_util.all_leaves([tree]):
        describe({STATE: tree})  # Orbax would write two arrays of one name over each other
    storage = open_storage(path)
    if storage.list(recursive=False):
        raise StorageError(f"{storage.url} exists already: save elsewhere, or remove it first", operation="save", path=storage.url)
    try:
        ocp.save(storage.url.removeprefix("file://"), tree)
    except (ValueError, OSError, RuntimeError) as error:
        raise StorageError(f"{storage.url} could not be written: {error}", operation="save", path=storage.url) from error
