"""What is particular to nnx and Equinox models."""

import copy
import inspect
import pickle
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from activations.frameworks import HIDDEN, INPUTS, EquinoxNetwork, NnxNetwork, X
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
        ('act', [0]),
        (['list/0', 'dict-b', 'pair/*'], None),
        (['list/0', 'dict-b', 'pair/function'], [1, 3, 4]),
        ('tuple/0', [2]),
        ('*/0', [1, 2]),
    ],
)
def test_nnx_functions(where, pruned):
    model = Holder()
    if pruned is None:  # a glob for the last part means layers alone
        with pytest.raises(ValueError, match=r"'pair/\*' matches no layer"):
            sparsify_activations(model, where, density=0.5)
        return
    dense = model(X)
    sparse = sparsify_activations(model, where, density=0.5)
    for i, (got, wanted) in enumerate(zip(sparse(X), dense, strict=True)):
        np.testing.assert_array_equal(got, half(wanted) if i in pruned else wanted)
    for got, wanted in zip(model(X), dense, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert nnx.split(sparse)[0] == nnx.split(sparsify_activations(model, where, density=0.5))[0]


def test_nnx_sequential():
    model = nnx.Sequential(linear(), nnx.relu, linear(1))
    wanted = model.layers[2](half(nnx.relu(model.layers[0](X))))
    for where in (nnx.relu, 'layers/1'):
        sparse = sparsify_activations(model, where, density=0.5)
        np.testing.assert_allclose(sparse(X), wanted, rtol=1e-6)
        np.testing.assert_allclose(nnx.jit(lambda model, x: model(x))(sparse, X), wanted, rtol=1e-6)
        twice = sparsify_activations(sparse, where, density=0.25)
        assert summarize_activations(twice, X, where=where)['layers/1'] == pytest.approx(
            0.75, abs=0.1
        )


def test_nnx_shared_layers_and_isinstance():
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


def test_nnx_trains():
    sparse = sparsify_activations(NnxNetwork(), 'first', density=0.5)
    optimizer = nnx.Optimizer(sparse, optax.sgd(0.1), wrt=nnx.Param)
    takes_model = 'model' in inspect.signature(optimizer.update).parameters  # from flax 0.11 on

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda model: (model(X)[1] ** 2).mean())(model)
        optimizer.update(*((model, grads) if takes_model else (grads,)))
        return loss

    losses = [float(step(sparse, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(np.count_nonzero(sparse(X)[0], axis=1), HIDDEN // 2)


@pytest.mark.parametrize(
    ('make', 'base'), [(NnxNetwork, nnx.Linear), (EquinoxNetwork, eqx.nn.Linear)]
)
def test_models_made_alike_share_their_classes(make, base):
    model = make()
    one, other = (
        sparsify_activations(model, lambda name, layer: name == 'first', density=0.5)
        for _ in range(2)
    )
    assert type(one.first) is type(other.first)
    assert issubclass(type(one.first), base)
    assert type(one.second) is base
    assert type(sparsify_activations(model, 'first', density=0.25).first) is not type(one.first)
    assert type(copy.deepcopy(one).first) is type(one.first)


def test_equinox_compiles_once_for_models_made_alike():
    traces = []

    @eqx.filter_jit
    def run(model, x):
        traces.append(1)
        return jax.vmap(model)(x)

    model = EquinoxNetwork()
    for _ in range(2):
        got = run(sparsify_activations(model, 'first', density=0.5), X)
    assert len(traces) == 1
    np.testing.assert_array_equal(np.count_nonzero(got[0], axis=1), HIDDEN // 2)


def test_equinox_shares_arrays_and_differentiates():
    model = EquinoxNetwork()
    sparse = sparsify_activations(model, eqx.nn.Linear, density=0.5)
    assert sparse.first.weight is model.first.weight
    grads = eqx.filter_grad(lambda model: jax.vmap(model)(X)[0].sum())(sparse)
    np.testing.assert_allclose(grads.first.bias, np.count_nonzero(jax.vmap(sparse)(X)[0], axis=0))
    stepped = eqx.apply_updates(sparse, grads)
    assert type(stepped.first) is type(sparse.first)


class StaticFunction(eqx.Module):
    function: Any = eqx.field(static=True)
    layers: list

    def __call__(self, x):
        return self.function(self.layers[0](x))


def test_equinox_functions():
    x = X[0]
    model = StaticFunction(jax.nn.relu, [eqx.nn.Lambda(jnp.tanh)])
    for where, wanted in {
        'function': half(jax.nn.relu(jnp.tanh(x))),
        jax.nn.relu: half(jax.nn.relu(jnp.tanh(x))),
        'layers/0/fn': jax.nn.relu(half(jnp.tanh(x))),
        jnp.tanh: jax.nn.relu(half(jnp.tanh(x))),
        eqx.nn.Lambda: jax.nn.relu(half(jnp.tanh(x))),
    }.items():
        sparse = sparsify_activations(model, where, density=0.5)
        np.testing.assert_allclose(sparse(x), wanted, rtol=1e-6)
        np.testing.assert_allclose(eqx.filter_jit(sparse)(x), wanted, rtol=1e-6)
        assert hash(jax.tree.structure(sparse)) == hash(
            jax.tree.structure(sparsify_activations(model, where, density=0.5))
        )


def test_equinox_mlp():
    model = eqx.nn.MLP(INPUTS, 2, HIDDEN, 2, activation=jax.nn.relu, key=KEY)
    call = {'call': lambda model, x: jax.vmap(model)(x)}
    sparse = sparsify_activations(model, 'layers/1', density=0.25, prune='inputs')
    hidden = jax.nn.relu(jax.vmap(model.layers[0])(X))
    wanted = jax.nn.relu(jax.vmap(model.layers[1])(prune_act_unstruct(hidden, 0.25)))
    np.testing.assert_allclose(jax.vmap(sparse)(X), jax.vmap(model.layers[2])(wanted), rtol=1e-5)
    # The activation sees one feature at a time: it can be counted, but there is nothing to choose among.
    report = summarize_activations(sparse, X, where=['activation', 'layers/0'], **call)
    total = np.count_nonzero(hidden) + np.count_nonzero(wanted)
    assert report['activation'] == pytest.approx(1 - total / (2 * hidden.size))
    assert report['layers/0'] == 0
    with pytest.raises(ValueError, match=r"layer 'activation' returned no float array .*MLP"):
        sparsify_activations(model, 'activation', density=0.5)(X[0])


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


@pytest.mark.parametrize('make', [NnxNetwork, EquinoxNetwork])
def test_each_entry_has_to_match_at_once(make):
    with pytest.raises(
        ValueError, match="where: 'frist' matches no layer of the model; they are 'first', 'second'"
    ):
        sparsify_activations(make(), ['first', 'frist'], density=0.5)
    with pytest.raises(ValueError, match='Embed'):
        summarize_activations(make(), X, where=nnx.Embed)


@pytest.mark.parametrize(
    'make', [lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), lambda: eqx.nn.Linear(2, 2, key=KEY)]
)
def test_a_model_without_layers_is_meant_by_its_class(make):
    with pytest.raises(
        ValueError, match=r'there is none in it; .* never means the model itself: name its class'
    ):
        sparsify_activations(make(), '*', density=0.5)
    sparsify_activations(make(), type(make()), density=0.5)


@pytest.mark.parametrize('make', [NnxNetwork, EquinoxNetwork])
def test_a_result_is_copied_but_not_pickled(make):
    model = make()
    sparse = sparsify_activations(model, 'first', density=0.5)
    x = X[0] if make is EquinoxNetwork else X
    for one in (
        copy.copy(sparse),
        copy.deepcopy(sparse),
        *([nnx.clone(sparse)] if make is NnxNetwork else []),
    ):
        assert type(one.first) is type(sparse.first)
        np.testing.assert_array_equal(one(x)[0], sparse(x)[0])
    for copied in (copy.copy, copy.deepcopy):
        np.testing.assert_array_equal(copied(sparse.first)(x), sparse.first(x))
    for kept in (sparse, sparse.first):
        with pytest.raises(TypeError, match='cannot be pickled; pickle the original model'):
            pickle.dumps(kept)
