"""Masks of parameters that are sharded over a mesh: the same as on one device, made where the parameters are.

What devices tell one another while masks are made are counts: nothing larger than the longest axis of a parameter.
"""

import functools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpruner
from helpers import compiling, eight_devices, hlo
from jaxpruner.core import packing
from jaxpruner.mask_calculator import replacement

SHAPES = {'wide': (256, 128), 'narrow': (64, 24)}
MESH = {'rows': 4, 'columns': 2}
LONGEST = max(max(shape) for shape in SHAPES.values())
COLLECTIVES = ('all-gather', 'all-to-all', 'all-reduce', 'collective-permute', 'reduce-scatter')

NO_SELECTION = (
    'no_prune',
    'static_sparse',
)  # in update; what they do in init stands on one device anyway
UNSTRUCTURED = [
    name for name in jaxpruner.all_algorithm_names() if name not in (*NO_SELECTION, 'iterative_nm')
]
# Algorithm and sparsity type.
FAST = [
    *[(name, 'unstructured') for name in UNSTRUCTURED],
    *[('magnitude', kind) for kind in ('2:4', 'nm_2,4,0', 'block_4,4', 'channel_-1', 'channel_0')],
    ('iterative_nm', '2:4'),
]
THOROUGH = [
    ('iterative_nm', 'nm_2,4,0'),
    *[('rigl', kind) for kind in ('block_4,4', 'channel_-1', 'channel_0')],
]
# Each case with masks as they are, and packed: arithmetic is the same, so that few packed ones do in fast runs.
CASES = [
    *[(*case, False) for case in FAST],
    *[(name, 'unstructured', True) for name in ('magnitude', 'random', 'rigl')],
    *[
        pytest.param((*case, is_packed), marks=pytest.mark.slow)
        for case, is_packed in [
            *[(case, True) for case in FAST if case[0] not in ('magnitude', 'random', 'rigl')],
            *[
                (case, True)
                for case in FAST
                if case[0] == 'magnitude' and case[1] != 'unstructured'
            ],
            *[(case, is_packed) for case in THOROUGH for is_packed in (False, True)],
        ]
    ],
]

# How a parameter lies on the mesh.
SPECS = [
    PartitionSpec('rows', 'columns'),
    PartitionSpec('rows', None),
    PartitionSpec(None, 'columns'),
    PartitionSpec(('rows', 'columns'), None),
]


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config, '-m', 'not slow')


@pytest.mark.slow
def test_further_cases_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config, '-m', 'slow')


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


def assert_sharded(result, shape):
    """An array of the given shape lies on the mesh as a parameter does."""
    assert result.shape == shape
    assert result.sharding.is_equivalent_to(sharding(), len(shape)), result.sharding


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
    for name, shape in SHAPES.items():
        mask = np.asarray(packing.unpack_like(state.masks[name], shape))
        np.testing.assert_array_equal(
            mask, masks_of_one_device(algorithm, kind)[name], err_msg=name
        )
        assert 1 - mask.mean() > 0.1, 'the update has pruned'
        assert_sharded(state.masks[name], packing.packed_shape(shape) if is_packed else shape)
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
    """And more leaves of the same shapes take no more programs."""
    few = {'0': arrays(0), '1': arrays(1)}
    many = {str(i): arrays(i) for i in range(6)}
    make_masks(jax.device_put(few, sharding()))
    jax.random.split(jax.random.key(0), len(jax.tree.leaves(many)))  # a key for each leaf
    sharded = jax.device_put(many, sharding())
    with compiling.Programs() as programs:
        masks = make_masks(sharded)
    assert programs.number == 0
    jax.tree.map(np.testing.assert_array_equal, masks, make_masks(many))
    for layer in masks.values():
        for name, shape in SHAPES.items():
            assert_sharded(layer[name], shape)


@pytest.mark.parametrize('algorithm', ['set', 'rigl'])
def check_replacing_weights_of_large_leaves(algorithm, monkeypatch):
    """Their scores are not written down; those of one device are."""
    masks_of_one_device(algorithm, 'unstructured')
    monkeypatch.setattr(replacement, '_MIN_LAZY_SIZE', 0)
    check_masks_are_those_of_one_device((algorithm, 'unstructured', False))


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


def check_values_of_an_algorithm_lie_with_their_parameters():
    updater = make('movement', 'unstructured', False)
    tx = updater.wrap_optax(optax.adam(0.1))
    params = jax.device_put(arrays(0), sharding())
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    for name, shape in SHAPES.items():
        assert_sharded(tx.init(params).algorithm_state[name], shape)
        assert_sharded(state.algorithm_state[name], shape)


