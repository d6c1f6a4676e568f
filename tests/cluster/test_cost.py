"""What saving costs the training: it doesn't wait for the computation, and it is right although the next step donates the state."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import raystate


@functools.partial(jax.jit, donate_argnums=0)
def _long_step(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 400, lambda _, y: jnp.sin(y) * 1.0001 + 1e-3, x)


@pytest.mark.long
def test_save_returns_while_the_step_is_still_computing(ray_cluster: Any, make_run: Any) -> None:
    run = make_run()
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1, keep_last=10)
    start = np.linspace(0.0, 1.0, 1 << 21, dtype=np.float32)
    expected = {}
    x = jnp.array(start)
    for step in range(1, 4):
        x = _long_step(x)
        expected[step] = np.asarray(x)
    still_computing = []
    with raystate.StateManager(config) as manager:
        manager.restore_or_init(lambda: {"x": jnp.array(start)})
        x = jnp.array(start)
        for step in range(1, 4):
            x = _long_step(x)  # donates what the save before was given
            manager.save(step, {"x": x})
            still_computing.append(not x.is_ready())
            manager.wait_until_finished()  # on a busy machine an earlier one would give way
    assert any(still_computing), "save waited for the computation each time"
    for step, value in expected.items():
        restored = raystate.Reader(run.storage).restore({"x": np.empty_like(start)}, step)
        assert restored.state["x"].tobytes() == value.tobytes()


@pytest.mark.long
def test_steps_of_milliseconds_keep_every_promise(ray_cluster: Any, make_run: Any) -> None:
    """Steps come faster than slots can come back: each that save() called durable is, and the last one too."""
    run = make_run()
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=4, keep_last=100)
    promised: list[int] = []
    with raystate.StateManager(config) as manager:
        manager.restore_or_init(lambda: {"x": jnp.zeros(1 << 20)})
        for step in range(1, 51):
            if manager.save(step, {"x": jnp.full(1 << 20, step, jnp.float32)}):
                promised.append(step)
    assert promised == list(range(4, 51, 4))
    assert set(raystate.Reader(run.storage).all_steps()) >= {*promised, 50}
