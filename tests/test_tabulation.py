"""A model as a table: the numbers of each leaf, their sums, and text that fits."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpruner

PARAMS = {
    'hidden': {'kernel': jnp.ones((16, 8)), 'bias': jnp.zeros(8)},
    'out': {'kernel': jnp.ones((8, 3), jnp.bfloat16)},
}
HIDDEN_MASK = (jnp.arange(128).reshape(16, 8) % 4 == 0).astype(jnp.uint8)  # 32 of 128
OUT_MASK = (jnp.arange(24).reshape(8, 3) % 3 == 0).astype(jnp.uint8)  # 8 of 24
MASKS = {'hidden': {'kernel': HIDDEN_MASK, 'bias': None}, 'out': {'kernel': OUT_MASK}}
# Leaf, weights, kept, bytes dense, bytes packed: bits and kept weights.
EXPECTED = [
    ('hidden/bias', 8, 8, 32, 32),
    ('hidden/kernel', 128, 32, 512, 16 + 32 * 4),
    ('out/kernel', 24, 8, 48, 3 + 8 * 2),
]


def numbers(table):
    return [(row.name, row.weights, row.kept, row.dense_bytes, row.packed_bytes) for row in table]


def fixed(masks):
    pruner = jaxpruner.FixedMask(masks=masks, use_packed_masks=True)
    return pruner.wrap_optax(optax.adam(0.1))


GIVEN = {
    'packed masks': jax.tree.map(lambda mask: jnp.packbits(mask, axis=0), MASKS),
    'masks of booleans': jax.tree.map(lambda mask: mask != 0, MASKS),
    'a chained state': optax.chain(optax.clip(1.0), fixed(MASKS)).init(PARAMS),
    'states of two pruners': optax.multi_transform(
        {
            'first': fixed({'hidden': MASKS['hidden'], 'out': {'kernel': None}}),
            'second': fixed({'hidden': {'kernel': None, 'bias': None}, 'out': MASKS['out']}),
        },
        {'hidden': {'kernel': 'first', 'bias': 'first'}, 'out': {'kernel': 'second'}},
    ).init(PARAMS),
}


@pytest.mark.parametrize('masks', GIVEN.values(), ids=GIVEN)
def test_masks_are_counted(masks):
    assert numbers(jaxpruner.tabulate(PARAMS, masks)) == EXPECTED


def test_shapes_will_do_where_masks_are_given_and_zeros_where_they_are_not():
    assert numbers(jaxpruner.tabulate(jax.eval_shape(lambda: PARAMS), MASKS)) == EXPECTED
    table = jaxpruner.tabulate(jaxpruner.apply_mask(PARAMS, MASKS))
    assert [row.kept for row in table] == [0, 32, 8]


def test_what_is_no_array_of_numbers_is_left_out():
    params = {'key': jax.random.key(0), 'none': None, 'number': 3, 'w': jnp.ones(2)}
    assert [row.name for row in jaxpruner.tabulate(params)] == ['w']
    assert 'total' in str(jaxpruner.tabulate({}))


def deep(layers):
    """Layers with masks of which layer 2 keeps less, and a last one of another shape."""
    params = {f'layers/{i}/mlp/up': jnp.ones((4, 8)) for i in range(layers)}
    masks = {name: (jnp.arange(32) % 4 == 0).reshape(4, 8) for name in params}
    masks['layers/2/mlp/up'] = (jnp.arange(32) % 8 == 0).reshape(4, 8)
    return {**params, 'layers/9/mlp/up': jnp.ones((2, 8))}, {**masks, 'layers/9/mlp/up': None}


def test_equal_layers_are_one_row():
    params, masks = deep(4)
    table = jaxpruner.tabulate(params, masks)
    assert [row.kept for row in table] == [8, 8, 4, 8, 16]
    rows = [line.split() for line in str(table).split('\n')[2:]]
    kept, stored = 8 + 8 + 4 + 8, 3 * (4 + 8 * 4) + 4 + 4 * 4
    assert rows[0] == (
        f'layers/{{0-3}}/mlp/up 4×8 float32 75.00%-87.50% {kept} 512 B {stored} B'.split()
    )
    assert rows[1] == 'layers/9/mlp/up 2×8 float32 0.00% 16 64 B 64 B'.split()
    assert rows[3] == f'total 144 69.44% 44 576 B {stored + 64} B'.split()


def test_other_masks_and_numbers_that_are_not_known_are_refused_by_name():
    other = {'hidden': {'kernel': jnp.ones((2, 2), jnp.uint8), 'bias': None}, 'out': None}
    with pytest.raises(ValueError, match=r'^hidden/kernel: .*\(2, 2\)'):
        jaxpruner.tabulate(PARAMS, other)
    with pytest.raises(TypeError, match=r'hidden/bias: .*outside jit'):
        jaxpruner.tabulate(jax.eval_shape(lambda: PARAMS))
    with pytest.raises(TypeError, match=r'hidden/kernel: .*outside jit'):
        jax.jit(lambda masks: jaxpruner.tabulate(PARAMS, masks))(MASKS)
