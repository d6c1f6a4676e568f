"""Run as a program: stock Orbax on 8 CPU devices, without raystate. Argument: a JSON object of what to do; prints a JSON object.

{"read": root, "step": n}: read a step in every way, bit for bit.
{"damaged": [root]}: how reading fails. {"grain": root, "step": n}: go on with the step's grain iterator.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
warnings.simplefilter("ignore")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from orbax.checkpoint import v1  # noqa: E402
from state_example import array, flat, notes, state  # noqa: E402


def sharded(name: str) -> jax.ShapeDtypeStruct:
    """An abstract leaf with a sharding that is not the saved one."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    value = array(name)
    parts = {2: PartitionSpec("y", "x"), 1: PartitionSpec("y")}.get(value.ndim, PartitionSpec())
    fits = all(size % 8 == 0 and size for size in value.shape)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, parts if fits else PartitionSpec()))


def check(done: list[str], what: str, got: Any, expected: Any, target: Any = None) -> None:
    assert flat(got) == flat(expected), (
        f"{what}: {[(k, v, flat(got).get(k)) for k, v in flat(expected).items() if flat(got).get(k) != v]}"
    )
    if target is not None:
        for leaf, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(target), strict=True):
            assert not hasattr(wanted, "sharding") or leaf.sharding == wanted.sharding, what
    done.append(what)


def read(root: str, step: int) -> dict[str, Any]:
    done: list[str] = []
    target, expected = state(sharded), state()
    args = ocp.args
    best = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(root, options=best) as manager:
        steps, metrics, best_step = manager.all_steps(), manager.metrics(step), manager.best_step()
        custom = manager.metadata(step).custom_metadata
        got = manager.restore(step, args=args.Composite(state=args.StandardRestore(target), vocabulary=args.JsonRestore()))
        check(done, "v0 CheckpointManager with target on new shardings", got["state"], expected, target)
        vocabulary = got["vocabulary"]
        got = manager.restore(step, args=args.Composite(state=args.StandardRestore(), notes=args.PyTreeRestore()))
        check(done, "v0 CheckpointManager without target", got["state"], expected)
        check(done, "v0 CheckpointManager, second tree", got["notes"], notes())
    check(done, "v0 StandardCheckpointer", ocp.StandardCheckpointer().restore(f"{root}/{step}/state", target), expected, target)
    check(done, "v1 load with target on new shardings", v1.load(f"{root}/{step}", target), expected, target)
    check(done, "v1 load", v1.load(f"{root}/{step}"), expected)
    leaves = flat(jax.tree.map(lambda leaf: repr((leaf.shape, leaf.dtype.name)), v1.metadata(f"{root}/{step}").metadata["params"]))
    with v1.training.Checkpointer(root) as checkpointer:
        assert checkpointer.latest.step == step
        check(done, "v1 training.Checkpointer", checkpointer.load(abstract_state=target), expected, target)
    return {
        "done": done,
        "steps": list(steps),
        "metrics": metrics,
        "best_step": best_step,
        "custom": custom,
        "vocabulary": vocabulary,
        "v1_params": {".".join(path): text[1] for path, text in leaves.items()},
        "metadata": metadata(f"{root}/{step}/state"),
    }


def metadata(item: str) -> dict[str, Any]:
    """Orbax's own view of an item: parameter name -> [kind, shape, dtype, chunk]."""
    found: dict[str, Any] = {}
    described = ocp.PyTreeCheckpointer().metadata(item).item_metadata
    assert described is not None
    tree = described.tree
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: x is None or (isinstance(x, dict | list) and not x)
    ):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if isinstance(leaf, ocp.metadata.ArrayMetadata) and not isinstance(leaf, ocp.metadata.ScalarMetadata):
            storage = leaf.storage
            found[name] = [
                "array",
                list(leaf.shape),
                np.dtype(leaf.dtype).name,
                list(storage.chunk_shape or ()) if storage else None,
            ]
        else:
            found[name] = [type(leaf).__name__]
    return found


def continued(root: str, step: int) -> list[int]:
    """The next elements of the step's iterator, restored by grain's own handler."""
    import grain

    iterator = iter(grain.MapDataset.range(100).shuffle(seed=7).to_iter_dataset())
    with ocp.CheckpointManager(root) as manager:
        iterator = manager.restore(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(iterator)))["data"]
    return [int(next(iterator)) for _ in range(3)]


def damaged(root: str) -> str:
    """How stock Orbax refuses a step; "" if it reads it."""
    step = next(name for name in os.listdir(root) if name.isdigit())
    try:
        v1.load(f"{root}/{step}")
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> None:
    asked = json.loads(sys.argv[1])
    out: dict[str, Any] = {}
    if "read" in asked:
        out["read"] = read(asked["read"], asked["step"])
    if "grain" in asked:
        out["grain"] = continued(asked["grain"], asked["step"])
    if "damaged" in asked:
        out["damaged"] = {root: damaged(root) for root in asked["damaged"]}
    assert "raystate" not in sys.modules
    print(json.dumps(out))  # noqa: T201


if __name__ == "__main__":
    main()
