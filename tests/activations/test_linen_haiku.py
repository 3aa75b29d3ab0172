"""What is particular to flax.linen, Haiku, and functions that call their layers."""

import copy
import pickle
import subprocess
import sys

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError

from activations.frameworks import FRAMEWORKS, HIDDEN, LinenNetwork, X
from helpers import rows
from jaxpruner.activations import prune_act_unstruct, sparsify_activations, summarize_activations

KEY = jax.random.key(0)


def half(x):
    return prune_act_unstruct(x, 0.5)


class Scaled(nn.Dense):
    """Calls its base class's method, which is no call of another layer."""

    @nn.compact
    def __call__(self, x):
        return 1 + super().__call__(x)


class Outer(nn.Module):
    layer: type = nn.Dense

    def setup(self):
        self.inner = nn.Sequential([self.layer(HIDDEN)])
        self.embed = nn.Embed(3, HIDDEN)

    def __call__(self, x):
        return self.embed.attend(self.inner(x))


def hidden(module, variables):
    return module.apply(variables, X, method=lambda self, x: self.inner(x))


@pytest.mark.parametrize(
    ('layer', 'where'),
    rows.crossed(
        [nn.Dense, Scaled, nn.remat(nn.Dense), nn.jit(nn.Dense)],
        ['inner/layers_0', 'inner-*', 'inner', nn.Dense],
    ),
)
def test_submodules(layer, where):
    model = Outer(layer)
    variables = model.init(KEY, X)
    sparse = sparsify_activations(model, where, density=0.5)
    np.testing.assert_allclose(hidden(sparse, variables), half(hidden(model, variables)), rtol=1e-6)
    np.testing.assert_array_equal(hidden(model, variables) == 0, False)


def test_another_method_has_to_be_named():
    model = Outer()
    variables = model.init(KEY, X)
    wanted = prune_act_unstruct(model.apply(variables, X), 1 / 3)
    np.testing.assert_array_equal(
        sparsify_activations(model, 'embed.attend', density=1 / 3).apply(variables, X), wanted
    )
    for where in ('embed', nn.Embed, lambda name, layer: name.startswith('embed')):
        with pytest.raises(ValueError, match='matches no layer that was called; these were: '):
            sparsify_activations(model, where, density=0.5).apply(variables, X)


def test_the_model_itself_is_meant_by_its_class_alone():
    model = nn.Dense(HIDDEN)
    variables = model.init(KEY, X)
    sparse = sparsify_activations(model, nn.Dense, density=0.5)
    np.testing.assert_array_equal(sparse.apply(variables, X), half(model.apply(variables, X)))
    assert summarize_activations(sparse, variables, X, where=nn.Dense)['Dense'] == 0.5
    for where in ('*', lambda name, layer: True):
        with pytest.raises(ValueError, match='never means the model itself: name its class'):
            sparsify_activations(model, where, density=0.5).apply(variables, X)
    with pytest.raises(
        ValueError,
        match=r'only layers of .* one that is the whole model is meant by its class alone',
    ):
        sparsify_activations(model.apply, '*', density=0.5)(variables, X)


def test_linen_scan_prunes_each_layer_of_the_stack():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            x = nn.Dense(HIDDEN, name='dense')(x)
            return x, x

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                nn.remat(Block), variable_axes={'params': 0}, split_rngs={'params': True}, length=3
            )
            return scan(name='blocks')(x, None)[1]

    x = jnp.ones((2, HIDDEN))
    sparse = sparsify_activations(Stack(), 'blocks/dense', density=0.25)
    variables = sparse.init(KEY, x)
    for run in (sparse.apply, jax.jit(sparse.apply)):
        np.testing.assert_array_equal(
            np.count_nonzero(run(variables, x), axis=-1), np.full((3, 2), 2)
        )
    grads = jax.grad(lambda variables: sparse.apply(variables, x).sum())(variables)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_all_float_arrays_of_an_output_are_pruned():
    class Several(nn.Module):
        def __call__(self, x):
            return {'a': x, 'b': [jnp.arange(4), x[0, 0], -x]}

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Several()(x)

    got = sparsify_activations(Model(), 'Several_0', density=0.5).apply({}, X)
    np.testing.assert_array_equal(got['a'], half(X))
    np.testing.assert_array_equal(got['b'][0], np.arange(4))
    assert got['b'][1] == X[0, 0]
    np.testing.assert_array_equal(got['b'][2], -half(X))


