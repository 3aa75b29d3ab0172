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

PARAMS = {'a': jnp.ones((5, 3)), 'b': jnp.ones((8, 4)), 'bias': jnp.ones(4)}


def static(packed=False, sparsity=0.75):
    return jaxpruner.create_updater_from_config(
        {'algorithm': 'static_sparse', 'sparsity': sparsity, 'is_packed': packed}
    )


def linear(tx):
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    return nnx.state(model, nnx.Param), nnx.Optimizer(model, tx, wrt=nnx.Param)


def in_chains(tx):
    return optax.chain(optax.chain(optax.clip(1.0), tx), optax.trace(0.9))


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


@pytest.mark.parametrize(('wrap', 'packed'), [(optax.chain, True), (in_chains, False)])
def test_states_that_nnx_boxes_or_splits_are_read(wrap, packed):
    pruner = static(packed)
    params, optimizer = linear(wrap(pruner.wrap_optax(optax.adam(0.1))))
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


def test_a_mask_of_another_parameter_is_refused():
    masks, params = {'w': jnp.zeros(5, jnp.uint8)}, {'w': jnp.ones((16, 4))}
    for call in (jaxpruner.unpack_masks, lambda m, p: jaxpruner.apply_mask(p, m)):
        with pytest.raises(ValueError, match=r'\(5,\)'):
            call(masks, params)


# Moments of weights that come back.


MODEL = {'w': jax.random.normal(jax.random.key(0), (8, 16)), 'b': jnp.ones(16)}
# Parameters and an optimizer; the contract knows more of them.
MOMENTS = {
    'factored': (MODEL, optax.adafactor(0.1, momentum=0.9, min_dim_size_to_factor=2)),
    'counters': (MODEL, optax.MultiSteps(optax.adamw(0.1), 4).gradient_transformation()),
    'a dense leaf of the same shape': (MODEL | {'dense': MODEL['w']}, optax.adam(0.1)),
}


@pytest.mark.parametrize(('params', 'tx'), MOMENTS.values(), ids=MOMENTS)
def test_moments_of_regrown_weights_alone_become_zero(params, tx):
    types = {'w': 'unstructured', '*': None}
    pruner = jaxpruner.RigL(sparsity=0.5, drop_fraction_fn=lambda step: 0.4, sparsity_type=types)
    inner = tx.init(params)
    for _ in range(3):
        _, inner = tx.update(params, inner, params)
    old = pruner.init_state(params)._replace(inner_state=inner)
    new = pruner.update_state(old, params, jax.tree.map(lambda leaf: leaf[::-1], params))
    back, changed = np.asarray(new.masks['w']) > np.asarray(old.masks['w']), 0
    leaves = jax.tree_util.tree_leaves_with_path(inner)
    for (path, was), now in zip(leaves, jax.tree.leaves(new.inner_state), strict=True):
        is_own = jnp.shape(was) == back.shape and 'dense' not in jax.tree_util.keystr(path)
        np.testing.assert_array_equal(now, np.where(back, 0, was) if is_own else was)
        changed += is_own and bool(np.any(np.asarray(was)[back]))
    assert changed


# A state that another pruner made: its targets win until optax replaces them.

KERNEL = {'bias': jnp.ones(4), 'kernel': jnp.arange(32.0).reshape(8, 4) + 1}


@pytest.mark.parametrize('cls', [jaxpruner.MagnitudePruning, jaxpruner.GlobalMagnitudePruning])
def test_targets_of_the_state_hold_until_they_are_replaced(cls):
    wrap = in_chains if cls is jaxpruner.MagnitudePruning else optax.chain
    first, later = (cls(jaxpruner.PeriodicSchedule(1), sparsity=target) for target in (0.5, 0.75))
    state = wrap(first.wrap_optax(optax.sgd(0.1))).init(KERNEL)
    tx = wrap(later.wrap_optax(optax.sgd(0.1)))
    targets = later.init_state(KERNEL).target_sparsities
    replaced = optax.tree_utils.tree_set(state, target_sparsities=targets)
    assert jax.tree.structure(replaced) == jax.tree.structure(state)
    for given, zeros in [(state, 16), (replaced, 24)]:
        (found,) = jaxpruner.sparse_states(jax.jit(tx.update)(KERNEL, given, KERNEL)[1])
        assert int((found.masks['kernel'] == 0).sum()) == zeros
    assert float(jaxpruner.sparsity_metrics(replaced)['_target_sparsity']) == 0.75
