"""What an item's OCDBT database holds: its keys, how many bytes each takes, and in which file they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorstore as ts

from raystate.core.formats.errors import CorruptCheckpointError
from raystate.orbax import kv


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValue:
    """One value: a chunk, or an array's own metadata.

    Attributes:
        nbytes: as stored, which is mostly compressed.
        file: where they lie, relative to the item's folder; "": within a node of the database, as small values do.
    """

    nbytes: int
    file: str


def stored_values(base: ts.KvStore, manifest: ts.KvStore) -> dict[str, StoredValue]:
    """All keys of a database, in order. Reads its tree, and no value.

    Args:
        base: the folder of the database.
        manifest: the folder of its manifest, which may lie elsewhere.

    Raises:
        CorruptCheckpointError: it has not the form that TensorStore gives to such a database.
        ValueError, TimeoutError: as TensorStore (`kv.named_errors` gives them our names).
    """
    found: dict[str, StoredValue] = {}
    try:
        versions = kv.result(ts.ocdbt.dump(manifest))["versions"]
        root = versions[-1]["root"].get("location") if versions else None
        nodes = [(root, b"")] if root else []
        while nodes:
            location, prefix = nodes.pop()
            node: dict[str, Any] = kv.result(ts.ocdbt.dump(base, location))
            for entry in node["entries"]:
                key = prefix + entry["key"]
                if node["height"]:
                    nodes.append((entry["location"], prefix + entry["subtree_common_prefix"]))
                elif "inline_value" in entry:
                    found[key.decode()] = StoredValue(nbytes=len(entry["inline_value"]), file="")
                else:
                    _, base_path, file, _, length = entry["indirect_value"].split(":")
                    found[key.decode()] = StoredValue(nbytes=int(length), file=base_path + file)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"the database has not the form that is known: {error!r}") from error
    return dict(sorted(found.items()))
