"""Counts of scores that several devices hold: each counts its own shard, and one sum is made of the counts."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpruner
from helpers import eight_devices, hlo
from jaxpruner import mask_calculator, sparsity_types
from jaxpruner.mask_calculator import selection
from jaxpruner.mask_calculator.selection import passes
from jaxpruner.mask_calculator.selection.passes import LeafByLeaf

COLLECTIVES = ('all-gather', 'all-to-all', 'all-reduce', 'collective-permute', 'reduce-scatter')
SHAPE = (4, 16, 8)
# Of the axis of rows (layers, say) and of the others.
SPECS = [
    (),
    ('x',),
    (None, 'x'),
    (None, 'x', 'y'),
    (None, ('x', 'y')),
    ('y', None, 'x'),
    (None, None, ('y', 'x')),
]


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)


@pytest.mark.parametrize('axes', [(), (0,), (1, 2), (0, 1, 2)])
def test_flags(axes):
    flags = jax.random.bernoulli(jax.random.key(0), 0.3, SHAPE)
    counts = selection.count_true(flags, axes, jnp.dtype('uint32'))
    assert counts.dtype == jnp.uint32
    np.testing.assert_array_equal(counts, np.asarray(flags).sum(axes))


def test_on_one_device():
    scores, thresholds = (
        jax.random.normal(jax.random.key(0), SHAPE),
        jnp.array([[-1.0, 0.5]] * SHAPE[0]),
    )
    counts = LeafByLeaf([scores], [False]).count_reaching(thresholds)
    np.testing.assert_array_equal(counts, (scores[..., None] >= thresholds[0]).sum((1, 2)))


def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y'))


def collectives(compiled):
    return [
        math.prod(shape)
        for instruction in hlo.reached(compiled.as_text())
        if instruction.opcode.removesuffix('-start') in COLLECTIVES
        for shape in instruction.shapes
    ]


@pytest.mark.parametrize('spec', SPECS, ids=str)
def check_counts_are_those_of_one_device(spec):
    scores = jnp.round(jax.random.normal(jax.random.key(0), SHAPE) * 4)
    thresholds = jnp.arange(-4.0, 8.0).reshape(4, 3)
    sharded = jax.device_put(scores, NamedSharding(mesh(), PartitionSpec(*spec)))

    @jax.jit
    def both(scores, thresholds):
        ranking = LeafByLeaf([scores], [True])
        ends = jnp.array([[1, 50, 128]] * 4, jnp.uint32)
        between = passes.count_between_before(ranking.arrays, thresholds, ends, ranking.counter)
        return ranking.count_reaching(thresholds), between

    compiled = both.lower(sharded, thresholds).compile()
    reaching, between = compiled(sharded, thresholds)
    np.testing.assert_array_equal(
        reaching, (np.asarray(scores)[..., None] >= thresholds[:, None, None]).sum((1, 2))
    )
    flat = np.asarray(scores).reshape(4, -1)
    inside = (flat >= thresholds[:, :1]) & (flat < thresholds[:, 1:2])
    np.testing.assert_array_equal(
        between, np.stack([inside[:, :end].sum(1) for end in (1, 50, 128)], 1)
    )
    assert (
        max(collectives(compiled), default=0) <= 2 * 4 * 3
    )  # the counts of both, which XLA may send as one
    assert bool(collectives(compiled)) is (spec != ())


def check_one_sum_for_many_arrays():
    shardings = [
        PartitionSpec('x'),
        PartitionSpec(None, 'y'),
        PartitionSpec(),
        PartitionSpec(('x', 'y')),
    ]
    arrays = [jax.random.normal(jax.random.key(i), (16, 32)) for i in range(len(shardings))]
    sharded = [
        jax.device_put(a, NamedSharding(mesh(), s)) for a, s in zip(arrays, shardings, strict=True)
    ]

    def masks(arrays):
        counts = (10, 20, 30, 40)
        requests = [
            selection.Request(array, count, count_per_device=True)
            for array, count in zip(arrays, counts, strict=True)
        ]
        return [kept.mask for kept in selection.keep_largest_each(requests)]

    compiled = jax.jit(masks).lower(sharded).compile()
    for mask, array, count in zip(compiled(sharded), arrays, (10, 20, 30, 40), strict=True):
        assert int(mask.sum()) == count
        assert float(array[mask == 1].min()) > float(array[mask == 0].max())
    assert max(collectives(compiled)) <= 32
    sums = [size for size in collectives(compiled) if size == 4 * 3]
    assert len(sums) == 2, 'one for thresholds, one for ties'


@pytest.mark.parametrize('kind', [sparsity_types.Block((4, 4)), sparsity_types.Channel(0)], ids=str)
def check_pooled_scores_that_no_mesh_axis_divides(kind):
    """6 rows of blocks on 4 devices."""
    scores = jax.random.normal(jax.random.key(0), (24, 16))
    sharded = jax.device_put(scores, NamedSharding(mesh(), PartitionSpec('x')))
    mask = jax.jit(lambda scores: mask_calculator.topk_group_mask_calculator(scores, 0.7, kind))
    np.testing.assert_array_equal(mask(sharded), mask(scores))


def check_scores_that_were_reshaped():
    scores = jax.random.normal(jax.random.key(0), (24, 16))
    sharded = jax.device_put(scores, NamedSharding(mesh(), PartitionSpec('x', 'y')))
    for keep in (
        selection.keep_largest,
        lambda scores, count: selection.keep_largest_jointly([scores], count)[0],
    ):
        mask = jax.jit(lambda scores, keep=keep: keep(scores.reshape(6, 4, 16).sum(1), 20))
        np.testing.assert_array_equal(mask(sharded), mask(scores))


def check_masks_have_no_derivative():
    def kept(params):
        pruned, _ = jaxpruner.MagnitudePruning(
            sparsity_distribution_fn=lambda _: {'w': 0.5}
        ).instant_sparsify(params)
        return jnp.sum(pruned['w'] ** 2)

    params = {'w': jnp.arange(1.0, 17.0).reshape(4, 4)}
    sharded = jax.device_put(params, NamedSharding(mesh(), PartitionSpec('x', 'y')))
    gradient = jax.jit(jax.grad(kept))(sharded)['w']
    np.testing.assert_array_equal(gradient, jnp.where(params['w'] > 8, 2 * params['w'], 0))


def check_batches_are_counted_as_xla_likes():
    scores = jax.random.normal(jax.random.key(0), (3, 16, 8))
    sharded = jax.device_put(scores, NamedSharding(mesh(), PartitionSpec(None, 'x', 'y')))

    def mask_of(layer):
        request = selection.Request(layer, 17, count_per_device=True)
        return selection.keep_largest_each([request])[0].mask

    masks = jax.jit(jax.vmap(mask_of))(sharded)
    assert masks.sum((1, 2)).tolist() == [17, 17, 17]
    np.testing.assert_array_equal(
        masks, jnp.stack([selection.keep_largest(one, 17) for one in scores])
    )
