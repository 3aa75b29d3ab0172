"""`sparsify_activations` does the same in every framework."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activations.frameworks import FRAMEWORKS, HIDDEN, X
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


def expected(
    framework, model, prune_first=lambda x: x, prune_input=lambda x: x, prune_second=lambda x: x
):
    """What the model should return, its second layer computed by hand."""
    params = framework.params(model)
    hidden = prune_first(framework.run(model, params, X)[0])
    return hidden, prune_second(framework.second(params, prune_input(jnp.tanh(hidden))))


def assert_close(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one == 0, other == 0)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def half(x):
    return prune_act_unstruct(x, 0.5)


def two_of_four(x):
    return prune_act_struct(x, (2, 4))


SETTINGS = {
    'density': ({'density': 0.5}, {'prune_first': half}),
    'pattern': ({'pattern': '2:4'}, {'prune_first': two_of_four}),
    'pattern with its axis': ({'pattern': NByM(2, 4)}, {'prune_first': two_of_four}),
}


@pytest.mark.parametrize(('kwargs', 'by_hand'), SETTINGS.values(), ids=SETTINGS)
def test_the_chosen_layer_alone_is_pruned(framework, model, kwargs, by_hand):
    sparse = sparsify_activations(model, framework.layers[0], **kwargs)
    got = framework.run(sparse, framework.params(sparse), X)
    assert_close(got, expected(framework, model, **by_hand))
    np.testing.assert_array_equal(np.count_nonzero(got[0], axis=1), HIDDEN // 2)


def test_inputs_are_pruned(framework, model):
    sparse = sparsify_activations(model, framework.layers[1], density=0.25, prune='inputs')
    wanted = expected(framework, model, prune_input=lambda x: prune_act_unstruct(x, 0.25))
    assert_close(framework.run(sparse, framework.params(sparse), X), wanted)


def test_the_original_stays_as_it_was(framework, model):
    before = framework.run(model, framework.params(model), X)
    sparse = sparsify_activations(model, framework.layers[0], density=0.5)
    framework.run(sparse, framework.params(sparse), X)
    for one, other in zip(framework.run(model, framework.params(model), X), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_parameters_are_the_same_and_at_the_same_paths(framework, model):
    wanted = framework.params(model)
    got = framework.params(sparsify_activations(model, framework.layers[0], density=0.5))
    assert tree_lib.flatten_with_paths(got)[0] == tree_lib.flatten_with_paths(wanted)[0]
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


WHERE = {
    'glob': lambda framework: framework.layers[0][:3] + '*',
    'class': lambda framework: framework.layer_class,
    'predicate': lambda framework: lambda name, layer: name in framework.layers,
    'list': lambda framework: [
        framework.layers[0],
        lambda name, layer: name == framework.layers[1],
    ],
    'everything': lambda framework: '*',
}


@pytest.mark.parametrize('where', WHERE.values(), ids=WHERE)
def test_ways_to_choose(framework, model, where):
    where = where(framework)
    both = not isinstance(where, str) or where == '*' or framework.layers[1].startswith(where[:-1])
    sparse = sparsify_activations(model, where, density=0.5)
    wanted = expected(
        framework, model, prune_first=half, **({'prune_second': half} if both else {})
    )
    assert_close(framework.run(sparse, framework.params(sparse), X), wanted)


def test_nested_and_measured(framework, model):
    first, second = framework.layers
    sparse = sparsify_activations(
        sparsify_activations(model, first, density=0.25), second, pattern='1:4'
    )
    wanted = expected(
        framework,
        model,
        prune_first=lambda x: prune_act_unstruct(x, 0.25),
        prune_second=lambda x: prune_act_struct(x, (1, 4)),
    )
    params = framework.params(sparse)
    assert_close(framework.run(sparse, params, X), wanted)
    report = summarize_activations(sparse, params, X, call=framework.run)
    assert report == {
        first: 0.75,
        second: 0.75,
        '_total_sparsity': 0.75,
        '_nactivations': 60,
        '_nactivations_nnz': 15,
    }


def test_on_one_layer_the_inner_setting_comes_first(framework, model):
    name = framework.layers[0]
    sparse = sparsify_activations(
        sparsify_activations(model, name, pattern='1:4'), name, density=0.25
    )
    wanted = expected(
        framework,
        model,
        prune_first=lambda x: prune_act_unstruct(prune_act_struct(x, (1, 4)), 0.25),
    )
    assert_close(framework.run(sparse, framework.params(sparse), X), wanted)


def test_under_jit_vmap_and_grad(framework, model):
    sparse = sparsify_activations(model, framework.layers[0], density=0.5)
    params = framework.params(sparse)
    wanted = framework.run(sparse, params, X)
    assert_close(jax.jit(lambda params, x: framework.run(sparse, params, x))(params, X), wanted)
    assert_close(jax.vmap(lambda x: framework.run(sparse, params, x[None]))(X)[0][:, 0], wanted[0])

    def loss(params, x):
        return framework.run(sparse, params, x)[0].sum()

    # Of a sum over what is kept, the derivative by the bias counts what is kept.
    bias = next(
        leaf
        for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params, X))
        if leaf.shape == (HIDDEN,)
    )
    np.testing.assert_allclose(bias, np.count_nonzero(wanted[0], axis=0))


def test_straight_through(framework, model):
    sparse = sparsify_activations(model, framework.layers[0], density=0.5, straight_through=True)
    grads = jax.grad(lambda params: framework.run(sparse, params, X)[0].sum())(
        framework.params(sparse)
    )
    bias = next(leaf for leaf in jax.tree.leaves(grads) if leaf.shape == (HIDDEN,))
    np.testing.assert_allclose(bias, len(X))


def test_bfloat16(framework, model):
    sparse = sparsify_activations(model, framework.layers[0], density=0.5)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), framework.params(sparse))
    hidden = framework.run(sparse, params, X.astype(jnp.bfloat16))[0]
    assert hidden.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.count_nonzero(hidden.astype(np.float32), axis=1), HIDDEN // 2)


def test_a_partial_group_is_warned_of_by_the_layer_s_name(framework, model):
    name = framework.layers[0]
    sparse = sparsify_activations(model, name, pattern=(2, 3))
    with pytest.warns(
        UserWarning, match=f"layer '{name}': activations of shape .* last group keeps 2 of 2"
    ):
        hidden = framework.run(sparse, framework.params(model), X)[0]
    np.testing.assert_array_equal(np.count_nonzero(hidden, axis=1), 6)


def test_a_name_that_matches_nothing_is_refused(framework, model):
    first, second = framework.layers
    with pytest.raises(
        ValueError, match=f"where: '{second}9' matches no layer .*'{second}', '{first}'"
    ):
        framework.run(
            sparsify_activations(model, second + '9', density=0.5), framework.params(model), X
        )


def test_a_mistake_at_a_layer_names_it(framework, model):
    name = framework.layers[0]
    sparse = sparsify_activations(model, name, pattern='2:4', axis=5)
    with pytest.raises(ValueError, match=f"layer '{name}': .*axis 5 does not exist"):
        framework.run(sparse, framework.params(model), X)


REFUSED = {
    'neither': ({}, ValueError, 'one of density .* and pattern .* got neither'),
    'both': ({'density': 0.5, 'pattern': '2:4'}, ValueError, "got density=0.5 and pattern='2:4'"),
    'density': ({'density': 1.5}, ValueError, r'density must lie in \(0, 1\]'),
    'density type': ({'density': '0.5'}, TypeError, 'density must be a number'),
    'pattern': ({'pattern': (4, 2)}, ValueError, 'n must not exceed m'),
    'pattern type': ({'pattern': 0.5}, TypeError, 'an N:M pattern is written'),
    'prune': (
        {'density': 0.5, 'prune': 'weights'},
        ValueError,
        "prune must be 'outputs' or 'inputs', got 'weights'",
    ),
    'batch axes': (
        {'density': 0.5, 'batch_axes': 0.5},
        TypeError,
        'batch_axes must be a whole number',
    ),
    'batch axes bool': (
        {'density': 0.5, 'batch_axes': (0, True)},
        TypeError,
        r'or None, got \(0, True\)',
    ),
    'batch axes of a pattern': (
        {'pattern': '2:4', 'batch_axes': None},
        ValueError,
        'batch_axes=None means nothing',
    ),
    'batch axes text': ({'density': 0.5, 'batch_axes': 'all'}, ValueError, "or 'auto', got 'all'"),
    'straight through': (
        {'density': 0.5, 'straight_through': 1},
        TypeError,
        'must be True or False, got 1',
    ),
    'axis': ({'pattern': '2:4', 'axis': 0.5}, TypeError, 'axis must be a whole number'),
    'axis of a density': (
        {'density': 0.5, 'axis': -1},
        ValueError,
        'axis=-1 means nothing with a density',
    ),
    'two axes': (
        {'pattern': NByM(2, 4, axis=0), 'axis': 1},
        ValueError,
        'lies along axis 0, but axis 1',
    ),
    'no layers': (
        {'density': 0.5, 'where': []},
        ValueError,
        "where names no layer; '\\*' means every one",
    ),
    'where type': (
        {'density': 0.5, 'where': ['a', 3]},
        TypeError,
        'where must be a name or glob .* got 3',
    ),
}


@pytest.mark.parametrize(('kwargs', 'error', 'words'), REFUSED.values(), ids=REFUSED)
def test_settings_are_checked_at_once(framework, model, kwargs, error, words):
    with pytest.raises(error, match=words):
        sparsify_activations(model, **{'where': '*', **kwargs})


PREDICATES = {
    'arguments': (jnp.tanh, 'nor does it take'),
    'result': (lambda name, layer: None, 'must say True or False of a layer, got None'),
}


@pytest.mark.parametrize(('predicate', 'words'), PREDICATES.values(), ids=PREDICATES)
def test_predicates_are_checked(framework, model, predicate, words):
    with pytest.raises(TypeError, match=words):
        framework.run(
            sparsify_activations(model, predicate, density=0.5), framework.params(model), X
        )


@pytest.mark.parametrize(
    ('model', 'words'),
    [
        (3, 'got 3'),
        (FRAMEWORKS['linen'].layer_class, 'the class Dense; make a model of it'),
        (None, 'got None'),
    ],
)
def test_what_is_no_model_is_refused(model, words):
    with pytest.raises(TypeError, match=words):
        sparsify_activations(model, '*', density=0.5)
    with pytest.raises(TypeError, match=words):
        summarize_activations(model)


@given(
    values=st.lists(st.floats(-8, 8, width=16), min_size=HIDDEN, max_size=HIDDEN),
    density=st.floats(1 / 1024, 1),
)
@settings(max_examples=8, deadline=None)
def test_every_density_keeps_the_core_s_count(values, density):
    import flax.linen as nn

    class Identity(nn.Module):
        def __call__(self, x):
            return x

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Identity()(x)

    x = jnp.array([values])
    got = sparsify_activations(Model().apply, 'Identity_0', density=density)({}, x)
    np.testing.assert_array_equal(got, prune_act_unstruct(x, density))
