"""Blocks move when they are due. Each that leaves is replaced by another, which starts at zero, with zero moments."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpruner import mask_calculator, sparse, sparsity_schedules, sparsity_types
from jaxpruner.mask_calculator import MaskedLeaf
from jaxpruner.sparse.operators import block_layout
from jaxpruner.sparse.training import block_positions, conversion
from jaxpruner.sparse.training.layouts import Layout
from jaxpruner.sparsity_types import Groups
from sparse.training.models import BLOCK, PARAMS, X, apply_fn, loss

TX = optax.adam(1e-2)
EVERY_FIVE = sparsity_schedules.PeriodicSchedule(update_freq=5, update_start_step=1)
ONLY = ('up/kernel', 'layers/kernel')


def model_of(algorithm, fraction=0.5, scheduler=EVERY_FIVE, block=BLOCK):
    return sparse.block_sparse(
        apply_fn,
        PARAMS,
        X,
        sparsity=0.5,
        block=block,
        only=ONLY,
        algorithm=algorithm,
        scheduler=scheduler,
        drop_fraction_fn=optax.constant_schedule(fraction),
    )


def norms_of(model):
    def probed(weights, topology, probe):
        return loss(lambda w, x: model.apply(w, topology, x, probe=probe), weights)

    return lambda weights, topology: jax.grad(probed, 2)(weights, topology, model.probe())


def trained(model, steps):
    """Weights, topology and state after some steps, in one compiled step that also moves blocks."""

    @jax.jit
    def step(weights, topology, state, number):
        gradients = jax.grad(
            lambda weights: loss(lambda w, x: model.apply(w, topology, x), weights)
        )(weights)
        updates, state = TX.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
        return model.update(
            weights, topology, state, tx=TX, step=number, block_norms=norms_of(model)
        )

    weights, topology = model.pack(PARAMS)
    carried = weights, topology, model.wrap_optax(TX).init(weights)
    history = [carried]
    for number in range(steps):
        carried = step(*carried, number)
        history.append(carried)
    return history


@pytest.mark.parametrize('algorithm', ['static_sparse', 'set', 'rigl'])
def test_blocks_move_when_they_are_due(algorithm):
    model = model_of(algorithm)
    history = trained(model, 7)
    topologies = [topology for _, topology, _ in history]
    for number, (before, after) in enumerate(itertools.pairwise(topologies)):
        is_due = algorithm != 'static_sparse' and number == 5
        for name, positions in after.items():
            assert positions.shape == before[name].shape
            assert np.array_equal(positions, before[name]) != is_due
            rows = np.sort(np.asarray(positions).reshape(-1, positions.shape[-1]), axis=1)
            assert (np.diff(rows) > 0).all()
    if algorithm == 'static_sparse':
        return
    (_, before, _), (weights, after, state) = history[5], history[6]
    for name, path in {'up/kernel': 'up', 'layers/kernel': 'layers'}.items():
        is_new = np.asarray(before[name] != after[name])
        stored = before[name].shape[-2] * before[name].shape[-1]
        assert (is_new.sum((-2, -1)) <= max(1, stored // 2)).all()
        for tree in (weights, state[0].mu, state[0].nu):
            values = np.asarray(tree[path]['kernel']['values'])
            assert not values[is_new].any()
            assert values[~is_new].any()
    # Nothing is trained in place of what left: the same model goes on, and new blocks learn.
    weights, after, _ = history[7]
    assert all(np.asarray(weights['up']['kernel']['values']).any((-2, -1)).ravel())


def test_rigl_grows_where_the_dense_gradient_is_largest():
    model = model_of('rigl')
    weights, topology = model.pack(PARAMS)
    norms = jax.jit(norms_of(model))(weights, topology)
    dense = jax.grad(lambda params: loss(apply_fn, params))(model.unpack(weights, topology))
    gradient = np.pad(np.asarray(dense['up']['kernel']), ((0, 2), (0, 2)))
    blocks = gradient.reshape(3, 4, 3, 8).transpose(2, 0, 1, 3)
    expected = np.sqrt((blocks**2).sum((-2, -1)))
    np.testing.assert_allclose(norms['up/kernel'], expected, rtol=1e-4)
    state = TX.init(weights)
    update = jax.jit(functools.partial(model.update, tx=TX, step=3, due=True))
    _, moved, _ = update(weights, topology, state, block_norms=norms)
    before, after = np.asarray(topology['up/kernel']), np.asarray(moved['up/kernel'])
    stored = np.asarray(weights['up']['kernel']['values'])
    sizes = model.layouts['up/kernel'].block_sizes()
    for group in range(3):
        mean_squares = (stored[group] ** 2).sum((-2, -1)) / sizes[group, before[group]]
        order = np.argsort(mean_squares)
        stays = set(before[group][order[1:]])
        grown = max(set(range(3)) - stays, key=lambda block: expected[group, block])
        assert set(after[group]) == stays | {grown}


def repeated(params, x):
    """The gradients of the two products cancel."""
    return x @ params['w'] - x @ params['w']


def recurrent(params, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ params['w']), None), x, length=3)[0]


def untied(params, x):
    """The same as `recurrent`, with a leaf of its own for each trip."""
    return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, params['w'])[0]


SQUARE = jnp.asarray(np.random.default_rng(5).normal(size=(8, 8)) / 3, jnp.float32)
ROWS = jnp.asarray(np.random.default_rng(6).normal(size=(5, 8)), jnp.float32)


def norms_at(function, params, map_examples=False):
    """What the backward pass returns for the probe, and the gradient of the dense leaf."""
    model = sparse.block_sparse(function, params, ROWS, sparsity=0.5, block=(4, 4))
    # Layers of equal weights then have equal blocks.
    weights, topology = model.pack(params, select='magnitude')

    def total(probe):
        def apply(x):
            return model.apply(weights, topology, x, probe=probe)

        return jnp.sum((jax.vmap(apply)(ROWS[:, None]) if map_examples else apply(ROWS)) ** 3)

    dense = model.unpack(weights, topology)
    gradient = jax.grad(lambda params: jnp.sum(function(params, ROWS) ** 3))(dense)
    return jax.grad(total)(model.probe())['w'], gradient['w']


def norms_of_blocks(gradient):
    return jnp.linalg.norm(gradient.reshape(2, 4, 2, 4), axis=(1, 3)).T


def test_the_probe_has_the_block_norms_of_the_gradient():
    norms, gradient = norms_at(lambda params, x: x @ params['w'], {'w': SQUARE})
    np.testing.assert_allclose(norms, norms_of_blocks(gradient), rtol=1e-5)


def test_the_norms_of_several_places_are_added():
    def shifted(params, x):  # its results are not zero, so that there are gradients
        return repeated(params, x) + 1

    norms, gradient = norms_at(shifted, {'w': SQUARE})
    assert not gradient.any()
    at_one_place = norms_of_blocks(ROWS.T @ jnp.full((5, 8), 3.0))
    np.testing.assert_allclose(norms, 2 * at_one_place, rtol=1e-5)


def test_the_norms_of_several_trips_are_added():
    norms, gradient = norms_at(recurrent, {'w': SQUARE})
    of_trips, _ = norms_at(untied, {'w': jnp.stack([SQUARE] * 3)})
    np.testing.assert_allclose(norms, of_trips.sum(0), rtol=1e-4)
    # Blocks that only one trip reads have the norm of the gradient; of others it is smaller.
    assert (norms > 1.1 * norms_of_blocks(gradient)).any()


def test_the_norms_of_mapped_examples_are_added():
    norms, gradient = norms_at(lambda params, x: x @ params['w'], {'w': SQUARE}, map_examples=True)
    assert (norms > norms_of_blocks(gradient)).all()


REPLACE = jax.jit(block_positions.replace)


def share_of(stored, fraction):
    return int(np.round(np.float32(stored) * np.float32(fraction)))


# (stored, fraction): how many are dropped, rounded half to even.
DROPPED = {(10, 0.3): 3, (8, 0.2): 2, (5, 0.5): 2, (7, 0.5): 4, (5, 0.05): 0, (4, 0): 0, (4, 1): 4}


@pytest.mark.parametrize(('stored', 'fraction'), DROPPED)
def test_as_many_blocks_are_dropped_as_weights_under_a_mask(stored, fraction):
    norms, scores = jnp.arange(1.0, stored + 1), jnp.arange(2.0 * stored)
    positions = jnp.arange(stored)
    blocks = REPLACE(positions[None], norms[None], scores[None], fraction)
    groups = Groups(sparsity_types.Unstructured())
    mask = jnp.zeros(2 * stored, jnp.uint8).at[:stored].set(1)
    magnitudes = jnp.zeros(2 * stored).at[:stored].set(norms)
    (after,) = mask_calculator.drop_and_grow(
        [MaskedLeaf(mask, magnitudes, scores, groups)], fraction
    )
    count = DROPPED[stored, fraction]
    assert int(blocks.is_new.sum()) == count
    assert int(((mask == 1) & (after == 0)).sum()) == count


@settings(max_examples=20)
@given(
    st.sampled_from((1, 5)),
    st.sampled_from((0, 3)),
    st.floats(0, 1, width=32),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_replacement_keeps_numbers_and_order(stored, spare, fraction, seed, has_nan):
    rng = np.random.default_rng(seed)
    candidates = stored + spare
    positions = jnp.asarray(rng.permutation(candidates)[:stored][None], jnp.int32)
    norms, scores = rng.random((1, stored)), rng.random((1, candidates))
    if has_nan:
        scores[0, 0] = np.nan
    found = REPLACE(positions, jnp.asarray(norms), jnp.asarray(scores), jnp.float32(fraction))
    most = stored if fraction == 1 else stored - 1
    count = min(most, share_of(stored, fraction))
    before, after = np.asarray(positions[0]), np.asarray(found.positions[0])
    dropped = before[np.argsort(norms[0], kind='stable')[:count]]
    staying = set(before.tolist()) - set(dropped.tolist())
    others = [block for block in range(candidates) if block not in staying]
    others.sort(key=lambda block: -np.inf if np.isnan(scores[0, block]) else scores[0, block])
    assert set(after.tolist()) == staying | set(others[len(others) - count :])
    np.testing.assert_array_equal(before != after, found.is_new[0])


@settings(max_examples=20)
@given(st.floats(0, 1, width=32, allow_subnormal=False), st.integers(0, 10**6))
def test_the_smallest_blocks_of_a_matrix_are_dropped_whatever_group_they_are_in(fraction, seed):
    rng = np.random.default_rng(seed)
    groups, blocks, candidates = 4, 3, 7
    positions = np.stack([rng.permutation(candidates)[:blocks] for _ in range(groups)])
    magnitudes, scores = rng.random((groups, blocks)), np.ones((groups, candidates))
    # What is stored already scores lowest, so that nothing that is dropped is grown again.
    np.put_along_axis(scores, positions, 0, axis=-1)
    result = REPLACE(
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(magnitudes),
        jnp.asarray(scores),
        jnp.float32(fraction),
    )
    droppable = magnitudes.copy()
    if fraction < 1:
        np.put_along_axis(droppable, magnitudes.argmax(-1)[:, None], np.inf, axis=-1)
    most = groups * (blocks - 1) if fraction < 1 else groups * blocks
    count = min(most, share_of(groups * blocks, fraction))
    expected = np.zeros(groups * blocks, bool)
    expected[np.argsort(droppable, axis=None)[:count]] = True
    np.testing.assert_array_equal(result.is_new.ravel(), expected)
    for group in np.sort(result.positions, axis=-1):
        assert (np.diff(group) > 0).all()


def test_blocks_at_an_edge_are_not_dropped_for_their_padding():
    layout = Layout((), inputs=5, outputs=9, block=(4, 8), blocks=2)
    positions = jnp.array([[0, 1], [1, 0]])
    weights = jnp.ones((5, 9))
    values = block_layout.gather_blocks(weights, positions, layout.block)
    magnitudes = conversion.mean_magnitudes(values, positions, layout)
    np.testing.assert_allclose(magnitudes, np.ones((2, 2)), rtol=1e-6)


def test_what_a_group_has_learned_stays_unless_all_of_it_is_dropped():
    positions, norms = jnp.array([[2], [0]]), jnp.array([[1.0], [5.0]])
    scores = jnp.array([[9.0, 2.0, 1.0], [0.0, 2.0, 9.0]])
    assert REPLACE(positions, norms, scores, 0.3).positions.tolist() == [[2], [0]]
    assert REPLACE(positions, norms, scores, 1.0).positions.tolist() == [[0], [2]]


def test_a_layer_of_a_single_block_goes_on_learning_while_others_move():
    single = {'up/kernel': (5, 8), 'layers/kernel': BLOCK}
    model = model_of('set', fraction=0.3, block=single)
    assert 'the block of each group stays' in model.plan.leaves['up/kernel'].note
    assert not model.plan.leaves['layers/kernel'].note
    before, after = trained(model, 6)[-2:]
    assert not np.array_equal(before[1]['layers/kernel'], after[1]['layers/kernel'])
    values = np.asarray(after[0]['up']['kernel']['values'])
    assert values.any(axis=(-2, -1)).all()


@settings(max_examples=30)
@given(st.integers(1, 20), st.integers(1, 9), st.data())
def test_positions_at_the_start_cover_inputs_evenly(candidates, groups, data):
    blocks = data.draw(st.integers(1, candidates))
    layout = Layout((2,), candidates, groups, (1, 1), blocks)
    positions = block_positions.balanced(layout, np.random.default_rng(0))
    for layer in positions:
        assert all(len(set(group)) == blocks for group in layer)
        readers = np.bincount(layer.ravel(), minlength=candidates)
        assert readers.max() - readers.min() <= 1


def test_models_that_are_mapped_move_apart():
    model = model_of('set')
    weights, topology = model.pack(PARAMS)
    state = TX.init(weights)

    def move(step):
        return model.update(weights, topology, state, tx=TX, step=step)[1]

    steps = jnp.array([5, 6])
    many = jax.jit(jax.vmap(move))(steps)
    assert np.any(many['up/kernel'][0] != topology['up/kernel'])
    np.testing.assert_array_equal(many['up/kernel'][1], topology['up/kernel'])
    np.testing.assert_array_equal(many['up/kernel'][0], jax.jit(move)(5)['up/kernel'])
