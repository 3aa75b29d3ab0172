"""Subclasses of SET and RigL train by what they override, as JaxPruner's users write it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_schedules

PARAMS = {'u': jax.random.normal(jax.random.key(0), (8, 16)), 'bias': jnp.ones(16)}
GRADS = jax.tree.map(lambda leaf: leaf[::-1] * 2, PARAMS)
U, G = np.abs(np.asarray(PARAMS['u'])), np.asarray(GRADS['u'])
SETTINGS = {'sparsity': 0.5, 'drop_fraction_fn': optax.constant_schedule(0.4)}


def updated(cls, **settings):
    """The mask before a mask update, and after it inside a compiled step."""
    updater = cls(scheduler=sparsity_schedules.PeriodicSchedule(1), **(SETTINGS | settings))
    tx = updater.wrap_optax(optax.sgd(0.1, momentum=0.9))
    state = tx.init(PARAMS)
    after = jax.jit(tx.update)(GRADS, state, PARAMS, batch=-1.0)[1]
    return np.asarray(state.masks['u']), np.asarray(after.masks['u'])


def replaced(mask, drop, grow, fraction=0.4):
    """The published rule in NumPy."""
    mask, drop, grow = mask.ravel().copy(), np.asarray(drop).ravel(), np.asarray(grow).ravel()
    number = round(float(mask.sum()) * fraction)
    kept = np.flatnonzero(mask)
    mask[kept[np.argsort(drop[kept], kind='stable')[:number]]] = 0
    free = np.flatnonzero(mask == 0)
    mask[free[np.argsort(-grow[free], kind='stable')[:number]]] = 1
    return mask.reshape(8, 16)


class Drop(jaxpruner.RigL):
    def _get_drop_scores(self, sparse_state, params, grads):
        return jax.tree.map(lambda p: -jnp.abs(p), params)


@dataclasses.dataclass
class WithField(jaxpruner.SET):
    sign: float = -1.0

    def _get_grow_scores(self, sparse_state, params, grads):
        return jax.tree.map(lambda g: self.sign * g, grads)


class ByBatch(jaxpruner.RigL):
    """Names an extra argument of `update`."""

    def _get_grow_scores(self, sparse_state, params, grads, batch=None):
        return jax.tree.map(lambda leaf: leaf * batch, grads)


class HalvesTheFraction(jaxpruner.RigL):
    def _update_masks(self, old_mask, drop_score, grow_score, drop_fraction):
        return super()._update_masks(old_mask, drop_score, grow_score, drop_fraction / 2)


class OwnUpdate(jaxpruner.RigL):
    def update_state(self, sparse_state, params, grads):
        drop = self._get_drop_scores(sparse_state, params, grads)
        grow = self._get_grow_scores(sparse_state, params, grads)
        mask = self._update_masks(sparse_state.masks['u'], drop['u'], grow['u'], 0.2)
        return sparse_state._replace(masks={'bias': None, 'u': mask})


# The scores by which weights are dropped and grown, and the share that is replaced.
OVERRIDES = {
    jaxpruner.RigL: (U, np.abs(G), 0.4),
    Drop: (-U, np.abs(G), 0.4),
    WithField: (U, -G, 0.4),
    ByBatch: (U, -G, 0.4),
    HalvesTheFraction: (U, np.abs(G), 0.2),
    OwnUpdate: (U, np.abs(G), 0.2),
}


@pytest.mark.parametrize('cls', OVERRIDES, ids=lambda cls: cls.__name__)
def test_training_goes_by_what_is_overridden(cls):
    before, after = updated(cls)
    np.testing.assert_array_equal(after, replaced(before, *OVERRIDES[cls]))


@pytest.mark.parametrize(
    ('hook', 'returns', 'words'),
    [
        ('get_drop_scores', {'u': PARAMS['u']}, 'Wrong.get_drop_scores.*bias'),
        (
            '_get_grow_scores',
            {'u': jnp.ones(16), 'bias': None},
            r'Wrong.get_grow.* u .*\(8, 16\).*\(16,\)',
        ),
        ('update_masks', jnp.ones(16), r'Wrong.update_masks.*\(8, 16\).*\(16,\)'),
        ('update_state', None, 'Wrong.update_state .*SparseState, got NoneType'),
    ],
)
def test_what_a_hook_must_not_return_is_refused_by_its_name(hook, returns, words):
    wrong = type('Wrong', (jaxpruner.SET,), {hook: lambda *arguments, **named: returns})
    with pytest.raises((TypeError, ValueError), match=words):
        updated(wrong)


def test_the_default_key_can_be_folded_as_in_the_original():
    class OfCount(jaxpruner.SET):
        def _get_grow_scores(self, sparse_state, params, grads):
            key = jax.random.fold_in(self.rng_seed, sparse_state.count)
            return jaxpruner.pruners.generate_random_scores(params, key)

    np.testing.assert_array_equal(updated(OfCount)[1], updated(jaxpruner.SET)[1])


def test_an_overridden_update_masks_sees_one_leaf_and_one_layer():
    seen = []

    class Looks(jaxpruner.SET):
        def _update_masks(self, old_mask, drop_score, grow_score, drop_fraction):
            seen.append((old_mask.shape, drop_score.shape))
            return super()._update_masks(old_mask, drop_score, grow_score, drop_fraction)

    params = {'blocks': jnp.ones((3, 4, 8)), 'head': jnp.ones((4, 8))}
    updater = Looks(sparsity=0.5, stacked='blocks')
    after = updater.update_state(updater.init_state(params), params, params)
    assert set(seen) == {((4, 8), (4, 8))}
    assert [int(mask.sum()) for mask in after.masks['blocks']] == [16, 16, 16]


def test_is_debug_prints_each_mask_update(capfd):
    updated(jaxpruner.SET, is_debug=True)
    jax.effects_barrier()
    assert 'SET' in capfd.readouterr().out
