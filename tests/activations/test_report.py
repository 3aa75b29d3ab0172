"""`summarize_activations` counts what layers return."""

import inspect

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from activations.frameworks import FRAMEWORKS, X
from jaxpruner.activations import sparsify_activations, summarize_activations


@pytest.mark.parametrize('framework', FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_counts_of_a_dense_model(framework):
    model = framework.make()
    params = jax.tree.map(jnp.round, framework.params(model))  # so that some activations are zero
    x = jnp.round(X).at[0].set(0)
    outputs = framework.run(model, params, x)
    nonzero = [int(np.count_nonzero(output)) for output in outputs]
    sizes = [output.size for output in outputs]
    wanted = {
        name: (size - n) / size
        for name, size, n in zip(framework.layers, sizes, nonzero, strict=True)
    }
    wanted |= {'_total_sparsity': (sum(sizes) - sum(nonzero)) / sum(sizes)}
    wanted |= {'_nactivations': sum(sizes), '_nactivations_nnz': sum(nonzero)}
    report = summarize_activations(model, params, x, call=framework.run)
    assert report == wanted
    assert list(report) == list(wanted)
    assert {type(value) for value in report.values()} == {float, int}
    # What was compiled for the first report serves the second.
    assert summarize_activations(model, params, x, call=framework.run) == wanted


ARGUMENTS = {
    'linen': lambda framework: (framework.params(framework.make()), X),
    'function': lambda framework: (framework.params(framework.make()), X),
    'haiku': lambda framework: (framework.params(framework.make()), X),
    'haiku_with_state': lambda framework: (framework.params(framework.make()), {}, X),
    'nnx': lambda framework: (X,),
    'equinox': lambda framework: (X[0],),
}


@pytest.mark.parametrize(('name', 'arguments'), ARGUMENTS.items(), ids=ARGUMENTS)
def test_how_a_model_is_run_by_default(name, arguments):
    framework = FRAMEWORKS[name]
    sparse = sparsify_activations(framework.make(), framework.layers[0], density=0.25)
    report = summarize_activations(sparse, *arguments(framework), where=framework.layers[0])
    assert report[framework.layers[0]] == report['_total_sparsity'] == 0.75


class Rows(nn.Module):
    """Returns as many zeros as its input says."""

    @nn.compact
    def __call__(self, carry, zeros):
        y = jnp.where(jnp.arange(4) < zeros, 0.0, 1.0)
        return carry, Halve()(y)


class Halve(nn.Module):
    def __call__(self, x):
        return x / 2


class Twice(nn.Module):
    def setup(self):
        self.layer = Halve()

    def __call__(self, carry, zeros):
        first = self.layer(jnp.where(jnp.arange(4) < zeros[0], 0.0, 1.0))
        return carry, first + self.layer(jnp.where(jnp.arange(4) < zeros[1], 0.0, 1.0))


class Loop(nn.Module):
    @nn.compact
    def __call__(self, carry, zeros):
        return jax.lax.scan(lambda carry, zeros: Rows(name='rows')(carry, zeros), carry, zeros)


class Prints(nn.Module):
    def __call__(self, carry, x):
        jax.debug.callback(lambda x: None, x)
        return carry, x


SCAN = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}}


def callbacks_fail_in_scan():
    """Whether nn.scan takes every callback, `jax.debug.print` too, for a dependency, as in flax 0.12.12."""
    try:
        nn.scan(Prints, **SCAN)().apply({}, 0.0, jnp.zeros(1))
    except ValueError as error:
        return 'data dependency on the scan body' in str(error)
    return False


checked = pytest.mark.skipif(
    callbacks_fail_in_scan(),
    reason='nn.scan of this flax refuses callbacks unless check_constancy_invariants=False',
)
unchecked = pytest.mark.skipif(
    'check_constancy_invariants' not in inspect.signature(nn.scan).parameters,
    reason='nn.scan of this flax has no check_constancy_invariants',
)


def scan(module, **settings):
    return lambda: nn.scan(module, **SCAN, **settings)()


UNCHECKED = {'check_constancy_invariants': False}
LIFTED = {
    'scan': pytest.param(scan(Rows), 'Halve_0', marks=checked),
    'remat scan': pytest.param(scan(nn.remat(Rows)), 'Halve_0', marks=checked),
    'unchecked scan': pytest.param(scan(Rows, **UNCHECKED), 'Halve_0', marks=unchecked),
    'unchecked remat scan': pytest.param(
        scan(nn.remat(Rows), **UNCHECKED), 'Halve_0', marks=unchecked
    ),
    'vmap': (
        nn.vmap(
            Rows, in_axes=(None, 0), variable_axes={'params': None}, split_rngs={'params': False}
        ),
        'Halve_0',
    ),
    'twice': (Twice, 'layer'),
    'plain scan': (Loop, 'rows/Halve_0'),
}


