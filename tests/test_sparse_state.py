"""Finding a pruner's state in any optimizer state, masks at one bit a weight, moments of regrown weights."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpruner
from helpers import steps
from jaxpruner.algorithms import sparse_trainers

PARAMS = {'a': jnp.ones((5, 3)), 'b': jnp.ones((8, 4)), 'bias': jnp.ones(4)}


def static(packed=False, sparsity=0.75):
    return jaxpruner.create_updater_from_config(
        {'algorithm': 'static_sparse', 'sparsity': sparsity, 'is_packed': packed}
    )


def linear(tx):
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    return nnx.state(model, nnx.Param), nnx.Optimizer(model, tx, wrt=nnx.Param)


LABELS = {'a': 'x', 'b': 'x', 'bias': 'y'}
WRAPPED = {
    'alone': lambda tx: tx,
    'chain in chain': lambda tx: optax.chain(optax.chain(optax.clip(1.0), tx), optax.trace(0.9)),
    'MultiSteps': lambda tx: optax.MultiSteps(tx, 2),
    'multi_transform': lambda tx: optax.multi_transform({'x': tx, 'y': optax.sgd(0.1)}, LABELS),
    'masked': lambda tx: optax.masked(tx, {'a': True, 'b': True, 'bias': False}),
    'inject_hyperparams': lambda tx: optax.inject_hyperparams(
        lambda rate: static().wrap_optax(optax.sgd(rate))
    )(rate=0.1),
}


@pytest.mark.parametrize('wrap', WRAPPED.values(), ids=WRAPPED)
def test_the_state_is_found_and_used_anywhere(wrap):
    pruner = static()
    state = wrap(pruner.wrap_optax(optax.adam(0.1))).init(PARAMS)
    (found,) = jaxpruner.sparse_states(state)
    assert isinstance(found, jaxpruner.SparseState)
    pruned = pruner.post_gradient_update(PARAMS, state)
    assert int((pruned['b'] != 0).sum()) == 8
    assert (pruned['bias'] == 1).all()
    steps.assert_equal(pruner.pre_forward_update(PARAMS, state), PARAMS)


def test_none_and_many_are_refused():
    plain = optax.adam(0.1).init(PARAMS)
    assert jaxpruner.sparse_states(plain) == []
    with pytest.raises(ValueError, match='found 0'):
        static().post_gradient_update(PARAMS, plain)
    with pytest.raises(ValueError, match='SparseState'):
        jaxpruner.sparsity_metrics(plain)
    nested = static().wrap_optax(static().wrap_optax(optax.sgd(0.1))).init(PARAMS)
    assert len(jaxpruner.sparse_states(nested)) == 2
    beside = [static().wrap_optax(optax.sgd(0.1)).init(PARAMS)] * 2
    with pytest.raises(ValueError, match=r'found 2.*sparse_states'):
        static().post_gradient_update(PARAMS, beside)


def test_metrics_are_exact_and_those_of_stacked_states_their_mean():
    tx = optax.chain(static(packed=True).wrap_optax(optax.sgd(0.1)))
    params = PARAMS | {'empty': jnp.zeros((0, 4))}
    stacked = jax.vmap(tx.init)(jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), params))
    for state in (tx.init(params), stacked):
        metrics = jax.jit(jaxpruner.sparsity_metrics)(state)
        assert float(metrics['a']) == pytest.approx(1 - 4 / 15)  # bits of two bytes do not tell
        assert float(metrics['b']) == pytest.approx(0.75)
        assert float(metrics['empty']) == 0
        assert 'bias' not in metrics
        assert float(metrics['_mask_sparsity']) == pytest.approx(1 - 12 / 47)
        assert float(metrics['_target_sparsity']) == pytest.approx(0.75)
    dense = jaxpruner.NoPruning().wrap_optax(optax.sgd(0.1)).init(PARAMS)
    assert float(jaxpruner.sparsity_metrics(dense)['_mask_sparsity']) == 0


@pytest.mark.parametrize(('name', 'packed'), [('alone', True), ('chain in chain', False)])
def test_states_that_nnx_boxes_or_splits_are_read(name, packed):
    pruner = static(packed)
    params, optimizer = linear(WRAPPED[name](pruner.wrap_optax(optax.adam(0.1))))
    split = nnx.split(optimizer)[1]  # in which tuples are mappings
    for state in (optimizer.opt_state, split, {'step': 3, 'optimizer': split}):
        (found,) = jaxpruner.sparse_states(state)
        assert int(found.count) == 0
        pruned = pruner.post_gradient_update(params, state)
        assert jaxpruner.summarize_sparsity(pruned)['kernel'] == 0.75
        metrics = jaxpruner.sparsity_metrics(state, pruned)
        assert float(metrics['kernel']) == float(metrics['_target_sparsity']) == 0.75
    assert jaxpruner.sparse_states({'masks': jnp.ones(3), 'inner_state': jnp.ones(3)}) == []


# Masks at one bit a weight. Few shapes, since programs are compiled for each.

SHAPES = [(), (1,), (7,), (8,), (1, 9), (16, 3), (5, 1, 3), (2, 8, 4), (9, 17, 2), (2, 1, 3, 12)]


@hypothesis.given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=15)
@pytest.mark.filterwarnings('ignore:FixedMask')
def test_packed_masks_say_what_unpacked_ones_say(shape, seed):
    mask = np.random.default_rng(seed).integers(0, 2, shape, np.uint8)
    params, masks = {'w': jnp.ones(shape)}, {'w': jnp.asarray(mask)}

    def state(packed, masks=masks):
        pruner = jaxpruner.FixedMask(masks, use_packed_masks=packed)
        return pruner.wrap_optax(optax.sgd(0.1)).init(params)

    bits = state(True).masks['w']
    assert bits.dtype == np.uint8
    assert bits.ndim == mask.ndim
    # Of one axis, the last of whole bytes or else the longest, eight weights are a byte.
    whole = any(length % 8 == 0 for length in shape)
    longest = max(shape, default=1)
    size = mask.size // 8 if whole else mask.size // longest * math.ceil(longest / 8)
    assert bits.size == size
    # The deep-dive cells return flat bits.
    flat = jnp.packbits(jnp.asarray(mask).reshape(-1))
    for stored in (mask, mask != 0, bits, *([flat] if mask.ndim else [])):
        pruned = jaxpruner.apply_mask(params, {'w': jnp.asarray(stored)})
        np.testing.assert_array_equal(pruned['w'], mask)
        unpacked = jaxpruner.unpack_masks({'w': jnp.asarray(stored)}, params)
        np.testing.assert_array_equal(unpacked['w'], mask)
        np.testing.assert_array_equal(state(True, {'w': jnp.asarray(stored)}).masks['w'], bits)
    np.testing.assert_array_equal(state(False, {'w': bits}).masks['w'], mask)


def test_stacked_masks_pack_alike():
    mask = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 20, 10)), jnp.uint8)

    def packed(mask):
        pruner = jaxpruner.FixedMask({'w': mask}, use_packed_masks=True)
        return pruner.wrap_optax(optax.sgd(0.1)).init({'w': jnp.ones(mask.shape)}).masks['w']

    np.testing.assert_array_equal(jax.vmap(packed)(mask), jnp.stack([packed(m) for m in mask]))


def test_a_mask_of_another_parameter_is_refused():
    masks, params = {'w': jnp.zeros(5, jnp.uint8)}, {'w': jnp.ones((16, 4))}
    for call in (jaxpruner.unpack_masks, lambda m, p: jaxpruner.apply_mask(p, m)):
        with pytest.raises(ValueError, match=r'\(5,\)'):
            call(masks, params)


# Moments of weights that come back.

MODEL = {'w': jax.random.normal(jax.random.key(0), (8, 16)), 'b': jnp.ones(16)}
WHERE = {'w': jnp.zeros((8, 16), jnp.uint8).at[0].set(1), 'b': None}
MOMENTS = {
    'sgd': optax.sgd(0.1, momentum=0.9),
    'adam': optax.adam(0.1),
    'adamw': optax.chain(optax.clip(1.0), optax.adamw(0.1)),
    'adafactor': optax.adafactor(0.1, momentum=0.9),
    'lion': optax.lion(0.1),
    'rmsprop': optax.rmsprop(0.1, momentum=0.9),
    'lamb': optax.lamb(0.1),
    'muon': optax.contrib.muon(0.1),
    'MultiSteps': optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation(),
    'inject_hyperparams': optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    'masked': optax.masked(optax.adam(0.1), {'w': True, 'b': False}),
    'multi_transform': optax.multi_transform(
        {'x': optax.adam(0.1), 'y': optax.sgd(0.1, 0.9)}, {'w': 'x', 'b': 'y'}
    ),
}


def check_zeroed(before, after, where):
    """What has the parameter's shape is zero there and unchanged elsewhere, as all the rest is."""
    assert jax.tree.structure(after) == jax.tree.structure(before)
    changed = 0
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        chosen = where if new.shape == where.shape else np.zeros(jnp.shape(new), bool)
        np.testing.assert_array_equal(new, np.where(chosen, 0, old))
        changed += bool(np.any(np.asarray(old)[chosen]))
    assert changed


