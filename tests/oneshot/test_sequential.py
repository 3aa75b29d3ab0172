"""Blocks that are calibrated when those before them are pruned, against a loop in NumPy and the whole at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner.oneshot import SparseGPT, Wanda
from oneshot import model, references

LAYERS = 3
STACKED = {
    'a': model.normal(LAYERS, 8, 16) / 2,
    'b': model.normal(LAYERS, 16, 8) / 2,
    'out': model.normal(8, 4),
}
UNROLLED = {f'{name}{i}': STACKED[name][i] for name in 'ab' for i in range(LAYERS)} | {
    'out': STACKED['out']
}
BATCHES = [model.normal(40, 8) for _ in range(2)]
BLOCKS = [[f'a{i}', f'b{i}'] for i in range(LAYERS)]


def layer(x, a, b):
    return jnp.tanh(x @ a) @ b


def scanned(params, x):
    def body(x, taken):
        return jax.checkpoint(layer)(x, *taken), x.sum()

    x, sums = jax.lax.scan(body, jnp.exp(x * 0.1), (params['a'], params['b']), reverse=True)
    return (x + sums.sum()) @ params['out']


def unrolled(params, x):
    x, total = jnp.exp(x * 0.1), 0
    for i in reversed(range(LAYERS)):
        total += x.sum()
        x = jax.jit(layer)(x, params[f'a{i}'], params[f'b{i}'])
    return (x + total) @ params['out']


def half(params):
    return dict.fromkeys(params, 0.5)


def stacked(tree):
    return {name: np.stack([tree[f'{name}{i}'] for i in range(LAYERS)]) for name in 'ab'} | {
        'out': tree['out']
    }


def test_a_scan_is_pruned_as_its_layers_one_after_another():
    found = SparseGPT(sparsity_distribution_fn=half, sequential=True).instant_sparsify(
        STACKED, apply_fn=scanned, batches=iter(BATCHES)
    )
    alone = SparseGPT(sparsity_distribution_fn=half, sequential=True, blocks=BLOCKS)
    expected = alone.instant_sparsify(UNROLLED, apply_fn=unrolled, batches=BATCHES)
    jax.tree.map(np.testing.assert_array_equal, found[1], stacked(expected[1]))
    jax.tree.map(
        lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-3, atol=1e-4),
        found[0],
        stacked(expected[0]),
    )
    at_once = SparseGPT(sparsity_distribution_fn=half).instant_sparsify(
        STACKED, apply_fn=scanned, batches=BATCHES
    )
    assert any(
        (at_once[1][name] != found[1][name]).any() for name in STACKED
    )  # it does make a difference


def test_each_layer_is_calibrated_with_those_before_it_pruned():
    """Two leaves that meet one value are a block; the next layers see what both of them give."""
    weights = [np.asarray(model.normal(8, 8), np.float64) for _ in range(4)]
    params = dict(zip('abcd', map(jnp.float32, weights), strict=True))

    def apply(params, x):
        x = jnp.tanh(x @ params['a']) + jnp.tanh(x @ params['b'])
        return jnp.tanh(x @ params['c']) @ params['d']

    for pruner, reference in ((SparseGPT, references.sparsegpt), (Wanda, _wanda)):
        pruned, masks = pruner(sparsity_distribution_fn=half, sequential=True).instant_sparsify(
            params, apply_fn=apply, batches=BATCHES
        )
        x, new = np.concatenate(BATCHES).astype(np.float64), {}
        for number, name in enumerate('abcd'):
            new[name], mask = reference(weights[number], x, 0.5)
            np.testing.assert_array_equal(masks[name], mask, err_msg=name)
            np.testing.assert_allclose(pruned[name], new[name], rtol=1e-3, atol=1e-4)
            if name == 'b':
                x = np.tanh(x @ new['a']) + np.tanh(x @ new['b'])
            elif name == 'c':
                x = np.tanh(x @ new['c'])


def _wanda(weights, inputs, sparsity):
    mask = references.mask_of(references.wanda(weights, inputs), sparsity)
    return weights * mask, mask


def test_one_block_is_the_whole_at_once():
    """Every way in which a model reads its weights, and batches of two shapes; a scan's trips stay apart."""
    names = {'sparsity_type': {'stack': None, '*': 'unstructured'}}
    arguments = {'apply_fn': model.apply, 'batches': model.BATCHES} | names
    found = jaxpruner.prune(
        model.PARAMS, 0.5, 'sparsegpt', sequential=True, blocks=['*'], **arguments
    )
    expected = jaxpruner.prune(model.PARAMS, 0.5, 'sparsegpt', **arguments)
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])
    jax.tree.map(
        lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6), found[0], expected[0]
    )


