"""A sample of generated text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jobs.lm import model as lm


def generate(graph: Any, params: Any, prompt: bytes, *, count: int, seq_len: int, temperature: float, seed: int) -> bytes:
    """Continue `prompt` by `count` bytes, on one device.

    Args:
        graph: the model's graph.
        params: whole parameters on one device.
        prompt: at least one byte; only its last seq_len bytes are read.
        count: bytes to generate.
        seq_len: bytes of context.
        temperature: 1 samples from the model's own distribution, less is more cautious.
        seed: of the choices.
    """
    prompt = prompt[-seq_len:]

    @jax.jit
    def run(params: Any, window: jax.Array) -> jax.Array:
        def pick(carry: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            window, filled = carry
            scores = lm.logits(graph, params, window[None])[0, filled - 1]
            byte = jax.random.categorical(jax.random.fold_in(jax.random.key(seed), number), scores / temperature).astype(jnp.int32)
            full = filled == seq_len
            window = jnp.where(full, jnp.roll(window, -1), window)
            at = jnp.where(full, seq_len - 1, filled)
            return (window.at[at].set(byte), at + 1), byte

        return jax.lax.scan(pick, (window, jnp.int32(len(prompt))), jnp.arange(count))[1]

    window = np.zeros(seq_len, np.int32)
    window[: len(prompt)] = np.frombuffer(prompt, np.uint8)
    return prompt + np.asarray(run(params, jnp.asarray(window))).astype(np.uint8).tobytes()