@pytest.mark.parametrize('tx', MOMENTS.values(), ids=MOMENTS)
def test_moments_of_chosen_weights_alone_become_zero(tx):
    state = tx.init(MODEL)
    for _ in range(3):
        _, state = tx.update(MODEL, state, MODEL)
    check_zeroed(state, sparse_trainers.restart_inner_state(state, WHERE), WHERE['w'] == 1)
    pruner = jaxpruner.RigL(sparsity=0.5, drop_fraction_fn=lambda step: 0.4)
    old = pruner.init_state(MODEL)._replace(inner_state=state)
    new = pruner.update_state(old, MODEL, jax.tree.map(lambda leaf: leaf[::-1], MODEL))
    back = np.asarray(new.masks['w']) > np.asarray(old.masks['w'])
    assert back.any()
    check_zeroed(state, new.inner_state, back)


def test_moments_of_other_shapes_and_of_one_name_elsewhere_are_left_alone():
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2)
    _, state = tx.update(MODEL, tx.init(MODEL), MODEL)
    steps.assert_equal(sparse_trainers.restart_inner_state(state, WHERE), state)
    params = {'w': jnp.ones((2, 2)), 'inner': {'w': jnp.ones((2, 2))}}
    _, state = optax.adam(0.1).update(params, optax.adam(0.1).init(params), params)
    where = {'w': jnp.ones((2, 2)), 'inner': {'w': None}}
    new = sparse_trainers.restart_inner_state(state, where)
    assert not new[0].mu['w'].any()
    assert new[0].mu['inner']['w'].all()
    with pytest.raises(ValueError, match='lbfgs'):
        sparse_trainers.restart_inner_state(optax.lbfgs().init(MODEL), WHERE)


