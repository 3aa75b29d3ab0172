"""T5 1.1 in flax nnx: an encoder and a decoder of pre-normalised blocks with relative positions.

As in T5 1.1: RMSNorm, no biases, gated GELU, attention scores that are not divided by the square
root of the width, and an output layer that is not tied to the embedding. No dropout, as in its
pre-training.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

FAN_IN = nnx.initializers.variance_scaling(1.0, 'fan_in', 'normal')
MASKED = -1e9  # added to scores of positions that may not be seen


class Sizes(NamedTuple):
    """The sizes of the model; the defaults are those of T5 1.1 Base (248 million parameters)."""

    vocabulary: int = 32_128
    width: int = 768  # of the residual stream
    heads: int = 12
    head_width: int = 64
    mlp_width: int = 2_048
    layers: int = 12  # of the encoder, and as many of the decoder
    buckets: int = 32  # of relative positions
    distance: int = 128  # from which on all positions share a bucket


class T5(nnx.Module):
    """The model: tokens that are given and tokens so far, to logits of the next token."""

    def __init__(self, sizes: Sizes, dtype: DTypeLike = jnp.float32, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(1.0)
        layers = _Layers(dtype, rngs)
        self.embedding = nnx.Embed(
            sizes.vocabulary, sizes.width, dtype=dtype, embedding_init=init, rngs=rngs
        )
        self.encoder = Stack(sizes, layers, is_decoder=False)
        self.decoder = Stack(sizes, layers, is_decoder=True)
        self.head = layers.linear(sizes.width, sizes.vocabulary)

    def __call__(self, inputs: jax.Array, targets_so_far: jax.Array) -> jax.Array:
        """Logits of each target, float32[batch, target length, vocabulary]; both are int tokens."""
        encoded = self.encoder(self.embedding(inputs))
        decoded = self.decoder(self.embedding(targets_so_far), encoded)
        return self.head(decoded).astype(jnp.float32)


class _Layers(NamedTuple):
    """Makes the layers of a model: all compute in one dtype and draw from the same numbers."""

    dtype: DTypeLike
    rngs: nnx.Rngs

    def linear(self, inputs: int, outputs: int, init: nnx.Initializer = FAN_IN) -> nnx.Linear:
        return nnx.Linear(
            inputs, outputs, use_bias=False, dtype=self.dtype, kernel_init=init, rngs=self.rngs
        )

    def norm(self, width: int) -> nnx.RMSNorm:
        return nnx.RMSNorm(width, dtype=self.dtype, rngs=self.rngs)


class Stack(nnx.Module):
    """The encoder, or the decoder: blocks that share one relative position bias."""

    def __init__(self, sizes: Sizes, layers: _Layers, is_decoder: bool):
        self.is_decoder = is_decoder
        self.buckets = sizes.buckets
        self.distance = sizes.distance
        self.position_bias = nnx.Embed(
            sizes.buckets, sizes.heads, embedding_init=FAN_IN, rngs=layers.rngs
        )
        self.layers = sizes.layers
        for number in range(sizes.layers):
            block = Block(sizes, layers, is_decoder)
            setattr(self, f'block{number + 1}', block)
        self.norm = layers.norm(sizes.width)

    def __call__(self, hidden: jax.Array, encoded: jax.Array | None = None) -> jax.Array:
        """Runs the blocks."""
        length = hidden.shape[1]
        positions = position_buckets(length, not self.is_decoder, self.buckets, self.distance)
        bias = self.position_bias(jnp.asarray(positions)).transpose(2, 0, 1)
        if self.is_decoder:
            is_seen = jnp.tri(length, dtype=bool)
            bias += jnp.where(is_seen, 0.0, MASKED)
        for number in range(self.layers):
            block = getattr(self, f'block{number + 1}')
            hidden = block(hidden, bias, encoded)
        return self.norm(hidden)


class Block(nnx.Module):
    """Self-attention, in the decoder attention to what was encoded, and a gated MLP."""

    def __init__(self, sizes: Sizes, layers: _Layers, is_decoder: bool):
        self.attention = Attention(sizes, layers)
        self.attention_norm = layers.norm(sizes.width)
        if is_decoder:
            self.cross_attention = Attention(sizes, layers)
            self.cross_attention_norm = layers.norm(sizes.width)
        self.gate = layers.linear(sizes.width, sizes.mlp_width)
        self.up = layers.linear(sizes.width, sizes.mlp_width)
        self.down = layers.linear(sizes.mlp_width, sizes.width)
        self.mlp_norm = layers.norm(sizes.width)

    def __call__(
        self, hidden: jax.Array, bias: jax.Array, encoded: jax.Array | None = None
    ) -> jax.Array:
        """Adds to the residual stream."""
        normed = self.attention_norm(hidden)
        hidden += self.attention(normed, normed, bias)
        if encoded is not None:
            normed = self.cross_attention_norm(hidden)
            hidden += self.cross_attention(normed, encoded)
        normed = self.mlp_norm(hidden)
        gated = nnx.gelu(self.gate(normed)) * self.up(normed)
        return hidden + self.down(gated)


class Attention(nnx.Module):
    """Attention of several heads."""

    def __init__(self, sizes: Sizes, layers: _Layers):
        joined = sizes.heads * sizes.head_width
        self.heads = sizes.heads
        self.dtype = layers.dtype
        # What other models divide the scores by is in the initial query instead.
        narrow = nnx.initializers.variance_scaling(1 / sizes.head_width, 'fan_in', 'normal')
        self.query = layers.linear(sizes.width, joined, narrow)
        self.key = layers.linear(sizes.width, joined)
        self.value = layers.linear(sizes.width, joined)
        self.out = layers.linear(joined, sizes.width)

    def __call__(
        self, queries: jax.Array, seen: jax.Array, bias: jax.Array | None = None
    ) -> jax.Array:
        """Attends from queries [batch, length, width] to `seen` [batch, seen length, width].

        `bias` [heads, length, seen length] is added to the scores.
        """

        def split(joined):
            return joined.reshape(*joined.shape[:2], self.heads, -1)

        query = split(self.query(queries))
        key = split(self.key(seen))
        value = split(self.value(seen))
        scores = jnp.einsum('bqhd,bkhd->bhqk', query, key).astype(jnp.float32)
        if bias is not None:
            scores += bias
        weights = jax.nn.softmax(scores).astype(self.dtype)
        attended = jnp.einsum('bhqk,bkhd->bqhd', weights, value)
        joined = attended.reshape(*attended.shape[:2], -1)
        return self.out(joined)


def position_buckets(length: int, bidirectional: bool, buckets: int, distance: int) -> np.ndarray:
    """The bucket of each pair of positions, int[length (query), length (key)].

    Near distances have a bucket each, farther ones share ever wider ones, the last one from
    `distance` on. Bidirectional, later positions have half of the buckets; else they share the
    first.

    >>> position_buckets(4, False, 32, 128)[3]
    array([3, 2, 1, 0])
    """
    positions = np.arange(length)
    relative = positions[None, :] - positions[:, None]
    if bidirectional:
        buckets //= 2
        away = np.abs(relative)
    else:
        away = np.maximum(-relative, 0)
    near = buckets // 2
    # In float32 and with its epsilon, as in T5: distances on an edge fall to the same side.
    epsilon = np.finfo(np.float32).eps
    scaled = np.maximum(away, 1).astype(np.float32) / near + epsilon
    ratio = np.log(scaled) / np.log(distance / near)
    beyond = (ratio * (buckets - near)).astype(int)
    far = np.minimum(near + beyond, buckets - 1)
    bucket = np.where(away < near, away, far)
    if bidirectional:
        bucket += buckets * (relative > 0)
    return bucket
