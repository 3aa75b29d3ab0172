"""Models of Flax NNX for the table of uses."""

import jax
import jax.numpy as jnp
from flax import nnx

from uses.table import ATTENTION, BIAS, REST, Model, floats, stacked


def _model(make_module, *inputs):
    def make():
        module = nnx.eval_shape(lambda: make_module(rngs=nnx.Rngs(0)))
        graphdef, params, rest = nnx.split(module, (nnx.Param, nnx.BatchStat), ...)
        # Keys of random numbers and the like are no parameters; none of these models uses them.
        rest = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if leaf.dtype != 'key<fry>' else leaf,
            rest,
        )

        def apply_fn(params, *inputs):
            return nnx.merge(graphdef, params, rest)(*inputs)

        return apply_fn, params, inputs

    return make


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Scanned(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return Block(rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def through(x, layer):
            return layer(x)

        return through(x, self.layers)


class LoRA(nnx.Module):
    def __init__(self, rngs):
        self.lora = nnx.LoRALinear(3, 4, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.lora(x)


MODELS = {
    'scanned': Model(_model(Scanned, floats(2, 6, 8)), stacked({**ATTENTION, **REST})),
    'lora': Model(_model(LoRA, floats(2, 3)), {'*/bias': BIAS, '*': 'dot 0>1'}),
}
