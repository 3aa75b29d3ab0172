"""Channels that are removed in training leave all of their leaves, and the model without them is the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import channel_groups
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner.structure import GroupedChannels

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(8, 6)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=(8, 3)), jnp.float32)


def arrays(**shapes):
    return {name: jnp.asarray(RNG.normal(size=size), jnp.float32) for name, size in shapes.items()}


# A norm with running statistics, and biases: leaves that the default filter leaves out.
NORMED = {
    'params': {
        'up': arrays(kernel=(6, 16), bias=16),
        'norm': arrays(scale=16, bias=16),
        'middle': arrays(kernel=(16, 10), bias=10),
        'down': arrays(kernel=(10, 3), bias=3),
    },
    'batch_stats': {'norm': {'mean': jnp.ones(16), 'var': 2 * jnp.ones(16)}},
}


def dense(layer, x):
    return x @ layer['kernel'] + layer['bias']


def normed(variables, x):
    params, stats = variables['params'], variables['batch_stats']['norm']
    x = (dense(params['up'], x) - stats['mean']) * jax.lax.rsqrt(stats['var'] + 1e-5)
    x = jax.nn.relu(x * params['norm']['scale'] + params['norm']['bias'])
    return dense(params['down'], jax.nn.gelu(dense(params['middle'], x)))


def normed_params(params, x):
    return normed({'params': params, 'batch_stats': NORMED['batch_stats']}, x)


# Layers of a scan: each keeps hidden units of its own.
SCANNED = {
    'layers': arrays(up=(4, 6, 12), bias=(4, 12), down=(4, 12, 6)),
    'head': arrays(kernel=(6, 3), bias=3),
}


def scanned(params, x):
    def layer(x, p):
        return x + jnp.tanh(x @ p['up'] + p['bias']) @ p['down'], None

    x, _ = jax.lax.scan(layer, x, params['layers'])
    return dense(params['head'], x)


NORMED_GRAPH = channel_groups(normed, NORMED, X)
SCANNED_GRAPH = channel_groups(scanned, SCANNED, X)
SCHEDULE = jaxpruner.sparsity_schedules.PolynomialSchedule(2, 1, 7)


def train(pruner, function, params, steps=10):
    """Trains under jit; yields parameters and the state after each step."""
    tx = pruner.wrap_optax(optax.adamw(1e-2))

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda params: jnp.mean((function(params, X) - Y) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
        yield params, state


@pytest.mark.parametrize('packed', [True, False])
def test_channels_leave_all_leaves_at_each_step_and_then_the_model(packed):
    pruner = (jaxpruner.MagnitudePruning if packed else jaxpruner.SaliencyPruning)(
        scheduler=SCHEDULE,
        sparsity=0.5,
        sparsity_type=GroupedChannels(NORMED_GRAPH),
        use_packed_masks=packed,
    )
    counts = []
    for params, state in train(pruner, normed_params, NORMED['params']):
        masks = sparse_state_lib.unpack_masks(state.masks, params)
        first, second = masks['up']['bias'], masks['middle']['bias']
        of_leaves = {
            'up': {'kernel': first[None], 'bias': first},
            'norm': {'scale': first, 'bias': first},
            'middle': {'kernel': first[:, None] * second, 'bias': second},
            'down': {'kernel': second[:, None]},
        }
        assert masks['down'].pop('bias') is None
        jax.tree.map(
            lambda mask, expected, param: (
                np.testing.assert_array_equal(mask, np.broadcast_to(expected, mask.shape)),
                np.testing.assert_array_equal(jnp.where(mask, 0, param), 0),
            ),
            *(masks, of_leaves, params | {'down': {'kernel': params['down']['kernel']}}),
        )
        counts.append((int(first.sum()), int(second.sum())))
    assert (counts[0], counts[-1]) == ((16, 10), (8, 5))
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) > 2

    keep = NORMED_GRAPH.nonzero_channels(state)
    assert {name: len(kept) for name, kept in keep.items()} == {
        'params/up/kernel[1]': 8,
        'params/middle/kernel[1]': 5,
    }
    variables = {'params': params, 'batch_stats': NORMED['batch_stats']}
    small = NORMED_GRAPH.shrink(variables, keep)
    assert small['batch_stats']['norm']['mean'].shape == (8,)
    found = NORMED_GRAPH.small_apply(keep)(small, X)
    np.testing.assert_allclose(found, normed(variables, X), rtol=1e-5, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, NORMED_GRAPH.nonzero_channels(params), keep)


def test_layers_of_a_scan_keep_units_of_their_own():
    pruner = jaxpruner.MagnitudePruning(
        scheduler=SCHEDULE,
        sparsity=0.5,
        sparsity_type=GroupedChannels(SCANNED_GRAPH, groups='layers/*'),
        use_packed_masks=True,
    )
    (*_, (params, state)) = train(pruner, scanned, SCANNED)
    keep = SCANNED_GRAPH.nonzero_channels(state)
    assert {name: kept.shape for name, kept in keep.items()} == {'layers/up[2]': (4, 6)}
    assert len(np.unique(keep['layers/up[2]'], axis=0)) > 1
    small, small_state = SCANNED_GRAPH.shrink((params, state), keep)
    assert small['layers']['down'].shape == (4, 6, 6)
    found = SCANNED_GRAPH.small_apply(keep)(small, X)
    np.testing.assert_allclose(found, scanned(params, X), rtol=1e-5, atol=1e-5)
    masks = sparse_state_lib.unpack_masks(small_state.masks, small)
    assert all(mask.all() for mask in jax.tree.leaves(masks))


def test_a_leaf_may_stay_dense_if_its_channels_vanish_all_the_same():
    grouped = GroupedChannels(NORMED_GRAPH)
    pruner = jaxpruner.MagnitudePruning(sparsity=0.5, sparsity_type={'down/*': None, '*': grouped})
    pruned, masks = pruner.instant_sparsify(NORMED['params'])
    assert masks['down']['kernel'] is None
    keep = NORMED_GRAPH.nonzero_channels(masks)
    assert len(keep['params/middle/kernel[1]']) == 5
    jax.tree.map(np.testing.assert_array_equal, NORMED_GRAPH.nonzero_channels(pruned), keep)
    # Zeros of what makes the channels are enough, and so are zeros of what reads them, but not of less.
    for dense_leaves in (['norm/bias'], ['up/kernel', 'norm/scale']):
        pruner.sparsity_type = dict.fromkeys(dense_leaves) | {'*': grouped}
        pruner.instant_sparsify(NORMED['params'])
    pruner.sparsity_type = {'norm/bias': None, 'middle/kernel': None, '*': grouped}
    with pytest.raises(ValueError, match=r'norm/bias.* get no masks'):
        pruner.instant_sparsify(NORMED['params'])


def test_sparsities_are_those_of_the_leaders():
    nothing = jax.tree.map(lambda _: None, NORMED['params'])
    pruner = jaxpruner.MagnitudePruning(
        sparsity_type=GroupedChannels(NORMED_GRAPH),
        sparsity_distribution_fn=lambda params: nothing | {'middle': {'kernel': 0.2, 'bias': None}},
    )
    pruned, masks = pruner.instant_sparsify(NORMED['params'])
    assert masks['up'] == {'kernel': None, 'bias': None}
    assert int(masks['middle']['bias'].sum()) == 8
    assert list(NORMED_GRAPH.nonzero_channels(pruned)) == ['params/middle/kernel[1]']


def test_what_is_left_is_read_off_any_tree():
    is_left = np.ones((4, 12))  # of units by layer
    is_left[0, 3] = is_left[1, :2] = 0

    def left():
        columns, rows = is_left[:, None] * np.ones((6, 1)), is_left[..., None] * np.ones(6)
        layers = {'up': columns, 'bias': is_left, 'down': rows}
        return SCANNED_GRAPH.nonzero_channels({'layers': layers, 'head': None})

    # All lists are as long as the longest: those of the layers that have lost nothing.
    assert left() == {}
    is_left[2:, 5] = 0
    keep = left()['layers/up[2]']
    assert keep.shape == (4, 11)
    assert 3 not in keep[0]
    assert 5 not in keep[2]
    assert [0 in keep[1], 1 in keep[1]] == [True, False]  # as long as the others
    is_left[:] = 0
    assert left()['layers/up[2]'].tolist() == [0]


TWO = {'a': arrays(w=(6, 8)), 'b': arrays(w=(8, 3))}
TWO_GRAPH = channel_groups(lambda p, x: jax.nn.softmax(x @ p['a']['w']) @ p['b']['w'], TWO, X)


GROUPED = GroupedChannels(SCANNED_GRAPH)


def pruner_of(algorithm, kind=GROUPED, **settings):
    return algorithm(sparsity=0.5, sparsity_type=kind, **settings)


def nonzero(graph, tree):
    return graph.nonzero_channels(tree)


MAGNITUDE = jaxpruner.MagnitudePruning
REFUSED = [
    (
        lambda: GroupedChannels(SCANNED_GRAPH, 'layers/pu*'),
        KeyError,
        r'matches no g.*layers/up\[2\]',
    ),
    (lambda: GroupedChannels(TWO_GRAPH), ValueError, r"groups='\*': no group is exact"),
    (lambda: GroupedChannels(TWO_GRAPH, 'a*'), ValueError, r"groups='a\*': no group is exact"),
    (
        lambda: pruner_of(jaxpruner.RigL, {'*': GROUPED}).init_state(SCANNED),
        ValueError,
        'RigL lets channels come b',
    ),
    (lambda: pruner_of(jaxpruner.GlobalMagnitudePruning), ValueError, 'needs Unstructured'),
    (
        lambda: pruner_of(MAGNITUDE).plan(NORMED['batch_stats']),
        ValueError,
        'norm/mean, .* not those',
    ),
    (
        lambda: pruner_of(MAGNITUDE, stacked='layers/*').plan(SCANNED),
        ValueError,
        'out of `stacked`',
    ),
    (lambda: jax.jit(lambda p: nonzero(SCANNED_GRAPH, p))(SCANNED), TypeError, 'outside of jit'),
    (
        lambda: nonzero(SCANNED_GRAPH, {'head': {'kernel': jnp.ones((6, 4))}}),
        ValueError,
        r'head/kernel has shape \(6, 4\), .* \(6, 3\)',
    ),
    (lambda: nonzero(TWO_GRAPH, TWO['a']), ValueError, r'the leaves w are not .* a, b'),
]


@pytest.mark.parametrize(('attempt', 'error', 'message'), REFUSED)
def test_errors_name_value_and_remedy(attempt, error, message):
    with pytest.raises(error, match=message):
        attempt()