def test_sparsities_of_layers_come_from_a_first_pass():
    arguments = {'sparsity_distribution_fn': half, 'owl': True, 'owl_multiple': 1.5, 'per': 'layer'}
    _, masks = Wanda(**arguments, sequential=True).instant_sparsify(
        STACKED, apply_fn=scanned, batches=iter(BATCHES)
    )
    _, at_once = Wanda(**arguments).instant_sparsify(STACKED, apply_fn=scanned, batches=BATCHES)
    for name in STACKED:
        counts = [
            mask.reshape(-1, *mask.shape[-2:]).sum((1, 2)) for mask in (masks[name], at_once[name])
        ]
        np.testing.assert_array_equal(*counts)
    assert len(set(masks['a'].sum((1, 2)).tolist())) > 1


def by_length(params, x):
    names = 'ab' if len(x) > 30 else 'ba'
    return jnp.tanh(x @ params[names[0]]) @ params[names[1]]


SQUARE = {'a': jnp.ones((8, 8)), 'b': jnp.ones((8, 8))}
BAD = [
    (
        {'blocks': ['a']},
        {},
        ValueError,
        'blocks are for sequential=True, or for owl=True per block',
    ),
    (
        {'blocks': 'a', 'sequential': True},
        {},
        TypeError,
        "blocks must be a list with a glob .* got 'a'",
    ),
    ({'blocks': [3], 'sequential': True}, {}, TypeError, r'blocks must be a list .* got \[3\]'),
    (
        {'blocks': ['a', ['c']], 'sequential': True},
        {},
        ValueError,
        "blocks: 'c' matches no parameter",
    ),
    (
        {'sequential': True},
        {'calibration': {}},
        ValueError,
        'sequential=True takes statistics as it goes',
    ),
    ({'sequential': True}, {'batches': []}, ValueError, 'batches are empty'),
    (
        {'sequential': True},
        {'batches': [BATCHES[0], BATCHES[0][:0]]},
        ValueError,
        r'batches\[1\] holds no samples: .* leave it out',
    ),
    ({'sequential': True}, {'batches': None}, ValueError, r'apply_fn=…, batches=…'),
    (
        {'sequential': True},
        {'batches': [*BATCHES, BATCHES[0][:20]]},
        ValueError,
        'batches of different shapes .* different orders',
    ),
    (
        {'sequential': True, 'sparsity_type': '3:6'},
        {},
        ValueError,
        'a: its 8 inputs do not divide into groups of m=6',
    ),
]


@pytest.mark.parametrize(('settings', 'arguments', 'error', 'message'), BAD)
def test_bad_calls(settings, arguments, error, message):
    given = {'apply_fn': by_length, 'batches': BATCHES[:1]} | arguments
    with pytest.raises(error, match=message):
        Wanda(sparsity_distribution_fn=half, **settings).instant_sparsify(SQUARE, **given)


def test_an_interrupt_leaves_the_parameters_as_they_are():
    def batches():
        yield from BATCHES
        raise KeyboardInterrupt

    params = {name: leaf + 0 for name, leaf in UNROLLED.items()}
    for sequential in (False, True):
        with pytest.raises(KeyboardInterrupt):
            Wanda(sparsity_distribution_fn=half, sequential=sequential).instant_sparsify(
                params, apply_fn=unrolled, batches=batches()
            )
    jax.tree.map(np.testing.assert_array_equal, params, UNROLLED)
