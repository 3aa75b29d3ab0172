"""Masks of parameters that are sharded over a mesh: the same as on one device, made where the parameters are.

What devices tell one another while masks are made are counts: nothing larger than the longest axis of a parameter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpruner
from benchmarks.compiled import collectives
from helpers import eight_devices, steps

SHAPES = {'wide': (256, 128), 'narrow': (64, 24)}
MESH = {'rows': 4, 'columns': 2}
LONGEST = 256
WINDOW = {'update_freq': 1, 'update_start_step': 0, 'update_end_step': 4, 'drop_fraction': 0.3}
# How a parameter lies on the mesh.
SPECS = [
    PartitionSpec('rows', 'columns'),
    PartitionSpec(None, 'columns'),
    PartitionSpec(('rows', 'columns'), None),
]
# Algorithm, sparsity type, whether masks are packed.
CASES = [
    ('magnitude', 'unstructured', True),
    ('magnitude', '2:4', True),
    ('magnitude', 'channel_-1', True),
    ('global_magnitude', 'unstructured', True),
    ('random', 'unstructured', False),
    ('rigl', 'unstructured', True),
    ('magnitude_ste', 'unstructured', False),
    ('set', 'block_4,4', False),
]


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)


def make(algorithm, kind='unstructured', is_packed=False):
    config = {'algorithm': algorithm, 'sparsity_type': kind, 'use_packed_masks': is_packed}
    sparsity = 0.5 if kind == '2:4' else 0.75
    return jaxpruner.create_updater_from_config(config | WINDOW | {'sparsity': sparsity})


def arrays(seed, shapes=SHAPES):
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in shapes.items()
    }


def sharding(spec=SPECS[0], **settings):
    devices = np.array(jax.devices()).reshape(tuple(MESH.values()))
    return NamedSharding(Mesh(devices, tuple(MESH), **settings), spec)


def assert_placed(masks, params, is_packed=False):
    """Each mask, or its bits, lies on the mesh as its parameter does."""
    for name, param in params.items():
        assert masks[name].size == param.size // (8 if is_packed else 1)
        assert masks[name].sharding.is_equivalent_to(param.sharding, param.ndim), name


def largest_sent(compiled):
    """The most elements that devices send each other in one collective; 0 where they send none."""
    return collectives(compiled.as_text()).largest


@functools.cache
def masks_of_one_device(algorithm, kind='unstructured'):
    """Not packed: however masks are stored, the arithmetic is the same."""
    tx = make(algorithm, kind).wrap_optax(optax.adam(0.1))
    return jax.jit(tx.update)(arrays(1), tx.init(arrays(0)), arrays(0))[1].masks


@pytest.mark.parametrize(('algorithm', 'kind', 'is_packed'), CASES)
def check_masks_are_those_of_one_device(algorithm, kind, is_packed):
    tx = make(algorithm, kind, is_packed).wrap_optax(optax.adam(0.1))
    params, grads = jax.device_put((arrays(0), arrays(1)), sharding())
    state = tx.init(params)
    compiled = jax.jit(tx.update).lower(grads, state, params).compile()
    _, state = compiled(grads, state, params)
    masks = jaxpruner.unpack_masks(state.masks, params)
    steps.assert_equal(masks, masks_of_one_device(algorithm, kind))
    assert masks['wide'].mean() < 0.9, 'the update has pruned'
    assert_placed(state.masks, params, is_packed)
    assert largest_sent(compiled) <= LONGEST
    # N:M ranks inside groups, which no device shares with another; the rest has to count together.
    assert (largest_sent(compiled) > 0) is (kind != '2:4')


MADE = {
    'init': lambda params: make('rigl').init_state(params).masks,
    'instant_sparsify': lambda params: make('magnitude').instant_sparsify(params)[1],
}


@pytest.mark.parametrize('make_masks', MADE.values(), ids=MADE)
def check_outside_of_programs_leaves_stay_where_they_are(make_masks):
    params = jax.device_put(arrays(0), sharding())
    masks = make_masks(params)
    steps.assert_equal(masks, make_masks(arrays(0)))
    assert_placed(masks, params)


@pytest.mark.skipif(not hasattr(jax, 'set_mesh'), reason='this JAX has no explicit axes')
@pytest.mark.parametrize('algorithm', ['global_magnitude', 'rigl'])
def check_explicit_axes(algorithm):
    """Masks are those of one device where the types of arrays say how they are divided."""
    place = sharding(axis_types=(jax.sharding.AxisType.Explicit,) * len(MESH))
    tx = make(algorithm).wrap_optax(optax.adam(0.1))
    with jax.set_mesh(place.mesh):
        params, grads = jax.device_put((arrays(0), arrays(1)), place)
        _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    steps.assert_equal(state.masks, masks_of_one_device(algorithm))
    assert_placed(state.masks, params)


@pytest.mark.parametrize('spec', SPECS, ids=str)
def check_packed_masks_stay_with_their_parameters(spec):
    # Of each even two devices' part of the packed mask is larger than LONGEST.
    params = jax.device_put(arrays(0, {'wide': (256, 128), 'narrow': (256, 48)}), sharding(spec))
    stacked = arrays(1, {'stacked': (3, 256, 16)})
    params |= jax.device_put(stacked, sharding(PartitionSpec(None, *spec)))
    tx = make('magnitude', is_packed=True).wrap_optax(optax.adam(0.1))
    state = tx.init(params)
    assert_placed(state.masks, params, is_packed=True)
    compiled = jax.jit(tx.update).lower(params, state, params).compile()
    assert_placed(compiled(params, state, params)[1].masks, params, is_packed=True)
    assert 0 < largest_sent(compiled) <= LONGEST


def check_masks_whose_bytes_devices_share_are_right():
    """Of (24, 10) no device has whole bytes."""
    alone = arrays(0, {'torn': (24, 10), 'whole': (24, 16)})
    tx = make('magnitude', is_packed=True).wrap_optax(optax.adam(0.1))
    found, expected = (
        jaxpruner.unpack_masks(jax.jit(tx.update)(p, tx.init(p), p)[1].masks, p)
        for p in (jax.device_put(alone, sharding()), alone)
    )
    steps.assert_equal(found, expected)
