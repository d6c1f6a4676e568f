"""What users of Flax and Orbax ask a restore for, from a slot in memory; tests/orbax/test_loading.py asks storage."""

from __future__ import annotations

from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import raystate.restored
from raystate.arrays.raw import check_spread, raw_wants
from raystate.core.formats.errors import CapacityError, ConfigError, ReferenceMismatchError
from raystate.machine.memory import NodeMemory
from raystate.restored import Restored
from tests.arrays.saved import Saved


@pytest.fixture(scope="module")
def mesh(own_mesh):
    with own_mesh((2, 4), ("x", "y")) as mesh:
        yield mesh


def kernel(scale: float = 1.0) -> np.ndarray:
    return scale * np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture
def saved(mesh) -> Saved:
    return Saved(
        {
            "params": {
                "enc": {"w": jax.device_put(kernel(), NamedSharding(mesh, P("x", "y"))), "b": jnp.ones(8)},
                "dec": {"w": jnp.asarray(kernel(2)), "b": jnp.zeros(8)},
            },
            "opt": ({"mu": jnp.ones((8, 8))}, optax.EmptyState(), None, {}),
            "key": jax.random.key(3),
            "table": np.arange(6, dtype=np.float64),
            "step": 7,
            "name": "run",
        }
    )


# ---------------------------------------------------------------- no reference


