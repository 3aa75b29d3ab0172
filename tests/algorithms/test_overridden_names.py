"""Subclasses of SET and RigL train by what they override, under JaxPruner's names and under ours."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_schedules
from jaxpruner.algorithms import sparse_trainers
from jaxpruner.core import optimizer_state
from jaxpruner.mask_calculator import lazy_scores

PARAMS = {'u': jax.random.normal(jax.random.key(0), (8, 16)), 'bias': jnp.ones(16)}
GRADS = jax.tree.map(lambda leaf: leaf[::-1] * 2, PARAMS)
SETTINGS = {'sparsity': 0.5, 'drop_fraction_fn': optax.constant_schedule(0.4)}


def updated(cls, **settings):
    """The mask before a mask update, and after it inside a compiled step."""
    schedule = sparsity_schedules.PeriodicSchedule(1)
    updater = cls(scheduler=schedule, **(SETTINGS | settings))
    tx = updater.wrap_optax(optax.sgd(0.1, momentum=0.9))
    state = tx.init(PARAMS)
    return np.asarray(state.masks['u']), np.asarray(
        jax.jit(tx.update)(GRADS, state, PARAMS)[1].masks['u']
    )


def replaced(mask, drop, grow, fraction=0.4):
    """The published rule in NumPy."""
    mask, drop, grow = mask.ravel().copy(), np.asarray(drop).ravel(), np.asarray(grow).ravel()
    number = round(float(mask.sum()) * fraction)
    kept = np.flatnonzero(mask)
    mask[kept[np.argsort(drop[kept], kind='stable')[:number]]] = 0
    free = np.flatnonzero(mask == 0)
    mask[free[np.argsort(-grow[free], kind='stable')[:number]]] = 1
    return mask.reshape(8, 16)


class PrivateDrop(jaxpruner.RigL):
    def _get_drop_scores(self, sparse_state, params, grads):
        return jax.tree.map(lambda p: -jnp.abs(p), params)


class PublicDrop(jaxpruner.RigL):
    def get_drop_scores(self, sparse_state, params, grads):
        return jax.tree.map(lambda p: -jnp.abs(p), params)


class PrivateGrow(jaxpruner.RigL):
    def _get_grow_scores(self, sparse_state, params, grads):
        return jax.tree.map(jnp.negative, grads)


class PublicGrow(jaxpruner.SET):
    def get_grow_scores(self, sparse_state, params, grads):
        return jax.tree.map(jnp.negative, grads)


class CallsSuper(jaxpruner.RigL):
    def _get_grow_scores(self, sparse_state, params, grads):
        return jax.tree.map(jnp.negative, super()._get_grow_scores(sparse_state, params, grads))


@dataclasses.dataclass
class WithField(jaxpruner.RigL):
    sign: float = -1.0

    def _get_grow_scores(self, sparse_state, params, grads):
        return jax.tree.map(lambda g: self.sign * g, grads)


class GrowMixin:
    def _get_grow_scores(self, sparse_state, params, grads):
        return jax.tree.map(jnp.negative, grads)


class FromMixin(GrowMixin, jaxpruner.SET):
    pass


class SecondGeneration(PrivateGrow):
    def get_grow_scores(self, sparse_state, params, grads):
        return jax.tree.map(lambda grad: -jnp.abs(grad), grads)


class FromGradsOfCount(jaxpruner.SET):
    """As copied from the original: the key of the updater is folded with the step."""

    def _get_grow_scores(self, sparse_state, params, grads):
        key = jax.random.fold_in(self.rng_seed, sparse_state.count)
        return jaxpruner.pruners.generate_random_scores(params, key)


U, G = np.abs(np.asarray(PARAMS['u'])), np.asarray(GRADS['u'])
OVERRIDES = {
    PrivateDrop: (-U, np.abs(G)),
    PublicDrop: (-U, np.abs(G)),
    PrivateGrow: (U, -G),
    PublicGrow: (U, -G),
    CallsSuper: (U, -np.abs(G)),
    WithField: (U, -G),
    FromMixin: (U, -G),
    SecondGeneration: (U, -np.abs(G)),
}


@pytest.mark.parametrize('cls', OVERRIDES)
def test_training_goes_by_what_is_overridden(cls):
    before, after = updated(cls)
    np.testing.assert_array_equal(after, replaced(before, *OVERRIDES[cls]))
    stock = updated(jaxpruner.RigL if issubclass(cls, jaxpruner.RigL) else jaxpruner.SET)[1]
    assert not np.array_equal(after, stock)


def test_the_default_key_can_be_folded_as_in_the_original():
    np.testing.assert_array_equal(*(updated(cls)[1] for cls in (FromGradsOfCount, jaxpruner.SET)))


def test_a_method_that_is_replaced_later_is_called(monkeypatch):
    def negative(sparse_state, params, grads):
        return jax.tree.map(jnp.negative, grads)

    updater = jaxpruner.SET(**SETTINGS)
    state = updater.init_state(PARAMS)
    expected = replaced(np.asarray(state.masks['u']), U, -G)
    monkeypatch.setattr(updater, '_get_grow_scores', negative)
    np.testing.assert_array_equal(updater.update_state(state, PARAMS, GRADS).masks['u'], expected)
    monkeypatch.setattr(
        jaxpruner.RigL, '_get_grow_scores', lambda self, *arguments: negative(*arguments)
    )
    replaced_class = jaxpruner.RigL(**SETTINGS)
    np.testing.assert_array_equal(
        replaced_class.update_state(state, PARAMS, GRADS).masks['u'], expected
    )


class KeepsTheFirst(jaxpruner.SET):
    def _update_masks(self, old_mask, drop_score, grow_score, drop_fraction):
        number = jnp.sum(old_mask)
        return (jnp.arange(old_mask.size) < number).reshape(old_mask.shape).astype(old_mask.dtype)


class HalvesTheFraction(jaxpruner.RigL):
    def update_masks(self, old_mask, drop_score, grow_score, drop_fraction):
        return super()._update_masks(old_mask, drop_score, grow_score, drop_fraction / 2)


class OwnUpdate(jaxpruner.RigL):
    def update_state(self, sparse_state, params, grads):
        drop = self._get_drop_scores(sparse_state, params, grads)
        grow = self._get_grow_scores(sparse_state, params, grads)
        masks = {
            'bias': None,
            'u': self._update_masks(sparse_state.masks['u'], drop['u'], grow['u'], 0.2),
        }
        return sparse_state._replace(masks=masks)


def test_masks_are_those_of_an_overridden_update_masks():
    before, after = updated(KeepsTheFirst)
    number = int(before.sum())
    assert after.ravel().tolist() == [1] * number + [0] * (before.size - number)
    for cls in (HalvesTheFraction, OwnUpdate):
        before, after = updated(cls)
        np.testing.assert_array_equal(after, replaced(before, U, np.abs(G), fraction=0.2))


def test_an_overridden_update_masks_sees_one_leaf_with_its_type_and_one_layer():
    seen = []

    class Looks(jaxpruner.SET):
        def _update_masks(self, old_mask, drop_score, grow_score, drop_fraction):
            seen.append((old_mask.shape, drop_score.shape, self.sparsity_type))
            return super()._update_masks(old_mask, drop_score, grow_score, drop_fraction)

    params = {'blocks': jnp.ones((3, 4, 8)), 'head': jnp.ones((4, 8))}
    block = jaxpruner.Block((2, 2))
    types = {'head': block, '*': jaxpruner.Unstructured()}
    updater = Looks(sparsity=0.5, sparsity_type=types, stacked='blocks')
    state = updater.init_state(params)
    after = updater.update_state(state, params, params)
    assert seen == [((4, 8), (4, 8), jaxpruner.Unstructured()), ((4, 8), (4, 8), block)]
    assert [int(mask.sum()) for mask in after.masks['blocks']] == [16, 16, 16]
    with pytest.raises(TypeError, match='update_masks works on one leaf, and'):
        updater._update_masks(state.masks['head'], params['head'], params['head'], 0.3)


@pytest.mark.parametrize('name', ['get_drop_scores', 'get_grow_scores', 'update_masks'])
@pytest.mark.parametrize(
    'cls', [jaxpruner.SET, jaxpruner.RigL, *OVERRIDES, KeepsTheFirst, HalvesTheFraction]
)
def test_both_names_are_one_method(cls, name):
    assert getattr(cls, name) is getattr(cls, f'_{name}')


def test_stock_classes_still_have_lazy_scores():
    names = 'elementwise_grow_score', '_get_grow_scores'
    assert lazy_scores.hook_describes(jaxpruner.RigL(), *names)
    assert not lazy_scores.hook_describes(PrivateGrow(), *names)


def both_names():
    class Both(jaxpruner.SET):
        def get_drop_scores(self, sparse_state, params, grads):
            return params

        def _get_drop_scores(self, sparse_state, params, grads):
            return params


def scores_alone():
    class Alone(jaxpruner.RigL):
        def calculate_scores(self, params, sparse_state=None, grads=None):
            return params


def mixin_last():
    class Last(jaxpruner.MagnitudePruning, jaxpruner.algorithms.SteMixin):
        pass


def global_mixin_last():
    class GlobalLast(jaxpruner.MagnitudePruning, jaxpruner.algorithms.GlobalPruningMixin):
        pass


REFUSED = [
    (both_names, 'Both defines both get_drop_scores and _get_drop_scores'),
    (
        scores_alone,
        r'Alone overrides calculate_scores, .*: SET never does; override get_drop_scores',
    ),
    (mixin_last, 'SteMixin has no effect after a pruner; write it first'),
    (global_mixin_last, 'GlobalPruningMixin has no effect after a pruner'),
]


@pytest.mark.parametrize(('define', 'message'), REFUSED)
def test_what_cannot_be_honoured_is_refused_where_it_is_defined(define, message):
    with pytest.raises(TypeError, match=message):
        define()


def test_scores_may_be_called_by_another_method_of_the_same_class():
    class BySize(jaxpruner.RigL):
        def calculate_scores(self, params, sparse_state=None, grads=None):
            return jax.tree.map(jnp.abs, params)

        def get_initial_masks(self, params, target_sparsities):
            return self.create_masks(self.calculate_scores(params), target_sparsities)

    sizes = np.abs(np.asarray(PARAMS['u']))
    first, _ = updated(BySize)
    np.testing.assert_array_equal(first, sizes >= np.median(sizes))


MOMENTS = {
    'sgd': optax.sgd(0.1, momentum=0.9),
    'adam': optax.adam(0.1),
    'chain': optax.chain(optax.clip(1.0), optax.adamw(0.1)),
    'multi_steps': optax.MultiSteps(optax.adam(0.1), 2),
    'inject': optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    'lamb': optax.lamb(0.1),
    'adafactor': optax.adafactor(0.1),
    'rmsprop': optax.rmsprop(0.1, momentum=0.9),
    'lion': optax.lion(0.1),
    'muon': optax.contrib.muon(0.1),
    'multi_transform': optax.multi_transform(
        {'x': optax.adam(0.1), 'y': optax.sgd(0.1)}, {'u': 'x', 'bias': 'y'}
    ),
}


@pytest.mark.parametrize('name', MOMENTS)
def test_update_state_by_itself_zeroes_the_moments_of_weights_that_come_back(name):
    tx, updater = MOMENTS[name], jaxpruner.RigL(**SETTINGS)
    inner_state = tx.init(PARAMS)
    for _ in range(3):
        _, inner_state = tx.update(GRADS, inner_state, PARAMS)
    state = updater.init_state(PARAMS)._replace(inner_state=inner_state)
    new = updater.update_state(state, PARAMS, GRADS)
    back = updater.weights_that_came_back(state, new)
    assert back['u'].any()
    expected = optimizer_state.zero_moments(tx, inner_state, back, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, new.inner_state, expected)
    assert updater.moments_to_reset(state, new) is None  # the driver does it no second time
    assert updater.moments_to_reset(state, new._replace(inner_state=inner_state)) is not None


def test_restart_inner_state_tells_leaves_of_one_name_apart():
    params = {'w': jnp.ones((2, 2)), 'inner': {'w': jnp.ones((2, 2))}}
    tx = optax.adam(0.1)
    state = tx.update(params, tx.init(params), params)[1]
    new = sparse_trainers.restart_inner_state(state, {'w': jnp.ones((2, 2)), 'inner': {'w': None}})
    assert not new[0].mu['w'].any()
    assert new[0].mu['inner']['w'].all()
    assert int(new[0].count) == 1


def test_a_history_of_parameters_is_refused():
    tx = optax.lbfgs()
    with pytest.raises(ValueError, match='lbfgs keeps a history'):
        sparse_trainers.restart_inner_state(tx.init(PARAMS), {'u': jnp.ones((8, 16)), 'bias': None})


def test_is_debug_prints_each_mask_update(capfd):
    updated(jaxpruner.SET, is_debug=True)
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert 'SET: masks updated at step 0, drop fraction 0.4' in out
    assert 'weights came back' in out


class GrowsByBatch(jaxpruner.RigL):
    def get_grow_scores(self, sparse_state, params, grads, batch=None):
        return jax.tree.map(lambda leaf: leaf * batch, grads)


@pytest.mark.parametrize('batch', [-1.0, 1.0])
def test_scores_to_grow_by_get_the_extra_arguments_that_they_name(batch):
    updater = GrowsByBatch(scheduler=sparsity_schedules.PeriodicSchedule(1), **SETTINGS)
    tx = updater.wrap_optax(optax.sgd(0.1))
    state = tx.init(PARAMS)
    before = np.asarray(state.masks['u'])
    after = jax.jit(tx.update)(GRADS, state, PARAMS, batch=batch, other=jnp.ones(3))[1].masks['u']
    expected = replaced(before, abs(PARAMS['u']), batch * GRADS['u'])
    np.testing.assert_array_equal(np.asarray(after), expected)
