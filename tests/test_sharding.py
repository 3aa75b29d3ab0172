"""Masks of parameters that are sharded over a mesh: the same as on one device, made where the parameters are.

What devices tell one another while masks are made are counts: nothing larger than the longest axis of a parameter.
"""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eight_devices
import hlo
import jaxpruner
from jaxpruner import packing

SHAPES = {'wide': (256, 128), 'narrow': (64, 24)}
MESH = {'rows': 4, 'columns': 2}
LONGEST = max(max(shape) for shape in SHAPES.values())
COLLECTIVES = ('all-gather', 'all-to-all', 'all-reduce', 'collective-permute', 'reduce-scatter')

NO_SELECTION = ('no_prune', 'static_sparse')  # in update; what they do in init stands on one device anyway
UNSTRUCTURED = [name for name in jaxpruner.all_algorithm_names() if name not in (*NO_SELECTION, 'iterative_nm')]
# Algorithm and sparsity type.
FAST = [
    *[(name, 'unstructured') for name in UNSTRUCTURED],
    *[('magnitude', kind) for kind in ('2:4', 'nm_2,4,0', 'block_4,4', 'channel_-1', 'channel_0')],
    ('iterative_nm', '2:4'),
]
THOROUGH = [('iterative_nm', 'nm_2,4,0'), *[('rigl', kind) for kind in ('block_4,4', 'channel_-1', 'channel_0')]]
# Each case with masks as they are, and packed: arithmetic is the same, so that few packed ones do in fast runs.
CASES = [
    *[(*case, False) for case in FAST],
    *[(name, 'unstructured', True) for name in ('magnitude', 'random', 'rigl')],
    *[
        pytest.param((*case, is_packed), marks=pytest.mark.slow)
        for case, is_packed in [
            *[(case, True) for case in FAST if case[0] not in ('magnitude', 'random', 'rigl')],
            *[(case, True) for case in FAST if case[0] == 'magnitude' and case[1] != 'unstructured'],
            *[(case, is_packed) for case in THOROUGH for is_packed in (False, True)],
        ]
    ],
]

# What is larger, and may be: numbers of elements that one collective brings to a device.
# Packed, 'narrow' has 3 columns, which two devices cannot share: each row of devices puts its part together.
PACKED_NARROW = 64 // 4 * 24


def largest_allowed(case):
    _, _, is_packed = case
    sizes = [LONGEST]
    if is_packed:
        sizes.append(PACKED_NARROW)
    return max(sizes)


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config, '-m', 'not slow')


@pytest.mark.slow
def test_further_cases_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config, '-m', 'slow')


def make(algorithm, kind, is_packed):
    settings = {'update_freq': 1, 'update_start_step': 0, 'update_end_step': 4, 'drop_fraction': 0.3}
    return jaxpruner.create_updater_from_config(
        {
            'algorithm': algorithm,
            'sparsity_type': kind,
            'use_packed_masks': is_packed,
            'sparsity': 0.75,
            **settings,
        }
    )


@functools.cache
def arrays(number):
    keys = jax.random.split(jax.random.PRNGKey(number), len(SHAPES))
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)}


def sharding():
    devices = np.array(jax.devices()).reshape(tuple(MESH.values()))
    return NamedSharding(Mesh(devices, tuple(MESH)), PartitionSpec(*MESH))


def case_name(case):
    return f'{case[0]}-{case[1]}-{"packed" if case[2] else "unpacked"}'


def assert_sharded(result, shape):
    """An array of the given shape lies on the mesh as a parameter does, as far as its axes can be divided."""
    expected = [
        name if length % count == 0 else None for (name, count), length in zip(MESH.items(), shape, strict=True)
    ]
    wanted = NamedSharding(sharding().mesh, PartitionSpec(*expected))
    assert result.shape == shape
    assert result.sharding.is_equivalent_to(wanted, len(shape)), result.sharding


@pytest.mark.parametrize('case', CASES, ids=case_name)
def check_masks_are_those_of_one_device(case):
    tx = make(*case).wrap_optax(optax.adam(0.1))
    params, grads = arrays(0), arrays(1)
    sharded_params, sharded_grads = jax.device_put((params, grads), sharding())
    state, sharded_state = tx.init(params), tx.init(sharded_params)
    update = jax.jit(tx.update)
    compiled = update.lower(sharded_grads, sharded_state, sharded_params).compile()
    _, sharded_state = compiled(sharded_grads, sharded_state, sharded_params)
    _, state = update(grads, state, params)
    for name, shape in SHAPES.items():
        np.testing.assert_array_equal(sharded_state.masks[name], state.masks[name], err_msg=name)
        removed = 1 - packing.unpack_like(state.masks[name], shape).mean()
        assert removed > 0.1, 'the update has pruned'
        assert_sharded(sharded_state.masks[name], packing.packed_shape(shape) if case[2] else shape)
    assert_small_collectives(compiled, case)


def assert_small_collectives(compiled, case):
    # XLA may write a collective as a pair, `all-gather-start` and `all-gather-done`.
    collectives = [
        (instruction.opcode, math.prod(shape))
        for instruction in hlo.reached(compiled.as_text())
        if instruction.opcode.removesuffix('-start') in COLLECTIVES
        for shape in instruction.shapes
    ]
    assert [(name, size) for name, size in collectives if size > largest_allowed(case)] == []
    # N:M ranks inside groups, which no device shares with another; the rest has to count together.
    ranks_in_groups = case[1] in ('2:4', 'nm_2,4,0')
    assert bool([name for name, size in collectives if size <= LONGEST]) is not ranks_in_groups


@pytest.mark.parametrize('algorithm', ['magnitude_ste', 'random_ste'])
def check_straight_through_forward_pass(algorithm):
    """These select in `pre_forward_update`, too."""
    case = (algorithm, 'unstructured', False)
    updater = make(*case)
    tx = updater.wrap_optax(optax.adam(0.1))
    params = arrays(0)
    sharded_params = jax.device_put(params, sharding())
    forward = jax.jit(updater.pre_forward_update)
    sharded_state = tx.init(sharded_params)
    compiled = forward.lower(sharded_params, sharded_state).compile()
    result, expected = compiled(sharded_params, sharded_state), forward(params, tx.init(params))
    for name, shape in SHAPES.items():
        np.testing.assert_array_equal(result[name], expected[name])
        assert_sharded(result[name], shape)
    assert_small_collectives(compiled, case)


@pytest.mark.parametrize('is_packed', [False, True], ids=['unpacked', 'packed'])
def check_initial_masks_lie_with_their_parameters(is_packed):
    params = jax.device_put(arrays(0), sharding())
    state = make('magnitude', 'unstructured', is_packed).init_state(params)
    for name, shape in SHAPES.items():
        assert_sharded(state.masks[name], packing.packed_shape(shape) if is_packed else shape)


@pytest.mark.parametrize('kind', ['unstructured', 'block_4,4', '2:4'])
def check_one_shot(kind):
    updater = make('magnitude', kind, False)
    pruned, masks = updater.instant_sparsify(arrays(0))
    sharded_pruned, sharded_masks = jax.jit(updater.instant_sparsify)(jax.device_put(arrays(0), sharding()))
    for name, shape in SHAPES.items():
        np.testing.assert_array_equal(sharded_masks[name], masks[name])
        np.testing.assert_array_equal(sharded_pruned[name], pruned[name])
        assert_sharded(sharded_masks[name], shape)