class Whole(nn.Module):
    def __call__(self, x):
        return jnp.sum(x).astype(int)


class Wholes(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Whole()(x)


def test_nothing_to_prune_is_refused():
    with pytest.raises(ValueError, match="layer 'Whole_0' returned no float array"):
        sparsify_activations(Wholes(), '*', density=0.5).apply({}, X)
    with pytest.raises(ValueError, match="layer 'Whole_0' was called without a float array"):
        sparsify_activations(Wholes(), '*', density=0.5, prune='inputs').apply({}, jnp.arange(3))


def test_named_inputs():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, name='dense')(inputs=x)

    variables = Model().init(KEY, X)
    got = sparsify_activations(Model(), 'dense', density=0.5, prune='inputs').apply(variables, X)
    np.testing.assert_array_equal(got, Model().apply(variables, half(X)))


def test_a_linen_object_behaves_like_its_module():
    model = LinenNetwork(name='net')
    sparse = sparsify_activations(model, 'Dense_0', density=0.5)
    assert sparse.name == 'net'
    outputs, variables = sparse.init_with_output(KEY, X)
    np.testing.assert_array_equal(outputs[0], half(model.apply(variables, X)[0]))
    again = copy.deepcopy(sparse)
    np.testing.assert_array_equal(again.apply(variables, X)[0], outputs[0])
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(sparse.module)).apply(variables, X)[0].shape, (5, HIDDEN)
    )
    for other in (sparse.clone(name='other'), sparse.copy(name='other')):
        assert other.name == 'other'
        np.testing.assert_array_equal(other.apply(variables, X)[0], outputs[0])
    with pytest.raises(
        AttributeError, match=r'a bound module would run without .* use apply\(variables, …\)'
    ):
        sparse.bind(variables)
    with pytest.raises(AttributeError, match='no attribute'):
        _ = sparse.no_such_thing


def test_a_jitted_function_is_refused():
    for use in (lambda f: sparsify_activations(f, '*', density=0.5), summarize_activations):
        with pytest.raises(TypeError, match=r'is already jitted.*put jax\.jit around the result'):
            use(jax.jit(LinenNetwork().apply))


def test_each_entry_has_to_match_in_each_call():
    model = Outer()
    variables = model.init(KEY, X)
    apply = sparsify_activations(model.apply, ['inner', 'innner/*'], density=0.5)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"where: 'innner/\*' matches no .* these were: .*'inner/layers_0'"
        ):
            apply(variables, X)
    apply = sparsify_activations(model.apply, ['embed.attend', 'inner'], density=0.5)
    apply(variables, X)
    with pytest.raises(
        ValueError, match=r"where: 'inner' matches no layer .*; these were: 'embed\.attend'"
    ):
        apply(variables, jnp.ones((2, HIDDEN)), method=lambda self, x: self.embed.attend(x))
    haiku = FRAMEWORKS['haiku'].make()
    with pytest.raises(
        ValueError, match="where: 'linaer' matches no layer that was called; these were: 'linear'"
    ):
        sparsify_activations(haiku, ['linear', 'linaer'], density=0.5).apply(haiku.init(KEY, X), X)


def _scanned(function):
    def body(carry, x):
        return carry, function(x)

    return lambda x: jax.lax.scan(body, 0, x[None])[1][0]


REUSED = {
    'jit': jax.jit,
    'checkpoint': jax.checkpoint,
    'scan': _scanned,
    'grad of checkpoint': lambda function: jax.grad(
        lambda x: (jax.checkpoint(function)(x) ** 2).sum()
    ),
    'jit in vmap': lambda function: jax.vmap(jax.jit(lambda x: function(x[None])[0])),
}


