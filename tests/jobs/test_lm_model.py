"""The model and its step on 8 virtual devices: what is split, what is causal, what is equal to the last bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jobs.lm import model as lm
from jobs.lm import step as lm_step
from jobs.lm.config import Config, MeshConfig, UsageError, validate

CONFIG: Config = validate(
    {
        "model": {"d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 64, "ngram": 3, "ngram_buckets": 128},
        "data": {"seq_len": 16},
        "train": {"steps": 40, "warmup_steps": 4, "batch_size": 8, "learning_rate": 0.01, "mesh": {"model": 2}},
        "ray": {"num_workers": 1, "devices_per_worker": 8},
    }
)


def _batch(step: int) -> np.ndarray:
    text = b"def f(x):\n    return x + 1\n" * 40
    starts = np.random.default_rng(step).integers(0, len(text) - 17, 8)
    return np.stack([np.frombuffer(text[start : start + 17], np.uint8) for start in starts])


@pytest.fixture(scope="module")
def computation() -> lm_step.Computation:
    if jax.device_count() != 8:
        pytest.skip("needs 8 virtual devices")
    return lm_step.build(CONFIG, lm_step.make_mesh(CONFIG.train.mesh))


@pytest.fixture(scope="module")
def init(computation: lm_step.Computation) -> Any:
    return jax.jit(computation.init, out_shardings=computation.shardings(jax.eval_shape(computation.init)))


def _run(computation: lm_step.Computation, state: Any, steps: range) -> tuple[Any, list[float]]:
    losses = []
    for step in steps:
        state, loss = computation.step(state, computation.batch(_batch(step)))
        losses.append(float(loss))
    return state, losses


def test_matrices_and_their_moments_are_split_over_all_devices(computation: lm_step.Computation, init: Any) -> None:
    state = init()
    split = 0
    for path, leaf in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        held = leaf.addressable_shards[0].data.size
        if leaf.size > 1000:
            assert held * 8 == leaf.size, name
            split += 1
        elif "scale" in name or leaf.ndim == 0:
            assert held == leaf.size, name
    assert split == 3 * (3 + 4)  # parameters and two moments: three tables, four matrices of the layers
    stored = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert stored < 0.16 * sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    after, _ = computation.step(state, computation.batch(_batch(0)))
    expected = computation.shardings(jax.eval_shape(computation.init))
    assert jax.tree.leaves(jax.tree.map(lambda leaf: leaf.sharding, after)) == jax.tree.leaves(expected)


def test_abstract_state_is_what_init_gives(computation: lm_step.Computation, init: Any) -> None:
    state = init()
    assert jax.tree.structure(state) == jax.tree.structure(computation.abstract_state)
    for real, abstract in zip(jax.tree.leaves(state), jax.tree.leaves(computation.abstract_state), strict=True):
        assert (real.shape, real.dtype, real.sharding) == (abstract.shape, abstract.dtype, abstract.sharding)


@pytest.mark.long
def test_a_byte_depends_on_no_later_byte() -> None:
    graph, _, _ = lm.abstract_model(CONFIG.model)
    params = lm.init_params(CONFIG.model, 0)
    tokens = jnp.asarray(_batch(0)[:, :16], jnp.int32)
    changed = tokens.at[:, 9].set((tokens[:, 9] + 1) % 256)
    before, after = lm.logits(graph, params, tokens), lm.logits(graph, params, changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert jnp.all(jnp.any(before[:, 9:] != after[:, 9:], axis=-1))


def test_loss_falls(computation: lm_step.Computation, init: Any) -> None:
    _, losses = _run(computation, init(), range(25))
    assert abs(losses[0] - np.log(256)) < 1.5
    assert losses[-1] < 0.6 * losses[0]


def test_the_mesh_must_fit_the_devices() -> None:
    assert lm_step.make_mesh(MeshConfig(data=-1, model=4)).shape == {"data": 2, "model": 4}
    with pytest.raises(UsageError, match=r"train.mesh: data 3 × model 2 does not fit the 8 devices"):
        lm_step.make_mesh(MeshConfig(data=3, model=2))
    with pytest.raises(UsageError, match=r"train.batch_size=6 should be a multiple"):
        lm_step.local_rows(lm_step.make_mesh(MeshConfig(data=4, model=2)), 6)
