"""Parameters and batches on eight devices are pruned as on one."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpruner
from helpers import eight_devices
from oneshot import model
from uses.table import scan


@pytest.mark.slow
def test_on_eight_devices(pytestconfig):
    eight_devices.run_checks(__file__, pytestconfig)


def apply(params, x):
    return scan(lambda x, w: jax.numpy.tanh(x @ w), x, params['stack']) @ params['out'].T


def loss_fn(params, x):
    return jax.numpy.sum(apply(params, x) ** 2)


CASES = [
    ('wanda', {'apply_fn': apply}),
    ('sparsegpt', {'apply_fn': apply, 'owl': True, 'sequential': True}),
    ('grasp', {'loss_fn': loss_fn}),
]


@pytest.mark.parametrize('is_explicit', [False, True])  # whether the axes are part of types
@pytest.mark.parametrize(('algorithm', 'settings'), CASES)
def check_masks_are_those_of_one_device(algorithm, settings, is_explicit):
    is_calibrated = algorithm in ('wanda', 'sparsegpt')
    if is_explicit and not (hasattr(jax, 'set_mesh') and is_calibrated):
        pytest.skip('this JAX has no explicit axes, or the model would have to name them')
    kinds = {'axis_types': (jax.sharding.AxisType.Explicit,) * 2} if is_explicit else {}
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ('data', 'model'), **kinds)
    params = {'stack': model.normal(2, 16, 16), 'out': model.normal(12, 16)}
    specs = {'stack': PartitionSpec(None, 'model'), 'out': PartitionSpec('model')}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    batch = model.normal(48, 16)
    expected = jaxpruner.prune(params, 0.5, algorithm, **settings, batches=[batch])
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec('data')))
    parted = jax.device_put(params, shardings)
    found = jaxpruner.prune(parted, 0.5, algorithm, **settings, batches=[batch])
    for name in params:
        np.testing.assert_array_equal(found[1][name], expected[1][name])
        np.testing.assert_allclose(found[0][name], expected[0][name], rtol=1e-3, atol=1e-4)
        for result in found:
            assert result[name].sharding.is_equivalent_to(shardings[name], result[name].ndim)
