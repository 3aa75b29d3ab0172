"""Ways in which models read their weights: moves, stacks, masks, groups of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from oneshot.model import normal
from uses.table import scan


def linear(params, x):
    return x @ params['w']


def equal(found, expected, atol=1e-5):
    """Masks are equal, and weights nearly."""
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, atol=atol), found[0], expected[0])


def scan_of_leaves(params, x):
    stack = jnp.concatenate([jnp.stack([params['first'], params['second']]), params['others']])
    return scan(lambda x, w: jnp.tanh(x @ w), x, stack)


def loop_of_leaves(params, x):
    for w in (params['first'], params['second'], *params['others']):
        x = jnp.tanh(x @ w)
    return x


@pytest.mark.parametrize('algorithm', ['wanda', 'sparsegpt'])
def test_leaves_that_one_scan_goes_through_are_pruned_as_without_it(algorithm):
    leaves = {'first': normal(8, 8), 'second': normal(8, 8), 'others': normal(2, 8, 8)}
    given = {'sparsity': 0.5, 'algorithm': algorithm, 'batches': [normal(32, 8)]}
    found = jaxpruner.prune(leaves, apply_fn=scan_of_leaves, **given)
    equal(found, jaxpruner.prune(leaves, apply_fn=loop_of_leaves, **given))
    words = r'first: a loop goes through this leaf and others, .* leave sequential out'
    with pytest.raises(ValueError, match=words):
        jaxpruner.prune(leaves, apply_fn=scan_of_leaves, sequential=True, **given)


@pytest.mark.parametrize('algorithm', ['magnitude', 'synflow'])
def test_numbers_of_python_stay_as_they_are(algorithm):
    apply = lambda params, x: x @ params['w'] * params['scale']  # noqa: E731
    given = {} if algorithm == 'magnitude' else {'apply_fn': apply, 'batches': [normal(16, 8)]}
    params = {'w': normal(8, 4), 'scale': 2.0, 'power': 3}
    pruned, masks = jaxpruner.prune(params, 0.5, algorithm, **given)
    assert (pruned['scale'], pruned['power']) == (2.0, 3)
    assert (masks['scale'], masks['power'], masks['w'].sum()) == (None, None, 16)


MASK = np.tri(8, dtype=np.float32)
ORDER = np.array([3, 1, 0, 7, 2, 6, 5, 4])


def scan_of_layers(params, x):
    return scan(lambda x, w: jnp.tanh(x @ w), x, params['w'])


def layers_by_a_counter(params, x):
    return jax.lax.fori_loop(0, 3, lambda number, x: jnp.tanh(x @ params['w'][number]), x)


def from_behind(params, x):
    return jax.lax.fori_loop(0, 3, lambda n, x: jnp.tanh(x @ params['w'][:, 2 - n]), x)


@pytest.mark.parametrize(('algorithm', 'in_blocks'), [('wanda', False), ('sparsegpt', True)])
def test_layers_that_a_counter_takes_are_pruned_as_those_of_a_scan(algorithm, in_blocks):
    weights, given = normal(3, 8, 8), {'batches': [normal(32, 8)], 'sequential': in_blocks}
    expected = jaxpruner.prune({'w': weights}, 0.5, algorithm, apply_fn=scan_of_layers, **given)
    found = jaxpruner.prune({'w': weights}, 0.5, algorithm, apply_fn=layers_by_a_counter, **given)
    equal(found, expected)
    params = {'w': weights[::-1].swapaxes(0, 1)}
    found = jaxpruner.prune(params, 0.5, algorithm, apply_fn=from_behind, **given)
    equal(jax.tree.map(lambda leaf: leaf.swapaxes(0, 1)[::-1], found), expected)


def test_permuted_weights_are_pruned_by_the_inputs_that_they_meet():
    weights, given = normal(8, 4), {'batches': [normal(32, 8) * np.arange(1, 9)]}
    permuted = lambda params, x: x @ params['w'][ORDER]  # noqa: E731
    found = jaxpruner.prune({'w': weights}, 0.5, 'sparsegpt', apply_fn=permuted, **given)
    expected = jaxpruner.prune({'w': weights[ORDER]}, 0.5, 'sparsegpt', apply_fn=linear, **given)
    equal(jax.tree.map(lambda leaf: leaf[ORDER], found), expected)


@pytest.mark.parametrize(
    ('algorithm', 'masked'),
    [('wanda', lambda w: w * MASK), ('sparsegpt', lambda w: jnp.where(MASK > 0, w, 0))],
)
def test_weights_behind_a_constant_mask_are_pruned_first(algorithm, masked):
    weights, given = normal(8, 8), {'batches': [normal(32, 8)]}
    apply = lambda params, x: x @ masked(params['w'])  # noqa: E731
    found, masks = jaxpruner.prune({'w': weights}, 0.75, algorithm, apply_fn=apply, **given)
    np.testing.assert_array_equal(found['w'] == 0, masks['w'] == 0)
    expected = jaxpruner.prune({'w': weights * MASK}, 0.75, algorithm, apply_fn=linear, **given)
    equal(({'w': found['w'] * MASK}, masks), ({'w': expected[0]['w'] * MASK}, expected[1]))


SIZES = np.array([9, 0, 16, 5])


@pytest.mark.parametrize('algorithm', ['wanda', 'sparsegpt'])
def test_experts_that_meet_groups_of_rows_are_pruned_by_their_own_rows(algorithm):
    def experts(params, x):
        return jax.lax.ragged_dot(x, params['w'].swapaxes(1, 2), jnp.asarray(SIZES))

    weights, x = normal(4, 6, 8), normal(32, 8)  # two rows belong to no expert
    given = {'sparsity': 0.5, 'algorithm': algorithm}
    with pytest.warns(UserWarning, match='inputs were alike|samples are fewer') as seen:
        found = jaxpruner.prune({'w': weights}, apply_fn=experts, batches=[x], **given)
    few, unseen = (str(warning.message) for warning in seen)
    assert 'w (5 samples, 8 inputs)' in few
    assert ': w, matrix 1;' in unseen
    starts = np.cumsum(SIZES) - SIZES
    for expert in (0, 2):
        batches = [x[starts[expert] :][: SIZES[expert]]]
        own = jax.tree.map(lambda leaf, expert=expert: leaf[expert].T, found)
        params = {'w': weights[expert].T}
        equal(own, jaxpruner.prune(params, apply_fn=linear, batches=batches, **given))