# A state that another pruner made: its targets win until it is retargeted.

KERNEL = {'bias': jnp.ones(4), 'kernel': jnp.arange(32.0).reshape(8, 4) + 1}
GIVEN = r'kernel.*0\.5.*0\.75'


def pruner_of(sparsity, cls=jaxpruner.MagnitudePruning, **settings):
    return cls(jaxpruner.PeriodicSchedule(1), sparsity=sparsity, **settings)


def state_of(pruner, params=KERNEL):
    return pruner.wrap_optax(optax.sgd(0.1)).init(params)


@pytest.mark.parametrize(
    ('cls', 'name'),
    [
        (jaxpruner.MagnitudePruning, 'chain in chain'),
        (jaxpruner.GlobalMagnitudePruning, 'alone'),
    ],
)
def test_targets_of_the_state_hold_until_it_is_retargeted(cls, name):
    wrap = WRAPPED[name]
    state = wrap(pruner_of(0.5, cls).wrap_optax(optax.sgd(0.1))).init(KERNEL)
    later = pruner_of(0.75, cls)
    tx = wrap(later.wrap_optax(optax.sgd(0.1)))
    retargeted = later.retarget(state, KERNEL)
    assert jax.tree.structure(retargeted) == jax.tree.structure(state)
    for given, zeros in [(state, 16), (retargeted, 24)]:
        (found,) = jaxpruner.sparse_states(jax.jit(tx.update)(KERNEL, given, KERNEL)[1])
        assert int((found.masks['kernel'] == 0).sum()) == zeros
    assert float(jaxpruner.sparsity_metrics(retargeted)['_target_sparsity']) == 0.75


def test_a_plan_says_where_targets_differ():
    state, later = state_of(pruner_of(0.5)), pruner_of(0.75)
    with pytest.warns(UserWarning, match=GIVEN) as caught:
        later.plan(KERNEL, state)
    assert len(caught) == 1
    later.plan(KERNEL, later.retarget(state, KERNEL))  # warnings are errors


def test_what_new_targets_cannot_change_is_refused_by_name():
    other = pruner_of(0.5, sparsity_type={'kernel': None})
    with pytest.raises(ValueError, match='kernel'):
        other.retarget(state_of(pruner_of(0.5)), KERNEL)
    with pytest.raises(ValueError, match='RigL'):
        pruner_of(0.75, jaxpruner.RigL).retarget(state_of(pruner_of(0.5, jaxpruner.RigL)), KERNEL)


def test_states_of_nnx_optimizers_and_traced_targets_are_retargeted():
    params, optimizer = linear(pruner_of(0.5).wrap_optax(optax.sgd(0.1)))
    state = pruner_of(0.75).retarget(optimizer.opt_state, params)
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.opt_state)
    assert float(jaxpruner.sparsity_metrics(state)['_target_sparsity']) == 0.75
    cls = jaxpruner.GlobalMagnitudePruning
    old = state_of(pruner_of(0.5, cls))
    new = jax.jit(lambda sparsity: pruner_of(sparsity, cls).retarget(old, KERNEL))(0.75)
    assert float(new.target_sparsities) == 0.75
