"""What a caller gives to `save`: what is taken, and what is refused with the argument, the path, what was given and the way out."""

import enum
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystate.arrays.checks import check_custom, check_metrics, check_step, hold_metrics
from raystate.arrays.items import pack_items
from raystate.arrays.tree import describe
from raystate.core.formats.errors import ConfigError

DEEP = 101


def nested(levels, make):
    value = 1
    for _ in range(levels):
        value = make(value)
    return value


def donated(value):
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(value))
    assert value.is_deleted()
    return value


# ---------------------------------------------------------------- step


@pytest.mark.parametrize(
    "step", [3, np.int32(3), np.uint64(3), np.array(3), jnp.int32(3), enum.IntEnum("E", {"a": 3})(3)], ids=repr
)
def test_a_step_is_an_int(step):
    assert check_step(step) == 3
    assert type(check_step(step)) is int


@pytest.mark.parametrize(
    "step",
    [-1, 2.5, 3.0, "3", None, True, np.bool_(True), np.array([3]), jnp.ones((), bool), jnp.float32(3), 2**63, [3], (), 10**5000],
    ids=lambda step: repr(step)[:20] if not isinstance(step, int) or abs(step) < 2**64 else "huge",
)
def test_what_is_no_step_is_refused(step):
    with pytest.raises(ConfigError, match="step must be the number of completed steps, an int >= 0") as caught:
        check_step(step)
    assert caught.value.field == "step"
    assert caught.value.got in str(caught.value)


def test_a_step_whose_array_was_donated_is_refused():
    with pytest.raises(ConfigError, match=r"jax.Array int32\[\]"):
        check_step(donated(jnp.int32(3)))


# ---------------------------------------------------------------- metrics


def test_metrics_are_numbers_and_arrays_of_shape_0():
    running = jnp.float32(0.5)
    given = {
        "loss": 0.25,
        "n": 3,
        "ok": True,
        "numpy": np.float32(1.5),
        "array": np.array(2),
        "bf16": ml_dtypes.bfloat16(1.5),
        "nan": math.nan,
        "größe/b": -math.inf,
        "jax": running,
        "bits": jnp.ones((), bool),
    }
    checked = check_metrics(given)
    assert checked is not given
    assert checked["jax"] is running
    assert [checked[name] for name in ("loss", "n", "ok", "numpy", "array", "bf16")] == [0.25, 3.0, 1.0, 1.5, 2.0, 1.5]
    assert {type(checked[name]) for name in ("loss", "n", "ok", "numpy", "array", "bf16", "nan")} == {float}
    assert check_metrics(None) == {} == check_metrics({})


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("text", "'text' is no number"),
        (None, "None is no number"),
        (1j, "builtins.complex|a complex is no number"),
        (np.complex64(1), "is no number"),
        (jnp.complex64(1), r"jax.Array complex64\[\] is no number"),
        (np.ones(1), r"numpy.ndarray float64\[1\] is no number"),
        (jnp.ones((2, 3)), r"jax.Array float32\[2, 3\] is no number"),
        (jax.random.key(0), "is no number"),
        (np.array("x"), "is no number"),
        (np.datetime64("2020-01-01"), "is no number"),
        ([1.0], "a list is no number"),
        (10**400, "larger than any float"),
        (10**5000, "larger than any float"),
        (float, "a type is no number"),
    ],
    ids=lambda value: str(type(value)),
)
def test_what_is_no_metric_is_refused_and_pointed_to_custom(value, what):
    with pytest.raises(ConfigError, match=what) as caught:
        check_metrics({"loss": 1.0, "bad one": value})
    assert (caught.value.field, caught.value.path) == ("metrics", "bad one")
    assert "bad one" in str(caught.value)
    assert "`custom`" in str(caught.value)


