"""Masks of a strategy are made where the parameters lie: no parameter is gathered."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from helpers import eight_devices, hlo
from jaxpruner import pruning, pruning_apply

SHAPE = (256, 128)
ENTRIES = {
    'unstr_unified_local': 0.3,
    'unstr_global': 0.3,
    'str_unified_local': (2, 4),
}


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('method', ENTRIES)
def check_sharded_parameters(method, packed):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('rows', 'columns'))
    sharding = NamedSharding(mesh, PartitionSpec('rows', 'columns'))
    random = np.random.default_rng(0)
    alone = {
        name: {'kernel': random.normal(size=SHAPE).astype(np.float32)}
        for name in ('first', 'second')
    }
    params = jax.device_put(alone, sharding)
    strategy = {1: {'method': method, 'prune_rate_pattern': ENTRIES[method]}}

    def after_epoch(params):
        mask_key = pruning(params, 1, None, strategy, use_packed_masks=packed)[1]
        return pruning_apply(params, mask_key)[0], mask_key

    program = jax.jit(after_epoch).lower(params).compile()
    pruned, mask_key = program(params)
    expected = pruning(alone, 1, None, strategy, use_packed_masks=packed)[1]
    for name in alone:
        np.testing.assert_array_equal(mask_key[name]['kernel'], expected[name]['kernel'])
        assert pruned[name]['kernel'].sharding.is_equivalent_to(sharding, 2)
        assert mask_key[name]['kernel'].sharding.is_equivalent_to(sharding, 2)
    collectives = [
        max(math.prod(shape) for shape in instruction.shapes)
        for instruction in hlo.reached(program.as_text())
        if instruction.opcode.startswith(('all-', 'collective-', 'reduce-scatter'))
    ]
    assert max(collectives, default=0) <= max(SHAPE)
