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


def at(sparsity, **settings):
    return functools.partial(sparsity_distributions.uniform, sparsity=sparsity, **settings)


def magnitude(sparsity=0.75, sparsity_type='unstructured', **settings):
    return jaxpruner.MagnitudePruning(
        sparsity_distribution_fn=at(sparsity), sparsity_type=sparsity_type, **settings
    )


def kept_by_masks(updater, params):
    """How many weights of each leaf have a mask of 1, a leaf without a mask all of them."""
    masks = updater.create_masks(
        updater.calculate_scores(params), updater.get_target_sparsities(params)
    )
    leaves, treedef = jax.tree.flatten(params)
    rows = zip(leaves, treedef.flatten_up_to(masks), strict=True)
    return [int(np.sum(leaf.size if mask is None else mask)) for leaf, mask in rows]


# Programs are compiled for each shape and type: none, one, a part of a group, whole groups, and a part beside them.
SIZES = st.sampled_from([0, 1, 3, 8])
TYPES = st.sampled_from(
    [
        sparsity_types.Unstructured(),
        sparsity_types.NByM(2, 4, -1, allow_partial=True),
        sparsity_types.NByM(1, 3, 0, allow_partial=True),
        sparsity_types.NByM(3, 3, 0, allow_partial=True),
        sparsity_types.Block((2, 3)),
        sparsity_types.Block((4, 1)),
        sparsity_types.Channel(0),
        sparsity_types.Channel(-1),
    ]
)


@hypothesis.given(SIZES, SIZES, TYPES, st.floats(0, 1, width=32), st.sampled_from([(), 'w']))
@hypothesis.settings(deadline=None, max_examples=60)
@pytest.mark.filterwarnings('ignore:.*contradicts the sparsity type')
def test_as_many_weights_are_kept_as_the_plan_says(height, width, sparsity_type, sparsity, stacked):
    shape = (2, height, width) if stacked else (height, width)
    params = {'w': jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)}
    updater = magnitude(sparsity, sparsity_type, stacked=stacked)
    plan = updater.plan(params)
    leaf = plan['w']
    assert leaf.is_stacked == bool(stacked)
    assert leaf.size == params['w'].size
    kept = kept_by_masks(updater, params)[0]
    if leaf.kept is None:
        # Blocks at the edges have fewer weights: which blocks are kept depends on the scores.
        assert height % sparsity_type.block_shape[0] or width % sparsity_type.block_shape[1]
        assert plan.kept is None
    else:
        assert leaf.kept == plan.kept == kept
    assert leaf.is_pruned or kept == leaf.size


@hypothesis.given(
    st.sampled_from([(1,), (40, 1), (7, 7, 30), (3, 20, 1, 33)]), st.floats(0, 1, width=32)
)
@hypothesis.settings(deadline=None, max_examples=20)
def test_of_leaves_that_are_ranked_together_the_total_is_told(sizes, sparsity):
    params = {
        f'w{i}': jnp.arange(1.0, 2 * size + 1).reshape(2, size) for i, size in enumerate(sizes)
    }
    updater = jaxpruner.GlobalMagnitudePruning(sparsity_distribution_fn=at(sparsity))
    plan = updater.plan(params)
    assert plan.kept == sum(kept_by_masks(updater, params))
    assert all(leaf.kept is None for leaf in plan.pruned)


def test_a_plan_shows_what_is_ranked_together():
    updater = jaxpruner.GlobalMagnitudePruning(sparsity=0.75, custom_sparsity_map={'head/*': 0.5})
    plan = updater.plan(PARAMS)
    assert [leaf.name for leaf in plan if leaf.is_ranked_with_others] == ['encoder/kernel']
    lines = {line.split()[0]: line for line in str(plan).splitlines()}
    assert 'unstructured, ranked together' in lines['encoder/kernel']
    assert 'together' not in lines['head/kernel'] + lines['encoder/bias']
    assert not any(leaf.is_ranked_with_others for leaf in magnitude().plan(PARAMS))


def test_a_target_of_0_in_a_joint_ranking_keeps_no_leaf_dense():
    params = {'a': jnp.full((4, 4), 0.01), 'b': jnp.ones((4, 4))}

    def planned(targets):
        updater = jaxpruner.GlobalMagnitudePruning(
            use_normalization=False, sparsity_distribution_fn=lambda params: targets
        )
        return updater.plan(params), kept_by_masks(updater, params)

    plan, kept = planned({'a': 0.0, 'b': 0.8})
    assert kept == [3, 16]
    assert (plan['a'].is_pruned, plan['a'].kept, plan.kept) == (True, None, 19)
    plan, kept = planned({'a': 0.0, 'b': None})
    assert (plan['a'].why_dense, plan['a'].kept, kept) == ('its target is 0', 16, [16, 16])