@pytest.mark.parametrize('dense_first', [True, False])
@pytest.mark.parametrize('reuse', REUSED.values(), ids=REUSED)
def test_functions_compiled_inside_are_compiled_apart(reuse, dense_first):
    model = LinenNetwork()
    variables = model.init(KEY, X)

    def first(x):
        return model.apply(variables, x)[0]

    apply, dense, pruned = (
        reuse(first),
        reuse(lambda x: first(x))(X),
        reuse(lambda x: half(first(x)))(X),
    )
    if dense_first:
        np.testing.assert_allclose(apply(X), dense, rtol=1e-6)
    for _ in range(2):
        sparse = sparsify_activations(lambda x: apply(x), 'Dense_0', density=0.5)
        for run in (sparse, sparse, jax.jit(sparse)):
            np.testing.assert_allclose(run(X), pruned, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(apply(X), dense, rtol=1e-5, atol=1e-6)


def test_reports_of_functions_that_jit_inside():
    model = LinenNetwork()
    variables = model.init(KEY, X)
    inner = jax.jit(model.apply)
    sparse = sparsify_activations(lambda variables, x: inner(variables, x), 'Dense_0', density=0.5)
    for _ in range(2):
        assert summarize_activations(sparse, variables, X)['Dense_0'] == 0.5
        np.testing.assert_allclose(sparse(variables, X)[0], half(inner(variables, X)[0]), rtol=1e-6)


def test_an_error_inside_leaves_nothing_behind():
    model = LinenNetwork()
    variables = model.init(KEY, X)
    sparse = sparsify_activations(model, 'Dense_0', density=0.5)
    with pytest.raises(ScopeParamShapeError):
        sparse.apply(variables, jnp.ones((2, 3)))
    np.testing.assert_array_equal(model.apply(variables, X)[0] == 0, False)


def test_a_traced_density():
    model = LinenNetwork()
    variables = model.init(KEY, X)

    @jax.jit
    def run(density):
        return sparsify_activations(model, 'Dense_0', density=density).apply(variables, X)[0]

    np.testing.assert_array_equal(np.count_nonzero(run(0.25), axis=1), 2)
    np.testing.assert_array_equal(np.count_nonzero(run(0.5), axis=1), 4)
    for name in ('nnx', 'equinox'):
        with pytest.raises(TypeError, match='must be known before it is traced'):
            jax.jit(
                lambda density, name=name: sparsify_activations(
                    FRAMEWORKS[name].make(), '*', density=density
                )
            )(0.5)


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
    for where, wanted in {
        'outer': (half(called), other),
        'outer/inner': (1 + half(called - 1), other),
        'outer-inner': (1 + half(called - 1), other),
        Derived: (half(called), other),
        'outer.other': (called, half(other)),
    }.items():
        got = sparsify_activations(model, where, density=0.5).apply(params, X)
        for one, other_one in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other_one, rtol=1e-5, atol=1e-6)


def test_a_function_may_call_layers_of_several_libraries():
    linen, haiku = FRAMEWORKS['linen'].make(), FRAMEWORKS['haiku'].make()
    variables, params = linen.init(KEY, X), haiku.init(KEY, X)

    def run(x):
        return linen.apply(variables, x)[0], haiku.apply(params, x)[0]

    got = sparsify_activations(run, ['Dense_0', 'linear'], density=0.5)(X)
    for one, dense in zip(got, run(X), strict=True):
        np.testing.assert_array_equal(one, half(dense))


WITHOUT = """
import sys
for name in ('flax', 'haiku', 'equinox'):
    sys.modules[name] = None
import jaxpruner
from jaxpruner import activations
try:
    activations.sparsify_activations(lambda x: x, '*', density=0.5)(1)
except ValueError as error:
    assert 'there was none' in str(error)
else:
    raise AssertionError
"""


def test_no_framework_is_needed():
    subprocess.run([sys.executable, '-c', WITHOUT], check=True)
