"""Activations pruned by magnitude: exact counts per example, gradients, every way in which JAX calls them."""

import functools
import math

import equinox as eqx
import flax.linen as nn
import haiku as hk
import hypothesis
import hypothesis.extra.numpy as hypothesis_numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from helpers import eight_devices, hlo, rows
from jaxpruner import activations, mask_calculator, selection
from jaxpruner.activations import prune_act_struct, prune_act_unstruct
from jaxpruner.sparsity_types import NByM

SHAPES = {
    'conv': ((4, 7, 5, 6), 0),
    'dense': ((6, 32), 0),
    'prime': ((3, 31), 0),
    'tokens': ((2, 3, 40), (0, 1)),
    'channels first': ((5, 4, 3), -1),
    'axes out of order': ((2, 3, 4, 5), (2, 0)),
    'one example': ((40,), 0),
    'no batch': ((4, 10), None),
    'a number': ((), 0),
}
DENSITIES = [1e-6, 0.1, 0.25, 0.5, 0.9, 0.999, 1.0]


def examples_of(x, batch_axes):
    """The examples as rows of float32, in the order of the batch axes; NumPy itself knows no bfloat16."""
    x = np.asarray(x.astype(jnp.float32))
    if batch_axes is None or x.ndim < 2:
        return np.reshape(x, (1, -1))
    axes = sorted(axis % x.ndim for axis in np.atleast_1d(batch_axes))
    moved = np.moveaxis(x, axes, range(len(axes)))
    return moved.reshape(math.prod(moved.shape[: len(axes)]), -1)


@pytest.mark.parametrize(
    ('name', 'density', 'dtype'),
    rows.crossed(SHAPES, DENSITIES, ['float32', 'bfloat16', 'float16']),
)
def test_each_example_keeps_the_core_s_count(name, density, dtype):
    shape, batch_axes = SHAPES[name]
    # Few of 16 bits are equal, so ties are there, too; no zeros, which could not be told from what is removed.
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)
    x = jnp.where(x == 0, jnp.ones_like(x), x)
    pruned = prune_act_unstruct(x, density, batch_axes=batch_axes)
    assert (pruned.shape, pruned.dtype) == (x.shape, x.dtype)
    after, before = examples_of(pruned, batch_axes), examples_of(x, batch_axes)
    count = int(selection.number_to_keep(after.shape[1], 1 - density))
    assert (after != 0).sum(1).tolist() == [count] * len(after)
    for row, old in zip(after, before, strict=True):
        mask = mask_calculator.topk_mask_calculator(jnp.abs(jnp.asarray(old)), 1 - density)
        np.testing.assert_array_equal(row, np.where(mask, old, 0))


FEW_VALUES = hypothesis_numpy.arrays(
    np.float32,
    st.sampled_from([(3, 8), (2, 3, 4), (4, 1), (2, 7)]),
    elements=st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, np.inf, -np.inf, np.nan]),
)


@hypothesis.settings(max_examples=60)
@hypothesis.given(FEW_VALUES, st.sampled_from(DENSITIES))
def test_ties_and_special_values_as_in_the_core(x, density):
    # The gradient shows the mask, where a zero that is kept does not.
    mask = jax.grad(lambda x: jnp.sum(prune_act_unstruct(x, density)))(jnp.asarray(x))
    for row, example in zip(mask, x, strict=True):
        expected = mask_calculator.topk_mask_calculator(jnp.abs(jnp.asarray(example)), 1 - density)
        np.testing.assert_array_equal(row, expected)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    FEW_VALUES, st.sampled_from([(1, 2), (2, 4), (3, 3), (1, 8), '2:3']), st.integers(-1, 1)
)
@pytest.mark.filterwarnings('ignore:activations of shape:UserWarning')
def test_n_of_each_m(x, pattern, axis):
    mask = jax.grad(lambda x: jnp.sum(prune_act_struct(x, pattern, axis=axis)))(jnp.asarray(x))
    n, m = map(int, pattern.split(':')) if isinstance(pattern, str) else pattern
    mask, scores = np.moveaxis(np.asarray(mask), axis, -1), np.moveaxis(np.abs(x), axis, -1)
    for start in range(0, scores.shape[-1], m):
        group, kept = scores[..., start : start + m], mask[..., start : start + m]
        assert np.all(kept.sum(-1) == min(n, group.shape[-1]))
        # NaN ranks lowest: below any number, so that -1 stands for it.
        group = np.where(np.isnan(group), -1, group)
        least_kept = np.where(kept == 1, group, np.inf).min(-1)
        assert np.all(least_kept >= np.where(kept == 0, group, -np.inf).max(-1))
    np.testing.assert_array_equal(
        np.moveaxis(np.asarray(prune_act_struct(jnp.asarray(x), pattern, axis=axis)), axis, -1),
        np.where(mask == 1, np.moveaxis(x, axis, -1), 0),
    )