@pytest.mark.parametrize('jitted', [False, True])
@pytest.mark.parametrize(('module', 'name'), LIFTED.values(), ids=LIFTED)
def test_linen_layers_in_loops_count_all_calls(module, name, jitted):
    model, zeros = module(), jnp.array([1, 4])

    def call(model, zeros):
        run = (
            jax.jit(lambda zeros: model.apply({}, 0.0, zeros))
            if jitted
            else lambda zeros: model.apply({}, 0.0, zeros)
        )
        return run(zeros)

    report = summarize_activations(model, zeros, where=name, call=call)
    assert report == {
        name: 5 / 8,
        '_total_sparsity': 5 / 8,
        '_nactivations': 8,
        '_nactivations_nnz': 3,
    }


def test_haiku_layers_in_loops_count_all_calls():
    def forward(zeros):
        layer = hk.Flatten(name='layer')
        return hk.scan(
            lambda carry, n: (carry, layer(jnp.where(jnp.arange(4) < n, 0.0, 1.0)[None])),
            0.0,
            zeros,
        )

    model = hk.without_apply_rng(hk.transform(forward))
    assert summarize_activations(model, {}, jnp.array([1, 4]))['layer'] == 5 / 8


def test_a_function_field_is_counted_where_it_is_chosen():
    model = nnx.Sequential(nnx.Linear(2, 4, rngs=nnx.Rngs(0)), nnx.relu)
    model.layers[0].kernel = nnx.Param(jnp.array([[1.0, -1.0, -1.0, -1.0], [0.0, 0.0, 0.0, 0.0]]))
    report = summarize_activations(model, jnp.ones((3, 2)), where=['layers/*', nnx.relu])
    assert report['layers/0'] == 0
    assert report['layers/1'] == 0.75


def test_the_innermost_of_several_taps_comes_first():
    framework = FRAMEWORKS['linen']
    model = framework.make()
    raw = sparsify_activations(lambda *args: summarize_activations(model, *args), '*', density=0.25)
    report = raw(framework.params(model), X)
    assert report['_total_sparsity'] == 0  # measured before the outer function prunes


@pytest.mark.parametrize('name', ['linen', 'haiku', 'nnx', 'equinox'])
def test_inputs_as_the_layer_itself_sees_them(name):
    framework = FRAMEWORKS[name]
    first, second = framework.layers
    model = framework.make()
    params, x = framework.params(model), X.at[0, 0].set(0)

    def report(model, **settings):
        return summarize_activations(model, params, x, call=framework.run, **settings)

    sparse = sparsify_activations(model, second, density=0.25, prune='inputs')
    # 5 examples: 6 inputs of the first layer, one of them zero; 8 of the second, of which 2 are kept.
    wanted = {
        first: 1 / 30,
        second: 0.75,
        '_total_sparsity': 31 / 70,
        '_nactivations': 70,
        '_nactivations_nnz': 39,
    }
    assert report(sparse, count='inputs') == wanted
    assert report(sparse)[second] == 0
    assert report(model, count='inputs')[second] == 0
    # Two settings on a layer: what it is given at last.
    twice = sparsify_activations(sparse, second, density=0.125, prune='inputs')
    assert report(twice, count='inputs', where=second)[second] == 0.875


def test_inputs_of_functions_and_of_layers_without_any():
    model = nnx.Sequential(nnx.Embed(3, 4, rngs=nnx.Rngs(0)), nnx.relu)
    sparse = sparsify_activations(model, nnx.relu, density=0.25, prune='inputs')
    report = summarize_activations(
        sparse, jnp.arange(3), where=['layers/*', nnx.relu], count='inputs'
    )
    assert report == {
        'layers/1': 0.75,
        '_total_sparsity': 0.75,
        '_nactivations': 12,
        '_nactivations_nnz': 3,
    }
    embed = nn.Sequential([nn.Embed(3, 4)])
    variables = embed.init(jax.random.key(0), jnp.arange(3))
    assert (
        summarize_activations(embed, variables, jnp.arange(3), count='inputs')['_nactivations'] == 0
    )


def test_what_is_counted_is_checked():
    with pytest.raises(ValueError, match="count must be 'outputs' or 'inputs', got 'both'"):
        summarize_activations(lambda x: x, X, count='both')


def test_under_jit_it_is_refused():
    with pytest.raises(TypeError, match=r'call it outside jax\.jit'):
        jax.jit(lambda x: summarize_activations(jnp.tanh, x))(X)


def test_a_function_without_layers_is_refused():
    with pytest.raises(ValueError, match='there was none: only layers of'):
        summarize_activations(lambda x: -x, X)