@pytest.mark.parametrize(
    "metrics", [[("loss", 1.0)], "loss", 3, 0, "", [], {1: 2.0}, {"": 2.0}, {"a\ud800": 2.0}, {None: 1.0}], ids=repr
)
def test_metrics_have_names(metrics):
    with pytest.raises(ConfigError, match="metrics") as caught:
        check_metrics(metrics)
    assert caught.value.field == "metrics"
    str(caught.value).encode()


def test_a_donated_metric_is_refused_but_may_be_donated_after_the_save():
    with pytest.raises(ConfigError, match="metrics, loss: it was donated"):
        check_metrics({"loss": donated(jnp.float32(3))})
    loss = jnp.float32(0.5)
    held = hold_metrics(check_metrics({"loss": loss, "n": 3}))
    donated(loss)
    assert {name: float(np.asarray(value)) for name, value in held.items()} == {"loss": 0.5, "n": 3.0}


def test_a_traced_metric_is_refused():
    with pytest.raises(ConfigError, match="inside jit"):
        jax.jit(lambda x: check_metrics({"loss": x}) and 1)(1.0)


def test_a_metric_that_is_still_computing_is_not_waited_for():
    @jax.jit
    def slow(x, passes):
        return jax.lax.fori_loop(0, passes, lambda _, y: jnp.sin(y) + x, x).sum()

    slow(jnp.ones(1024), 1).block_until_ready()
    passes, ahead = 1000, False
    while not ahead:  # however fast the machine
        value = slow(jnp.ones(1024), passes)
        held = hold_metrics(check_metrics({"loss": value}))
        ahead = not value.is_ready()
        assert float(np.asarray(held["loss"])) == float(value)
        passes *= 4
        assert passes < 10**7, "it waited each time"


# ---------------------------------------------------------------- custom


def test_custom_is_a_copy():
    custom = {
        "a": [1, (2.5, None)],
        "b": {"c": True},
        "n": np.int32(3),
        "x": np.float32(0.5),
        "t": np.str_("é😀"),
        "big": 2**200,
        "": "",
    }
    checked = check_custom(custom)
    assert checked == {"a": [1, [2.5, None]], "b": {"c": True}, "n": 3, "x": 0.5, "t": "é😀", "big": 2**200, "": ""}
    assert {type(checked[name]) for name in ("n", "x", "t")} == {int, float, str}
    custom["b"]["c"] = False
    assert checked["b"]["c"] is True
    assert check_custom(None) is None
    assert math.isnan(json.loads(json.dumps(check_custom([math.nan])))[0])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)


@given(JSON)
def test_json_comes_back_equal(value):
    assert json.loads(json.dumps(check_custom(value))) == value


@pytest.mark.parametrize(
    ("value", "where", "what"),
    [
        ({"a": {1, 2}}, "a", "sorted"),
        ({"a": [0, {"b": b"x"}]}, "a/1/b", "decode"),
        ({"a": {1: 2}}, "a", r"the key 1 is not a string.*str\(key\)"),
        ({"a": np.longdouble(1)}, "a", "is not JSON"),
        ({"a": np.datetime64("2020-01-01")}, "a", "is not JSON"),
        ({"a": 1j}, "a", "complex is not JSON"),
        ({"a": dict}, "a", "use its name"),
        ({"a": object()}, "a", "object is not JSON; "),
        ({"a": "x\ud800"}, "a", "lone surrogate"),
        ({"\udfff": 1}, "the value itself", "lone surrogate"),
        ({"a": 10**5000}, "a", "bits can't be written"),
        (nested(DEEP, lambda x: [x]), None, "more than 100 levels"),
        (nested(100_000, lambda x: {"a": x}), None, "more than 100 levels"),
    ],
    ids=lambda value: str(type(value)) if not isinstance(value, str) else value[:12].encode("ascii", "replace").decode(),
)
def test_what_is_not_json_is_refused(value, where, what):
    with pytest.raises(ConfigError, match=what) as caught:
        check_custom(value)
    assert caught.value.field == "custom"
    assert where is None or caught.value.path == where
    str(caught.value).encode()
    with pytest.raises(ConfigError, match=what) as caught:  # items are no less strict
        pack_items({"thing": {"below": value, "deep": [value]}}, process_index=1)
    assert (caught.value.field, caught.value.item) == ("items", "thing")
    str(caught.value).encode()


