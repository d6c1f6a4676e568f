"""A small run on a directory, written the way the actors do it: three steps that are visible, one that was retired, three attempts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401 - gives numpy the names "bfloat16", "int4", …
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from raystate.arrays.items import PackedItems, pack_items
from raystate.arrays.stage import copy, hold
from raystate.arrays.tree import describe
from raystate.core.formats.messages import HostId
from raystate.core.formats.tree import Package, SlotTable, WriteOptions
from raystate.observe.ledger.lines import EVENTS
from raystate.runtime.coordinator.packaging import build_package
from raystate.runtime.host.share import write_share
from raystate.runtime.host.writing import as_array
from raystate.runtime.parts import HostPart
from raystate.storage import StepFolder, Storage, open_storage
from raystate.storage.names import COMPILED, writer_name
from tests.orbax.state_example import flat
from tests.storage.attempt import RUN, Attempt

RETIRED, STEPS = 2, (4, 6, 8)
HOSTS = 2
SMALL_CHUNKS = WriteOptions(chunk_bytes=2048)  # what is megabytes in a user's state is a few rows here

# name -> (shape, dtype, axis that two devices share, "": each has all; None: a numpy array).
# Chunks of up to 1 KiB lie in B-tree nodes, larger ones in data files.
ARRAYS: dict[str, tuple[tuple[int, ...], str, str | None]] = {
    "kernel": ((64, 32), "float32", "rows"),  # 4 chunks in data files
    "embedding": ((300, 8), "bfloat16", "columns"),
    "mu": ((64, 30), "float16", None),
    "long": ((520,), "int64", None),
    "bias": ((32,), "bfloat16", "rows"),
    "count": ((), "int32", ""),
    "mask": ((9,), "bool", None),
    "small": ((8,), "int4", ""),
    "scaled": ((24,), "float8_e4m3fn", "rows"),
    "wave": ((6,), "complex64", ""),
    "zeros": ((600,), "float32", ""),  # equal to the fill value, which makes a loss hard to see
    "empty": ((0, 4), "float32", ""),
}


class Counting:
    """An iterator that is where it was set to."""

    def __init__(self, state: dict[str, Any] | None = None):
        self.state = state or {}

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a step is saved with. Random, of its step number."""

    arrays: dict[str, np.ndarray]
    key: int
    scalars: dict[str, Any]
    notes: dict[str, Any]
    items: dict[str, Any]
    metrics: dict[str, float]
    custom: dict[str, Any]

    def state(self) -> dict[str, Any]:
        """As a trainer has it."""
        placed = {name: _placed(array, ARRAYS[name][2]) for name, array in self.arrays.items()}
        return {"params": placed, "rng": jax.random.key(self.key), "none": None, "nothing": [], **self.scalars}

    def flat(self) -> dict[Any, Any]:
        """What a restore without a reference must give, bit for bit; as `flat_restored` gives it."""
        rng = np.asarray(jax.random.key_data(jax.random.key(self.key)))
        state = {"params": self.arrays, "rng": rng, "none": None, "nothing": [], **self.scalars}
        return flat({"state": state, "notes": self.notes, **self.items, "metrics": self.metrics, "custom": self.custom})


def content(step: int) -> Content:
    seeded = np.random.default_rng(step)
    words = [f"wörd-{seeded.integers(10**6)}" for _ in range(40)]
    return Content(
        arrays={name: _array(seeded, shape, dtype, name) for name, (shape, dtype, _) in ARRAYS.items()},
        key=step,
        scalars={"n": step, "rate": float(seeded.random()), "big": 2**40 + step, "flag": step % 4 == 0, "text": words[0]},
        notes={"name": words[1], "tags": words[2:4], "seen": step * 7, "odd": _array(seeded, (5, 3), "int8", "odd")},
        items={
            "vocabulary": {"tokens": words, "sizes": [step, 2, {"x": None}]},
            "data": {"next": step * 100, "epoch": 3},
            "shuffle": {"seed": int(seeded.integers(10**9))},
        },
        metrics={"loss": float(seeded.random()), "accuracy": 0.5},
        custom={"commit": f"{seeded.integers(10**9):x}", "nested": {"k": [step]}},
    )


def _array(seeded: np.random.Generator, shape: tuple[int, ...], dtype: str, name: str) -> np.ndarray:
    """Of random bits, NaNs of every kind among them."""
    if name == "zeros":
        return np.zeros(shape, dtype)
    if dtype in ("bool", "int4"):
        return seeded.integers(0, 2, shape).astype(dtype)
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return seeded.integers(0, 256, nbytes, np.uint8).view(dtype).reshape(shape)


def _placed(array: np.ndarray, axis: str | None) -> Any:
    if axis is None:
        return array
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    spec = {"rows": PartitionSpec("x"), "columns": PartitionSpec(None, "x"), "": PartitionSpec()}[axis]
    return jax.device_put(array, NamedSharding(mesh, spec))


def make_run(root: Path) -> dict[int, Content]:
    """Write the run. Returns the content of each visible step."""
    storage = open_storage(root)
    first = Attempt(storage, "first", _package)
    first.save(RETIRED)
    first.save(STEPS[0])
    Attempt(storage, "second", _package).save(STEPS[1], retires=[(RETIRED, False, "three are kept")])
    third = Attempt(storage, "third", _package)
    third.save(STEPS[2])
    third.append(reason="all is carried out")
    storage.create(f"{EVENTS}/000002-0001.json", json.dumps({"kind": "recovery", "cause": "killed"}).encode())
    storage.create(f"{COMPILED}/cpu-jax-1/{'a' * 64}.{'b' * 32}", b"a program, of no use for any step")
    return {step: content(step) for step in STEPS}


def _package(folder: StepFolder) -> Package:
    save = str(folder.save)
    return build_package(
        folder.storage, RUN, folder.step, save, _parts(folder.storage, folder.write_prefix, save, content(folder.step))
    )


def _parts(storage: Storage, prefix: str, save: str, saved: Content) -> list[HostPart]:
    """The pieces of one process, dealt out to hosts as if each were a process of its own."""
    items = {name: Counting(value) if name in ("data", "shuffle") else value for name, value in saved.items.items()}
    packed: PackedItems = pack_items({"notes": saved.notes, **items}, process_index=0)
    described = describe({"state": saved.state(), **packed.trees}, options=SMALL_CHUNKS)
    layout = described.layout
    data = np.zeros(layout.data_bytes, np.uint8)
    copy(hold(described), data)
    parts: list[HostPart] = []
    for host in range(HOSTS):
        writer = writer_name(save, host)
        part = HostPart(
            host=HostId(str(host)),
            writer=writer,
            trees=layout.trees,
            objects={},
            claims={},
            local={host: {}},
            tables={
                host: SlotTable(
                    layout_ref="",
                    crc32c=(),
                    values=described.values,
                    iterators=packed.iterators,
                    json_items=packed.json_items if host == 0 else {},
                    metrics=saved.metrics,
                    custom=saved.custom,
                )
            },
        )
        for index, tree in enumerate(layout.trees):
            mine = [piece for number, piece in enumerate(layout.pieces) if piece.tree == index and number % HOSTS == host]
            arrays = [(p.leaf, p.start, as_array(data[p.offset : p.offset + p.nbytes], layout, p)) for p in mine if p.owned]
            if arrays:
                part.objects[tree.item] = write_share(storage, prefix, writer, tree, arrays)
                part.claims[tree.item] = [(leaf, start, array.shape) for leaf, start, array in arrays]
        parts.append(part)
    return parts
