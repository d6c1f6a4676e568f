"""What the examples must have left on disk. Each check gets the names that a page has defined and the folder that it ran in.

They run in the interpreter of the page, and read with stock Orbax, which knows nothing of raystate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

import raystate

Names = dict[str, Any]


def on_disk(step: Path, item: str = "state", *, other_devices: bool = False) -> dict[str, np.ndarray]:
    """Every array of an item by its name on disk, read by stock Orbax. other_devices: it was saved from devices that aren't here."""
    if item != "state":
        return in_memory(ocp.load(str(step), checkpointable_name=item))
    if not other_devices:
        return in_memory(ocp.load(str(step)))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), ocp.metadata(str(step)).metadata)
    return in_memory(ocp.load(str(step), tree))


def in_memory(tree: Any) -> dict[str, np.ndarray]:
    """Every array of a tree by the name that Orbax gives it; of a typed PRNG key its data."""
    return {_name(path): _host(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _host(leaf: Any) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _name(path: Any) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def assert_equal(expected: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> None:
    assert expected, "nothing to compare"
    assert sorted(expected) == sorted(got)
    for name, value in expected.items():
        assert (value.dtype, value.shape, value.tobytes()) == (got[name].dtype, got[name].shape, got[name].tobytes()), name


def linen(names: Names, folder: Path) -> None:
    state = names["state"]
    stored = on_disk(folder / "runs/linen/20")
    assert_equal(in_memory({"params": state.params, "opt_state": state.opt_state, "step": state.step}), stored)
    assert_equal(in_memory(state), in_memory(names["restored"].state))
    assert_equal(in_memory(state), in_memory(names["on_the_host"]))
    assert_equal(in_memory(state.params), in_memory(names["params"]))


def nnx_model(names: Names, folder: Path) -> None:
    nnx, both, stored = names["nnx"], names["made"], folder / "runs/nnx/20"
    whole = {"model": nnx.state(both["model"]), "optimizer": nnx.state(both["optimizer"])}
    ocp.save(str(folder / "by-orbax"), nnx.State(whole))
    assert _names_in(stored) == _names_in(folder / "by-orbax")
    arrays = {"model": nnx.state(both["model"], nnx.Param), "optimizer": whole["optimizer"]}
    raw = {name.removesuffix(".value"): value for name, value in on_disk(stored).items() if ".rngs." not in name}
    assert_equal(in_memory(nnx.to_pure_dict(nnx.State(arrays))), raw)
    for got in (names["model"], names["updated"]):
        assert_equal(in_memory(nnx.to_pure_dict(arrays["model"])), in_memory(nnx.to_pure_dict(nnx.state(got, nnx.Param))))
    two = in_memory(nnx.to_pure_dict(names["optimizer"]))
    assert_equal(
        two, {name.removesuffix(".value"): value for name, value in on_disk(folder / "runs/nnx-two/20", "optimizer").items()}
    )


def _names_in(step: Path) -> list[str]:
    """Names of the leaves, as stock Orbax lists them."""
    return sorted(_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(ocp.metadata(str(step)).metadata))


def equinox(names: Names, folder: Path) -> None:
    assert_equal(in_memory(names["state"]), on_disk(folder / "runs/equinox/20"))
    assert_equal(in_memory(names["state"]["model"]), in_memory(names["arrays"]))


def keras(names: Names, folder: Path) -> None:
    assert_equal(in_memory(names["state"]), on_disk(folder / "runs/keras/20"))
    assert_equal(in_memory(names["state"]), in_memory(names["init"]()))


def several_items(names: Names, folder: Path) -> None:
    newest = folder / "runs/items/6"
    np.testing.assert_array_equal(on_disk(newest)["w"], [6.0] * 3)
    assert_equal(in_memory(names["combined"]["average"]), on_disk(newest, "average"))
    assert raystate.Reader(folder / "runs/items").all_steps() == [3, 6]
    again = names["Vocabulary"]()
    ocp.load_checkpointables(str(folder / "weights"), {"vocabulary": again})
    assert again.words == (folder / "weights/vocabulary/words.txt").read_text().split() == ["ship", "sea"]


def roll_back(names: Names, folder: Path) -> None:
    found = {int(step.name): on_disk(step)["w"][0] for step in (folder / "runs/spiky").iterdir() if step.name.isdigit()}
    assert found == {2: 2.0, 4: 4.0, 6: 204.0}


def only_one_process(names: Names, folder: Path) -> None:
    assert "rank 1" in str(names["cause"]), names["cause"]
    assert raystate.Reader(folder / "runs/one").all_steps() == []


def launch(names: Names, folder: Path) -> None:
    """The cell of the notebook is run again, as it stands, in the same process."""
    assert names["restored"].step == 0
    before = raystate.Reader(folder / "runs/cell").restore()
    exec(names["cell"], names)
    assert names["restored"].step == before.step == 5
    names["manager"].close()
    np.testing.assert_array_equal(on_disk(folder / "runs/cell/10")["w"], [10.0] * 3)
    for run, step in (("actors", 6), ("trainer", 6)):
        np.testing.assert_array_equal(on_disk(folder / f"runs/{run}/{step}", other_devices=True)["w"], [float(step)] * 4)


def follow(names: Names, folder: Path) -> None:
    seen = names["seen"]
    assert seen[-1] == (8, 404.0)
    assert (8, 8.0) in seen, "the one before the rollback"
    assert on_disk(folder / "runs/live/8")["w"] == 404.0


def sweep(names: Names, folder: Path) -> None:
    runs = sorted((folder / "runs/sweep").iterdir())
    assert len(runs) == 2
    ends = {float(raystate.Reader(run).metadata().metrics["loss"]) for run in runs}
    assert ends == {result.metrics["loss"] for result in names["results"]}
    assert {float(on_disk(run / "4")["w"]) for run in runs} == {4 * rate for rate in (0.1, 0.2)} or len(ends) == 2
    population(names, folder)


def population(names: Names, folder: Path) -> None:
    """The weak trial has gone on from the better one's bits, with a rate of its own; each in its own storage."""
    end = {run: raystate.Reader(run).metadata(10) for run in sorted((folder / "runs/population").iterdir())}
    (weak,) = [run for run, found in end.items() if found.custom is not None]
    (better,) = {*end} - {weak}
    rate = end[weak].metrics["rate"]
    assert end[weak].custom == [better.as_uri(), {"rate": rate}] and rate != end[better].metrics["rate"]
    for run, began_with in ((weak, better), (better, better)):
        state = on_disk(began_with / "5")
        for _ in range(5):
            state, _ = names["train_step"](state, end[run].metrics["rate"])
        assert_equal(in_memory(state), on_disk(run / "10"))
    assert on_disk(weak / "5")["w"].tobytes() != on_disk(better / "5")["w"].tobytes()


def from_orbax(names: Names, folder: Path) -> None:
    assert on_disk(folder / "run/4")["w"].tolist() == [1, 2, 3, 4]
    assert raystate.load(folder / "run", step=3)["w"].tolist() == [0, 1, 2, 3], "what Orbax wrote before stays"


def sources(names: Names, folder: Path) -> None:
    """A run that began with another's parameters, and one with those of a plain Orbax checkpoint."""
    expected = in_memory(names["state"].params)
    for run, step in (("pretrained", 3), ("tuned", 2), ("from_orbax", 1)):
        stored = on_disk(folder / f"runs/{run}/{step}")
        got = {name.removeprefix("params."): value for name, value in stored.items() if name.startswith("params.")}
        assert_equal(expected, got)
        assert stored["step"] == step


def which_steps(names: Names, folder: Path) -> None:
    del names
    steps = sorted(int(path.name) for path in (folder / "runs/chosen").iterdir() if path.name.isdigit())
    assert steps == [1, 4, 7, 8, 9, 10]
    for step in steps:
        assert_equal({"w": np.full(3, step, np.float32)}, on_disk(folder / f"runs/chosen/{step}"))