def test_without_a_reference_everything_is_as_it_was_saved(saved: Saved, mesh):
    raw = saved.restore(None)
    assert raw["params"]["enc"]["w"].sharding == NamedSharding(mesh, P("x", "y"))
    assert not raw["params"]["dec"]["w"].committed, "on the default device it is free to move, as it was"
    assert raw["key"].dtype == jax.random.key(0).dtype
    assert jax.random.key_data(raw["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
    assert isinstance(raw["table"], np.ndarray) and raw["table"].dtype == np.float64
    assert (raw["step"], raw["name"], raw["opt"][1:]) == (7, "run", [None, None, {}])
    assert np.array_equal(raw["params"]["enc"]["w"], kernel())


def test_devices_that_are_not_here_give_host_arrays(saved: Saved, monkeypatch: pytest.MonkeyPatch):
    few = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda: few)
    raw = saved.restore(None)
    assert isinstance(raw["params"]["enc"]["w"], np.ndarray)
    assert np.array_equal(raw["params"]["enc"]["w"], kernel())
    assert isinstance(raw["params"]["dec"]["w"], jax.Array)


def test_wide_arrays_stay_wide():
    with jax.enable_x64(True):
        saved = Saved({"a": jnp.arange(3, dtype=jnp.int64) + 2**40})
    raw = saved.restore(None)
    assert isinstance(raw["a"], np.ndarray)
    assert raw["a"].tolist() == [2**40, 2**40 + 1, 2**40 + 2]


def test_a_raw_tree_above_the_free_memory_is_refused_with_numbers(saved: Saved, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        raystate.restored, "node_memory", lambda: NodeMemory(total_bytes=1 << 30, used_bytes=(1 << 30) - 800, source="machine")
    )
    with pytest.raises(CapacityError, match=r"takes 0\.0 MiB .* can be had \(90% of what is free on this machine\)") as caught:
        saved.restore(None)
    assert caught.value.needed_bytes == 64 * 4 * 3 + 2 * 8 * 4 + 8 + 48
    assert caught.value.available_bytes == 720
    assert "one sharding over all devices" in str(caught.value)
    assert not saved.source.requests
    with pytest.raises(CapacityError):
        saved.restore({"step": 0}, transforms=lambda tree: tree)
    assert saved.restore({"step": 0}) == {"step": 7}


def test_several_processes_never_get_all_of_an_array_each(saved: Saved, monkeypatch: pytest.MonkeyPatch):
    wants = raw_wants(saved.spec)
    check_spread(saved.spec, wants, processes=1)
    with pytest.raises(
        ReferenceMismatchError, match=r"each of 2 processes would get all of them: opt/0/mu, params/dec/b"
    ) as caught:
        check_spread(saved.spec, wants, processes=2)
    assert "4 arrays" in str(caught.value) and "jax.sharding.NamedSharding(mesh, spec)" in str(caught.value)
    spread = Saved({"w": saved.restore(None)["params"]["enc"]["w"], "n": jnp.int32(1), "key": jax.random.key(0), "t": np.ones(4)})
    wants = raw_wants(spread.spec)
    check_spread(spread.spec, wants, processes=2)  # numbers, keys and small numpy arrays have nothing to spread
    monkeypatch.setattr("raystate.arrays.raw.WHOLE_BYTES", 40)
    with pytest.raises(ReferenceMismatchError, match="its numpy arrays have"):
        check_spread(spread.spec, wants, processes=2)


def test_the_state_dict_is_edited_and_given_to_flax():
    params = {"dense": {"kernel": jnp.ones((2, 3))}}
    tx = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    state = TrainState.create(apply_fn=print, params=params, tx=tx)
    raw = Restored(step=1, state=Saved(state).restore(None))
    edited = raw.state_dict()
    assert edited["opt_state"] == {"0": {}, "1": edited["opt_state"]["1"]}
    assert edited["opt_state"]["1"]["1"] == {}
    edited["params"]["dense"]["kernel"] = edited["params"]["dense"]["kernel"] * 5
    edited["step"] = 9
    back: Any = flax.serialization.from_state_dict(state, edited)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert back.step == 9
    assert np.asarray(back.params["dense"]["kernel"]).tolist() == [[5.0] * 3] * 2
    own = flax.serialization.to_state_dict(state)
    assert jax.tree.structure(Restored(step=1, state=state).state_dict()) == jax.tree.structure(own)


# ---------------------------------------------------------------- abstract meshes


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_model_that_was_only_traced_comes_back_on_the_mesh_in_force(kind):
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("x", "y"))
            self.dense = nnx.Linear(8, 8, rngs=rngs, kernel_init=init)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        graph, split = nnx.split(Net(nnx.Rngs(0)))
        real: Any = split
        saved = Saved(real)
        reference: Any = nnx.state(nnx.eval_shape(lambda: Net(nnx.Rngs(1))))
        got = saved.restore(reference)
        model: Any = nnx.merge(graph, got)
        assert model.dense.kernel.get_value().sharding == NamedSharding(mesh, P("x", "y"))
        assert np.array_equal(model.dense.kernel.get_value(), real["dense"]["kernel"].get_value())
        specs = saved.restore(nnx.get_partition_spec(reference))  # bare PartitionSpecs
        assert specs["dense"]["kernel"].get_value().sharding == NamedSharding(mesh, P("x", "y"))
        assert "doesn't fit the mesh in force" in saved.differences({"dense": P("z")})["dense/kernel/value"]
    with jax.set_mesh(None):
        assert "no mesh is in force: restore under jax.set_mesh" in saved.differences(P())["dense/bias/value"]


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize("left_out", [..., None, ocp.PLACEHOLDER, "absent"], ids=["dots", "None", "PLACEHOLDER", "absent"])
def test_only_the_part_that_is_asked_for_is_read(saved: Saved, left_out: Any):
    reference: dict[str, Any] = {"params": {"enc": {"w": jnp.zeros((8, 8))}, "dec": left_out}, "opt": left_out, "step": 0}
    if left_out == "absent":
        del reference["params"]["dec"], reference["opt"]
    got = saved.restore(reference)
    assert saved.bytes_read == 8 * 8 * 4
    assert np.array_equal(got["params"]["enc"]["w"], kernel())
    assert jax.tree.structure(got) == jax.tree.structure(reference)
    if left_out != "absent":
        assert got["opt"] is left_out


def test_what_the_checkpoint_lacks_is_listed_with_the_way_out(saved: Saved):
    new = {"head": {"w": np.ones(2), "b": np.ones(2)}, "step": 0}
    with pytest.raises(ReferenceMismatchError) as caught:
        saved.restore(new)
    assert dict(caught.value.differences) == dict.fromkeys(["head/w", "head/b"], "is not in the checkpoint")
    assert "not in the checkpoint (2): head/b, head/w" in str(caught.value)
    assert "partial=True keeps the reference's value" in str(caught.value)
    got = saved.restore(new, partial=True)
    assert got["head"]["w"] is new["head"]["w"] and got["step"] == 7