def test_shapes_are_enough_and_nothing_is_computed_on_a_device():
    shapes = jax.eval_shape(lambda: PARAMS)
    updater = magnitude()
    with jax.transfer_guard('disallow'):
        plan = updater.plan(shapes)
    assert (
        [leaf.kept for leaf in plan]
        == [leaf.kept for leaf in updater.plan(PARAMS)]
        == [16, 128, 10, 40]
    )
    huge = updater.plan({'w': jax.ShapeDtypeStruct((2**20, 2**12), jnp.bfloat16)})
    assert huge['w'].kept == 2**30


def test_leaves_are_found_by_path_and_by_name():
    plan = magnitude().plan(PARAMS)
    assert plan['encoder', 'kernel'] is plan['encoder/kernel']
    assert [leaf.path for leaf in plan.pruned] == [('encoder', 'kernel'), ('head', 'kernel')]
    assert len(plan) == 4
    with pytest.raises(KeyError, match=r"'encoder/kernle'; .*encoder/kernel"):
        plan['encoder/kernle']


def test_of_two_leaves_with_one_name_the_first_is_found():
    plan = magnitude().plan({'a': {'b': jnp.ones((2, 2))}, 'a/b': jnp.ones((3, 3))})
    assert [leaf.shape for leaf in plan] == [(2, 2), (3, 3)]
    assert plan['a/b'].shape == (2, 2)


@pytest.mark.parametrize('leaf', [jax.nn.relu, 'relu'])
def test_a_leaf_that_is_no_array_is_refused_by_name(leaf):
    updater = jaxpruner.MagnitudePruning(
        sparsity_distribution_fn=lambda params: {'w': 0.5, 'f': None}
    )
    for function in (updater.get_target_sparsities, updater.instant_sparsify):
        with pytest.raises(TypeError, match=r'^f: .*no array.*is_array'):
            function({'w': jnp.ones((2, 2)), 'f': leaf})


def test_each_line_of_the_table_fits_80_columns():
    deep = {
        f'transformer_block_{i}': {'self_attention': {'query_projection': PARAMS}} for i in range(3)
    }
    lines = str(magnitude().plan(deep)).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == 'MagnitudePruning prunes 6 of 12 leaves'
    assert lines[-1].split() == ['total', '0.7221', '582', '2,094']


def own_distribution(params):
    return jax.tree.map(lambda leaf: None, params)


# A pruner, a leaf's name, and words of the reason.
REASONS = [
    (magnitude(), 'head/bias', 'default filter leaves out 1-D leaves'),
    (magnitude(0.0), 'head/kernel', 'target is 0'),
    (magnitude(0.001), 'head/kernel', 'less than one weight'),
    (
        magnitude(sparsity_type={'head/*': None, '*': 'unstructured'}),
        'head/kernel',
        'sparsity type is None',
    ),
    (
        jaxpruner.MagnitudePruning(sparsity_distribution_fn=own_distribution),
        'head/kernel',
        'own_distribution',
    ),
    (
        jaxpruner.MagnitudePruning(sparsity_distribution_fn=None),
        'head/kernel',
        'sparsity_distribution_fn is None',
    ),
    (
        jaxpruner.MagnitudePruning(
            sparsity_distribution_fn=at(0.5, custom_sparsity_map={'head/*': None})
        ),
        'head/kernel',
        'custom_sparsity_map says None',
    ),
    (
        jaxpruner.MagnitudePruning(
            sparsity_distribution_fn=at(0.5, filter_fn=lambda path, leaf: False)
        ),
        'head/kernel',
        'filter_fn leaves it out',
    ),
    (jaxpruner.NoPruning(), 'head/kernel', 'NoPruning gives it no target'),
]


@pytest.mark.parametrize(
    ('updater', 'name', 'words'), REASONS, ids=[words for _, _, words in REASONS]
)
def test_the_reason_is_given_why_a_leaf_stays_dense(updater, name, words):
    leaf = updater.plan(PARAMS)[name]
    assert words in leaf.why_dense
    assert not leaf.is_pruned
    assert leaf.kept == leaf.size


def test_what_a_plan_cannot_count_it_does_not_count():
    own_ranking = magnitude(topk_fn=lambda scores, sparsity: jnp.ones_like(scores, jnp.uint8))
    plan = own_ranking.plan(PARAMS)
    assert plan['head/kernel'].is_pruned
    assert plan['head/kernel'].kept is None
    assert plan.kept is None
    assert '?' in str(plan)


def test_targets_that_are_traced_are_not_read():
    def kept(sparsity):
        return magnitude(sparsity).plan(PARAMS)['head/kernel']

    leaves = []
    jax.jit(lambda sparsity: leaves.append(kept(sparsity)))(0.5)
    assert leaves[0].is_pruned
    assert leaves[0].target is None


def test_leaves_that_are_numbers_of_python_have_a_place():
    plan = magnitude().plan({'scale': 1.0, 'w': jnp.ones((4, 4))})
    assert (plan['scale'].size, plan['scale'].is_pruned) == (1, False)


