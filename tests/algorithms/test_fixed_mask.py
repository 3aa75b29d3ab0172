"""Fine-tuning with masks that are there."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner.core import packing

KERNEL = jax.random.normal(jax.random.key(0), (12, 6))


def test_targets_are_logged_as_numbers(caplog):
    masks = jaxpruner.masks_from_zeros({'kernel': jnp.eye(4), 'bias': jnp.ones(4)})
    with caplog.at_level('INFO', 'jaxpruner'):
        jaxpruner.FixedMask(masks).wrap_optax(optax.sgd(0.1)).init(
            {'kernel': jnp.eye(4), 'bias': jnp.ones(4)}
        )
    assert "target_sparsities: {'bias': None, 'kernel': 0.75}" in caplog.messages


@pytest.mark.parametrize('given_packed', [False, True])
@pytest.mark.parametrize('packed', [False, True])
def test_masks_of_a_pruned_checkpoint_are_kept(packed, given_packed):
    pruned, _ = jaxpruner.create_updater_from_config(
        {'algorithm': 'magnitude', 'sparsity': 0.5}
    ).instant_sparsify({'kernel': KERNEL, 'bias': jnp.zeros(6)})
    masks = jaxpruner.masks_from_zeros(pruned)
    assert masks['bias'] is None
    given = jax.tree.map(packing.pack, masks) if given_packed else masks
    updater = jaxpruner.FixedMask(masks=given, use_packed_masks=packed)
    tx = updater.wrap_optax(optax.adam(0.1))
    params, state = pruned, tx.init(pruned)
    assert float(state.target_sparsities['kernel']) == 0.5
    for _ in range(3):
        updates, state = jax.jit(tx.update)(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params['kernel'] != 0, pruned['kernel'] != 0)
    assert not np.array_equal(params['kernel'], pruned['kernel'])
    assert jax.eval_shape(tx.init, pruned).count.shape == ()


def test_one_shot_applies_the_masks():
    mask = jnp.zeros((12, 6), jnp.uint8).at[0].set(1)
    pruned, masks = jaxpruner.FixedMask(masks={'kernel': mask}).instant_sparsify({'kernel': KERNEL})
    np.testing.assert_array_equal(pruned['kernel'][1:], 0)
    np.testing.assert_array_equal(masks['kernel'], mask)


def test_what_was_not_pruned_gets_no_mask():
    params = {'dense': KERNEL, 'sparse': KERNEL.at[0].set(0), 'bias': jnp.zeros(3)}
    masks = jaxpruner.masks_from_zeros(params)
    assert masks['dense'] is None
    assert masks['bias'] is None
    assert int(masks['sparse'].sum()) == 66
    chosen = jaxpruner.masks_from_zeros(params, filter_fn=lambda path, leaf: path == ('dense',))
    assert jax.tree.leaves(chosen) == []


def test_a_leaf_of_zeros_is_not_frozen():
    with pytest.warns(UserWarning, match='out is all zeros; it is left dense, not frozen'):
        assert jaxpruner.masks_from_zeros({'out': jnp.zeros((3, 3))}) == {'out': None}


def test_masks_of_booleans_are_taken():
    pruned = {'kernel': KERNEL.at[0].set(0)}
    updater = jaxpruner.FixedMask(jax.tree.map(lambda leaf: leaf != 0, pruned))
    state = updater.wrap_optax(optax.sgd(0.1)).init(pruned)
    assert state.masks['kernel'].dtype == jnp.uint8
    assert float(jaxpruner.sparsity_metrics(state)['kernel']) == pytest.approx(1 / 12)
