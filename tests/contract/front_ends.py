"""The same two-layer model as each library keeps it: what is a pytree of arrays is a model.

A new front-end is one row of `FRONT_ENDS`: a function that makes `(params, apply)`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import FrozenDict

# 12 is no multiple of 8, so packed masks are padded; the last layer is 4 wide, so that 2:4 fits.
INPUTS, HIDDEN, OUTPUTS = 16, 12, 4

Made = tuple[Any, Callable[[Any, jax.Array], jax.Array]]


class Layers(NamedTuple):
    first: Any
    second: Any


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(INPUTS, HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, OUTPUTS, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def _arrays() -> dict[str, dict[str, jax.Array]]:
    return {
        'first': {'bias': jnp.zeros(HIDDEN), 'kernel': jnp.zeros((INPUTS, HIDDEN))},
        'second': {'bias': jnp.zeros(OUTPUTS), 'kernel': jnp.zeros((HIDDEN, OUTPUTS))},
    }


def _container(pack: Callable[[Any], Any], layers: Callable[[Any], Any]) -> Callable[[], Made]:
    """A plain container: `pack` makes it from the two layers, `layers` takes (kernel, bias) out of it twice."""

    def apply(params, x):
        (kernel_1, bias_1), (kernel_2, bias_2) = layers(params)
        return jnp.tanh(x @ kernel_1 + bias_1) @ kernel_2 + bias_2

    return lambda: (pack(_arrays()), apply)


def _by_name(params):
    return [(params[name]['kernel'], params[name]['bias']) for name in ('first', 'second')]


def _flat(arrays):
    return [arrays[name][kind] for name in ('first', 'second') for kind in ('kernel', 'bias')]


def _nnx() -> Made:
    graphdef, params = nnx.split(Network(nnx.Rngs(0)), nnx.Param)
    return params, lambda params, x: nnx.merge(graphdef, params)(x)


def _equinox() -> Made:
    # Weights are (out, in) here, and the filtered module has None where the model has functions.
    model = eqx.nn.MLP(INPUTS, OUTPUTS, HIDDEN, 1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return params, lambda params, x: jax.vmap(eqx.combine(params, static))(x)


def _haiku() -> Made:
    def forward(x):  # Haiku's modules live inside a transformed function alone
        return hk.nets.MLP([HIDDEN, OUTPUTS], activation=jnp.tanh)(x)

    model = hk.without_apply_rng(hk.transform(forward))
    return model.init(jax.random.key(0), jnp.zeros((1, INPUTS))), model.apply


FRONT_ENDS: dict[str, Callable[[], Made]] = {
    'dict': _container(dict, _by_name),
    'frozen_dict': _container(FrozenDict, _by_name),
    'list': _container(_flat, lambda p: [p[:2], p[2:]]),
    'tuple': _container(lambda a: tuple(_flat(a)), lambda p: [p[:2], p[2:]]),
    'named_tuple': _container(lambda a: Layers(**a), lambda p: _by_name(p._asdict())),
    'nnx': _nnx,
    'equinox': _equinox,
    'haiku': _haiku,
}


@functools.cache
def _made(name: str) -> Made:
    return FRONT_ENDS[name]()


def make(name: str, seed: int) -> Made:
    """The model with weights (biases, too) that differ from seed to seed."""
    params, apply = _made(name)
    random = np.random.default_rng(seed)
    values = jax.tree.map(
        lambda leaf: jnp.asarray(0.4 * random.normal(size=leaf.shape), leaf.dtype), params
    )
    return values, apply
