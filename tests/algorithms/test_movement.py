"""Movement pruning beside NumPy, and the place in the state where an algorithm keeps values of its own."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpruner
from jaxpruner import sparsity_distributions, sparsity_schedules, tree

STEPS = 6
PARAMS = {
    'kernel': jnp.asarray(np.random.default_rng(0).normal(size=(6, 5)), jnp.float32),
    'bias': jnp.ones(5),
}
GRADIENTS = [
    jax.tree.map(
        lambda leaf, seed=seed: jax.random.normal(jax.random.key(seed), leaf.shape), PARAMS
    )
    for seed in range(STEPS)
]
HALF = functools.partial(sparsity_distributions.uniform, sparsity=0.5)
EVERY_STEP = sparsity_schedules.PeriodicSchedule(update_freq=1, update_start_step=0)
EVERY_SECOND_STEP = sparsity_schedules.PeriodicSchedule(update_freq=2, update_start_step=2)


@dataclasses.dataclass
class Counting(jaxpruner.BaseUpdater):
    """Ranks by the sum of the gradients so far; the simplest algorithm that needs a memory."""

    def init_algorithm_state(self, params, target_sparsities):
        return tree.map_with_missing(
            lambda p, t: None if t is None else jnp.zeros_like(p), params, target_sparsities
        )

    def track(self, sparse_state, params, grads, weight=1.0):
        sums = tree.map_with_missing(
            lambda p, g, s: None if s is None else s + weight * g,
            params,
            grads,
            sparse_state.algorithm_state,
        )
        return sparse_state._replace(algorithm_state=sums), None

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return sparse_state.algorithm_state


@dataclasses.dataclass
class OwnInitState(Counting):
    """Makes its state itself, as extensions in the wild do, and knows nothing of later fields."""

    def init_state(self, params):
        state = super().init_state(params)
        return jaxpruner.SparseState(state.masks, None, state.target_sparsities, state.count)


def counting(cls=Counting, **settings):
    return cls(scheduler=EVERY_SECOND_STEP, sparsity_distribution_fn=HALF, **settings)


def total_of(gradients):
    return sum(np.asarray(grads['kernel']) for grads in gradients)


def largest_half(scores):
    mask = np.zeros(scores.size, np.uint8)
    mask[np.argsort(-scores.reshape(-1), kind='stable')[: scores.size // 2]] = 1
    return mask.reshape(scores.shape)


def run(tx, jitted=True, params=PARAMS, **extra):
    update = jax.jit(tx.update, static_argnames='update_masks') if jitted else tx.update
    state = tx.init(params)
    for grads in GRADIENTS:
        updates, state = update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params, state


RUNS = {
    'jit': ({}, lambda updater: run(updater.wrap_optax(optax.adam(0.1)))),
    'eager': ({}, lambda updater: run(updater.wrap_optax(optax.adam(0.1)), jitted=False)),
    'packed': (
        {'use_packed_masks': True},
        lambda updater: run(updater.wrap_optax(optax.adam(0.1))),
    ),
    'skips gradients': (
        {'skip_gradients': True},
        lambda updater: run(updater.wrap_optax(optax.adam(0.1))),
    ),
    'chained': (
        {},
        lambda updater: run(optax.chain(optax.identity(), updater.wrap_optax(optax.sgd(0.1)))),
    ),
    'state of its own making': (
        {'cls': OwnInitState},
        lambda updater: run(updater.wrap_optax(optax.sgd(0.1))),
    ),
}


@pytest.mark.parametrize('name', RUNS)
def test_values_are_renewed_in_every_step_and_ranked_when_due(name):
    settings, train = RUNS[name]
    params, opt_state = train(counting(**settings))
    (state,) = jaxpruner.sparse_states(opt_state)
    np.testing.assert_allclose(state.algorithm_state['kernel'], total_of(GRADIENTS), rtol=1e-5)
    assert state.algorithm_state['bias'] is None
    # The last mask update is that of step 4, which has seen five gradients.
    mask = largest_half(total_of(GRADIENTS[:5]))
    np.testing.assert_array_equal(np.asarray(params['kernel']) != 0, mask != 0)


def test_extra_arguments_reach_track_by_name():
    _, state = run(counting().wrap_optax(optax.sgd(0.1)), weight=2.0, unknown=3.0)
    np.testing.assert_allclose(state.algorithm_state['kernel'], 2 * total_of(GRADIENTS), rtol=1e-5)


@pytest.mark.parametrize('make', [counting, functools.partial(counting, skip_gradients=True)])
def test_the_host_may_decide(make):
    tx = make().wrap_optax(optax.adam(0.1))
    update = jax.jit(tx.update, static_argnames='update_masks')
    params, state = PARAMS, tx.init(PARAMS)
    for step, grads in enumerate(GRADIENTS):
        updates, state = update(
            grads, state, params, update_masks=EVERY_SECOND_STEP.is_mask_update_iter(step)
        )
        params = optax.apply_updates(params, updates)
    expected_params, expected = run(tx)
    jax.tree.map(np.testing.assert_array_equal, (params, state), (expected_params, expected))


def test_multi_steps_give_the_mean_of_their_gradients():
    tx = optax.MultiSteps(
        counting().wrap_optax(optax.sgd(0.1)), every_k_schedule=2
    ).gradient_transformation()
    _, opt_state = run(tx)
    (state,) = jaxpruner.sparse_states(opt_state)
    assert int(state.count) == STEPS // 2
    np.testing.assert_allclose(state.algorithm_state['kernel'], total_of(GRADIENTS) / 2, rtol=1e-5)


def test_vmap_keeps_values_of_each_model():
    tx = counting(use_packed_masks=True).wrap_optax(optax.adam(0.1))
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), PARAMS)
    state = jax.vmap(tx.init)(params)
    update = jax.jit(jax.vmap(tx.update))
    for grads in GRADIENTS:
        both = jax.tree.map(lambda grad: jnp.stack([grad, -grad]), grads)
        updates, state = update(both, state, params)
        params = optax.apply_updates(params, updates)
    total = total_of(GRADIENTS)
    np.testing.assert_allclose(
        state.algorithm_state['kernel'], np.stack([total, -total]), rtol=1e-5
    )


def test_boxes_of_nnx_hold_values_too():
    model = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, counting().wrap_optax(optax.sgd(0.1)), wrt=nnx.Param)
    structure = jax.tree.structure(nnx.state(model, nnx.Param))
    takes_model = (
        'model' in inspect.signature(optimizer.update).parameters
    )  # older releases have it already
    for grads in GRADIENTS:
        boxed = jax.tree.unflatten(structure, [grads['bias'], grads['kernel']])
        optimizer.update(*((model, boxed) if takes_model else (boxed,)))
    (state,) = jaxpruner.sparse_states(optimizer.opt_state)
    (sums,) = jax.tree.leaves(state.algorithm_state)
    np.testing.assert_allclose(sums, total_of(GRADIENTS), rtol=1e-5)


def test_movement_beside_numpy():
    """Each forward pass uses the largest sums of minus weight times gradient; pruned weights wait."""
    updater = jaxpruner.MovementPruning(scheduler=EVERY_STEP, sparsity_distribution_fn=HALF)
    tx = updater.wrap_optax(optax.sgd(0.1))
    update = jax.jit(tx.update)
    params, state = PARAMS, tx.init(PARAMS)
    weights, scores = np.asarray(PARAMS['kernel'], np.float64), np.zeros((6, 5))
    for grads in GRADIENTS:
        forward = np.asarray(updater.pre_forward_update(params, state)['kernel'])
        np.testing.assert_allclose(forward, weights * largest_half(scores), rtol=1e-5)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        gradient = np.asarray(grads['kernel'], np.float64)
        scores = scores - weights * gradient
        weights = weights - 0.1 * gradient * largest_half(scores)
        np.testing.assert_allclose(state.algorithm_state['kernel'], scores, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(params['kernel'], weights, rtol=1e-5)


def test_movement_brings_weights_back_with_their_values():
    updater = jaxpruner.MovementPruning(
        scheduler=EVERY_STEP, sparsity_distribution_fn=lambda _: {'w': 0.5}
    )
    tx, params = updater.wrap_optax(optax.sgd(0.0)), {'w': jnp.array([2.0, 1.0])}
    state = tx.init(params)
    used = []
    for gradient in ([1.0, -1.0], [-2.0, 0.0]):
        _, state = tx.update({'w': jnp.array(gradient)}, state, params)
        used.append(updater.pre_forward_update(params, state)['w'].tolist())
    assert used == [[0.0, 1.0], [2.0, 0.0]]


def test_movement_sums_sixteen_bits_in_thirty_two():
    tx = jaxpruner.MovementPruning(sparsity_distribution_fn=HALF).wrap_optax(optax.sgd(0.1))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    state = run(tx, params=params)[1]
    assert state.algorithm_state['kernel'].dtype == jnp.float32


def test_movement_prunes_once_by_given_gradients():
    updater = jaxpruner.MovementPruning(sparsity_distribution_fn=lambda _: {'w': 0.5})
    params = {'w': jnp.array([2.0, 1.0])}
    pruned, _ = updater.instant_sparsify(params, {'w': jnp.array([1.0, -1.0])})
    assert pruned['w'].tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match=r'wrap_optax.*instant_sparsify\(params, grads\)'):
        updater.instant_sparsify(params)


def test_of_scores_that_need_a_state_pruning_once_says_so():
    with pytest.raises(ValueError, match=r'^Counting .*\(algorithm_state\).*wrap_optax'):
        counting().instant_sparsify(PARAMS)


def test_another_mistake_in_scores_stays_what_it_is():
    class Misspelt(jaxpruner.BaseUpdater):
        def calculate_scores(self, params, sparse_state=None, grads=None):
            return grads.kernel

    with pytest.raises(AttributeError, match='kernel'):
        Misspelt(sparsity=0.5).instant_sparsify(PARAMS)
