"""The model: a small decoder-only transformer over bytes, in Flax NNX.

Every matrix is split over both mesh axes, ("data", "model"): over "model" as in tensor parallelism, over "data" so that no device
holds a whole copy. The layers are one stack, so that the compiler sees a single layer whatever the depth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jobs.lm.config import ModelConfig

VOCABULARY = 256
_PRIMES = (0, 0, 1_000_003, 2_654_435, 40_503_001, 97_531_007, 122_949_823)  # by n-gram length, for the hash

Tree = Any  # nested dicts of arrays
Place = Callable[..., jax.Array]  # (array, *mesh axes) -> the same array, laid out so


def anywhere(array: jax.Array, *_axes: Any) -> jax.Array:
    """The `Place` of a single device."""
    return array


def _split(stddev: float, *axes: str | tuple[str, ...] | None) -> Any:
    return nnx.with_partitioning(nnx.initializers.normal(stddev), axes)


class Block(nnx.Module):
    """Attention and a gated feed-forward layer, each before-normalized and added."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d, ff = config.d_model, config.d_ff
        self.heads = config.n_heads
        inner, outer = d**-0.5, (2 * config.n_layers * d) ** -0.5
        key = rngs.params
        self.attention_scale = nnx.Param(jnp.ones(d))
        self.qkv = nnx.Param(_split(inner, "data", None, "model")(key(), (d, 3, d)))
        self.attention_out = nnx.Param(_split(outer, "model", "data")(key(), (d, d)))
        self.feed_scale = nnx.Param(jnp.ones(d))
        self.feed_in = nnx.Param(_split(inner, "data", None, "model")(key(), (d, 2, ff)))
        self.feed_out = nnx.Param(_split(outer, "model", "data")(key(), (ff, d)))

    def __call__(self, x: jax.Array, rotation: jax.Array) -> jax.Array:
        """x: [batch, time, d]; rotation: [time, d / heads / 2, 2], cosine and sine."""
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dce->btce", _normalize(x, self.attention_scale[...]), self.qkv[...]), 2, 0)
        q, k, v = (a.reshape(*a.shape[:2], self.heads, -1) for a in (q, k, v))
        mixed = jax.nn.dot_product_attention(_rotate(q, rotation), _rotate(k, rotation), v, is_causal=True)
        x = x + mixed.reshape(x.shape) @ self.attention_out[...]
        gate, up = jnp.moveaxis(jnp.einsum("btd,dce->btce", _normalize(x, self.feed_scale[...]), self.feed_in[...]), 2, 0)
        return x + (jax.nn.silu(gate) * up) @ self.feed_out[...]


class ByteLM(nnx.Module):
    """Logits of the next byte. The byte embedding is tied to the output."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d = config.d_model
        self.buckets = config.ngram_buckets
        self.embedding = nnx.Param(_split(d**-0.5, "model", "data")(rngs.params(), (VOCABULARY, d)))
        # Split over features, not rows: each device then looks up its own features of any row.
        self.longest = config.ngram
        for n in range(2, self.longest + 1):
            table = nnx.Param(_split(d**-0.5, None, ("model", "data"))(rngs.params(), (config.ngram_buckets, d)))
            setattr(self, f"ngram_{n}", table)
        self.final_scale = nnx.Param(jnp.ones(d))

        @nnx.split_rngs(splits=config.n_layers)
        @nnx.vmap(in_axes=0, out_axes=0, axis_size=config.n_layers, transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.blocks = stack(rngs)

    def __call__(self, tokens: jax.Array, place: Place) -> jax.Array:
        """tokens: int32 [batch, time] -> float32 [batch, time, 256]."""
        embedding = self.embedding[...]
        scale = embedding.shape[1] ** 0.5
        x = place(embedding, None, None)[tokens]
        for n in range(2, self.longest + 1):
            found = getattr(self, f"ngram_{n}")[...][_ngram_bucket(place(tokens, None, None), n, self.buckets)]
            # In two moves (an exchange over "data", then a gather over "model"); in one, the compiler would copy it everywhere.
            x = x + place(place(found, None, None, ("model", "data")), "data", None, "model")
        x = place(x * scale, "data", None, None)
        rotation = _rotation(tokens.shape[1], embedding.shape[1] // self.blocks.heads)
        graph, layers = nnx.split(self.blocks)

        def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            return place(nnx.merge(graph, params)(x, rotation), "data", None, None), None

        x, _ = jax.lax.scan(layer, x, layers)
        return _normalize(x, self.final_scale[...]) @ embedding.T


def _normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _rotation(length: int, features: int) -> jax.Array:
    frequency = 10_000.0 ** (-jnp.arange(0, features, 2) / features)
    angle = jnp.arange(length)[:, None] * frequency
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def _rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Rotary position: x [batch, time, heads, features]."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = rotation[:, None, :, 0], rotation[:, None, :, 1]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _ngram_bucket(tokens: jax.Array, n: int, buckets: int) -> jax.Array:
    """Row of the table for the n bytes that end at each position; bytes before the beginning count as 0."""
    code = tokens.astype(jnp.uint32)
    for back in range(1, n):
        earlier = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]
        code = code * jnp.uint32(_PRIMES[n]) + earlier.astype(jnp.uint32) + jnp.uint32(1)
    code = (code ^ (code >> 15)) * jnp.uint32(2_246_822_519)
    return ((code ^ (code >> 13)) % jnp.uint32(buckets)).astype(jnp.int32)


# ---------------------------------------------------------------- as plain trees


def init_params(config: ModelConfig, seed: int) -> Tree:
    """Fresh parameters as nested dicts. Meant to run inside `jax.jit`, which then places them."""
    with nnx.use_eager_sharding(False):
        return nnx.to_pure_dict(nnx.state(ByteLM(config, rngs=nnx.Rngs(params=seed)), nnx.Param))


def abstract_model(config: ModelConfig) -> tuple[Any, Tree, Tree]:
    """Without computing anything: the graph, the shapes, and the `PartitionSpec`s; the trees are like `init_params`'s."""
    with nnx.use_eager_sharding(False):
        graph, params = nnx.split(nnx.eval_shape(lambda: ByteLM(config, rngs=nnx.Rngs(params=0))), nnx.Param)
    return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(nnx.get_partition_spec(params))


def logits(graph: Any, params: Tree, tokens: jax.Array, place: Place = anywhere) -> jax.Array:
    """Apply the model as a pure function: int32 [batch, time] -> float32 [batch, time, 256]."""
    with nnx.use_eager_sharding(False):
        return nnx.merge(graph, params)(tokens, place)


def nats_per_byte(graph: Any, params: Tree, windows: jax.Array, place: Place = anywhere) -> jax.Array:
    """Cross-entropy of every byte but each window's first: uint8 [batch, time + 1] -> float32 [batch, time]."""
    tokens = windows.astype(jnp.int32)
    scores = place(logits(graph, params, tokens[:, :-1], place), "data", None, None)
    chosen = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - chosen
