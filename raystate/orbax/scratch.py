"""Orbax in a private scratch directory: it writes the small files of a step there, and nowhere else.

Orbax's own commit cannot be fenced, so raystate never lets it see the shared storage. Here it gets
a tree whose arrays are mere stand-ins: their data was written by the hosts. Its files in the
scratch directory are read back, and the directory is removed. Steps that differ only in values
(JSON items, metrics, custom metadata, times) share one such visit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raystate.core.formats.tree import LeafSpec, TreeSpec, nest
from raystate.patching import patched

# Orbax says these when arrays are written by others, which is what we want. Each stands at one place in Orbax.
_EXPECTED_WARNINGS = ("No jax.Array in TypeHandlerRegistry", "Skipping merge of OCDBT checkpoints: No")
# Where Orbax's handlers put JSON, by their default and by CheckpointManager's choice.
_JSON_FILE = "metadata"
_METRICS_FILE = "metrics"
_STEP_METADATA = "_CHECKPOINT_METADATA"
_EVENTS = ("/jax/orbax/", "/jax/checkpoint/")
_RECORDS = ("record_event", "record_event_duration_secs", "record_scalar")
# Orbax counts its saves in globals. A signal's handler may save while its thread holds it.
_one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class JaxArray:
    """A leaf in place of a jax.Array whose bytes lie elsewhere. `write_shape` goes into `_METADATA`."""

    write_shape: tuple[int, ...]


@dataclass(frozen=True)
class NumpyArray:
    """A leaf in place of a numpy array; Orbax records no write shape for it."""

    write_shape: None = None


@dataclass(frozen=True)
class Scalar:
    """A leaf in place of a Python number."""

    write_shape: None = None


_TYPESTRS = {JaxArray: "jax.Array", NumpyArray: "np.ndarray", Scalar: "scalar"}  # Orbax chooses a handler by class


def small_files(
    trees: Sequence[TreeSpec],
    values: Sequence[Mapping[int, Any]],
    *,
    json_items: Mapping[str, Any],
    metrics: Mapping[str, float],
    custom: dict[str, Any],
    handlers: Mapping[str, str],
) -> dict[str, bytes]:
    """Every file that Orbax writes for such a step, except array data: name relative to the step's folder -> bytes.

    Args:
        trees: the array items.
        values: per tree: leaf index -> value of its string leaves.
        json_items: item -> value.
        metrics: written as CheckpointManager does; nothing if empty.
        custom: `custom_metadata` of the step.
        handlers: items that are written elsewhere -> what their handlers call themselves. Orbax itself can't be told: its registry is
            per process, and a second handler of grain's name would break `import grain`.
    """
    began_ns = time.time_ns()
    files = dict(
        _written_by_orbax(
            tuple(trees), tuple(tuple(sorted(strings.items())) for strings in values), frozenset(json_items), bool(metrics)
        )
    )
    for item, value in json_items.items():
        files[f"{item}/{_JSON_FILE}"] = json.dumps(value).encode()
    if metrics:
        files[f"metrics/{_METRICS_FILE}"] = json.dumps(dict(metrics)).encode()
    step_metadata = json.loads(files[_STEP_METADATA])
    step_metadata |= {"init_timestamp_nsecs": began_ns, "commit_timestamp_nsecs": time.time_ns(), "custom_metadata": custom}
    step_metadata["item_handlers"] |= handlers
    files[_STEP_METADATA] = json.dumps(step_metadata).encode()
    return files


@functools.lru_cache(maxsize=8)  # from one step to the next only values change; Orbax takes tens of milliseconds
def _written_by_orbax(
    trees: tuple[TreeSpec, ...], strings: tuple[tuple[tuple[int, Any], ...], ...], json_items: frozenset[str], with_metrics: bool
) -> Mapping[str, bytes]:
    """The files of a step with these trees and items, whose JSON values, metrics and custom metadata are empty."""
    api = load_orbax()
    ocp = api.ocp
    with (
        tempfile.TemporaryDirectory(prefix="raystate-scratch-") as scratch,
        _one_at_a_time,
        _expected_warnings_silenced(),
        _unheard(),
    ):
        handlers: dict[str, Any] = {}
        args: dict[str, Any] = {}
        alone = {"multiprocessing_options": api.of_one_process()}
        for tree, texts in zip(trees, map(dict, strings), strict=True):
            handlers[tree.item] = api.tree_handler(alone)
            args[tree.item] = ocp.args.PyTreeSave(
                nest(tree.leaves, [stand_in(leaf, texts.get(i)) for i, leaf in enumerate(tree.leaves)])
            )
        for item in json_items:
            handlers[item] = ocp.JsonCheckpointHandler(filename=_JSON_FILE, **alone)
            args[item] = ocp.args.JsonSave({})
        if with_metrics:
            handlers["metrics"] = ocp.JsonCheckpointHandler(filename=_METRICS_FILE, **alone)
            args["metrics"] = ocp.args.JsonSave({})
        root = Path(scratch) / "0"
        together = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(**alone), **handlers)
        with ocp.Checkpointer(together, **alone) as checkpointer:
            checkpointer.save(root, args=ocp.args.Composite(**args), custom_metadata={})
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def stand_in(leaf: LeafSpec, value: Any) -> Any:
    """What Orbax is given for a leaf."""
    match leaf.kind:
        case "array":
            assert leaf.array is not None
            return JaxArray(leaf.array.chunk) if leaf.array.typestr == "jax.Array" else NumpyArray()
        case "scalar":
            return Scalar()
        case "string":
            return value
        case "none":
            return None
        case "dict":
            return {}
        case "list":
            return []


@contextlib.contextmanager
def _expected_warnings_silenced() -> Iterator[None]:
    def unexpected(record: logging.LogRecord) -> bool:
        return not any(text in str(record.msg) for text in _EXPECTED_WARNINGS)

    logger = logging.getLogger("absl")
    logger.addFilter(unexpected)
    try:
        yield
    finally:
        logger.removeFilter(unexpected)


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Who listens for Orbax's events would count what is done here as saves. Orbax has no switch for them, and records them from
    several threads: so for these moments jax.monitoring passes on everybody else's only."""
    from jax import monitoring

    def muted(record: Any) -> Any:
        return lambda event, *rest, **more: None if event.startswith(_EVENTS) else record(event, *rest, **more)

    with contextlib.ExitStack() as stack:
        for name in _RECORDS:  # tests/orbax/test_monitoring.py
            stack.enter_context(patched(monitoring, name, muted(getattr(monitoring, name))))
        yield