def test_a_partial_last_group_warns():
    with pytest.warns(
        UserWarning,
        match=r'shape \(2, 10\) have length 10 along axis -1, which m=4 .* keeps 2 of 2',
    ):
        kept = prune_act_struct(jnp.ones((2, 10)), (2, 4))
    np.testing.assert_array_equal(kept, [[0, 0, 1, 1, 0, 0, 1, 1, 1, 1]] * 2)


FUNCTIONS = {
    'unstructured': lambda x, **options: prune_act_unstruct(x, 0.25, **options),
    'structured': lambda x, **options: prune_act_struct(x, (1, 4), **options),
}
X = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)), jnp.float32)


@pytest.mark.parametrize('prune', FUNCTIONS.values(), ids=FUNCTIONS)
def test_gradients(prune):
    weights = jnp.arange(1.0, 33.0).reshape(4, 8)
    kept = prune(X) != 0
    np.testing.assert_array_equal(
        jax.grad(lambda x: jnp.sum(weights * prune(x)))(X), jnp.where(kept, weights, 0)
    )
    straight = jax.grad(lambda x: jnp.sum(weights * prune(x, straight_through=True)))(X)
    np.testing.assert_array_equal(straight, weights)
    np.testing.assert_array_equal(prune(X, straight_through=True), prune(X))
    tangent = jax.jvp(prune, (X,), (weights,))[1]
    np.testing.assert_array_equal(tangent, jnp.where(kept, weights, 0))
    hessian = jax.hessian(lambda x: jnp.sum(prune(x) ** 3))(X)
    assert int((hessian != 0).sum()) == int(kept.sum())


@pytest.mark.parametrize('prune', FUNCTIONS.values(), ids=FUNCTIONS)
def test_jit_vmap_scan_and_remat(prune):
    expected = prune(X)
    np.testing.assert_array_equal(jax.jit(prune)(X), expected)
    np.testing.assert_array_equal(jax.vmap(prune)(X), expected)
    np.testing.assert_array_equal(jax.lax.map(prune, X), expected)
    np.testing.assert_array_equal(jax.checkpoint(prune)(X), expected)
    stacked = jnp.stack([X, 2 * X])
    np.testing.assert_array_equal(jax.vmap(prune)(stacked), jnp.stack([expected, 2 * expected]))


WRAPPED = {
    'remat': jax.checkpoint,
    'remat of jit': lambda prune: jax.checkpoint(jax.jit(prune)),
    'map': lambda prune: lambda x: jax.lax.map(prune, x),
    'scan': lambda prune: lambda x: jax.lax.scan(lambda carry, row: (carry, prune(row)), 0, x)[1],
    'scan of remat': lambda prune: (
        lambda x: jax.lax.scan(lambda c, row: (c, jax.checkpoint(prune)(row)), 0, x)[1]
    ),
    'vmap': jax.vmap,
}


