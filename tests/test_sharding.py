"""Masks of parameters that are sharded over a mesh: the same as on one device, made where the parameters are.

What devices tell one another while masks are made are counts: nothing larger than the longest axis of a parameter.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpruner
from helpers import eight_devices, hlo

SHAPES = {'wide': (256, 128), 'narrow': (64, 24)}
MESH = {'rows': 4, 'columns': 2}
LONGEST = max(max(shape) for shape in SHAPES.values())
COLLECTIVES = ('all-gather', 'all-to-all', 'all-reduce', 'collective-permute', 'reduce-scatter')

# Algorithm, sparsity type, whether masks are packed.
CASES = [
    ('magnitude', 'unstructured', False),
    ('magnitude', 'unstructured', True),
    ('magnitude', '2:4', True),
    ('magnitude', 'block_4,4', False),
    ('magnitude', 'channel_-1', True),
    ('global_magnitude', 'unstructured', True),
    ('random', 'unstructured', False),
    ('rigl', 'unstructured', True),
    ('magnitude_ste', 'unstructured', False),
    ('set', 'block_4,4', False),
]

# How a parameter lies on the mesh.
SPECS = [
    PartitionSpec('rows', 'columns'),
    PartitionSpec(None, 'columns'),
    PartitionSpec(('rows', 'columns'), None),
]


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)


def make(algorithm, kind, is_packed):
    settings = {
        'update_freq': 1,
        'update_start_step': 0,
        'update_end_step': 4,
        'drop_fraction': 0.3,
    }
    return jaxpruner.create_updater_from_config(
        {
            'algorithm': algorithm,
            'sparsity_type': kind,
            'use_packed_masks': is_packed,
            'sparsity': 0.5 if kind in ('2:4', 'nm_2,4,0') else 0.75,
            **settings,
        }
    )


@functools.cache
def arrays(number):
    keys = jax.random.split(jax.random.PRNGKey(number), len(SHAPES))
    return {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def sharding(spec=SPECS[0]):
    devices = np.array(jax.devices()).reshape(tuple(MESH.values()))
    return NamedSharding(Mesh(devices, tuple(MESH)), spec)


def case_name(case):
    return f'{case[0]}-{case[1]}-{"packed" if case[2] else "unpacked"}'


def assert_sharded(result, size):
    """An array of so many elements lies on the mesh as a parameter does."""
    assert result.size == size
    assert result.sharding.is_equivalent_to(sharding(), result.ndim), result.sharding


@functools.cache
def masks_of_one_device(algorithm, kind):
    """Not packed: however masks are stored, the arithmetic is the same."""
    tx = make(algorithm, kind, False).wrap_optax(optax.adam(0.1))
    return jax.jit(tx.update)(arrays(1), tx.init(arrays(0)), arrays(0))[1].masks


@pytest.mark.parametrize('case', CASES, ids=case_name)
def check_masks_are_those_of_one_device(case):
    algorithm, kind, is_packed = case
    tx = make(*case).wrap_optax(optax.adam(0.1))
    params, grads = jax.device_put((arrays(0), arrays(1)), sharding())
    state = tx.init(params)
    compiled = jax.jit(tx.update).lower(grads, state, params).compile()
    _, state = compiled(grads, state, params)
    masks = jaxpruner.unpack_masks(state.masks, params)
    for name, shape in SHAPES.items():
        mask = np.asarray(masks[name])
        np.testing.assert_array_equal(
            mask, masks_of_one_device(algorithm, kind)[name], err_msg=name
        )
        assert 1 - mask.mean() > 0.1, 'the update has pruned'
        assert_sharded(state.masks[name], math.prod(shape) // (8 if is_packed else 1))
    assert_small_collectives(compiled, case)


@pytest.mark.parametrize(
    'make_masks',
    [
        lambda params: make('rigl', 'unstructured', False).init_state(params).masks,
        lambda params: make('magnitude', 'unstructured', False).instant_sparsify(params)[1],
    ],
    ids=['init', 'instant_sparsify'],
)
def check_outside_of_programs_leaves_stay_where_they_are(make_masks):
    many = {str(i): arrays(i) for i in range(2)}
    masks = make_masks(jax.device_put(many, sharding()))
    jax.tree.map(np.testing.assert_array_equal, masks, make_masks(many))
    for layer in masks.values():
        for name, shape in SHAPES.items():
            assert_sharded(layer[name], math.prod(shape))


@pytest.mark.skipif(not hasattr(jax, 'set_mesh'), reason='this JAX has no explicit axes')
@pytest.mark.parametrize('algorithm', ['magnitude', 'global_magnitude', 'magnitude_ste', 'rigl'])
def check_explicit_axes(algorithm):
    """Masks are those of one device where the types of arrays say how they are divided."""
    explicit = (jax.sharding.AxisType.Explicit,) * len(MESH)
    mesh = Mesh(sharding().mesh.devices, tuple(MESH), axis_types=explicit)
    place = NamedSharding(mesh, SPECS[0])
    tx = make(algorithm, 'unstructured', False).wrap_optax(optax.adam(0.1))
    with jax.set_mesh(mesh):
        params, grads = jax.device_put((arrays(0), arrays(1)), place)
        _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    expected = masks_of_one_device(algorithm, 'unstructured')
    for name, mask in state.masks.items():
        np.testing.assert_array_equal(mask, expected[name])
        assert mask.sharding.is_equivalent_to(place, mask.ndim)


def collectives_of(compiled):
    # XLA may write a collective as a pair, `all-gather-start` and `all-gather-done`.
    return [
        (instruction.opcode, math.prod(shape))
        for instruction in hlo.reached(compiled.as_text())
        if instruction.opcode.removesuffix('-start') in COLLECTIVES
        for shape in instruction.shapes
    ]


def assert_small_collectives(compiled, case):
    collectives = collectives_of(compiled)
    assert [(name, size) for name, size in collectives if size > LONGEST] == []
    # N:M ranks inside groups, which no device shares with another; the rest has to count together.
    ranks_in_groups = case[1] in ('2:4', 'nm_2,4,0')
    assert bool([name for name, size in collectives if size <= LONGEST]) is not ranks_in_groups


def on_mesh(shapes, spec):
    keys = jax.random.split(jax.random.PRNGKey(0), len(shapes))
    params = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return jax.device_put(params, sharding(spec))


# Of each even two devices' part of the packed mask is larger than LONGEST.
PACKED_SHAPES = {'wide': (256, 128), 'narrow': (256, 48), 'stacked': (3, 256, 16)}


@pytest.mark.parametrize('spec', SPECS, ids=str)
def check_packed_masks_stay_with_their_parameters(spec):
    shapes = {name: shape for name, shape in PACKED_SHAPES.items() if len(shape) == 2}
    params = on_mesh(shapes, spec)
    params |= on_mesh({'stacked': PACKED_SHAPES['stacked']}, PartitionSpec(None, *spec))
    placed = jax.tree.map(lambda param: param.sharding, params)
    tx = make('magnitude', 'unstructured', True).wrap_optax(optax.adam(0.1))
    state = tx.init(params)
    update = jax.jit(tx.update, donate_argnums=(0, 1))
    compiled = update.lower(params, state, params).compile()

    def assert_in_place(state):
        for name, mask in state.masks.items():
            assert mask.size == math.prod(PACKED_SHAPES[name]) // 8
            assert mask.sharding.is_equivalent_to(placed[name], mask.ndim), (name, mask.sharding)

    assert_in_place(state)
    masks = state.masks
    for _ in range(3):
        grads = jax.tree.map(jnp.copy, params)
        _, state = compiled(grads, state, params)
        assert_in_place(state)
    assert all(mask.is_deleted() for mask in jax.tree.leaves(masks)), 'donated'
    # Nothing but counts is sent.
    assert [(name, size) for name, size in collectives_of(compiled) if size > LONGEST] == []


def check_masks_whose_bytes_devices_share_are_right():
    """Of (24, 10) no device has whole bytes."""
    params = on_mesh({'torn': (24, 10), 'whole': (24, 16)}, SPECS[0])
    alone = jax.tree.map(np.asarray, params)
    tx = make('magnitude', 'unstructured', True).wrap_optax(optax.adam(0.1))
    state = tx.init(params)
    found, expected = (
        jaxpruner.unpack_masks(jax.jit(tx.update)(p, s, p)[1].masks, p)
        for p, s in ((params, state), (alone, tx.init(alone)))
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
