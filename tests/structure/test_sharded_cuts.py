"""Parameters that devices share are cut where they are, and the smaller model runs on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from helpers import eight_devices
from jaxpruner import channel_groups

KEEP = {'up[1]': np.arange(0, 32, 2)}


def test_cuts_over_eight_devices(pytestconfig):
    eight_devices.run_checks(__file__, pytestconfig)


@pytest.mark.parametrize('is_jitted', [False, True])
def check_parameters_stay_on_their_devices(is_jitted):
    rng = np.random.default_rng(0)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('rows', 'columns'))
    specs = {'up': PartitionSpec('rows', 'columns'), 'down': PartitionSpec('columns', 'rows')}
    shapes = {'up': (8, 32), 'down': (32, 4)}
    params = {
        name: jax.device_put(
            jnp.asarray(rng.normal(size=shape), jnp.float32), NamedSharding(mesh, specs[name])
        )
        for name, shape in shapes.items()
    }
    x = jnp.asarray(rng.normal(size=(5, 8)), jnp.float32)

    def apply(p, x):
        return jnp.tanh(x @ p['up']) @ p['down']

    graph = channel_groups(apply, params, x)

    def shrink(params):
        return graph.shrink(params, KEEP)

    small = (jax.jit(shrink) if is_jitted else shrink)(params)
    for name, spec in specs.items():
        assert len(small[name].sharding.device_set) == 8, name
        assert not small[name].sharding.is_fully_replicated, (name, spec, small[name].sharding)
    found = jax.jit(graph.small_apply(KEEP))(small, x)
    expected = apply(graph.zeroed(params, KEEP), x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