@pytest.mark.parametrize(
    ('function', 'wrapper', 'straight_through'), rows.crossed(FUNCTIONS, WRAPPED, [False, True])
)
def test_gradients_under_remat_scan_and_vmap(function, wrapper, straight_through):
    prune, wrap = FUNCTIONS[function], WRAPPED[wrapper]
    weights = jnp.arange(1.0, 33.0).reshape(4, 8)

    def gradient(prune):
        return jax.grad(lambda x: jnp.sum(weights * prune(jnp.sin(x)) ** 2))(X)

    plain = functools.partial(prune, straight_through=straight_through)
    np.testing.assert_allclose(gradient(wrap(plain)), gradient(plain), rtol=1e-6)


@pytest.mark.parametrize('axes', [np.int64(-1), [np.int32(1)], (1,)])
def test_ways_to_write_batch_axes(axes):
    np.testing.assert_array_equal(
        prune_act_unstruct(X, 0.5, batch_axes=axes), prune_act_unstruct(X.T, 0.5).T
    )


def test_a_pattern_with_its_own_axis():
    np.testing.assert_array_equal(
        prune_act_struct(X, NByM(1, 2, axis=0)), prune_act_struct(X, (1, 2), axis=0)
    )
    with pytest.warns(UserWarning, match='along axis 0, which m=3'):
        prune_act_struct(X, NByM(1, 3, axis=0))


def test_the_count_at_a_half_is_the_core_s():
    assert int((prune_act_unstruct(jnp.arange(1.0, 11.0), 0.15) != 0).sum()) == 1


def test_a_density_may_be_traced():
    sweep = jax.vmap(lambda density: prune_act_unstruct(X, density))(jnp.array([0.25, 0.5, 1.0]))
    assert [(one != 0).sum(-1).tolist() for one in sweep] == [[2] * 4, [4] * 4, [8] * 4]


@pytest.mark.parametrize('shape', [(0, 4), (4, 0), (0,)])
def test_nothing_to_prune(shape):
    assert prune_act_unstruct(jnp.ones(shape), 0.5).shape == shape
    assert prune_act_struct(jnp.ones(shape), '2:4').shape == shape


def test_the_spellings_of_the_document():
    assert activations.pruning_act_struct is prune_act_struct
    assert activations.puning_act_unstruct is prune_act_unstruct


REFUSED = [
    (lambda: prune_act_unstruct(X, 0.0), ValueError, r'density must lie in \(0, 1\].* got 0.0'),
    (lambda: prune_act_unstruct(X, 50), ValueError, r'50.0 per cent is 0.5'),
    (
        lambda: prune_act_unstruct(X, '0.5'),
        TypeError,
        r"density must be a number above 0 and at most 1, got '0.5'",
    ),
    (
        lambda: prune_act_unstruct(jnp.arange(8), 0.5),
        TypeError,
        r'activations must be floats, got int32\[8\]',
    ),
    (
        lambda: prune_act_unstruct(X, 0.5, batch_axes=2),
        ValueError,
        r'batch_axes: axis 2 does not exist .* \(4, 8\)',
    ),
    (
        lambda: prune_act_unstruct(X, 0.5, batch_axes=(0, 1)),
        ValueError,
        r'batch_axes=\(0, 1\) leave nothing',
    ),
    (
        lambda: prune_act_unstruct(X[0], 0.5, batch_axes=7),
        ValueError,
        r'axis 7 does not exist .* \(8,\)',
    ),
    (
        lambda: prune_act_unstruct(X, 0.5, batch_axes=True),
        TypeError,
        r'batch_axes must be a whole number.* got True',
    ),
    (
        lambda: prune_act_unstruct(X, 0.5, batch_axes='01'),
        TypeError,
        r"batch_axes must be a whole number.* got '01'",
    ),
    (
        lambda: prune_act_unstruct(X, 0.5, batch_axes=[0.5]),
        TypeError,
        r'batch_axes must be a whole .* got \[0.5\]',
    ),
    (
        lambda: prune_act_unstruct(X, 0.5, straight_through=1),
        TypeError,
        'straight_through must be True or .* got 1',
    ),
    (
        lambda: prune_act_struct(X, '1:4', straight_through='no'),
        TypeError,
        "straight_through must be .* got 'no'",
    ),
    (
        lambda: prune_act_struct(X, NByM(1, 4), axis=0),
        ValueError,
        'lies along axis -1, but axis 0 is asked for',
    ),
    (lambda: prune_act_struct(X, (5, 4)), ValueError, r'n must not exceed m, got n=5, m=4'),
    (lambda: prune_act_struct(X, 0.5), TypeError, r'an N:M pattern is written \(n, m\).* got 0.5'),
    (
        lambda: prune_act_struct(X, (1, 4), axis=2),
        ValueError,
        r'x: axis 2 does not exist in shape \(4, 8\)',
    ),
    (
        lambda: prune_act_struct(jnp.arange(8), (1, 4)),
        TypeError,
        r'activations must be floats, got int32\[8\]',
    ),
]


