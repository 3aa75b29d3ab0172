"""What a plan says of each leaf is what happens to it."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import sparsity_distributions, sparsity_types

PARAMS = {
    'encoder': {'kernel': jnp.ones((32, 16)), 'bias': jnp.zeros(16)},
    'head': {'kernel': jnp.ones((16, 10)), 'bias': jnp.zeros(10)},
}


def magnitude(sparsity=0.75, sparsity_type='unstructured', **settings):
    return jaxpruner.MagnitudePruning(sparsity=sparsity, sparsity_type=sparsity_type, **settings)


def uniform(**settings):
    distribution = functools.partial(sparsity_distributions.uniform, sparsity=0.75, **settings)
    return magnitude(None, sparsity_distribution_fn=distribution)


def kept_by_masks(pruner, params):
    """How many weights of each leaf have a mask of 1, a leaf without a mask all of them."""
    targets = pruner.get_target_sparsities(params)
    masks = pruner.create_masks(pruner.calculate_scores(params), targets)
    leaves, treedef = jax.tree.flatten(params)
    rows = zip(leaves, treedef.flatten_up_to(masks), strict=True)
    return [int(np.sum(leaf.size if mask is None else mask)) for leaf, mask in rows]


# Programs are compiled for each shape and type: none, one, whole groups, and a part beside them.
SIZES = st.sampled_from([0, 1, 3, 8])
TYPES = st.sampled_from(
    [
        sparsity_types.Unstructured(),
        sparsity_types.NByM(2, 4, -1, allow_partial=True),
        sparsity_types.NByM(1, 3, 0, allow_partial=True),
        sparsity_types.Block((2, 3)),
        sparsity_types.Channel(0),
        sparsity_types.Channel(-1),
    ]
)


@hypothesis.given(SIZES, SIZES, TYPES, st.floats(0, 1, width=32), st.sampled_from([(), 'w']))
@hypothesis.settings(max_examples=25)
@pytest.mark.filterwarnings('ignore:.*contradicts the sparsity type')
def test_as_many_weights_are_kept_as_the_plan_says(height, width, sparsity_type, sparsity, stacked):
    shape = (2, height, width) if stacked else (height, width)
    params = {'w': jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)}
    pruner = magnitude(sparsity, sparsity_type, stacked=stacked)
    plan = pruner.plan(params)
    leaf, kept = plan['w'], kept_by_masks(pruner, params)[0]
    if leaf.kept is None:
        # Blocks at the edges have fewer weights: which blocks are kept depends on the scores.
        assert height % sparsity_type.block_shape[0] or width % sparsity_type.block_shape[1]
        assert plan.kept is None
    else:
        assert leaf.kept == plan.kept == kept
    assert leaf.is_pruned or kept == leaf.size


@pytest.mark.parametrize('sparsity', [0.3, 0.999])
def test_of_leaves_that_are_ranked_together_the_total_is_told(sparsity):
    pruner = jaxpruner.GlobalMagnitudePruning(sparsity=sparsity)
    plan = pruner.plan(PARAMS)
    assert plan.kept == sum(kept_by_masks(pruner, PARAMS))
    assert all(leaf.kept is None for leaf in plan.pruned)


def test_shapes_are_enough_and_nothing_is_computed_on_a_device():
    pruner = magnitude()
    with jax.transfer_guard('disallow'):
        plan = pruner.plan(jax.eval_shape(lambda: PARAMS))
    assert [leaf.kept for leaf in plan] == [leaf.kept for leaf in pruner.plan(PARAMS)]
    huge = pruner.plan({'w': jax.ShapeDtypeStruct((2**20, 2**12), jnp.bfloat16)})
    assert huge['w'].kept == 2**30


def test_leaves_are_found_by_path_and_by_name():
    plan = magnitude().plan(PARAMS)
    assert plan['encoder', 'kernel'] is plan['encoder/kernel']
    assert [leaf.path for leaf in plan.pruned] == [('encoder', 'kernel'), ('head', 'kernel')]
    assert len(plan) == 4
    with pytest.raises(KeyError, match=r"'encoder/kernle'; .*encoder/kernel"):
        plan['encoder/kernle']
    scale = magnitude().plan({'scale': 1.0, 'w': jnp.ones((4, 4))})['scale']
    assert (scale.size, scale.is_pruned) == (1, False)


def test_the_table_fits_80_columns_and_has_a_row_for_equal_layers():
    deep = {f'block_{i}': {'self_attention': {'query_projection': PARAMS}} for i in range(3)}
    lines = str(magnitude().plan(deep)).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == 'MagnitudePruning prunes 6 of 12 leaves'
    assert lines[-1].split() == ['total', '0.7221', '582', '2,094']
    shapes = {f'h.{i}.up': jax.ShapeDtypeStruct((8, 4), 'float32') for i in range(12)}
    shapes['h.3.up'] = jax.ShapeDtypeStruct((8, 2), 'float32')
    plan = magnitude(0.5).plan(shapes)
    assert len(plan) == 12
    rows = [line.split() for line in str(plan).splitlines()[3:-2]]
    assert rows == [
        'h.{0-2,4-11}.up 8×4 float32 unstructured 0.5 176 352'.split(),
        'h.3.up 8×2 float32 unstructured 0.5 8 16'.split(),
    ]


def own_distribution(params):
    return jax.tree.map(lambda leaf: None, params)


OWN = magnitude(None, sparsity_distribution_fn=own_distribution)
UNSET = magnitude(None, sparsity_distribution_fn=None)
DENSE_HEAD = {'head/*': None, '*': 'unstructured'}
# A pruner, a leaf's name, and words of the reason.
REASONS = [
    (magnitude(), 'head/bias', '1-D'),
    (magnitude(0.0), 'head/kernel', 'target is 0'),
    (magnitude(0.001), 'head/kernel', 'less than one weight'),
    (magnitude(sparsity_type=DENSE_HEAD), 'head/kernel', 'sparsity type'),
    (OWN, 'head/kernel', 'own_distribution'),
    (UNSET, 'head/kernel', 'MagnitudePruning'),
    (uniform(custom_sparsity_map={'head/*': None}), 'head/kernel', 'custom_sparsity_map'),
    (uniform(filter_fn=lambda path, leaf: False), 'head/kernel', 'filter_fn'),
    (jaxpruner.NoPruning(), 'head/kernel', 'NoPruning'),
]


@pytest.mark.parametrize(('pruner', 'name', 'words'), REASONS, ids=[row[2] for row in REASONS])
def test_the_reason_is_given_why_a_leaf_stays_dense(pruner, name, words):
    leaf = pruner.plan(PARAMS)[name]
    assert words in leaf.why_dense
    assert not leaf.is_pruned
    assert leaf.kept == leaf.size


def test_what_a_plan_cannot_count_it_does_not_count():
    plan = magnitude(topk_fn=lambda scores, sparsity: jnp.ones_like(scores, jnp.uint8)).plan(PARAMS)
    assert plan['head/kernel'].is_pruned
    assert plan['head/kernel'].kept is plan.kept is None
    traced = []
    jax.jit(lambda sparsity: traced.append(magnitude(sparsity).plan(PARAMS)['head/kernel']))(0.5)
    assert traced[0].is_pruned
    assert traced[0].target is None


# N:M prunes to its own share.
ONE = {'w': jnp.arange(1.0, 33).reshape(4, 8)}
SHARES = [(None, '1:4', 0.75), (0.0, '2:4', 0.0), (0.67, 'nm_1,4,0', 0.75), (0.376, '5:8', 0.375)]


@pytest.mark.parametrize(('sparsity', 'sparsity_type', 'target'), SHARES)
@pytest.mark.filterwarnings('ignore:.*contradicts', 'ignore:.*target is 0')
def test_n_by_m_prunes_to_its_own_share(sparsity, sparsity_type, target):
    pruner = jaxpruner.MagnitudePruning(sparsity_type=sparsity_type, sparsity=sparsity)
    assert pruner.plan(ONE)['w'].target == target
    assert pruner.get_target_sparsities(ONE) == {'w': target}
    assert int((pruner.instant_sparsify(ONE)[0]['w'] == 0).sum()) == 32 * target


def test_a_sparsity_that_contradicts_n_by_m_is_said_and_a_traced_one_becomes_its_share():
    with pytest.warns(UserWarning, match=r'a/w .*0\.9.*2:4') as caught:
        targets = magnitude(0.9, '2:4').get_target_sparsities({'a': ONE, 'b': ONE})
    assert len(caught) == 1
    assert targets == {'a': {'w': 0.5}, 'b': {'w': 0.5}}
    mapped = jax.vmap(lambda sparsity: magnitude(sparsity, '2:4').get_target_sparsities(ONE)['w'])
    assert mapped(jnp.array([0.0, 0.9])).tolist() == [0.0, 0.5]
