"""Run as a program: stock Orbax and typed PRNG keys, on 4 CPU devices, without raystate. Argument: a JSON object; prints one.

{"write": root}: checkpoints with keys by stock Orbax. {"read": root, "step": n}: read a step's keys in every way.
Keys are shown as [implementation, logical shape, key data], all else as values.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

if __name__ == "__main__":  # the tests import the tree from here, with their own devices
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"
    warnings.simplefilter("ignore")

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import v1


def keyed() -> dict[str, Any]:
    """A state with one key, many keys of another kind, and what flax.nnx keeps for a Dropout, as a plain tree."""
    return {
        "key": jax.random.key(3),
        "many": {"rbg": jax.random.split(jax.random.key(1, impl="rbg"), 8)},
        "dropout": {"rngs": {"count": jax.numpy.uint32(5), "key": jax.random.key(7)}},
        "old": jax.random.PRNGKey(3),  # plain uint32 data stays that
    }


def shown(tree: Any) -> dict[str, Any]:
    """Dotted path -> what must be equal."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            found[name] = [str(jax.random.key_impl(leaf)), list(leaf.shape), np.asarray(jax.random.key_data(leaf)).tolist()]
        else:
            found[name] = [leaf.dtype.name, list(leaf.shape), np.asarray(leaf).tolist()]
    return found


def target() -> Any:
    """The abstract tree, on a mesh that no writer had."""
    mesh = jax.make_mesh((4,), ("d",))

    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec("d") if leaf.shape == (8,) else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(abstract, keyed())


def write(root: str) -> dict[str, Any]:
    for name, zarr3 in (("v0", False), ("v0_zarr3", True)):
        handler = ocp.PyTreeCheckpointHandler(use_zarr3=zarr3)
        with ocp.CheckpointManager(f"{root}/{name}", item_handlers=handler) as manager:
            manager.save(3, args=ocp.args.PyTreeSave(keyed()))
            manager.wait_until_finished()
    v1.save(f"{root}/v1/3", keyed())
    return shown(keyed())


def read(root: str, step: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    wanted = target()
    found["v1 with target"] = v1.load(f"{root}/{step}", wanted)
    with ocp.CheckpointManager(root) as manager:
        got = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))
    found["v0 with target"] = got["state"]
    for got in found.values():
        assert got["many"]["rbg"].sharding == wanted["many"]["rbg"].sharding
    # Without a target Orbax looks for the writer's devices, which this machine may not have; so: everything on one device.
    one = SingleDeviceSharding(jax.devices()[0])
    args = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=one), keyed())
    found["v0 without target"] = ocp.PyTreeCheckpointer().restore(f"{root}/{step}/state", restore_args=args)
    return {what: shown(got) for what, got in found.items()}


def main() -> None:
    asked = json.loads(sys.argv[1])
    out: dict[str, Any] = {"expected": shown(keyed())}
    if "write" in asked:
        write(asked["write"])
    if "read" in asked:
        out["read"] = read(asked["read"], asked["step"])
    assert "raystate" not in sys.modules
    print(json.dumps(out))  # noqa: T201


if __name__ == "__main__":
    main()