@pytest.mark.parametrize(('call', 'error', 'message'), REFUSED)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Inside the modules of four libraries.


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return prune_act_struct(prune_act_unstruct(nn.Dense(16)(x), 0.5), (1, 4))


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, x):
        return prune_act_struct(prune_act_unstruct(self.linear(x), 0.5), (1, 4))


class EquinoxLayer(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return prune_act_struct(prune_act_unstruct(self.linear(x), 0.5, batch_axes=None), (1, 4))


def run_linen():
    layer = LinenLayer()
    variables = layer.init(jax.random.key(0), X)
    return variables['params']['Dense_0']['kernel'], lambda kernel, x: layer.apply(
        {'params': {'Dense_0': {'kernel': kernel, 'bias': jnp.zeros(16)}}}, x
    )


def run_nnx():
    graph, state = nnx.split(NnxLayer(nnx.Rngs(0)))
    kernel = jax.tree.leaves(state['linear']['kernel'])[0]

    def apply(kernel, x):
        layer = nnx.merge(graph, state)
        layer.linear.kernel = nnx.Param(kernel)
        return layer(x)

    return kernel, apply


def run_equinox():
    layer = EquinoxLayer(eqx.nn.Linear(8, 16, use_bias=False, key=jax.random.key(0)))
    return layer.linear.weight, lambda weight, x: jax.vmap(
        eqx.tree_at(lambda it: it.linear.weight, layer, weight)
    )(x)


def run_haiku():
    def forward(x):
        return prune_act_struct(prune_act_unstruct(hk.Linear(16, with_bias=False)(x), 0.5), (1, 4))

    model = hk.without_apply_rng(hk.transform(forward))
    return model.init(jax.random.key(0), X)['linear']['w'], lambda w, x: model.apply(
        {'linear': {'w': w}}, x
    )


@pytest.mark.parametrize('make', [run_linen, run_nnx, run_equinox, run_haiku])
def test_inside_modules(make):
    weights, apply = make()
    out = jax.jit(apply)(weights, X)
    kernel = weights if weights.shape == (8, 16) else weights.T
    expected = prune_act_struct(prune_act_unstruct(X @ kernel, 0.5), (1, 4))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    grads = jax.grad(lambda w: jnp.sum(apply(w, X)))(weights)
    reference = jax.grad(
        lambda w: jnp.sum(prune_act_struct(prune_act_unstruct(X @ w, 0.5), (1, 4)))
    )(kernel)
    np.testing.assert_allclose(
        grads if weights.shape == (8, 16) else grads.T, reference, rtol=1e-4, atol=1e-5
    )


# Batches that are sharded.


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
    collectives = [
        max(math.prod(shape) for shape in instruction.shapes)
        for instruction in hlo.reached(program.as_text())
        if instruction.opcode.startswith(('all-', 'collective-', 'reduce-scatter'))
    ]
    # Devices agree on whether another pass is needed, and on nothing else.
    assert max(collectives, default=0) <= 1