def on_mesh(shapes, spec):
    keys = jax.random.split(jax.random.PRNGKey(0), len(shapes))
    params = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return jax.device_put(params, sharding(spec))


# Of each even two devices' part of the packed mask is larger than LONGEST. Alone the shape of 'across' would be packed
# along its first axis, of which eight devices have no whole bytes.
PACKED_SHAPES = {
    'wide': (256, 128),
    'narrow': (256, 48),
    'across': (96, 208),
    'stacked': (3, 256, 16),
}


@pytest.mark.parametrize('spec', SPECS, ids=str)
def check_packed_masks_stay_with_their_parameters(spec, caplog):
    shapes = {name: shape for name, shape in PACKED_SHAPES.items() if len(shape) == 2}
    params = on_mesh(shapes, spec)
    params |= on_mesh({'stacked': PACKED_SHAPES['stacked']}, PartitionSpec(None, *spec))
    placed = jax.tree.map(lambda param: param.sharding, params)
    tx = make('magnitude', 'unstructured', True).wrap_optax(optax.adam(0.1))
    with caplog.at_level(logging.WARNING):
        state = tx.init(params)
    assert caplog.text == ''
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
    # A target for a checkpoint, which knows no sharding, has the same shapes but for 'across'.
    target = jax.eval_shape(tx.init, params)
    assert all(
        target.masks[name].shape == state.masks[name].shape for name in shapes.keys() - {'across'}
    )
    # Nothing but counts is sent.
    assert [(name, size) for name, size in collectives_of(compiled) if size > LONGEST] == []


@pytest.mark.skipif(
    not hasattr(jax, 'typeof'), reason='types of this version of JAX have no sharding'
)
def check_shardings_that_are_part_of_types_are_known_where_init_is_traced():
    explicit = (jax.sharding.AxisType.Explicit,) * len(MESH)
    mesh = Mesh(sharding().mesh.devices, tuple(MESH), axis_types=explicit)
    shape = PACKED_SHAPES['across']
    params = jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, SPECS[-1]))
    traced = jax.eval_shape(make('magnitude', 'unstructured', True).init_state, params).masks
    assert traced.shape == packing.packed_shape(shape, -1) != packing.packed_shape(shape)


# Spec, and shapes of which a byte holds weights of several devices, and of which none does: an axis that is not divided
# can always be packed.
TORN = [
    (PartitionSpec('rows', 'columns'), {'torn': (24, 10)}, {'whole': (24, 16)}),
    (PartitionSpec('columns', 'rows'), {'torn': (10, 60)}, {'whole': (10, 64)}),
    (PartitionSpec('rows', None), {}, {'whole': (60, 20)}),
    (PartitionSpec(None, 'columns'), {}, {'whole': (6, 20)}),
    (PartitionSpec(('rows', 'columns'), None), {}, {'whole': (24, 10)}),
]


@pytest.mark.parametrize(('spec', 'torn', 'whole'), TORN, ids=str)
def check_a_warning_names_masks_that_devices_share(spec, torn, whole, caplog):
    alone = {name: np.asarray(param) for name, param in on_mesh(torn | whole, spec).items()}
    params = on_mesh(torn | whole, spec)
    tx = make('magnitude', 'unstructured', True).wrap_optax(optax.adam(0.1))
    with caplog.at_level(logging.WARNING):
        state = tx.init(params)
    assert [record.name for record in caplog.records] == ['jaxpruner.core.masking'] * len(torn)
    for shape in torn.values():
        assert f'torn of shape {shape}, sharded as {spec}' in caplog.text
        assert 'use_packed_masks=False' in caplog.text
    assert 'whole of shape' not in caplog.text
    caplog.clear()
    _, state = jax.jit(tx.update)(params, state, params)
    assert caplog.text == ''
    # They are right all the same.
    _, expected = jax.jit(tx.update)(alone, tx.init(alone), alone)
    for name, shape in (torn | whole).items():
        mask = packing.unpack_like(state.masks[name], shape)
        np.testing.assert_array_equal(mask, packing.unpack_like(expected.masks[name], shape))


@pytest.mark.parametrize('kind', ['unstructured', 'block_4,4', '2:4'])
def check_one_shot(kind):
    updater = make('magnitude', kind, False)
    pruned, masks = updater.instant_sparsify(arrays(0))
    sharded_pruned, sharded_masks = jax.jit(updater.instant_sparsify)(
        jax.device_put(arrays(0), sharding())
    )
    for name, shape in SHAPES.items():
        np.testing.assert_array_equal(sharded_masks[name], masks[name])
        np.testing.assert_array_equal(sharded_pruned[name], pruned[name])
        assert_sharded(sharded_masks[name], shape)