@functools.cache
def load_orbax() -> SimpleNamespace:
    """Orbax and our small classes on top of it; imported at the first call, on CPU."""
    if "jax" not in sys.modules:
        import jax

        # A Coordinator may run on a machine with an accelerator, which belongs to the trainers.
        jax.config.update("jax_platforms", "cpu")
    import orbax.checkpoint as ocp

    class StandInHandler(ocp.type_handlers.TypeHandler):
        def __init__(self, typestr: str):
            self._typestr = typestr

        def typestr(self) -> str:
            return self._typestr

        async def metadata(self, infos: Any) -> Any:
            raise NotImplementedError("stand-ins are only saved")

        async def deserialize(self, infos: Any, args: Any = None) -> Any:
            raise NotImplementedError("stand-ins are only saved")

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:  # noqa: ARG002
            for value, info in zip(values, infos, strict=True):
                info.write_shape = value.write_shape
            return []

    def tree_handler(alone: dict[str, Any]) -> Any:
        registry = ocp.type_handlers.create_type_handler_registry(
            *((kind, StandInHandler(typestr)) for kind, typestr in _TYPESTRS.items()),
            (str, ocp.type_handlers.StringHandler()),
        )
        return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, type_handler_registry=registry, **alone)

    def of_one_process() -> Any:
        """In a JAX program of several processes Orbax would wait for the others."""
        me = ocp.multihost.process_index()
        return ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me}, barrier_sync_key_prefix="raystate")

    return SimpleNamespace(ocp=ocp, tree_handler=tree_handler, of_one_process=of_one_process)


def _in_a_forked_child() -> None:
    """The thread that holds the lock, if one does, is the parent's: it would never be released."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


os.register_at_fork(after_in_child=_in_a_forked_child)
