"""What is particular to flax.linen, Haiku, and functions that call their layers."""

import inspect

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError

from activations.frameworks import HIDDEN, LinenNetwork, X
from jaxpruner.activations import prune_act_unstruct, sparsify_activations, summarize_activations

KEY = jax.random.key(0)


def half(x):
    return prune_act_unstruct(x, 0.5)


class Outer(nn.Module):
    layer: type = nn.Dense

    def setup(self):
        self.inner = nn.Sequential([self.layer(HIDDEN)])
        self.embed = nn.Embed(3, HIDDEN)

    def __call__(self, x):
        return self.embed.attend(self.inner(x))


@pytest.mark.parametrize(
    ('layer', 'where'), [(nn.remat(nn.Dense), 'inner'), (nn.jit(nn.Dense), nn.Dense)]
)
def test_submodules(layer, where):
    def hidden(module):
        return module.apply(variables, X, method=lambda self, x: self.inner(x))

    model = Outer(layer)
    variables = model.init(KEY, X)
    sparse = sparsify_activations(model, where, density=0.5)
    np.testing.assert_allclose(hidden(sparse), half(hidden(model)), rtol=1e-6)
    np.testing.assert_array_equal(hidden(model) == 0, False)


def test_other_methods_are_not_seen():
    model = Outer()
    variables = model.init(KEY, X)
    for where in ('embed', nn.Embed, lambda name, layer: name.startswith('embed')):
        with pytest.raises(ValueError, match='matches no layer; '):
            sparsify_activations(model, where, density=0.5).apply(variables, X)


def test_linen_scan_prunes_each_layer_of_the_stack():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            x = nn.Dense(HIDDEN, name='dense')(x)
            return x, x

    stack = nn.scan(
        nn.remat(Block), variable_axes={'params': 0}, split_rngs={'params': True}, length=3
    )
    sparse = sparsify_activations(stack(), 'dense', density=0.25)
    variables = sparse.init(KEY, jnp.ones((2, HIDDEN)), None)
    _, outputs = jax.jit(sparse.apply)(variables, jnp.ones((2, HIDDEN)), None)
    np.testing.assert_array_equal(np.count_nonzero(outputs, axis=-1), np.full((3, 2), 2))


class Several(nn.Module):
    def __call__(self, x):
        return {'a': x, 'b': [jnp.arange(4), x[0, 0], -x]}


class Whole(nn.Module):
    def __call__(self, x):
        return jnp.sum(x).astype(int)


class Holder(nn.Module):
    make: type

    @nn.compact
    def __call__(self, x):
        return self.make(name='layer')(x=x)


def test_arrays_of_a_call():
    got = sparsify_activations(Holder(Several), 'layer', density=0.5).apply({}, X)
    np.testing.assert_array_equal(got['a'], half(X))
    np.testing.assert_array_equal(got['b'][0], np.arange(4))
    assert got['b'][1] == X[0, 0]
    np.testing.assert_array_equal(got['b'][2], -half(X))
    sparse = sparsify_activations(Holder(Several), 'layer', density=0.5, prune='inputs')
    np.testing.assert_array_equal(sparse.apply({}, X)['a'], half(X))  # given by name
    with pytest.raises(ValueError, match="layer 'layer' returned no float array"):
        sparsify_activations(Holder(Whole), '*', density=0.5).apply({}, X)
    sparse = sparsify_activations(Holder(Whole), '*', density=0.5, prune='inputs')
    with pytest.raises(ValueError, match="layer 'layer' was called without a float array"):
        sparse.apply({}, jnp.arange(3))


def test_a_linen_object_behaves_like_its_module():
    model = LinenNetwork(name='net')
    sparse = sparsify_activations(model, 'Dense_0', density=0.5)
    assert sparse.name == 'net'
    outputs, variables = sparse.init_with_output(KEY, X)
    np.testing.assert_array_equal(outputs[0], half(model.apply(variables, X)[0]))
    other = sparse.clone(name='other')
    assert other.name == 'other'
    np.testing.assert_array_equal(other.apply(variables, X)[0], outputs[0])
    with pytest.raises(AttributeError, match=r'bound module would run without .* use apply\('):
        sparse.bind(variables)
    with pytest.raises(ScopeParamShapeError):
        sparse.apply(variables, jnp.ones((2, 3)))  # an error inside leaves nothing behind
    np.testing.assert_array_equal(model.apply(variables, X)[0] == 0, False)


def test_haiku_paths_methods_and_base_classes():
    class Base(hk.Module):
        def __call__(self, x):
            return hk.Linear(HIDDEN, name='inner')(x)

    class Derived(Base):
        def __call__(self, x):
            return 1 + super().__call__(x)

        def other(self, x):
            return 2 * x

    def forward(x):
        layer = Derived(name='outer')
        return layer(x), layer.other(x)

    model = hk.without_apply_rng(hk.transform(forward))
    params = model.init(KEY, X)
    called, other = model.apply(params, X)
    inner = 1 + half(called - 1)
    for where, expected in {
        'outer': half(called),
        'outer/inner': inner,
        Derived: half(called),
    }.items():
        got = sparsify_activations(model, where, density=0.5).apply(params, X)
        np.testing.assert_allclose(got[0], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(got[1], other)


# Layers in loops count all calls.


class Halve(nn.Module):
    def __call__(self, x):
        return x / 2


class Rows(nn.Module):
    """Returns as many zeros as its input says."""

    @nn.compact
    def __call__(self, carry, zeros):
        return carry, Halve(name='layer')(jnp.where(jnp.arange(4) < zeros, 0.0, 1.0))


# nn.scan of flax 0.12.12 takes every callback, `jax.debug.print` too, for a dependency.
_SCAN = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}}
if 'check_constancy_invariants' in inspect.signature(nn.scan).parameters:
    _SCAN['check_constancy_invariants'] = False
LIFTED = {
    'remat scan': lambda: nn.scan(nn.remat(Rows), **_SCAN)(),
    'vmap': nn.vmap(
        Rows, in_axes=(None, 0), variable_axes={'params': None}, split_rngs={'params': False}
    ),
}


@pytest.mark.parametrize('module', LIFTED.values(), ids=LIFTED)
def test_layers_in_loops_count_all_calls(module):
    def call(model, zeros):
        return jax.jit(model.apply)({}, 0.0, zeros)

    report = summarize_activations(module(), jnp.array([1, 4]), where='layer', call=call)
    assert report['layer'] == report['_total_sparsity'] == 5 / 8
    assert (report['_nactivations'], report['_nactivations_nnz']) == (8, 3)
