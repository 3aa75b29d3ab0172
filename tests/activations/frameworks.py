"""One two-layer model in each framework, which returns what its first layer returns as well.

A new framework is one row of `FRAMEWORKS`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

INPUTS, HIDDEN, OUTPUTS = 6, 8, 4


class LinenNetwork(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.Dense(HIDDEN)(x)
        return hidden, nn.Dense(OUTPUTS)(jnp.tanh(hidden))


def haiku_network(x):
    hidden = hk.Linear(HIDDEN)(x)
    return hidden, hk.Linear(OUTPUTS)(jnp.tanh(hidden))


def through_both(self, x):
    hidden = self.first(x)
    return hidden, self.second(jnp.tanh(hidden))


class NnxNetwork(nnx.Module):
    __call__ = through_both

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(INPUTS, HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, OUTPUTS, rngs=rngs)


class EquinoxNetwork(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    __call__ = through_both

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(INPUTS, HIDDEN, key=keys[0])
        self.second = eqx.nn.Linear(HIDDEN, OUTPUTS, key=keys[1])


@dataclasses.dataclass(frozen=True)
class Framework:
    """How to use a model.

    Attributes:
      make: the model.
      params: the model's parameters, a pytree with the same paths whether it is sparsified or not.
      apply: runs a model with parameters on a batch.
      layers: names of the first and the second layer.
      layer_class: the class of both.
    """

    make: Callable[[], Any]
    params: Callable[[Any], Any]
    apply: Callable[[Any, Any, jax.Array], Any]
    layers: tuple[str, str]
    layer_class: type

    def run(self, model, params, x):
        """Compiled whole, which takes less time than to compile each operation."""
        return jax.jit(functools.partial(self.apply, model))(params, x)


X = jax.random.normal(jax.random.key(1), (5, INPUTS))


def second_layer(params, x):
    """The second layer by hand: its arrays are known by their shapes, and Equinox keeps weights as (out, in)."""
    leaves = {leaf.shape: leaf for leaf in jax.tree.leaves(params)}
    is_turned = (OUTPUTS, HIDDEN) in leaves
    kernel = leaves[OUTPUTS, HIDDEN].T if is_turned else leaves[HIDDEN, OUTPUTS]
    return x @ kernel + leaves[OUTPUTS,]


def _init(model):
    return model.init(jax.random.key(0), X)


def _apply(model, params, x):
    return model.apply(params, x)


def _apply_equinox(model, params, x):
    own, rest = eqx.partition(model, eqx.is_inexact_array)
    # Where layers are of another class, trees have the same leaves at the same paths, but not the same type.
    params = jax.tree.unflatten(jax.tree.structure(own), jax.tree.leaves(params))
    return jax.vmap(eqx.combine(params, rest))(x)


FRAMEWORKS = {
    'linen': Framework(LinenNetwork, _init, _apply, ('Dense_0', 'Dense_1'), nn.Dense),
    'function': Framework(
        lambda: LinenNetwork().apply,
        lambda apply: _init(LinenNetwork()),
        lambda apply, params, x: apply(params, x),
        ('Dense_0', 'Dense_1'),
        nn.Dense,
    ),
    'haiku': Framework(
        lambda: hk.without_apply_rng(hk.transform(haiku_network)),
        _init,
        _apply,
        ('linear', 'linear_1'),
        hk.Linear,
    ),
    'nnx': Framework(
        NnxNetwork,
        lambda model: nnx.state(model, nnx.Param),
        lambda model, params, x: nnx.merge(nnx.split(model)[0], params)(x),
        ('first', 'second'),
        nnx.Linear,
    ),
    'equinox': Framework(
        EquinoxNetwork,
        lambda model: eqx.filter(model, eqx.is_inexact_array),
        _apply_equinox,
        ('first', 'second'),
        eqx.nn.Linear,
    ),
}
