"""Straight-through methods select once a step, and begin where the step before found the threshold."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from helpers import compiling, hlo
from jaxpruner import sparsity_distributions, sparsity_schedules
from jaxpruner.mask_calculator.selection import row_by_row

ninety = functools.partial(sparsity_distributions.uniform, sparsity=0.9)
at_once = {
    'scheduler': sparsity_schedules.PeriodicSchedule(update_freq=3),
    'sparsity_distribution_fn': ninety,
}
METHODS = [jaxpruner.SteMagnitudePruning, jaxpruner.SteRandomPruning]
each_method = pytest.mark.parametrize('method', METHODS)


def make_params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        'in': jax.random.normal(keys[0], (64, 128)),
        'out': jax.random.normal(keys[1], (128, 8)),
        'b': jnp.ones(8),
    }


def make_short_params():
    """Leaves that share a buffer while they are ranked."""
    keys = jax.random.split(jax.random.key(0), row_by_row._WORTH_A_BUFFER)
    return {f'layer_{i}': jax.random.normal(key, (32, 32)) for i, key in enumerate(keys)}


def apply_two_layers(params, x):
    return jnp.tanh(x @ params['in']) @ params['out'] + params['b']


def apply_in_turn(params, x):
    for kernel in params.values():
        x = jnp.tanh(x @ kernel)
    return x


def make_step(updater, tx, apply=apply_two_layers, **settings):
    def step(params, state, x):
        def loss(params):
            return jnp.mean(apply(updater.pre_forward_update(params, state), x) ** 2)

        updates, new_state = tx.update(jax.grad(loss)(params), state, params, **settings)
        return optax.apply_updates(params, updates), new_state

    return step


def loops(step, *arguments, follow_loops=True):
    text = compiling.as_written(jax.jit(step).lower(*arguments)).as_text()
    return collections.Counter(i.opcode for i in hlo.reached(text, follow_loops=follow_loops))[
        'while'
    ]


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason='older XLA does not see that two nested loops are equal'
)
@pytest.mark.parametrize(
    ('kind', 'make_params', 'apply'),
    [
        pytest.param('unstructured', make_params, apply_two_layers, id='unstructured'),
        pytest.param('unstructured', make_short_params, apply_in_turn, id='in a buffer'),
        pytest.param('block_4,4', make_params, apply_two_layers, id='blocks'),
        pytest.param('channel_-1', make_params, apply_two_layers, id='channels'),
        pytest.param('2:4', make_params, apply_two_layers, id='2:4'),
    ],
)
@pytest.mark.parametrize('packed', [False, True], ids=['unpacked', 'packed'])
def test_a_step_selects_once(kind, make_params, apply, packed):
    own_share = (
        {'sparsity_distribution_fn': sparsity_distributions.NOT_GIVEN} if kind == '2:4' else {}
    )
    updater = jaxpruner.SteMagnitudePruning(
        **(at_once | own_share), sparsity_type=kind, use_packed_masks=packed
    )
    tx, params = updater.wrap_optax(optax.adam(1e-2)), make_params()
    state, x = tx.init(params), jnp.ones((4, len(next(iter(params.values())))))
    step = functools.partial(make_step, updater, tx, apply)

    def forward(params):
        return updater.pre_forward_update(params, state)

    of_selection = loops(forward, params)
    assert bool(of_selection) == (kind != '2:4')
    assert loops(step(update_masks=False), params, state, x) == of_selection
    assert loops(step(update_masks=True), params, state, x) == of_selection
    # In the graph the mask update is one loop more, which finds its masks again inside, in one pass: it begins at their
    # thresholds.
    outer_loops = loops(forward, params, follow_loops=False)
    assert loops(step(), params, state, x, follow_loops=False) == outer_loops + 1


@each_method
@pytest.mark.parametrize('start', ['nowhere', 'anywhere', 'not kept'])
def test_the_threshold_to_begin_at_changes_nothing(method, start):
    updater = method(**at_once)
    tx, params = updater.wrap_optax(optax.adam(1e-2)), make_params()
    state = expected = tx.init(params)
    step = jax.jit(make_step(updater, tx))
    first, expected = step(params, expected, jnp.ones((4, 64)))
    assert all(np.isfinite(expected.thresholds[name]) for name in ('in', 'out'))
    assert expected.thresholds['b'] is None
    others = {
        'nowhere': state.thresholds,
        'anywhere': {'in': jnp.float32(1e30), 'out': jnp.float32(-0.0), 'b': None},
        'not kept': None,
    }[start]
    params, got = step(params, state._replace(thresholds=others), jnp.ones((4, 64)))
    jax.tree.map(np.testing.assert_array_equal, params, first)
    jax.tree.map(np.testing.assert_array_equal, got.masks, expected.masks)
    assert (got.thresholds is None) is (start == 'not kept')


@each_method
def test_masks_of_an_update_are_those_of_its_forward_pass(method):
    updater = method(**at_once)
    tx, params = updater.wrap_optax(optax.sgd(1e-2)), make_params()
    state = tx.init(params)
    forward = updater.pre_forward_update(params, state)
    _, state = jax.jit(tx.update)(params, state, params)
    np.testing.assert_array_equal(state.masks['in'] != 0, forward['in'] != 0)
    assert int(state.masks['in'].sum()) == 819


def test_a_ranking_of_its_own_is_used():
    class Halves(jaxpruner.SteMagnitudePruning):
        def create_masks(self, scores, sparsities):
            del sparsities
            return jax.tree.map(
                lambda s: None if s.ndim < 2 else jnp.zeros(s.shape, jnp.uint8).at[:4].set(1),
                scores,
            )

    updater = Halves(**at_once)
    tx, params = updater.wrap_optax(optax.sgd(1e-2)), make_params()
    state = tx.init(params)
    assert state.thresholds is None
    _, state = tx.update(params, state, params)
    assert int(state.masks['in'].sum()) == 4 * 128
    assert int((updater.pre_forward_update(params, state)['in'] != 0).sum()) == 4 * 128


def test_stacked_layers_have_a_threshold_each():
    updater = jaxpruner.SteMagnitudePruning(**at_once, stacked='layers')
    tx = updater.wrap_optax(optax.sgd(1e-2))
    params = {
        'layers': jax.random.normal(jax.random.key(1), (3, 16, 8))
        * jnp.arange(1.0, 4.0)[:, None, None]
    }
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert state.thresholds['layers'].shape == (3,)
    assert np.all(np.diff(state.thresholds['layers']) > 0)
    assert state.masks['layers'].sum((1, 2)).tolist() == [13] * 3
