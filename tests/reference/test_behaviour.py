"""What the signatures of the original do not say: the behaviour that client code relies on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import (
    base_updater,
    mask_calculator,
    sparsity_distributions,
    sparsity_schedules,
    sparsity_types,
    utils,
)
from jaxpruner.algorithms import global_pruners, pruners, sparse_trainers, ste

PARAMS = {
    'first': {'kernel': jax.random.normal(jax.random.key(0), (16, 8)), 'bias': jnp.ones(8)},
    'second': {'kernel': jax.random.normal(jax.random.key(1), (8, 8)) * 0.01, 'bias': jnp.ones(8)},
}
GRADS = jax.tree.map(lambda leaf: leaf[::-1], PARAMS)
NESTED = [[4.0, 1.0, 3.0, 2.0], [8.0, 5.0, 7.0, 6.0]]
STRAIGHT_THROUGH = ('magnitude_ste', 'random_ste')


def kept(masks):
    return sum(int(mask.sum()) for mask in jax.tree.leaves(masks))


CALCULATORS = {
    'topk': (mask_calculator.topk_mask_calculator, (0.5,)),
    'internal': (mask_calculator._topk_mask_calculator_internal, (0.5,)),
    'n_by_m': (mask_calculator.topk_n_by_m_mask_calculator, (0.5, sparsity_types.NByM(1, 2))),
    'block': (mask_calculator.topk_block_mask_calculator, (0.5, 1, 2, True)),
    'channel': (mask_calculator.topk_channel_mask_calculator, (0.5, sparsity_types.Channel(-1))),
    'get_topk_fn': (mask_calculator.get_topk_fn(sparsity_types.Unstructured), (0.5,)),
}


@pytest.mark.parametrize('name', CALCULATORS)
def test_calculators_take_what_asarray_takes(name):
    calculate, arguments = CALCULATORS[name]
    expected = calculate(jnp.asarray(NESTED), *arguments)
    assert expected.dtype == mask_calculator.MASK_DTYPE
    assert int(expected.sum()) == 4
    for scores in (NESTED, tuple(map(tuple, NESTED)), np.asarray(NESTED), np.asarray(NESTED, int)):
        np.testing.assert_array_equal(calculate(scores, *arguments), expected)


def test_blocks_of_a_vector_are_those_of_a_row():
    mask = mask_calculator.topk_block_mask_calculator(
        [1.0, 1.0, 2.0, 2.0], 0.5, 1, 2, use_avg_pooling=True
    )
    assert mask.tolist() == [0, 0, 1, 1]


def test_sparsity_types_are_named_tuples():
    n, m, axis = sparsity_types.NByM(2, 4)
    assert (n, m, axis) == (2, 4, -1)
    assert sparsity_types.NByM(2, 4)._replace(axis=0) == sparsity_types.NByM(2, 4, 0)
    assert sparsity_types.NByM(2, 4, allow_partial=True)._replace(axis=0).allow_partial
    (shape, pools), (channel,) = sparsity_types.Block((2, 4)), sparsity_types.Channel(0)
    assert (shape, pools, channel) == ((2, 4), True, 0)
    assert sparsity_types.NByM(2, 4)._asdict() == {'n': 2, 'm': 4, 'axis': -1}
    assert sparsity_types.Block._make([(2, 2), False]) == sparsity_types.Block((2, 2), False)
    assert sparsity_types.NByM(2, 4)[1] == 4
    assert len(sparsity_types.NByM(2, 4)) == 3
    assert list(sparsity_types.Unstructured()) == []
    assert sparsity_types.Unstructured()  # true, although nothing can be unpacked


def test_the_class_unstructured_stands_for_an_instance():
    updater = jaxpruner.MagnitudePruning(sparsity_type=sparsity_types.Unstructured, sparsity=0.5)
    assert updater.sparsity_type == sparsity_types.Unstructured()


SHAPES = {'a': (2, 4), 'b': (3, 6), 'c': (2, 4, 6)}
ERDOS_RENYI = [
    ({}, [0.0, 0.31, 0.655]),
    ({'include_kernel': False}, [0.21, 0.47, 0.56]),
    ({'include_kernel': False, 'erk_power_scale': 2.0}, [0.21, 0.47, 0.56]),
    ({'erk_power_scale': 2.0}, [0.0, 0.033, 0.758]),
    ({'custom_sparsity_map': {'a': 0.9, 'no such name': 0.1}}, [0.9, 0.214, 0.607]),
]


@pytest.mark.parametrize(('settings', 'expected'), ERDOS_RENYI)
def test_erdos_renyi_of_named_shapes(settings, expected):
    sparsities = sparsity_distributions.get_sparsities_erdos_renyi(SHAPES, 0.5, **settings)
    assert list(sparsities) == list(SHAPES)
    np.testing.assert_allclose(list(sparsities.values()), expected, atol=6e-3)


@pytest.mark.parametrize(
    ('shapes', 'sparsity', 'message'),
    [({}, 0.5, 'empty'), (SHAPES, 1.5, 'got 1.5'), (SHAPES, -0.1, 'got -0.1')],
)
def test_erdos_renyi_refuses(shapes, sparsity, message):
    with pytest.raises(ValueError, match=message):
        sparsity_distributions.get_sparsities_erdos_renyi(shapes, sparsity)


def test_erdos_renyi_without_the_kernel_needs_two_axes():
    with pytest.raises(ValueError, match='b'):
        sparsity_distributions.get_sparsities_erdos_renyi({'b': (3,)}, 0.5, include_kernel=False)


def test_distributions_take_the_names_of_the_original():
    by_name = sparsity_distributions.erk(param_tree=PARAMS, sparsity=0.5)
    assert by_name == sparsity_distributions.erk(PARAMS, 0.5)
    kernels = sparsity_distributions.uniform(
        PARAMS, 0.5, filter_fn=sparsity_distributions.KERNEL_FILTER_FN
    )
    assert kernels == sparsity_distributions.uniform(
        PARAMS, 0.5, sparsity_distributions.NOT_DIM_ONE_FILTER_FN
    )
    assert sparsity_distributions.get_n_zeros(10, 0.29) == 2


GLOBAL = [jaxpruner.GlobalMagnitudePruning, jaxpruner.GlobalSaliencyPruning]


@pytest.mark.parametrize('cls', GLOBAL)
def test_global_sparsity_is_that_of_all_selected_leaves(cls):
    updater = cls(sparsity_schedules.OneShotSchedule(0), sparsity=0.75)
    _, masks = updater.instant_sparsify(PARAMS, GRADS)
    assert kept(masks) == (128 + 64) // 4
    assert masks['first']['bias'] is None
    state = updater.wrap_optax(optax.sgd(0.1)).init(PARAMS)
    assert state.target_sparsities.shape == ()
    assert float(state.target_sparsities) == 0.75
    assert float(jaxpruner.sparsity_metrics(state)['_target_sparsity']) == 0.75


@pytest.mark.parametrize('cls', GLOBAL)
def test_named_leaves_are_ranked_alone_at_their_own_sparsity(cls):
    updater = cls(sparsity=0.75, custom_sparsity_map={'second/kernel': 0.25})
    masks = updater.instant_sparsify(PARAMS, GRADS)[1]
    assert kept(masks['first']) == 32
    assert kept(masks['second']) == 48
    dense = cls(sparsity=0.75, custom_sparsity_map={'second/*': None})
    assert dense.instant_sparsify(PARAMS, GRADS)[1]['second'] == {'kernel': None, 'bias': None}


def test_global_create_masks_takes_one_number():
    updater = jaxpruner.GlobalMagnitudePruning(sparsity=0.8)
    scores = updater.calculate_scores(PARAMS)
    one, tree = updater.create_masks(scores, 0.8), updater.instant_sparsify(PARAMS)[1]
    jax.tree.map(np.testing.assert_array_equal, one, tree)
    assert one['first']['bias'] is None
    named = updater.create_masks(scores=scores, target_sparsity=jnp.float32(0.8))
    jax.tree.map(np.testing.assert_array_equal, one, named)


def test_global_normalisation_and_filter_are_fields():
    def masks(**settings):
        return jaxpruner.GlobalMagnitudePruning(sparsity=0.5, **settings).instant_sparsify(PARAMS)[
            1
        ]

    plain, normal = masks(use_normalization=False), masks(normalization_eps=0.0)
    assert kept(plain['second']) < 5 < kept(normal['second'])
    jax.tree.map(np.testing.assert_array_equal, masks(normalization_eps=1e6), plain)
    assert kept(masks(filter_fn=lambda key, param: key == ('first', 'kernel'))) == 64


@pytest.mark.parametrize('cls', [jaxpruner.MagnitudePruning, jaxpruner.GlobalMagnitudePruning])
def test_the_published_default_may_stand_beside_a_sparsity(cls):
    published_default = functools.partial(sparsity_distributions.uniform, sparsity=0.0)
    updater = cls(sparsity=0.5, sparsity_distribution_fn=published_default)
    masks = updater.instant_sparsify({'w': jnp.arange(8.0).reshape(2, 4)})[1]
    assert int(masks['w'].sum()) == 4


@dataclasses.dataclass
class Weighted(jaxpruner.BaseUpdater):
    weight: float = 2.0

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(lambda p: self.weight * jnp.abs(p), params)


# The dense baseline has no targets, and N:M says itself how sparse it is.
WITHOUT_SPARSITY = (jaxpruner.NoPruning, jaxpruner.IterativeNMPruning)
SPARSITY = [cls for cls in jaxpruner.api.ALGORITHM_REGISTRY.values() if cls not in WITHOUT_SPARSITY]


@pytest.mark.parametrize('cls', [*SPARSITY, Weighted], ids=lambda cls: cls.__name__)
def test_every_updater_takes_a_sparsity(cls):
    updater = cls(sparsity=0.75)
    targets = updater.get_target_sparsities(PARAMS)
    assert targets == {name: {'kernel': 0.75, 'bias': None} for name in PARAMS}
    assert updater.sparsity == 0.75
    assert dataclasses.replace(updater).get_target_sparsities(PARAMS) == targets
    other = dataclasses.replace(updater, sparsity=0.5, use_packed_masks=True)
    assert other.get_target_sparsities(PARAMS)['first']['kernel'] == 0.5
    assert updater.get_target_sparsities(PARAMS) == targets


def test_a_distribution_replaces_a_sparsity_where_that_is_taken_back():
    updater = jaxpruner.MagnitudePruning(sparsity=0.75)
    erk = functools.partial(sparsity_distributions.erk, sparsity=0.5)
    with pytest.raises(ValueError, match='sparsity'):
        dataclasses.replace(updater, sparsity_distribution_fn=erk)
    replaced = dataclasses.replace(updater, sparsity_distribution_fn=erk, sparsity=None)
    assert replaced.get_target_sparsities(PARAMS) == erk(PARAMS)
    assert (
        dataclasses.replace(updater, sparsity=None).get_target_sparsities(PARAMS)['first']['kernel']
        == 0.0
    )


@pytest.mark.parametrize('cls', [jaxpruner.RigL, jaxpruner.SteMagnitudePruning])
@pytest.mark.parametrize('method', ['pre_forward_update', 'post_gradient_update'])
def test_methods_take_the_state_by_either_name(cls, method):
    updater = cls(sparsity=0.5, scheduler=sparsity_schedules.PeriodicSchedule(1))
    state, call = updater.wrap_optax(optax.adam(0.1)).init(PARAMS), getattr(updater, method)
    expected = call(PARAMS, state)
    for names in ('opt_state', 'sparse_state'):
        named = call(params=PARAMS, **{names: state})
        jax.tree.map(np.testing.assert_array_equal, named, expected)


def test_summaries_of_the_total_alone():
    masks = {'a': jnp.array([1, 1, 0]), 'b': jnp.array([1, 0])}
    total = utils.summarize_intersection(masks, masks, only_total_intersection=True)
    assert total == {'_total_intersection': 1.0}
    assert set(utils.summarize_sparsity(masks, only_total_sparsity=True)) == {
        '_total_sparsity',
        '_nparams',
        '_nparams_nnz',
    }


def test_topk_fn_is_that_of_the_sparsity_type():
    updater = jaxpruner.MagnitudePruning(sparsity_type='1:2', sparsity=0.5)
    assert updater.topk_fn([1.0, 2.0, 4.0, 3.0], 0.5).tolist() == [0, 1, 1, 0]
    replaced = dataclasses.replace(updater, sparsity_type=sparsity_types.Unstructured())
    assert replaced.topk_fn([1.0, 2.0, 4.0, 3.0], 0.5).tolist() == [0, 0, 1, 1]
    mapped = jaxpruner.MagnitudePruning(sparsity_type={'first/*': '2:4', '*': None})
    with pytest.raises(TypeError, match='sparsity type'):
        mapped.topk_fn([1.0], 0.5)


def first_of_all(scores, sparsity):
    return (jnp.arange(scores.size) == 0).reshape(scores.shape).astype(jnp.uint8)


def test_a_topk_fn_of_ones_own_is_used():
    updater = jaxpruner.MagnitudePruning(sparsity=0.5, topk_fn=first_of_all)
    assert kept(dataclasses.replace(updater, rng_seed=3).instant_sparsify(PARAMS)[1]) == 2
    assigned = jaxpruner.MagnitudePruning(sparsity=0.5)
    assigned.topk_fn = first_of_all
    assert kept(assigned.instant_sparsify(PARAMS)[1]) == 2


def test_no_seed_is_the_default_key():
    for updater in (
        jaxpruner.RandomPruning(sparsity=0.5),
        jaxpruner.RandomPruning(sparsity=0.5, rng_seed=None),
    ):
        masks = updater.instant_sparsify(PARAMS)[1]
        for seed in (8, jax.random.PRNGKey(8), updater.rng_seed):
            other = jaxpruner.RandomPruning(sparsity=0.5, rng_seed=seed).instant_sparsify(PARAMS)[1]
            jax.tree.map(np.testing.assert_array_equal, masks, other)
    assert jaxpruner.SET() == jaxpruner.SET()
    scores = pruners.generate_random_scores(PARAMS, updater.rng_seed)
    jax.tree.map(
        np.testing.assert_array_equal, scores, pruners.generate_random_scores(PARAMS, rng_seed=8)
    )


def test_a_traced_key_is_a_seed():
    def masks_of(key):
        return jaxpruner.RandomPruning(sparsity=0.5, rng_seed=key).instant_sparsify(PARAMS)[1]

    expected = masks_of(jax.random.PRNGKey(3))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(masks_of)(jax.random.PRNGKey(3)), expected)


@dataclasses.dataclass
class MineThrough(ste.SteMixin, Weighted):
    pass


@dataclasses.dataclass
class MineGlobal(global_pruners.GlobalPruningMixin, Weighted):
    pass


def test_mixins_go_into_ones_own_updaters():
    through = MineThrough(weight=3.0, sparsity=0.5)
    state = through.wrap_optax(optax.sgd(0.1)).init(PARAMS)
    forward = through.pre_forward_update(PARAMS, state)
    assert utils.summarize_sparsity(forward['first'])['kernel'] == 0.5
    assert through.post_gradient_update(PARAMS, state) is PARAMS
    assert through.weight == 3.0
    together = MineGlobal(weight=3.0, sparsity=0.75, use_normalization=False)
    assert kept(together.instant_sparsify(PARAMS)[1]) == 48


ISINSTANCE = [
    (
        jaxpruner.SteMagnitudePruning,
        (ste.SteMixin, pruners.MagnitudePruning, base_updater.BaseUpdater),
    ),
    (jaxpruner.SteRandomPruning, (ste.SteMixin, pruners.RandomPruning)),
    (
        jaxpruner.GlobalMagnitudePruning,
        (global_pruners.GlobalPruningMixin, pruners.MagnitudePruning),
    ),
    (jaxpruner.GlobalSaliencyPruning, (global_pruners.GlobalPruningMixin, pruners.SaliencyPruning)),
    (jaxpruner.RigL, (sparse_trainers.SET, sparse_trainers.StaticRandomSparse)),
]


@pytest.mark.parametrize(('cls', 'bases'), ISINSTANCE)
def test_classes_are_what_they_were(cls, bases):
    assert all(isinstance(cls(), base) for base in bases)


def test_the_drop_fraction_of_the_classes_is_constant():
    for cls in (jaxpruner.SET, jaxpruner.RigL):
        assert [float(cls().drop_fraction_fn(step)) for step in (0, 1000)] == pytest.approx(
            [0.3, 0.3]
        )
        settings = {'eps': 1e-3, 'drop_fraction_fn': lambda step: 0.1, 'is_debug': True}
        updater = cls(sparsity_schedules.NoUpdateSchedule(), **settings)
        assert (updater.eps, updater.is_debug) == (1e-3, True)


def test_schedules_answer_as_they_did():
    one_shot = sparsity_schedules.OneShotSchedule(target_step=5)
    assert not sparsity_schedules.PeriodicSchedule(3, 0, 9).is_mask_update_iter(None)
    for step in (0, 5, 9):
        assert float(one_shot.get_sparsity_at_step(0.8, step)) == pytest.approx(0.8)
    named = sparsity_schedules.PolynomialSchedule(
        update_freq=1e1, update_start_step=4e5, update_end_step=8e5
    )
    assert (named.update_freq, named.update_start_step, named.update_end_step) == (
        10,
        400_000,
        800_000,
    )


def test_the_state_is_built_and_read_by_the_names_of_the_original():
    updater = jaxpruner.StaticRandomSparse(sparsity=0.5)
    state = updater.wrap_optax(optax.sgd(0.1, momentum=0.9)).init(PARAMS)
    assert int(state.count) == 0
    assert state.masks['first']['bias'] is None
    assert float(state.target_sparsities['first']['kernel']) == 0.5
    assert state.inner_state[0].trace['first']['kernel'].shape == (16, 8)
    made = base_updater.SparseState(
        masks=state.masks, inner_state=None, target_sparsities=None, count=jnp.int32(3)
    )
    pruned = updater.post_gradient_update(PARAMS, made)
    again = jaxpruner.apply_mask(param=PARAMS, mask=state.masks)
    jax.tree.map(np.testing.assert_array_equal, pruned, again)
    one = jaxpruner.apply_mask(
        PARAMS['first']['kernel'], state.masks['first']['kernel'], is_packed=False
    )
    np.testing.assert_array_equal(one, again['first']['kernel'])


def test_a_step_driven_by_hand_as_in_the_original():
    updater = jaxpruner.SaliencyPruning(sparsity=0.5)
    state = updater.init_state(PARAMS)._replace(inner_state=())
    new = updater.update_state(sparse_state=state, params=PARAMS, grads=GRADS)
    assert utils.summarize_sparsity(new.masks, only_total_sparsity=True)['_total_sparsity'] == 0.5
    with_more = updater.calculate_scores(PARAMS, sparse_state=state, grads=GRADS)
    assert with_more['first']['kernel'].shape == (16, 8)
    masks = updater.create_masks(with_more, updater.sparsity_distribution_fn(PARAMS))
    jax.tree.map(np.testing.assert_array_equal, masks, new.masks)
