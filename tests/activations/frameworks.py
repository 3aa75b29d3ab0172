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


class NnxNetwork(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(INPUTS, HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, OUTPUTS, rngs=rngs)

    def __call__(self, x):
        hidden = self.first(x)
        return hidden, self.second(jnp.tanh(hidden))


class EquinoxNetwork(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(INPUTS, HIDDEN, key=keys[0])
        self.second = eqx.nn.Linear(HIDDEN, OUTPUTS, key=keys[1])

    def __call__(self, x):
        hidden = self.first(x)
        return hidden, self.second(jnp.tanh(hidden))


def _jitted(run):
    """Compiled whole, which takes less time than to compile each operation."""
    return lambda model, params, x: jax.jit(functools.partial(run, model))(params, x)


@dataclasses.dataclass(frozen=True)
class Framework:
    """How to use a model.

    Attributes:
      make: the model.
      params: the model's parameters, a pytree with the same paths whether it is sparsified or not.
      run: runs a model with parameters on a batch.
      layers: names of the first and the second layer.
      layer_class: the class of both.
      second: the second layer by hand: parameters, inputs -> outputs.
    """

    make: Callable[[], Any]
    params: Callable[[Any], Any]
    run: Callable[[Any, Any, jax.Array], Any]
    layers: tuple[str, str]
    layer_class: type
    second: Callable[[Any, jax.Array], jax.Array]


X = jax.random.normal(jax.random.key(1), (5, INPUTS))


def _init(model):
    return model.init(jax.random.key(0), X)


def _dense(name, *, kernel='kernel', bias='bias', pick=lambda params: params):
    return lambda params, x: x @ pick(params)[name][kernel] + pick(params)[name][bias]


_inside = {'pick': lambda variables: variables['params']}
_linen = {
    'layers': ('Dense_0', 'Dense_1'),
    'layer_class': nn.Dense,
    'second': _dense('Dense_1', **_inside),
}
_haiku = {
    'layers': ('linear', 'linear_1'),
    'layer_class': hk.Linear,
    'second': _dense('linear_1', kernel='w', bias='b'),
}


def _array(variable):
    return jax.tree.leaves(variable)[0]


def _run_equinox(model, params, x):
    own, rest = eqx.partition(model, eqx.is_inexact_array)
    # Where layers are of another class, trees have the same leaves at the same paths, but not the same type.
    params = jax.tree.unflatten(jax.tree.structure(own), jax.tree.leaves(params))
    return jax.vmap(eqx.combine(params, rest))(x)


FRAMEWORKS = {
    'linen': Framework(
        LinenNetwork, _init, _jitted(lambda model, params, x: model.apply(params, x)), **_linen
    ),
    'function': Framework(
        lambda: LinenNetwork().apply,
        lambda apply: _init(LinenNetwork()),
        _jitted(lambda apply, params, x: apply(params, x)),
        **_linen,
    ),
    'haiku': Framework(
        lambda: hk.without_apply_rng(hk.transform(haiku_network)),
        _init,
        _jitted(lambda model, params, x: model.apply(params, x)),
        **_haiku,
    ),
    'nnx': Framework(
        NnxNetwork,
        lambda model: nnx.state(model, nnx.Param),
        _jitted(lambda model, params, x: nnx.merge(nnx.split(model)[0], params)(x)),
        ('first', 'second'),
        nnx.Linear,
        lambda params, x: x @ _array(params['second']['kernel']) + _array(params['second']['bias']),
    ),
    'equinox': Framework(
        EquinoxNetwork,
        lambda model: eqx.filter(model, eqx.is_inexact_array),
        _jitted(_run_equinox),
        ('first', 'second'),
        eqx.nn.Linear,
        lambda params, x: x @ params.second.weight.T + params.second.bias,
    ),
}
