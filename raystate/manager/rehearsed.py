"""`StateManager` in a rehearsal: it says what was saved and restored, and ends after a few saves."""

# JAX's own functions are only partly typed; everything of ours is checked strictly.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import site
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from raystate.arrays.items import PackedItems, pack_items, real_items
from raystate.arrays.paths import flatten
from raystate.arrays.paths import shown as shown_path
from raystate.arrays.tree import Described
from raystate.config.rehearsing import play
from raystate.config.state_config import StateConfig
from raystate.core.formats.errors import Interrupted
from raystate.manager.checking import AN_ADDRESS, SaveCheck
from raystate.manager.ending import is_clean_exit
from raystate.manager.facade import StateManager
from raystate.manager.staging import SaveArguments
from raystate.restored import STATE, Restored
from raystate.runtime.link import Link
from raystate.storage import open_storage, run_hash

MOST_SHOWN = 200  # characters of a value


class Records:
    """What one process of a rehearsal has to say: small JSON files below the scratch folder."""

    def __init__(self, config: StateConfig, rank: int):
        now = play()
        assert now is not None
        self.play = now
        self._storage = open_storage(now.scratch)
        self._run = config.storage.rpartition("/")[2]
        self._rank = rank
        self._count = 0
        self._process = secrets.token_hex(4)

    def write(self, kind: str, **facts: Any) -> None:
        self._count += 1
        name = f"records/{self.play.name}/{self._rank}-{self._process}-{self._count:06d}.json"
        record = {"kind": kind, "run": self._run, "rank": self._rank, **facts}
        self._storage.create(name, json.dumps(record).encode())


class RecordingCheck(SaveCheck):
    """The check of saves, whose findings and views are recorded."""

    def __init__(self, rank: int, records: Records):
        super().__init__("warn", rank)
        self._records = records

    def got(self, restored: Restored) -> None:
        super().got(restored)
        items = pack_items(real_items(restored.items, restored.items), process_index=self._rank)
        entries = _entries(restored.state, items, restored.custom)
        self._records.write("restored", step=restored.step, entries=entries)

    @property
    def has_looked(self) -> bool:
        """Each save is recorded."""
        return False

    def look(self, described: Described, given: SaveArguments) -> None:
        super().look(described, given)
        self._records.write("saved", step=given.step, entries=_entries(given.state, given.items, given.custom))

    def _tell(self, text: str) -> None:
        super()._tell(text)
        if not self._rank:
            self._records.write("told", text=text)


class RehearsedManager(StateManager):
    """As the one whose place it takes, but for its end."""

    def _open(self, config: StateConfig, link: Link, rank: int, world: int, group: str, *, launched: bool, takeover: bool) -> None:
        self._records = Records(config, rank)
        self._steps: set[int] = set()
        name = run_hash(config.storage, config.run)
        self._records.write("opened", hash=name, address=_cluster(), arena_dir=config.arena_dir)
        super()._open(config, link, rank, world, group, launched=launched, takeover=takeover)
        self._pipeline.check = RecordingCheck(rank, self._records)
        self._last.largest = math.inf  # all is compared

    def should_save(self, step: int) -> bool:
        """A loop that saves only steps that are due must come to its saves."""
        super().should_save(step)
        return True

    def save(
        self,
        step: int,
        state: object,
        *,
        items: Mapping[str, object] | None = None,
        metrics: Mapping[str, object] | None = None,
        custom: object = None,
        force: bool = False,
    ) -> bool:
        """As ever; after the play's last one nothing goes on.

        Raises:
            Interrupted: the play is over, its run closed.
        """
        now = self._records.play
        is_last = len(self._steps | {step}) >= now.saves
        force = force or (is_last and now.resumes)
        promised = super().save(step, state, items=items, metrics=metrics, custom=custom, force=force)
        self._steps.add(step)
        if not is_last:
            return promised
        if not now.resumes:
            self._last.forget()  # the next play doesn't go on from it
        self.close()
        raise Interrupted("the rehearsal ends here", step=step, rank=self._rank, phase="rehearsal")

    def close(self) -> None:
        super().close()
        self._records.write("closed")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not is_clean_exit(error) and not isinstance(error, Interrupted):
            text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
            self._records.write("failed", error=text, where=_users_line(error))
        super().__exit__(kind, error, trace)


def _cluster() -> str:
    import ray

    return ray.get_runtime_context().gcs_address if ray.is_initialized() else ""


def _users_line(error: BaseException) -> str:
    """The innermost line of the user's own code."""
    others = (*site.getsitepackages(), sys.prefix + "/lib", str(Path(__file__).parent.parent))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""


# ---------------------------------------------------------------- what is compared


def _entries(state: Any, items: PackedItems, custom: Any) -> dict[str, list[str]]:
    """path -> [kind, digest of the bytes, the value if it is short]"""
    found: dict[str, list[str]] = {}
    for name, tree in {STATE: state, **items.trees}.items():
        for node in flatten(tree):
            if not node.empty:
                found[f"{name}/{shown_path(node.path)}"] = _entry(node.value)
    for name, data in items.iterators.items():
        found[name] = _of_text("iterator", data)
    for name, files in items.files.items():
        found.update({f"{name}/{file}": _of_text("file", data) for file, data in files.items()})
    for name, value in items.json_items.items():
        found[name] = _of_text("JSON", json.dumps(value, sort_keys=True).encode())
    if custom is not None:
        found["custom"] = _of_text("JSON", json.dumps(custom, sort_keys=True).encode())
    return found


def _of_text(kind: str, data: bytes) -> list[str]:
    data = AN_ADDRESS.sub(b"<an address>", data)  # told already
    return [kind, _digest(data), re.sub(r"\s+", " ", data[:MOST_SHOWN].decode(errors="replace"))]


def _entry(value: Any) -> list[str]:
    if isinstance(value, jax.Array):
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if value.is_fully_addressable or value.is_fully_replicated:
            value = np.asarray(value.addressable_data(0) if value.is_fully_replicated else value)
        else:
            shards = sorted((str(shard.index), _digest(_bytes(np.asarray(shard.data)))) for shard in value.addressable_shards)
            return [_kind(value), _digest(json.dumps(shards).encode()), ""]
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return [_kind(array), _digest(_bytes(array)), str(array[()]) if array.size == 1 else ""]
    return [type(value).__name__, "", str(value)[:MOST_SHOWN]]


def _kind(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _bytes(array: np.ndarray) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
