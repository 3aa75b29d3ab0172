"""Blocks and weights move when they are due. What leaves is replaced by what starts at zero, with zero moments."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpruner import mask_calculator, sparsity_schedules, sparsity_types
from jaxpruner.sparse.training.layouts import Layout
from sparse.training.models import PARAMS, PRUNED, made, needs_csr, probed_loss, stored

TX = optax.adam(1e-2)
EVERY_FIVE = sparsity_schedules.PeriodicSchedule(update_freq=5, update_start_step=1)


def moving(kind, algorithm, fraction=0.5, **changes):
    fraction_fn = optax.constant_schedule(fraction)
    changes = {'sparsity': 0.5, 'scheduler': EVERY_FIVE, **changes}
    return made(kind, algorithm=algorithm, drop_fraction_fn=fraction_fn, **changes)


def trained(model, steps):
    """Weights, topology and state after each step; one compiled step also moves."""

    @jax.jit
    def step(weights, topology, state, number):
        def probe_grads(weights, topology):
            return jax.grad(probed_loss, 3)(model, weights, topology, model.probe())

        gradients = jax.grad(probed_loss, 1)(model, weights, topology)
        updates, state = TX.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
        return model.update(weights, topology, state, tx=TX, step=number, probe_grads=probe_grads)

    weights, topology = model.pack(PARAMS)
    history = [(weights, topology, model.wrap_optax(TX).init(weights))]
    for number in range(steps):
        history.append(step(*history[-1], number))
    assert step._cache_size() == 1
    return history


def rows_of(model, topology, name):
    return np.asarray(topology[name]['positions']).reshape(-1, model.layouts[name].kept)


SET = pytest.param('weights', 'set', marks=needs_csr)


@pytest.mark.parametrize(
    ('kind', 'algorithm'), [('blocks', 'static_sparse'), ('blocks', 'rigl'), SET]
)
def test_they_move_when_they_are_due(kind, algorithm):
    model = moving(kind, algorithm)
    history = trained(model, 7)
    steps = itertools.pairwise(history)
    for number, ((_, before, _), (weights, after, state)) in enumerate(steps):
        is_due = algorithm != 'static_sparse' and number == 5
        for name in PRUNED:
            old, new = (rows_of(model, topology, name) for topology in (before, after))
            assert (np.diff(new) > 0).all()
            assert np.array_equal(old, new) != is_due
            if not is_due:
                continue
            is_new = np.stack([~np.isin(*rows) for rows in zip(new, old, strict=True)])
            matrices = max(1, int(np.prod(model.layouts[name].layers)))
            assert is_new.sum() <= matrices * round(0.5 * new.size / matrices)
            for tree in (weights, state[0].mu, state[0].nu):
                values = stored(tree, name).reshape(*new.shape, -1)
                assert not values[is_new].any()
                assert values[~is_new].any()
    # What is new learns.
    values = stored(history[-1][0], 'up/kernel')
    assert (values != 0).mean() > 0.5


def test_models_that_are_mapped_move_apart():
    model = moving('blocks', 'set')
    weights, topology = model.pack(PARAMS)
    state = TX.init(weights)

    def move(step):
        return model.update(weights, topology, state, tx=TX, step=step)[1]['up/kernel']['positions']

    many = jax.jit(jax.vmap(move))(jnp.array([5, 6]))
    before = topology['up/kernel']['positions']
    assert np.any(many[0] != before)
    np.testing.assert_array_equal(many[1], before)
    np.testing.assert_array_equal(many[0], jax.jit(move)(5))


@needs_csr
def test_weights_are_replaced_as_under_a_mask():
    model = moving('weights', 'rigl', fraction=0.3)
    weights, topology = model.pack(PARAMS)
    gradients = jax.grad(probed_loss, 3)(model, weights, topology, model.probe())
    after = model.update(weights, topology, TX.init(weights), tx=TX, step=5, probe_grads=gradients)
    dense, masks = model.unpack(weights, topology)['layers'], model.masks(topology)['layers']
    of_matrix = gradients['layers/kernel'].reshape(2, 24, 24).swapaxes(1, 2)
    leaf = mask_calculator.MaskedLeaf(
        masks['kernel'],
        jnp.abs(dense['kernel']),
        jnp.abs(of_matrix),
        sparsity_types.Unstructured(),
        layer_axis=0,
    )
    (expected,) = mask_calculator.drop_and_grow([leaf], 0.3)
    np.testing.assert_array_equal(model.masks(after[1])['layers']['kernel'], expected)
    moved = model.unpack(after[0], after[1])['layers']['kernel']
    stays = np.asarray(expected) * np.asarray(masks['kernel'])
    np.testing.assert_array_equal(moved, dense['kernel'] * stays)


@settings(max_examples=8)
@given(st.floats(0, 1, width=32, allow_subnormal=False), st.integers(0, 10**6))
def test_the_smallest_blocks_of_a_matrix_are_dropped_whatever_group_they_are_in(fraction, seed):
    rng = np.random.default_rng(seed)
    groups, blocks, candidates = 4, 3, 7
    layout = Layout((), candidates, groups, kept=blocks, block=(1, 1))
    positions = np.stack([np.sort(rng.permutation(candidates)[:blocks]) for _ in range(groups)])
    magnitudes, scores = 1 + rng.random((groups, blocks)), np.ones((groups, candidates))
    # What is stored already scores lowest, so that nothing that is dropped is grown again.
    np.put_along_axis(scores, positions, 0, axis=-1)
    values = jnp.asarray(magnitudes).reshape(groups, blocks, 1, 1)
    arguments = values, jnp.asarray(positions, jnp.int32), jnp.asarray(scores)
    after, _ = jax.jit(layout.replace)(*arguments, jnp.float32(fraction))
    droppable = magnitudes.copy()
    if fraction < 1:  # each group keeps its largest
        np.put_along_axis(droppable, magnitudes.argmax(-1)[:, None], np.inf, axis=-1)
    count = int(np.round(np.float32(groups * blocks) * np.float32(fraction)))
    is_dropped = np.zeros(groups * blocks, bool)
    is_dropped[np.argsort(droppable, axis=None)[:count]] = True
    is_dropped &= np.isfinite(droppable).ravel()
    for old, new, gone in zip(positions, after, is_dropped.reshape(groups, blocks), strict=True):
        assert (np.diff(new) > 0).all()
        assert set(old[~gone]) == set(old) & set(np.asarray(new).tolist())


@settings(max_examples=10)
@given(st.integers(1, 20), st.integers(1, 9), st.data())
def test_blocks_at_the_start_cover_inputs_evenly(candidates, groups, data):
    kept = data.draw(st.integers(1, candidates))
    layout = Layout((2,), candidates, groups, kept, (1, 1))
    for layer in layout.draw(np.random.default_rng(0)):
        assert all(len(set(group)) == kept for group in layer)
        readers = np.bincount(layer.ravel(), minlength=candidates)
        assert readers.max() - readers.min() <= 1