def test_nothing_abstract_is_kept(saved: Saved):
    sharding = SingleDeviceSharding(jax.devices()[0])
    gone = jnp.ones(2)
    gone.delete()
    reference = {"a": jax.ShapeDtypeStruct((2,), jnp.float32), "b": sharding, "c": P("x"), "d": gone, "e": 1, "step": 0}
    for options in ({"partial": True}, {"transforms": {}}):
        differences = saved.differences(reference, **options)
        assert set(differences) == {"a", "b", "c", "d"}
        assert "has no value to keep" in differences["a"] and "deleted" in differences["d"]
    assert saved.restore({"a": ..., "e": 1}, partial=True) == {"a": ..., "e": 1}


def test_an_error_stays_readable_with_ten_thousand_leaves():
    saved = Saved({f"w{i:05}": np.zeros(1, np.float32) for i in range(500)})
    reference: dict[str, Any] = {f"v{i:05}": np.zeros(1) for i in range(10_000)}
    reference.update({f"w{i:05}": np.zeros((2, 2), np.float32) for i in range(400)})
    with pytest.raises(ReferenceMismatchError) as caught:
        saved.restore(reference)
    text = str(caught.value)
    assert "differ in 10400 places" in text
    assert "… and 380 more" in text
    assert "not in the checkpoint (10,000): v00000, " in text and "and 9,990 more" in text
    assert "Only in the checkpoint (100): w00400, " in text
    assert 'shapes="checkpoint"' in text
    assert len(text.splitlines()) < 30 and len(text) < 3000
    assert len(caught.value.differences) == 10_400


# ---------------------------------------------------------------- transforms


def test_renamed_moved_split_stacked_and_cast(saved: Saved, mesh):
    rows = NamedSharding(mesh, P("x"))
    reference = {
        "encoder": {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=rows)},
        "stacked": jax.ShapeDtypeStruct((2, 8, 8), jnp.float32, sharding=NamedSharding(mesh, P(None, "y"))),
        "left": np.zeros((8, 4), np.float32),
        "half": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16),
        "count": 0,
        "both": jax.ShapeDtypeStruct((), jnp.float32),
        "name": "",
    }
    got = saved.restore(
        reference,
        transforms={
            r"(enc)oder/kernel": r"params/\1/w",
            "stacked": (["params/enc/w", "params/dec/w"], lambda *parts: np.stack(parts)),
            "left": ("params/dec/w", lambda w: w[:, :4]),
            "half": ("params/dec/w", lambda w: w.astype(jnp.bfloat16)),
            "count": "step",
            "both": ("params/enc", lambda layer: (layer["w"].sum() + layer["b"].sum()).astype(np.float32)),
        },
    )
    assert got["encoder"]["kernel"].sharding == rows
    assert np.array_equal(got["encoder"]["kernel"], kernel())
    assert np.array_equal(got["stacked"], np.stack([kernel(), kernel(2)]))
    assert got["stacked"].sharding == NamedSharding(mesh, P(None, "y"))
    assert np.array_equal(got["left"], kernel(2)[:, :4])
    assert got["half"].dtype == jnp.bfloat16 and np.array_equal(got["half"], kernel(2).astype(jnp.bfloat16))
    assert (got["count"], got["name"], float(got["both"])) == (7, "run", kernel().sum() + 8)


def test_a_mapping_reads_only_what_it_needs(saved: Saved, mesh):
    reference = {"a": np.zeros((8, 8), np.float32), "b": np.zeros((8, 4), np.float32), "c": np.zeros((8, 4), np.float32)}
    halves = {"b": ("params/dec/w", lambda w: w[:, :4]), "c": ("params/dec/w", lambda w: w[:, 4:])}
    got = saved.restore(reference, transforms={"a": "params/enc/w", **halves})
    assert saved.bytes_read == 2 * 64 * 4, "dec/w once, for both of its halves"
    assert np.array_equal(np.concatenate([got["b"], got["c"]], axis=1), kernel(2))


