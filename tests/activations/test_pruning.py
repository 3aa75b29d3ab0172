"""Activations pruned by magnitude: exact counts per example, gradients, every way in which JAX calls them."""

import math

import hypothesis
import hypothesis.extra.numpy as hypothesis_numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.compiled import collectives
from helpers import eight_devices
from jaxpruner import mask_calculator
from jaxpruner.activations import prune_act_struct, prune_act_unstruct
from jaxpruner.sparsity_types import NByM

# Shape, batch axes, density, dtype, number kept of each example.
COUNTS = {
    'conv': ((4, 7, 5, 6), 0, 0.1, 'float32', 21),
    'prime': ((3, 31), 0, 0.999, 'float16', 31),
    'at least one': ((3, 31), 0, 1e-6, 'float32', 1),
    'float32 puts it below a half': ((10,), 0, 0.15, 'float32', 1),
    'tokens': ((2, 3, 40), (0, 1), 0.25, 'float32', 10),
    'examples last': ((4, 5, 6), -1, 0.1, 'float32', 2),
    'no batch': ((4, 10), None, 1.0, 'float32', 40),
    'no examples': ((0, 4), 0, 0.5, 'float32', 2),
}


@pytest.mark.parametrize(
    ('shape', 'axes', 'density', 'dtype', 'count'), COUNTS.values(), ids=COUNTS
)
def test_each_example_keeps_its_largest(shape, axes, density, dtype, count):
    # Few of 16 bits are equal, so ties are there, too; no zeros, which could not be told from what is removed.
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)
    x = jnp.where(x == 0, jnp.ones_like(x), x)
    pruned = prune_act_unstruct(x, density, batch_axes=axes)
    assert (pruned.shape, pruned.dtype) == (x.shape, x.dtype)
    first = () if axes is None or x.ndim < 2 else tuple(np.atleast_1d(axes))
    examples = math.prod(shape[axis] for axis in first)
    rows = (
        np.moveaxis(np.asarray(array, np.float32), first, range(len(first))).reshape(
            examples, x.size // max(examples, 1)
        )
        for array in (pruned, x)
    )
    for after, before in zip(*rows, strict=True):
        kept = np.argsort(-np.abs(before), kind='stable')[:count]
        np.testing.assert_array_equal(np.flatnonzero(after), np.sort(kept))
        np.testing.assert_array_equal(after[kept], before[kept])


FEW_VALUES = hypothesis_numpy.arrays(
    np.float32,
    st.sampled_from([(3, 8), (2, 3, 4), (4, 1), (2, 7)]),
    elements=st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, np.inf, -np.inf, np.nan]),
)


@hypothesis.settings(max_examples=40)
@hypothesis.given(FEW_VALUES, st.sampled_from([1e-6, 0.25, 0.5, 0.9, 1.0]))
def test_ties_and_special_values_as_in_the_core(x, density):
    # The gradient shows the mask, where a zero that is kept does not.
    mask = jax.grad(lambda x: jnp.sum(prune_act_unstruct(x, density)))(jnp.asarray(x))
    for row, example in zip(mask, x, strict=True):
        expected = mask_calculator.topk_mask_calculator(jnp.abs(jnp.asarray(example)), 1 - density)
        np.testing.assert_array_equal(row, expected)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    FEW_VALUES, st.sampled_from(['1:2', '2:4', '3:3', '1:8', '2:3']), st.integers(-1, 1)
)
@pytest.mark.filterwarnings('ignore:activations of shape:UserWarning')
def test_n_of_each_m_as_in_the_core(x, pattern, axis):
    mask = jax.grad(lambda x: jnp.sum(prune_act_struct(x, pattern, axis=axis)))(jnp.asarray(x))
    kind = NByM(*map(int, pattern.split(':')), axis, allow_partial=True)
    expected = mask_calculator.topk_n_by_m_mask_calculator(jnp.abs(jnp.asarray(x)), 0.5, kind)
    np.testing.assert_array_equal(mask, expected)


def test_a_partial_last_group_warns():
    words = r'shape \(2, 10\) have length 10 along axis -1, which m=4 .* keeps 2 of 2'
    with pytest.warns(UserWarning, match=words):
        kept = prune_act_struct(jnp.ones((2, 10)), (2, 4))
    np.testing.assert_array_equal(kept, [[0, 0, 1, 1, 0, 0, 1, 1, 1, 1]] * 2)


FUNCTIONS = {
    'unstructured': lambda x, **options: prune_act_unstruct(x, 0.25, **options),
    'structured': lambda x, **options: prune_act_struct(x, (1, 4), **options),
}
X = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)), jnp.float32)
WRAPPED = {
    'remat of jit': lambda prune: jax.checkpoint(jax.jit(prune)),
    'vmap': jax.vmap,
    'scan of remat': lambda prune: (
        lambda x: jax.lax.scan(lambda c, row: (c, jax.checkpoint(prune)(row)), 0, x)[1]
    ),
}


@pytest.mark.parametrize('wrapper', WRAPPED)
@pytest.mark.parametrize('function', FUNCTIONS)
def test_values_and_gradients(function, wrapper):
    prune = FUNCTIONS[function]
    kept, weights = prune(X) != 0, jnp.arange(1.0, 33.0).reshape(4, 8)
    assert int(kept.sum()) == 4 * 2
    for straight, gradient in ((False, jnp.where(kept, weights, 0)), (True, weights)):
        wrapped = WRAPPED[wrapper](lambda x, straight=straight: prune(x, straight_through=straight))
        np.testing.assert_array_equal(wrapped(X), jnp.where(kept, X, 0))
        got = jax.grad(lambda x, wrapped=wrapped: jnp.sum(weights * wrapped(x)))(X)
        np.testing.assert_array_equal(got, gradient)


REFUSED = [
    (lambda: prune_act_unstruct(X, 0.0), ValueError, r'density must lie in \(0, 1\].* got 0.0'),
    (lambda: prune_act_unstruct(jnp.arange(8), 0.5), TypeError, r'be floats, got int32\[8\]'),
    (lambda: prune_act_unstruct(X, 0.5, batch_axes=(0, 1)), ValueError, r'\(0, 1\) must be axes'),
    (lambda: prune_act_unstruct(X[0], 0.5, batch_axes=7), ValueError, 'batch_axes=7 must be axes'),
    (lambda: prune_act_unstruct(X, 0.5, batch_axes='0'), TypeError, 'as an integer'),
    (lambda: prune_act_struct(X, NByM(1, 4), axis=0), ValueError, 'but axis 0 is asked for'),
]  # fmt: skip


@pytest.mark.parametrize(('call', 'error', 'message'), REFUSED)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)


@pytest.mark.parametrize('prune', FUNCTIONS.values(), ids=FUNCTIONS)
def check_sharded_batches_stay_where_they_are(prune):
    mesh = Mesh(np.array(jax.devices()).reshape(8), ('data',))
    sharding = NamedSharding(mesh, PartitionSpec('data'))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 6, 6, 8)), jnp.float32)
    program = jax.jit(prune).lower(jax.device_put(x, sharding)).compile()
    pruned = program(jax.device_put(x, sharding))
    assert pruned.sharding.is_equivalent_to(sharding, x.ndim)
    np.testing.assert_array_equal(pruned, prune(x))
    # Devices agree on whether another pass is needed, and on nothing else.
    assert collectives(program.as_text()).largest <= 1
