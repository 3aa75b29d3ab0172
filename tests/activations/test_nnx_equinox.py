"""What is particular to nnx and Equinox models."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from activations.frameworks import HIDDEN, INPUTS, X
from jaxpruner.activations import prune_act_unstruct, sparsify_activations, summarize_activations

KEY = jax.random.key(0)


def half(x):
    return prune_act_unstruct(x, 0.5)


def linear(seed=0):
    return nnx.Linear(INPUTS, INPUTS, rngs=nnx.Rngs(seed))


class Pair(NamedTuple):
    layer: Any
    function: Any


class Holder(nnx.Module):
    """Functions in fields and in containers."""

    def __init__(self):
        self.act = nnx.relu
        self.list = [jnp.tanh, abs]
        self.tuple = (jnp.tanh, 3)
        self.pair = Pair(jnp.sin, jnp.cos)
        self.dict = {'a': nnx.relu, 'b': jnp.tanh}

    def __call__(self, x):
        functions = (self.act, self.list[0], self.tuple[0], self.pair.function, self.dict['b'])
        return [function(x) for function in functions]


@pytest.mark.parametrize(
    ('where', 'pruned'),
    [
        (nnx.relu, [0]),
        (jnp.tanh, [1, 2, 4]),
        (['list/0', 'dict-b', 'pair/function'], [1, 3, 4]),
        ('*/0', [1, 2]),
    ],
)
def test_nnx_functions(where, pruned):
    model = Holder()
    dense = model(X)
    sparse = sparsify_activations(model, where, density=0.5)
    for i, (got, plain) in enumerate(zip(sparse(X), dense, strict=True)):
        np.testing.assert_array_equal(got, half(plain) if i in pruned else plain)
    for got, plain in zip(model(X), dense, strict=True):
        np.testing.assert_array_equal(got, plain)
    assert nnx.split(sparse)[0] == nnx.split(sparsify_activations(model, where, density=0.5))[0]
    with pytest.raises(ValueError, match=r"'pair/\*' matches no layer"):  # a glob means layers
        sparsify_activations(model, 'pair/*', density=0.5)


def test_nnx_shared_layers():
    class Tied(nnx.Module):
        def __init__(self):
            self.one = linear()
            self.two = self.one

        def __call__(self, x):
            return self.two(self.one(x))

    model = Tied()
    sparse = sparsify_activations(model, 'one', density=0.5)
    assert sparse.one is sparse.two
    assert isinstance(sparse.one, nnx.Linear)
    np.testing.assert_array_equal(sparse(X), half(model.one(half(model.one(X)))))


def test_equinox_mlp():
    model = eqx.nn.MLP(INPUTS, 2, HIDDEN, 2, activation=jax.nn.relu, key=KEY)
    sparse = sparsify_activations(model, 'layers/1', density=0.25, prune='inputs')
    hidden = jax.nn.relu(jax.vmap(model.layers[0])(X))
    second = jax.nn.relu(jax.vmap(model.layers[1])(prune_act_unstruct(hidden, 0.25)))
    expected = jax.vmap(model.layers[2])(second)
    np.testing.assert_allclose(jax.vmap(sparse)(X), expected, rtol=1e-5)
    # The activation sees one feature at a time: it can be counted, but there is nothing to choose among.
    report = summarize_activations(
        sparse, X, where=['activation', 'layers/0'], call=lambda model, x: jax.vmap(model)(x)
    )
    total = np.count_nonzero(hidden) + np.count_nonzero(second)
    assert report['activation'] == pytest.approx(1 - total / (2 * hidden.size))
    assert report['layers/0'] == 0
    with pytest.raises(ValueError, match=r"layer 'activation' returned no float array .*MLP"):
        sparsify_activations(model, 'activation', density=0.5)(X[0])


def test_an_equinox_layer_sees_one_example():
    model = eqx.nn.Sequential([eqx.nn.Conv1d(2, 4, 1, key=KEY)])
    pruned = sparsify_activations(model, 'layers/0', density=0.25)(jnp.ones((2, 8)))
    # Of equal numbers in each channel the largest quarter is one channel, not a quarter of each.
    assert sorted(np.count_nonzero(pruned, axis=1)) == [0, 0, 0, 8]


def test_equinox_state_is_no_activation():
    class Model(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __call__(self, x, state):
            return self.norm(x, state)

    def make():
        mode = {'mode': 'batch'} if 'mode' in eqx.nn.BatchNorm.__init__.__annotations__ else {}
        return Model(eqx.nn.BatchNorm(INPUTS, 'batch', **mode))

    model, state = eqx.nn.make_with_state(make)()
    sparse = sparsify_activations(model, 'norm', density=0.5)

    def run(model):
        return jax.vmap(model, axis_name='batch', in_axes=(0, None), out_axes=(0, None))(X, state)

    (dense, dense_state), (got, got_state) = run(model), run(sparse)
    np.testing.assert_array_equal(got, half(dense))
    for one, other in zip(jax.tree.leaves(got_state), jax.tree.leaves(dense_state), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('make', [linear, lambda: eqx.nn.Linear(2, 2, key=KEY)])
def test_a_model_without_layers_is_meant_by_its_class(make):
    with pytest.raises(ValueError, match='never means the model itself: name its class'):
        sparsify_activations(make(), '*', density=0.5)
    sparsify_activations(make(), type(make()), density=0.5)
    with pytest.raises(ValueError, match='matches no layer'):
        summarize_activations(make(), X[0], where=nnx.Embed)
