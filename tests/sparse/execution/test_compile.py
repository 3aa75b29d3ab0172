"""Compiled models: equal to dense ones in every format, what is refused, and which format is chosen."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.sparse.execution import compiling
from sparse.training.models import needs_csr

RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def sparse_normal(*shape, kept=0.2):
    return jnp.where(jnp.asarray(RNG.random(shape)) < kept, normal(*shape), 0)


def model(p, x):
    """Two layers, three scanned ones, and a bias."""
    x = jnp.tanh(x @ p['up'])
    x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel) + x, None), x, p['layers'])
    return x @ p['out'].T + p['bias']


PARAMS = {
    'up': sparse_normal(12, 32),
    'layers': sparse_normal(3, 32, 32).at[1].set(0).at[:, :, 5].set(0),
    'out': sparse_normal(8, 32, kept=0.6).at[3].set(0),
    'bias': normal(8),
}
X = normal(6, 12)


SETTINGS = [
    'smaller',
    'blocks',
    'channels',
    'dense',
    {'layers': 'blocks 4x32', 'up': 'smaller'},
    pytest.param('csr', marks=needs_csr),
]


def compiled(setting, **settings):
    return compiling.compile(model, PARAMS, X, formats=setting, progress=False, **settings)


def assert_close(first, second):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), first, second)


@pytest.mark.parametrize('setting', SETTINGS, ids=str)
def test_results_are_those_of_the_dense_model(setting):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        apply, packed, report = compiled(setting)
        assert_close(apply(packed, X), model(PARAMS, X))
        # Inputs of other sizes, mapped over, and differentiated.
        xs = normal(2, 3, 12)
        expected = jax.vmap(lambda x: model(PARAMS, x))(xs)
        assert_close(jax.vmap(apply, (None, 0))(packed, xs), expected)
        assert_close(jax.jit(apply)(packed, xs[0]), expected[0])
        gradient = jax.grad(lambda apply, params, x: apply(params, x).sum(), 2)
        assert_close(gradient(apply, packed, X), gradient(model, PARAMS, X))
        of_params = jax.grad(lambda packed: apply(packed, X).sum(), allow_int=True)(packed)
    assert_close(of_params['bias'], jnp.full(8, 6.0))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(packed))
    names = {name: layer.format for name, layer in report.layers.items()}
    if isinstance(setting, dict):
        assert names == {'up': 'smaller', 'layers': 'blocks 4x32', 'out': 'dense'}
    elif setting in ('channels', 'dense'):
        assert set(names.values()) == {'dense'}
    else:
        assert names['up'].startswith(setting)
        assert names['layers'].startswith(setting)
    assert bool(report.channels) == (setting == 'channels')


def test_parameters_of_other_zeros_or_shapes_are_refused():
    apply, packed, _ = compiled('smaller')
    tuned = {**PARAMS, 'up': 2 * PARAMS['up'], 'bias': PARAMS['bias'] + 1}
    assert_close(apply(apply.pack(tuned), X), model(tuned, X))
    denser = {**PARAMS, 'up': PARAMS['up'].at[0].set(1)}
    with pytest.raises(ValueError, match='other weights of these parameters are zero'):
        apply.pack(denser)
    for wrong in (
        PARAMS,
        [packed],
        {**packed, 'bias': jnp.ones(9)},
        {**packed, 'more': jnp.ones(1)},
        {**packed, 'up': PARAMS['up']},
    ):
        with pytest.raises(ValueError, match='not packed for this model'):
            apply(wrong, X)


@pytest.mark.parametrize('what', ['params', 'sample'])
def test_what_is_timed_has_values(what):
    shapes = jax.eval_shape(lambda: (PARAMS, X))
    params, x = (shapes[0], X) if what == 'params' else (PARAMS, shapes[1])
    with pytest.raises(TypeError, match='has no values'):
        compiling.compile(model, params, x)
    apply, packed, _ = compiling.compile(model, PARAMS, shapes[1], formats='smaller')
    assert_close(apply(packed, X), model(PARAMS, X))


def test_the_fastest_candidate_is_chosen(timed):
    # Dense, and candidates from the first to the last.
    # The whole is dense, with fewer channels, and with formats, too.
    timed(products=[4e-3, 3e-3, 2e-3, 1e-3], whole=[100e-3, 60e-3, 50e-3])
    report = compiled('measure').report
    # Where there is no CSR, some leaves have no candidates.
    measured = [layer for layer in report.layers.values() if layer.milliseconds]
    assert measured
    for layer in measured:
        times = layer.milliseconds
        assert layer.format == min(times, key=times.get) != 'dense'
        trips = layer.shape[0] if len(layer.shape) == 3 else 1
        assert times['dense'] == pytest.approx(4 * trips)
    assert report.milliseconds == pytest.approx(100)
    assert report.measured == pytest.approx(50)


STAYS_DENSE = {
    'equal': ([1e-3, 1e-3], [1e-3, 1e-3]),
    'within noise': ([1e-3, 0.97e-3], [1e-3, 0.5e-3, 0.4e-3]),
    'the whole within noise': ([4e-3, 1e-3], [1e-3, 0.99e-3]),
}


@pytest.mark.parametrize(('products', 'whole'), STAYS_DENSE.values(), ids=STAYS_DENSE)
def test_products_stay_dense_unless_others_are_faster_beyond_noise(timed, products, whole):
    timed(products, whole)
    report = compiled('measure').report
    assert {layer.format for layer in report.layers.values()} == {'dense'}
    assert bool(report.channels) == (report.measured < report.milliseconds) == (whole[1] < 0.9e-3)


def test_measuring_for_real():
    """Whatever the machine says, the results are those of the dense model, and each candidate was timed."""
    apply, packed, report = compiled('measure', rounds=2)
    assert_close(apply(packed, X), model(PARAMS, X))
    assert report.milliseconds > 0
    for layer in report.layers.values():
        assert {'dense', layer.format} <= set(layer.milliseconds) | {'dense'}