# N:M prunes to its own share: a pruner, what it says of 'w', and what it warns of.
HALF_OF_FOUR = {'w': jnp.arange(1.0, 33).reshape(4, 8)}


def test_n_by_m_without_a_sparsity_prunes_to_n_by_m():
    updater = jaxpruner.MagnitudePruning(sparsity_type='1:4')
    assert updater.plan(HALF_OF_FOUR)['w'].target == 0.75
    pruned, _ = updater.instant_sparsify(HALF_OF_FOUR)
    assert jaxpruner.summarize_sparsity(pruned)['w'] == 0.75


def test_n_by_m_of_a_configuration_without_a_sparsity_prunes_to_n_by_m():
    updater = jaxpruner.create_updater_from_config(
        {'algorithm': 'magnitude', 'sparsity_type': '2:4'}
    )
    assert updater.get_target_sparsities(HALF_OF_FOUR) == {'w': 0.5}


def test_sparsity_0_keeps_everything():
    updater = magnitude(0.0, '2:4')
    assert updater.plan(HALF_OF_FOUR)['w'].why_dense == 'its target is 0'
    with pytest.warns(UserWarning, match='w: its target is 0'):
        masks = updater.instant_sparsify(HALF_OF_FOUR)[1]
    assert int(masks['w'].sum()) == 32


def test_a_sparsity_that_contradicts_n_by_m_is_said_and_n_by_m_holds():
    params = {'a': HALF_OF_FOUR, 'b': HALF_OF_FOUR}
    with pytest.warns(
        UserWarning, match=r'a/w \(and 1 more leaves\): sparsity 0.9 .*2:4.*0.5'
    ) as caught:
        targets = magnitude(0.9, '2:4').get_target_sparsities(params)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert targets == {'a': {'w': 0.5}, 'b': {'w': 0.5}}


@pytest.mark.parametrize(
    ('sparsity', 'sparsity_type'), [(0.5, '2:4'), (0.67, '1:3'), (0.333, '2:3')]
)
def test_a_rounded_share_contradicts_nothing(sparsity, sparsity_type):
    params = {'w': jnp.ones((2, 12))}
    n, m = map(int, sparsity_type.split(':'))
    assert magnitude(sparsity, sparsity_type).get_target_sparsities(params) == {'w': (m - n) / m}


def test_a_traced_sparsity_of_n_by_m_becomes_its_share():
    masks = jax.vmap(
        lambda sparsity: magnitude(sparsity, '2:4').get_target_sparsities(HALF_OF_FOUR)['w']
    )
    assert masks(jnp.array([0.0, 0.9])).tolist() == [0.0, 0.5]


def test_a_ranking_of_ones_own_decides_instead_of_the_type():
    updater = magnitude(
        0.9, '2:4', topk_fn=lambda scores, sparsity: jnp.ones_like(scores, jnp.uint8)
    )
    assert updater.get_target_sparsities(HALF_OF_FOUR) == {'w': 0.9}


# What a plan says of the share that is replaced, in a class and in a configuration.
WINDOW = {'update_freq': 4, 'update_start_step': 0, 'update_end_step': 8}
DROPS = {
    'a class': (
        lambda: jaxpruner.RigL(jaxpruner.PeriodicSchedule(4), sparsity=0.5),
        'replaces 0.3 of the kept weights\n',
    ),
    'a configuration': (
        lambda: jaxpruner.create_updater_from_config(
            {'algorithm': 'rigl', 'sparsity': 0.5} | WINDOW
        ),
        'replaces 0.1 of the kept weights at step 0, 0 at\nstep 8\n',
    ),
    'one that prunes nothing': (lambda: jaxpruner.RigL(sparsity=0.0), ''),
    'another algorithm': (lambda: jaxpruner.MagnitudePruning(sparsity=0.5), ''),
}


@pytest.mark.parametrize(('make', 'words'), DROPS.values(), ids=list(DROPS))
def test_a_plan_tells_the_drop_fraction(make, words):
    text = str(make().plan(HALF_OF_FOUR))
    assert words in text
    assert ('drop_fraction_fn' in text) == bool(words)


def test_equal_layers_are_one_row_of_the_printed_plan():
    shapes = {f'h.{i}.up': jax.ShapeDtypeStruct((8, 4), 'float32') for i in range(12)}
    shapes['h.3.up'] = jax.ShapeDtypeStruct((8, 2), 'float32')
    plan = jaxpruner.MagnitudePruning(sparsity=0.5).plan(shapes)
    rows = [line.split() for line in str(plan).splitlines()[3:-2]]
    assert rows == [
        'h.{0-2,4-11}.up 8×4 float32 unstructured 0.5 176 352'.split(),
        'h.3.up 8×2 float32 unstructured 0.5 8 16'.split(),
    ]
    assert len(plan) == 12