def test_a_subtree_moves_as_a_whole(saved: Saved):
    reference = {"model": {"encoder": {"w": np.zeros((8, 8), np.float32), "b": np.zeros(8, np.float32)}}}
    got = saved.restore(reference, transforms={"model/encoder": "params/enc"})
    assert np.array_equal(got["model"]["encoder"]["w"], kernel())
    nested = saved.restore(reference, transforms={"model": {"encoder": "params/dec"}})
    assert np.array_equal(nested["model"]["encoder"]["w"], kernel(2))


def test_an_empty_mapping_drops_and_keeps_as_in_the_flax_guide(saved: Saved):
    own = np.full(3, 4.0)
    got = saved.restore({"params": {"enc": {"b": np.zeros(8, np.float32)}}, "new": own, "step": 0}, transforms={})
    assert got["new"] is own and got["step"] == 7
    assert got["params"]["enc"]["b"].tolist() == [1] * 8


def test_orbax_transforms_give_what_orbax_gives():
    tree = {
        "a": np.arange(4),
        "b": {"c": np.ones(2), "d": [np.zeros(1), np.ones(1)]},
        "f": np.full(2, 2),
        "old1": {"w": np.ones(1)},
    }
    new: dict[str, Any] = {
        "a1": np.zeros(4, np.int64),
        "b": {"c": np.zeros(2)},
        "sum": np.zeros(1),
        "f": np.zeros(2, np.int64),
        "g": np.full(1, 5),
        "kept": np.full(1, 6),
        "new1": {"w": np.zeros(1)},
    }
    transforms = {
        "a1": ocp.Transform(original_key="a"),
        "b": {"c": ocp.Transform(value_fn=lambda value: value * 2)},
        "sum": ocp.Transform(multi_value_fn=lambda key, kv: kv["b"]["d"][0] + kv["b"]["d"][1] + len(key)),
        "kept": ocp.Transform(use_fallback=True),
        r"new(\d)/(.*)": ocp.Transform(original_key=r"old\1/\2"),
    }
    expected = ocp.apply_transformations(tree, transforms, new)
    saved = Saved(tree)
    got = saved.restore(new, transforms=transforms)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
    saved.source.requests.clear()
    only = ocp.RestoreTransform(
        multi_value_fn=lambda key, kv, args: kv["b"]["c"] * 3 + len(kv["b"]), multi_value_fn_input_args={"b/c": ocp.RestoreArgs()}
    )
    assert saved.restore({"x": np.zeros(2)}, transforms={"x": only})["x"].tolist() == [4.0, 4.0]
    assert saved.bytes_read == 16


def test_a_function_of_the_tree_sees_all_of_it(saved: Saved):
    def moved(tree: Any) -> Any:
        assert isinstance(tree["params"]["enc"]["w"], np.ndarray)
        return {"w": tree["params"]["enc"]["w"] + 1, "key": tree["key"]}

    got = saved.restore({"w": jnp.zeros((8, 8)), "key": jax.random.key(0)}, transforms=moved)
    assert np.array_equal(got["w"], kernel() + 1)
    assert jax.random.key_data(got["key"]).tolist() == [0, 3]
    assert np.array_equal(saved.restore(None, transforms=lambda tree: tree["params"]["dec"]["w"]), kernel(2))