@pytest.mark.parametrize("value", [jnp.ones(2), np.ones(())], ids=["jax", "numpy"])
def test_an_array_in_custom_is_pointed_to_items(value):
    with pytest.raises(ConfigError, match=r"custom, a/0: .* is not JSON; use float\(x\).*item"):
        check_custom({"a": [value]})
    assert list(pack_items({"thing": {"a": [value]}}, process_index=0).trees) == ["thing"]


def test_a_container_that_holds_itself_is_refused():
    circle: dict = {}
    circle["a"] = [circle]
    with pytest.raises(ConfigError, match="contains itself"):
        check_custom(circle)
    with pytest.raises(ConfigError, match="may hold itself"):
        describe({"state": circle})
    with pytest.raises(ConfigError, match=r"item 'thing'.*contains itself"):
        pack_items({"thing": circle}, process_index=0)


def test_100_levels_are_fine():
    value = nested(DEEP - 1, lambda x: [x])
    assert check_custom(value) == value


# ---------------------------------------------------------------- items


@pytest.mark.parametrize("items", [["data"], "data", 3, [("data", 1)], 0, ""], ids=repr)
def test_items_are_a_dict(items):
    with pytest.raises(ConfigError, match="items must be a dict") as caught:
        pack_items(items, process_index=0)
    assert caught.value.field == "items"


@pytest.mark.parametrize(
    "name",
    ["state", "metrics", "", ".hidden", "a/b", "_x", 3, "x" * 201, "a\n", "ä", "a b", "commit_success.txt", None, "\ud800", b"x", ("a",)],
    ids=ascii,
)  # fmt: skip
def test_an_item_is_called_as_a_folder_can_be(name):
    with pytest.raises(ConfigError, match="can't be called") as caught:
        pack_items({name: 1}, process_index=0)
    assert caught.value.field == "items"
    str(caught.value).encode()


def test_an_array_is_told_by_its_public_name():
    with pytest.raises(ConfigError, match=r"w: can't save a jax\.Array: dtype uint4 has no form in a checkpoint"):
        describe({"state": {"w": jnp.zeros(4, "uint4")}}, process_index=0)


class Iterator:
    def __init__(self, state):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    "state", ["\ud800", {1j: 2}, nested(DEEP, lambda x: [x]), object(), np.ones(3, object)], ids=lambda v: ascii(v)[:12]
)
def test_an_iterators_state_is_checked_as_strictly(state):
    with pytest.raises(ConfigError, match="the state of iterator 'data'") as caught:
        pack_items({"data": Iterator(state)}, process_index=3)
    assert (caught.value.field, caught.value.item) == ("items", "data")
    str(caught.value).encode()


def test_a_class_in_place_of_a_value_is_refused():
    with pytest.raises(ConfigError, match=r"item 'data': it is the class Iterator itself.*Iterator\(\)\?"):
        pack_items({"data": Iterator}, process_index=0)
    with pytest.raises(ConfigError, match=r"'state', a/0: it is the class Iterator itself.*Iterator\(\)\?") as caught:
        describe({"state": {"a": [Iterator], "b": np.ones(1)}})
    assert (caught.value.field, caught.value.path) == ("state", "a/0")


# ---------------------------------------------------------------- state and trees


class Plain:
    """Hashable; its text is another one in each process."""

    def __lt__(self, other):
        return id(self) < id(other)


