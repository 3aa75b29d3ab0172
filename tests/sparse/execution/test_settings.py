"""What `sparse.compile` refuses or warns of: settings, devices, channels, and results that differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.random_numbers import Normal
from jaxpruner import sparse
from jaxpruner.sparse.execution import choosing
from uses.table import conv, scan

normal = Normal(0)
X = jnp.ones((4, 16))
PARAMS = {
    'w': normal(16, 32).at[:8].set(0),
    'bias': jnp.ones(32),
    'scaled': jnp.ones((32, 8)),
}


def apply_fn(params, x):
    return (x @ params['w'] + params['bias']) @ (params['scaled'] * 0.5)


REFUSED = [
    ({'w': 'dense', 'b*': 'smaller'}, 'bias: no contraction reads it'),
    ({'scaled': 'smaller'}, 'scaled: .*computed from this leaf'),
    ({'biass': 'smaller'}, "'biass' matches no parameter.*bias"),
    ('blocks 64x64', 'w: blocks do not divide the matrix of 16 x 32'),
    ('mesure', "no format 'mesure'.*'measure' and 'channels'"),
    ({'w': 'channels'}, "no format 'channels'"),
    ('blocks 0x8', "no format 'blocks 0x8'"),
    (3, 'no format 3.*csr, smaller, blocks'),
]


@pytest.mark.parametrize(('setting', 'message'), REFUSED)
def test_settings_are_refused_with_the_reason(setting, message):
    with pytest.raises(ValueError, match=message):
        sparse.compile(apply_fn, PARAMS, X, formats=setting)


def test_leaves_that_are_no_matrices_may_be_named_where_they_stay_dense():
    for setting in ({'bias': 'dense', 'w': 'smaller'}, {'w': 'smaller', '*': 'smaller'}):
        report = sparse.compile(apply_fn, PARAMS, X, formats=setting).report
        assert {name: layer.format for name, layer in report.layers.items()} == {'w': 'smaller'}


def test_a_model_without_matrices_says_why():
    def scaled(params, x):
        return x @ (params['w'] * 0.5)

    params = {'w': jnp.ones((16, 8))}
    with pytest.raises(ValueError, match=r'no leaf of this model.*w: .*computed from this leaf'):
        sparse.compile(scaled, params, X, formats='smaller')
    report = sparse.compile(scaled, params, X, formats='channels').report
    assert 'w: dense, since ' in str(report)


def test_blocks_are_refused_where_windows_would_take_much_memory():
    params = {'w': jnp.zeros((3, 3, 16, 64)).at[..., :8].set(1)}
    images = jax.ShapeDtypeStruct((256, 256, 256, 16), jnp.float32)
    for setting in ('blocks', 'blocks 8x64'):
        with pytest.raises(ValueError, match='windows of its images would take 9216 MiB'):
            sparse.compile(lambda p, x: conv(x, p['w']), params, images, formats=setting)


# What a product is wrong by, for a largest result of 512, and whether that is more than rounding.
ERRORS = [('float32', 1, False), ('float32', 10, True), ('bfloat16', 40, False), ('int32', 1, True)]


@pytest.mark.parametrize(('dtype', 'error', 'is_refused'), [*ERRORS, ('float32', np.nan, True)])
def test_the_fastest_model_is_compared_with_the_dense_one(
    monkeypatch, timed, dtype, error, is_refused
):
    def wrong(self, rows, result_dtype):
        return jnp.full((len(rows), 512), 512, result_dtype).at[1, 2].add(error).at[:, 8:].set(0)

    monkeypatch.setattr(choosing.SmallerMatrix, 'multiply', wrong)
    monkeypatch.setattr(choosing, 'candidates', lambda leaf, nonzero: [choosing.Smaller()])
    timed(products=[4e-3, 1e-3], whole=[4e-3, 1e-3])
    params = {'w': jnp.ones((512, 512), dtype).at[:, 8:].set(0)}

    def compiled():
        x = jnp.ones((2, 512), dtype)
        return sparse.compile(lambda p, x: x @ p['w'], params, x, progress=False)

    if is_refused:
        with pytest.raises(RuntimeError, match=rf'result of .*differs by {error:.3g} .*is 512;'):
            compiled()
    else:
        assert compiled().report.layers['w'].format == 'smaller'


def mlp(params, x):
    return jax.nn.relu(x @ params['up'] + params['bias']) @ params['down']


def scanned_mlps(params, x):
    return scan(lambda x, layer: x + mlp(layer, x), x, params)


def assert_computes_as(apply, apply_fn, params):
    found = apply(apply.pack(params), X)
    np.testing.assert_allclose(found, apply_fn(params, X), rtol=1e-4, atol=1e-4)


def test_parameters_that_need_removed_channels_are_refused():
    up, down = normal(16, 64).at[:, :32].set(0), normal(64, 8)
    params = {'up': up, 'bias': jnp.ones(64).at[:32].set(0), 'down': down}
    apply, _, report = sparse.compile(mlp, params, X, formats='channels')
    assert report.channels == {'up[1]': 32}
    for tuned in (params, {**params, 'bias': 2 * params['bias']}):
        assert_computes_as(apply, mlp, tuned)
    with pytest.raises(ValueError, match=r'channels up\[1\] .* not those that are zero'):
        apply.pack({**params, 'bias': params['bias'].at[:3].set(0.5)})


def test_layers_that_keep_channels_of_their_own():
    up, bias = normal(2, 16, 8).at[0, :, :4].set(0).at[1, :, 4:].set(0), jnp.zeros((2, 8))
    params = {'up': up, 'bias': bias, 'down': normal(2, 8, 16)}
    apply, _, report = sparse.compile(scanned_mlps, params, X, formats='channels')
    assert set(report.channels.values()) == {4}
    for changed in (bias.at[0, 4:].set(0.5), bias.at[0, 4].set(0.5)):
        assert_computes_as(apply, scanned_mlps, {**params, 'bias': changed})
    with pytest.raises(ValueError, match=r'the channels .* not those that are zero'):
        apply.pack({**params, 'bias': bias.at[0, 2].set(0.5)})