def test_wrong_transforms_are_named_and_nothing_is_read(saved: Saved):
    reference = {"a": np.zeros(3, np.float32), "step": 0}

    def refused(transforms: Any) -> str:
        with pytest.raises((ConfigError, ReferenceMismatchError)) as caught:
            content.check(reference, None, raystate.restored.ReadOptions(transforms=transforms))
        return str(caught.value)

    content = saved.content()
    assert "transforms take it from 'params/end/b', which is not in the checkpoint" in refused({"a": "params/end/b"})
    assert "transforms take it from 'nope'" in refused({"a": (["step", "nope"], print)})
    assert "expected shape (3,), the checkpoint has (8,)" in refused({"a": "params/enc/b"})
    assert "'layer.*' matches no path of the reference" in refused({"a": ("step", np.ones), "layer.*": "params"})
    assert "transforms['(a']: not a regular expression" in refused({"(a": "step"})
    assert "transforms['a']: expected an old path" in refused({"a": 3})
    assert "transforms['a']: expected an old path" in refused({"a": ["step", "name"]})
    assert "can't be filled in" in refused({"a": r"\2"})
    assert "a function or a mapping of new path to old path, not a list" in refused(["a"])
    assert not saved.source.requests
    with pytest.raises(ConfigError, match="needs a reference, whose leaves it makes"):
        saved.restore(None, transforms={})


def test_what_a_function_gives_must_fit_and_its_own_error_says_where(saved: Saved):
    wrong = {"a": ("step", lambda step: [step]), "b": ("params/enc/b", lambda b: b[:3]), "c": ("name", lambda name: name)}
    differences = saved.differences({"a": 0, "b": np.zeros(8, np.float32), "c": ""}, transforms=wrong)
    assert set(differences) == {"a", "b"}
    assert "gave a list" in differences["a"] and "expected shape (8,), the checkpoint has (3,)" in differences["b"]
    with pytest.raises(ZeroDivisionError) as caught:
        saved.restore({"a": 0}, transforms={"a": ("step", lambda step: step // 0)})
    assert caught.value.__notes__ == ["raised by the function in transforms for a (from step)"]


# ---------------------------------------------------------------- shardings only


def test_one_sharding_stands_for_everything_below(saved: Saved, mesh):
    all_over = NamedSharding(mesh, P())
    got = saved.restore({"params": all_over, "opt": [all_over] * 4, "key": all_over, "step": 0})
    assert {leaf.sharding for leaf in jax.tree.leaves(got["params"])} == {all_over}
    assert sorted(got["params"]) == ["dec", "enc"]
    assert got["opt"][1:] == [None, None, {}]
    assert np.array_equal(got["params"]["dec"]["w"], kernel(2))
    whole = Saved({"a": {"b": jnp.ones(8)}, "c": [jnp.zeros(8), "text", 3], "d": {}})
    raw = whole.restore(all_over)
    assert raw["a"]["b"].sharding == all_over
    assert raw["c"][1:] == ["text", 3] and raw["d"] == {}
    with jax.set_mesh(mesh):
        assert whole.restore({"a": P("y"), "c": [..., "", 0]})["a"]["b"].sharding == NamedSharding(mesh, P("y"))
    assert "doesn't fit shape (8,)" in saved.differences({"params": NamedSharding(mesh, P("x", "y"))})["params/enc/b"]
    assert "the checkpoint has 4 leaves below it" in saved.differences({"params": jnp.zeros(3)})["params"]
    assert "the checkpoint has 1 leaf below it" in Saved({"a": {"b": jnp.ones(8)}}).differences({"a": jnp.zeros(3)})["a"]
    assert "did you mean step=8?" in saved.differences(8)["(the tree itself)"]


def test_a_small_array_lends_its_sharding_and_the_error_names_the_option(saved: Saved, mesh):
    small = {"params": {"enc": {"w": jax.device_put(jnp.zeros((2, 4)), NamedSharding(mesh, P("x", "y")))}}}
    with pytest.raises(ReferenceMismatchError, match='shapes="checkpoint" takes the checkpoint\'s shapes'):
        saved.restore(small)
    got = saved.restore(small, shapes="checkpoint")["params"]["enc"]["w"]
    assert got.sharding == NamedSharding(mesh, P("x", "y")) and np.array_equal(got, kernel())
    with pytest.raises(ReferenceMismatchError, match="cast=True converts"):
        saved.restore({"params": {"enc": {"b": np.zeros(8, np.float16)}}})
    with pytest.raises(ConfigError, match=r"shapes: expected 'match' .* not 'any'"):
        saved.restore({"step": 0}, shapes="any")
    with pytest.raises(ConfigError, match="partial must be True or False"):
        saved.restore({"step": 0}, partial="yes")
