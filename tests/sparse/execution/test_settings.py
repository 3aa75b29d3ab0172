"""What `sparse.compile` refuses or warns of: settings, reports of an earlier call, devices, and results that differ."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpruner import sparse
from jaxpruner.sparse.execution import checking, operators
from jaxpruner.sparse.operators import csr_kernel
from jaxpruner.sparse.program.models import find_products

KEY = jax.random.key(0)
X = jnp.ones((4, 16))
PARAMS = {
    'w': jax.random.normal(KEY, (16, 32)).at[:8].set(0),
    'bias': jnp.ones(32),
    'scaled': jnp.ones((32, 8)),
}
needs_csr = pytest.mark.skipif(
    csr_kernel.why_missing(jnp.float32) is not None, reason='this JAX has no CSR kernel'
)


def apply_fn(params, x):
    return (x @ params['w'] + params['bias']) @ (params['scaled'] * 0.5)


@pytest.mark.parametrize(
    ('setting', 'message'),
    [
        ({'bias': 'csr'}, 'bias: no contraction reads it'),
        ({'w': 'dense', 'b*': 'smaller'}, 'bias: no contraction reads it'),
        ({'scaled': 'smaller'}, 'scaled: .*computed from this leaf'),
        ({'biass': 'smaller'}, "'biass' matches no parameter.*bias"),
        ('mesure', "no format 'mesure'.*'measure' and 'channels'"),
        ('chanels', "no format 'chanels'.*'measure' and 'channels'"),
        ({'w': 'channels'}, "no format 'channels'"),
    ],
)
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


@pytest.mark.parametrize(('rounds', 'error'), [(0, ValueError), (1, ValueError), (2.5, TypeError)])
def test_a_number_of_rounds_that_says_nothing_is_refused(rounds, error):
    with pytest.raises(error, match=f'rounds .*{rounds}'):
        sparse.compile(apply_fn, PARAMS, X, rounds=rounds)


def test_blocks_are_refused_where_windows_would_take_much_memory():
    def convolved(params, x):
        numbers = ('NHWC', 'HWIO', 'NHWC')
        return lax.conv_general_dilated(x, params['w'], (1, 1), 'SAME', dimension_numbers=numbers)

    params = {'w': jnp.zeros((3, 3, 16, 64)).at[..., :8].set(1)}
    images = jax.ShapeDtypeStruct((256, 256, 256, 16), jnp.float32)
    for setting in ('blocks', 'blocks 8x64'):
        with pytest.raises(ValueError, match='windows of its images would take 9216 MiB'):
            sparse.compile(convolved, params, images, formats=setting)


def test_a_report_shows_which_leaves_stay_dense():
    params = {**PARAMS, 'more': jnp.ones(8)}
    report = sparse.compile(
        lambda params, x: apply_fn(params, x) + params['more'], params, X, formats='dense'
    ).report
    text = str(report)
    assert 'bias and 1 more: dense, since no contraction reads it' in text
    assert 'scaled: dense, since ' in text


class TestResults:
    """The fastest model is compared with the dense one."""

    def products(self, dtype):
        params = {'w': jnp.ones((4, 4), dtype)}
        return find_products(lambda p, x: x @ p['w'], params, jnp.ones((2, 4), dtype))

    @pytest.mark.parametrize(
        ('dtype', 'error'), [('float32', 0.02), ('bfloat16', 0.2), ('int32', 1)]
    )
    def test_differences_beyond_rounding_are_refused(self, dtype, error):
        products = self.products(dtype)
        expected = {'y': jnp.ones((2, 4), dtype)}
        checking.check_results(expected, expected, products)
        found = {'y': expected['y'].at[1, 2].add(error)}
        with pytest.raises(RuntimeError, match=r"result\['y'\].*differs by .*largest result is 1;"):
            checking.check_results(found, expected, products)

    def test_rounding_is_none(self):
        expected = jnp.array([1.0, 1e-9, jnp.nan, jnp.inf])
        found = jnp.array([1.0 + 1e-5, 0, 1, 2])
        checking.check_results(found, expected, self.products('float32'))

    def test_a_result_that_is_no_number_is_refused(self):
        with pytest.raises(RuntimeError, match='nan'):
            checking.check_results(jnp.array(jnp.nan), jnp.ones(()), self.products('float32'))

    def test_whole_numbers_that_follow_from_floats_are_not_compared(self):
        checking.check_results(jnp.array(3), jnp.array(4), self.products('float32'))

    def test_compile_compares(self, monkeypatch):
        def wrong(self, rows):
            return jnp.zeros((len(rows), 512))

        monkeypatch.setattr(operators.Smaller, 'multiply', wrong)
        params = {'w': jnp.ones((512, 512)).at[:, 8:].set(0)}
        with pytest.raises(RuntimeError, match='differs by 512'):
            sparse.compile(
                lambda p, x: x @ p['w'], params, jnp.ones((512, 512)), rounds=3, progress=False
            )


@needs_csr
def test_what_fills_layers_up_has_no_gradient():
    weights = np.zeros((2, 4, 6), np.float32)
    weights[0, 1, 2], weights[0, 2, 3], weights[0, 3, 1], weights[1, 1, 1] = 1, 2, 3, 4

    def scanned(params, x):
        return lax.scan(lambda x, w: (x, x @ w), x, params['w'])[1]

    params, x = {'w': jnp.asarray(weights)}, jnp.arange(8.0).reshape(2, 4)
    apply, packed, _ = sparse.compile(scanned, params, x, formats='csr')
    np.testing.assert_allclose(apply(packed, x), scanned(params, x))

    def loss(packed):
        return apply(packed, x).sum()

    (gradients,) = jax.grad(loss, allow_int=True)(packed).values()
    expected = jax.grad(lambda params: scanned(params, x).sum())(params)['w']
    assert gradients['w']['compressed'][1].tolist() == [expected[1, 1, 1], 0, 0]
    # In the order of the transposed matrix.
    assert gradients['w']['compressed'][0].tolist() == [
        expected[0, 3, 1],
        expected[0, 1, 2],
        expected[0, 2, 3],
    ]


_SEVERAL_DEVICES = """
import json, warnings
import jax, jax.numpy as jnp
from jaxpruner import sparse
mesh = jax.make_mesh((4,), ('m',), axis_types=(jax.sharding.AxisType.Auto,))
spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('m'))
whole = jax.device_put(jnp.eye(64), jax.devices()[0])
params = {'spread': jax.device_put(whole, spread), 'whole': whole}
apply_fn = lambda p, x: x @ p['spread'] @ p['whole']
x = jnp.ones((4, 64))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    apply, packed, _ = sparse.compile(apply_fn, params, x, formats='blocks 4x64')
messages = [str(warning.message) for warning in caught]
error = float(abs(apply(packed, x) - 1).max())
with jax.set_mesh(mesh):
    report = sparse.compile(apply_fn, params, x, formats='FORMAT').report
print(json.dumps([messages, error, report.device, [layer.format for layer in report.layers.values()]]))
"""


@pytest.mark.skipif(not hasattr(jax, 'set_mesh'), reason='this JAX has no set_mesh')
def test_several_devices():
    format = 'csr' if csr_kernel.why_missing(jnp.float32) is None else 'smaller'
    flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=4'
    finished = subprocess.run(
        [sys.executable, '-c', _SEVERAL_DEVICES.replace('FORMAT', format)],
        env={**os.environ, 'XLA_FLAGS': flags},
        check=True,
        capture_output=True,
        text=True,
    )
    messages, error, device, chosen = json.loads(finished.stdout)
    (message,) = messages
    assert 'spread lie on several devices' in message
    assert error == 0
    assert device.startswith('cpu')
    assert chosen == [format] * 2
