"""`sparsify_activations` and `summarize_activations` do the same in every framework."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from activations.frameworks import FRAMEWORKS, HIDDEN, X, second_layer
from jaxpruner import tree as tree_lib
from jaxpruner.activations import (
    prune_act_struct,
    prune_act_unstruct,
    sparsify_activations,
    summarize_activations,
)
from jaxpruner.sparsity_types import NByM


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    return FRAMEWORKS[request.param]


@pytest.fixture
def model(framework):
    return framework.make()


def as_it_is(x):
    return x


def half(x):
    return prune_act_unstruct(x, 0.5)


def by_hand(framework, model, first=as_it_is, inputs=as_it_is, second=as_it_is):
    """What the model should return, its second layer computed by hand."""
    params = framework.params(model)
    hidden = first(framework.run(model, params, X)[0])
    return hidden, second(second_layer(params, inputs(jnp.tanh(hidden))))


def check(framework, sparse, model, **pruned):
    got = framework.run(sparse, framework.params(sparse), X)
    for one, other in zip(got, by_hand(framework, model, **pruned), strict=True):
        np.testing.assert_array_equal(one == 0, other == 0)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_one_layer_is_pruned_and_the_model_stays_as_it_was(framework, model):
    first, second = framework.layers
    check(framework, sparsify_activations(model, first, density=0.5), model, first=half)
    pattern = NByM(2, 4) if first == 'first' else '2:4'
    sparse = sparsify_activations(model, first, pattern=pattern)
    check(framework, sparse, model, first=lambda x: prune_act_struct(x, (2, 4)))
    inputs = sparsify_activations(model, second, density=0.5, prune='inputs')
    check(framework, inputs, model, inputs=half)
    check(framework, model, model)
    before, after = (tree_lib.flatten_with_paths(framework.params(m))[:2] for m in (model, sparse))
    jax.tree.map(np.testing.assert_array_equal, after, before)


WHERE = {
    'class': lambda framework: framework.layer_class,
    'predicate': lambda framework: lambda name, layer: name in framework.layers,
    'glob': lambda framework: framework.layers[0][:3] + '*',
}


@pytest.mark.parametrize('where', WHERE)
def test_ways_to_choose(framework, model, where):
    is_one = where == 'glob' and framework.layers[0] == 'first'
    sparse = sparsify_activations(model, WHERE[where](framework), density=0.5)
    check(framework, sparse, model, first=half, second=as_it_is if is_one else half)


def test_settings_on_settings_and_what_is_measured(framework, model):
    first, second = framework.layers
    sparse = sparsify_activations(model, first, pattern='1:4')
    sparse = sparsify_activations(sparse, second, pattern='1:4')
    sparse = sparsify_activations(sparse, first, density=0.125)

    def both(x):  # the first setting comes first
        return prune_act_unstruct(prune_act_struct(x, (1, 4)), 0.125)

    check(framework, sparse, model, first=both, second=lambda x: prune_act_struct(x, (1, 4)))
    x, params = X.at[0, 0].set(0), framework.params(sparse)
    report = summarize_activations(sparse, params, x, call=framework.run)
    totals = {'_total_sparsity': 50 / 60, '_nactivations': 60, '_nactivations_nnz': 10}
    assert report == {first: 0.875, second: 0.75} | totals
    assert {type(value) for value in report.values()} == {float, int}
    # Inputs as the layer itself sees them, after all settings: 6 of the first layer, one of them zero; 8 of the second.
    sparse = sparsify_activations(model, second, density=0.25, prune='inputs')
    sparse = sparsify_activations(sparse, second, density=0.125, prune='inputs')
    report = summarize_activations(sparse, params, x, call=framework.run, count='inputs')
    assert (report[first], report[second]) == (1 / 30, 0.875)
    assert report['_nactivations'] == 5 * (6 + 8)


def test_under_jit_vmap_and_grad(framework, model):
    first = framework.layers[0]
    straight = first == 'first'
    sparse = sparsify_activations(model, first, density=0.5, straight_through=straight)
    params = framework.params(sparse)

    def hidden(params, x=X):
        return framework.run(sparse, params, x)[0]

    mapped = jax.vmap(lambda x: hidden(params, x[None]))(X)[:, 0]
    np.testing.assert_allclose(mapped, hidden(params), rtol=1e-5, atol=1e-6)
    grads = jax.jit(jax.grad(lambda params: hidden(params).sum()))(params)
    bias = next(leaf for leaf in jax.tree.leaves(grads) if leaf.shape == (HIDDEN,))
    # Of a sum over what is kept, the derivative by the bias counts what is kept.
    expected = len(X) if straight else np.count_nonzero(hidden(params), axis=0)
    np.testing.assert_allclose(bias, expected)


def test_messages_name_the_layer(framework, model):
    first, second = framework.layers
    params = framework.params(model)

    def run(where, **settings):
        return framework.run(sparsify_activations(model, where, **settings), params, X)

    words = f"layer '{first}': activations of shape .* last group keeps 2 of 2"
    with pytest.warns(UserWarning, match=words):
        run(first, pattern=(2, 3))
    with pytest.raises(ValueError, match=f"layer '{first}': .*axis 5 does not exist"):
        run(first, pattern='2:4', axis=5)
    for where in (second + '9', [first, second + '9']):
        words = f"where: '{second}9' matches no layer; did you mean '{second}'"
        with pytest.raises(ValueError, match=words):
            run(where, density=0.5)


REFUSED = {
    'neither': ({}, ValueError, 'one of density .* and pattern .* got neither'),
    'both': ({'density': 0.5, 'pattern': '2:4'}, ValueError, "got density=0.5 and pattern='2:4'"),
    'density': ({'density': 1.5}, ValueError, r'density must lie in \(0, 1\]'),
    'prune': ({'density': 0.5, 'prune': 'weights'}, ValueError, "or 'inputs', got 'weights'"),
    'batch axes of a pattern': ({'pattern': '2:4', 'batch_axes': None}, ValueError, 'is for a den'),
    'axis of a density': ({'density': 0.5, 'axis': -1}, ValueError, 'axis for a pattern'),
    'where type': ({'density': 0.5, 'where': ['a', 3]}, TypeError, 'where must be a name .* got 3'),
}  # fmt: skip


@pytest.mark.parametrize(('kwargs', 'error', 'words'), REFUSED.values(), ids=REFUSED)
def test_settings_are_checked_at_once(kwargs, error, words):
    with pytest.raises(error, match=words):
        sparsify_activations(FRAMEWORKS['linen'].make(), **{'where': '*', **kwargs})


def test_what_cannot_be_run_is_refused():
    with pytest.raises(TypeError, match='expected a flax or Equinox module'):
        sparsify_activations(3, '*', density=0.5)
    apply = FRAMEWORKS['function'].make()
    for use in (lambda f: sparsify_activations(f, '*', density=0.5), summarize_activations):
        with pytest.raises(TypeError, match=r'is already jitted.*put jax\.jit around the result'):
            use(jax.jit(apply))
    with pytest.raises(TypeError, match=r'call it outside jax\.jit'):
        jax.jit(lambda x: summarize_activations(jnp.tanh, x))(X)
    with pytest.raises(ValueError, match="count must be 'outputs' or 'inputs', got 'both'"):
        summarize_activations(apply, X, count='both')
    with pytest.raises(ValueError, match='there is none: only layers of'):
        summarize_activations(lambda x: -x, X)


def test_a_traced_density():
    model = FRAMEWORKS['linen'].make()
    params = FRAMEWORKS['linen'].params(model)

    @jax.jit
    def run(density):
        return sparsify_activations(model, 'Dense_0', density=density).apply(params, X)[0]

    for density in (0.25, 0.5):
        np.testing.assert_array_equal(np.count_nonzero(run(density), axis=1), HIDDEN * density)
