"""What is logged of masks, and where weights and masks disagree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_schedules

PARAMS = {'a': jnp.ones((3, 5)), 'b': jnp.ones((4, 8)), 'bias': jnp.ones(8)}
ADAM = optax.adam(0.1)


def pruner(packed=False):
    once = sparsity_schedules.OneShotSchedule(target_step=0)
    return jaxpruner.MagnitudePruning(once, sparsity=0.5, use_packed_masks=packed)


def train(tx, steps=3, after=lambda params, state: params):
    params, state = PARAMS, tx.init(PARAMS)
    for step in range(steps):
        grads = jax.tree.map(
            lambda leaf, step=step: jnp.cos(step + jnp.indices(leaf.shape)[-1]), params
        )
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = after(optax.apply_updates(params, updates), state)
    return params, state


@pytest.mark.parametrize('packed', [False, True])
def test_disagreements_are_counted(packed):
    params, state = train(pruner(packed=packed).wrap_optax(ADAM))
    metrics = jax.jit(jaxpruner.sparsity_metrics)(state, params)
    names = {name for name in metrics if name.startswith('_disagreement')}
    assert names == {'_disagreement', '_disagreement/a', '_disagreement/b'}
    assert float(metrics['_disagreement']) == 0.0
    # 8 of 15 and 16 of 32 weights are kept; two pruned weights of `b` are not zero any more, one of them not a number.
    rows, columns = np.nonzero(np.asarray(params['b']) == 0)
    params['b'] = params['b'].at[rows[:2], columns[:2]].set(jnp.array([1.0, jnp.nan]))
    metrics = jax.jit(jaxpruner.sparsity_metrics)(state, params)
    assert float(metrics['_disagreement/a']) == 0.0
    assert float(metrics['_disagreement/b']) == pytest.approx(2 / 16)
    assert float(metrics['_disagreement']) == pytest.approx(2 / (7 + 16))
    assert float(metrics['_mask_sparsity']) == pytest.approx((7 + 16) / 47)
    assert float(jaxpruner.summarize_sparsity(params)['_total_sparsity']) == pytest.approx(
        (7 + 14) / 55
    )


def test_a_scale_outside_the_pruner_leaves_pruned_weights_beside_zero_and_its_remedies():
    """The pruner emits -p for a pruned weight p; half of it halves p in each step."""
    inside = pruner().wrap_optax(optax.chain(ADAM, optax.scale(0.5)))
    outside = optax.chain(pruner().wrap_optax(ADAM), optax.scale(0.5))
    params, state = train(outside)
    assert float(jaxpruner.sparsity_metrics(state, params)['_disagreement']) == 1.0
    (mask,) = (np.asarray(own.masks['b']) for own in jaxpruner.sparse_states(state))
    np.testing.assert_allclose(np.asarray(params['b'])[mask == 0], 0.5**3, rtol=1e-5)
    for trained in (train(inside), train(outside, after=pruner().post_gradient_update)):
        metrics = jaxpruner.sparsity_metrics(*reversed(trained))
        assert float(metrics['_disagreement']) == 0.0


def test_other_parameters_are_refused_by_name():
    state = pruner().wrap_optax(ADAM).init(PARAMS)
    with pytest.raises(ValueError, match=r'^a: .*\(3, 5\).*\(2, 2\)'):
        jaxpruner.sparsity_metrics(state, PARAMS | {'a': jnp.ones((2, 2))})


def test_the_target_counts_leaves_of_their_own_sparsity():
    updater = jaxpruner.GlobalMagnitudePruning(
        sparsity_schedules.PolynomialSchedule(1, 0, 3),
        sparsity=0.75,
        custom_sparsity_map={'a': 0.2},
        use_packed_masks=True,
    )
    tx = updater.wrap_optax(ADAM)
    state = tx.init(PARAMS)
    metrics = jaxpruner.sparsity_metrics(state)
    assert '_disagreement' not in metrics
    assert float(metrics['_target_sparsity']) == pytest.approx((3 + 24) / 47)
    _, state = train(tx, steps=1)
    # Leaves of their own sparsity wait for no schedule.
    assert float(jaxpruner.sparsity_metrics(state)['a']) == pytest.approx(0.2)
    _, state = train(tx, steps=4)
    metrics = jaxpruner.sparsity_metrics(state)
    assert float(metrics['_mask_sparsity']) == pytest.approx((3 + 24) / 47)