@pytest.mark.parametrize(
    ("tree", "path", "what"),
    [
        ({"a": {"": np.ones(1)}}, "a", "empty key"),
        ({"": np.ones(1)}, "(the tree itself)", "empty key"),
        ({"a": {"b\ud800": np.ones(1)}}, "a", "lone surrogate"),
        ({"a": [{"b": "t\udc00"}], "c": np.ones(1)}, "a/0/b", "lone surrogate"),
        ({"a": {"b/": np.ones(1)}}, "a/b/", "can't end with '/'"),
        ({"/": 3}, "/", "can't end with '/'"),
        ({"a": {"~x": "text"}}, "a/~x", "can't have a '~'"),
        ({"a": "text", "a/b": "text"}, "a/b", "can't both be kept"),
        ({"x" * 60_001: np.ones(1)}, "(the tree itself)", "60001 bytes"),
        ({1: np.ones(1), "1": np.ones(1)}, "(the tree itself)", "sortable"),
        ({"a": [{None: 1, "b": 2}]}, "a/0", "sortable"),
        (nested(DEEP, lambda x: {"a": x}), "a/a/a", "101 levels deep"),
        ({"a": np.ma.masked_array([1, 2], np.array([False, True]))}, "a", "mask"),
        ({"a": 10**5000}, "a", "64 bits"),
    ],
    ids=lambda value: value[:14] if isinstance(value, str) else "",
)
@pytest.mark.parametrize("item", ["state", "ema"])
def test_leaves_that_cannot_be_written_are_named(tree, path, what, item):
    with pytest.raises(ConfigError, match=what) as caught:
        describe({"state": {"w": np.ones(1)}, item: tree})
    assert (caught.value.item, caught.value.path) == (item, path)
    assert caught.value.field == ("state" if item == "state" else "items")
    str(caught.value).encode()


def test_a_tree_without_end_is_refused():
    with pytest.raises(ConfigError, match=r"flatten|5000 levels deep"):  # by jax, or where it can do it
        describe({"state": nested(5000, lambda x: [x])})


def test_a_key_without_a_text_of_its_own_is_refused():
    with pytest.raises(ConfigError, match="a dict key of type Plain has no name"):
        describe({"state": {Plain(): np.ones(1)}})


@pytest.mark.parametrize(
    "key", ["a", 3, -1, True, (1, "b"), 1.5, np.int64(3), "mlp/~/linear_0", "a.b", ".", "..", "é\0", "a~"], ids=ascii
)
def test_keys_with_a_text_of_their_own_are_kept(key):
    described = describe({"state": {"x": {key: np.ones(1)}, "y": {key: {"w": 3}}}})
    assert [leaf.path for leaf in described.layout.trees[0].leaves] == [("x", str(key)), ("y", str(key), "w")]


@pytest.mark.parametrize("make", [lambda: jnp.ones(8), lambda: jax.random.key(1)], ids=["array", "PRNG key"])
@pytest.mark.parametrize("item", ["state", "ema"])
def test_a_donated_array_is_refused_at_every_call(make, item):
    def trees(value):
        return {"state": {"w": np.ones(1)}, item: {"a": [value], "s": 3}}

    plan = describe(trees(make())).plan
    array = make()
    jax.block_until_ready(jax.jit(lambda x: (x, 1), donate_argnums=0)(array))
    if not array.is_deleted():
        array.delete()
    for previous in (None, plan):
        with pytest.raises(ConfigError, match=r"a/0: .*donated.*newest state") as caught:
            describe(trees(array), previous=previous)
        assert (caught.value.item, caught.value.path) == (item, "a/0")
        assert caught.value.field == ("state" if item == "state" else "items")
    assert describe(trees(make()), previous=plan).plan is plan


def test_a_string_is_checked_at_every_call():
    plan = describe({"state": {"name": "run", "w": np.ones(1)}}).plan
    assert describe({"state": {"name": "löwe", "w": np.ones(1)}}, previous=plan).plan is plan
    with pytest.raises(ConfigError, match="lone surrogate"):
        describe({"state": {"name": "r\ud800", "w": np.ones(1)}}, previous=plan)
