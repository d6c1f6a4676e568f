"""The flattening is ours, the names must be Orbax's: compared container by container."""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st

from raystate.arrays.paths import flatten, names
from raystate.arrays.tree import describe
from raystate.core.formats.errors import RaystateError


@flax.struct.dataclass
class Data:
    first: jax.Array
    rest: dict
    static: str = flax.struct.field(pytree_node=False, default="x")


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def _linen_state():
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.chain(optax.clip(1.0), optax.adamw(1e-3)))


def _trees():
    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adamw(1e-3), wrt=nnx.Param)
    weights = {"w": jnp.ones(3), "b": jnp.ones(())}
    return {
        "nested": {"a": {"b": [jnp.ones(1), (2, {"c": 3.5})]}, "z": "text", "y": True},
        "tuple on top": (jnp.ones(2), [1, 2], "s"),
        "empties": {"none": None, "list": [], "tuple": (), "dict": {}, "named": optax.EmptyState(), "a": 1},
        "int keys": {3: {}, 4: jnp.ones(1), 11: 2},
        "frozen": freeze({"a": {"b": jnp.ones(2)}, "e": {}}),
        "optax": optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(weights),
        "optax masked": optax.masked(optax.adam(1e-3), {"w": True, "b": False}).init(weights),
        "optax multi": optax.multi_transform({"x": optax.adam(1.0), "y": optax.sgd(1.0)}, {"w": "x", "b": "y"}).init(weights),
        "flax struct": Data(jnp.ones(2), {"z": None, "y": [], "x": ()}),
        "linen TrainState": _linen_state(),
        "nnx.state": nnx.state(net),
        "nnx.split": nnx.split(optimizer)[1],
        "nnx.Optimizer": optimizer,
        "nnx.Module": net,
        "nnx pure dict": nnx.to_pure_dict(nnx.state(net)),
        "numpy": {"a": np.ones((2, 2)), "s": np.float32(1)},
    }


@pytest.mark.parametrize("name", list(_trees()))
def test_names_and_order_are_orbaxs(name):
    import orbax.checkpoint as ocp

    tree = _trees()[name]
    expected = ocp.tree.to_flat_dict(tree, keep_empty_nodes=True)
    nodes = flatten(tree)
    assert [names(node.path) for node in nodes] == list(expected)
    for node, value in zip(nodes, expected.values(), strict=True):
        assert node.value is value


@pytest.mark.parametrize("name", [name for name in _trees() if name != "nnx.Module"])
def test_index_and_key_paths_lead_to_the_same_places_in_orbaxs_serialized_tree(name):
    import orbax.checkpoint as ocp

    tree = _trees()[name]
    serialized = ocp.tree.serialize_tree(tree, keep_empty_nodes=True)
    for node in flatten(tree):
        place = serialized
        for key in node.path:
            assert isinstance(place, list) == isinstance(key, int)
            place = place[key]
        assert place is node.value or (node.empty and type(place) is type(node.value))


def test_a_container_that_orbax_cannot_rebuild_is_refused():
    import orbax.checkpoint as ocp

    with pytest.raises(AssertionError):
        ocp.tree.serialize_tree(_trees()["nnx.Module"], keep_empty_nodes=True)
    with pytest.raises(RaystateError, match=r"layers.*nnx\.state"):
        describe({"state": _trees()["nnx.Module"]})


_leaf = st.one_of(st.integers(0, 5), st.none(), st.just(()), st.just({}))
_tree = st.recursive(
    _leaf,
    lambda children: st.one_of(
        st.lists(children, min_size=1, max_size=3),
        st.tuples(children, children),
        st.dictionaries(st.sampled_from("abc"), children, min_size=1, max_size=3),
        st.builds(optax.TraceState, children),
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(tree=st.dictionaries(st.sampled_from("xyz"), _tree, min_size=1))
def test_any_nesting_has_orbaxs_names(tree):
    import orbax.checkpoint as ocp

    assert [names(node.path) for node in flatten(tree)] == list(ocp.tree.to_flat_dict(tree, keep_empty_nodes=True))
