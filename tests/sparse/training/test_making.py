"""What block_sparse chooses and refuses, and what its plan says."""

import re

import jax
import numpy as np
import optax
import pytest

from jaxpruner import sparse, sparsity_schedules
from sparse.training.models import BLOCK, PARAMS, X, apply_fn


def made(**settings):
    return sparse.block_sparse(apply_fn, PARAMS, X, **{'sparsity': 0.5, 'block': BLOCK, **settings})


def test_the_plan_says_what_becomes_of_each_leaf():
    model = made()
    leaves = model.plan.leaves
    assert list(leaves) == [
        'head/kernel',
        'layers/bias',
        'layers/kernel',
        'table',
        'up/bias',
        'up/kernel',
    ]
    assert leaves['up/kernel'].layout.blocks == 2
    assert leaves['layers/kernel'].layout.layers == (2,)
    assert '3 outputs is smaller than a block of 4 x 8' in leaves['head/kernel'].note
    assert leaves['table'].layout is None
    assert leaves['layers/bias'].kept == 44
    text = str(model.plan)
    assert '3 groups of 2 of 3 blocks 4×8' in re.sub(r'\s+', ' ', text)
    assert f'{model.plan.kept:,}' in text


def test_settings_go_by_name():
    model = made(sparsity={'up/*': 0.7, '*': 0.5}, block={'up/*': (2, 8), 'layers/*': BLOCK})
    assert {name: layout.block for name, layout in model.layouts.items()} == {
        'up/kernel': (2, 8),
        'layers/kernel': BLOCK,
    }
    assert model.plan.leaves['head/kernel'].note == 'no name in block matches it'


def test_ranks_go_by_name():
    model = made(sparsity=0.4, low_rank={'up/*': 2, 'layers/*': 1})
    assert {name: layout.rank for name, layout in model.layouts.items()} == {
        'up/kernel': 2,
        'layers/kernel': 1,
    }
    weights, _ = model.pack(PARAMS)
    assert weights['up']['kernel']['down'].shape[-1] == 2
    assert made(sparsity=0.4, low_rank={'up/*': 2}).layouts['layers/kernel'].rank == 0


REFUSED = {
    'sparsity of 1': ({'sparsity': 1.0}, ValueError, 'sparsity must be below 1'),
    'sparsity above 1': ({'sparsity': {'up/*': 1.5}}, ValueError, r"sparsity\['up/\*'\].*1\.5"),
    'block of one number': ({'block': 8}, TypeError, r'block must be .*\(8, 128\).* got 8'),
    'block of nothing': ({'block': (0, 8)}, ValueError, r'at least one input.*\(0, 8\)'),
    'a rank below 0': ({'low_rank': -1}, ValueError, 'low_rank.*-1'),
    'a rank that is none': ({'low_rank': 1.5}, TypeError, 'low_rank.*1.5'),
    'a rank by name': ({'low_rank': {'up/*': -1}}, ValueError, r"low_rank\['up/\*'\].*-1"),
    'a rank of nothing': ({'low_rank': {'upp/*': 1}}, ValueError, "low_rank.*'upp/\\*'"),
    'too large a rank': (
        {'low_rank': 9, 'only': 'up/kernel'},
        ValueError,
        "'up/kernel'.*rank 9.*at most 3",
    ),
    'a name of nothing': ({'only': 'upp/kernel'}, ValueError, "only: 'upp/kernel'.*'up/kernel'"),
    'a bias': ({'only': ('up/*', 'up/bias')}, ValueError, 'up/bias.*no contraction'),
    'a small leaf': ({'only': 'head/kernel'}, ValueError, "'head/kernel'.*3 outputs.*4 x 8"),
    'nothing is left': ({'block': (64, 64)}, ValueError, 'no leaf.*up/kernel.*64 x 64'),
    'an algorithm': ({'algorithm': 'riggle'}, ValueError, "'riggle'.*'rigl'"),
    'a count that changes': (
        {'scheduler': sparsity_schedules.PolynomialSchedule(1, 0, 10)},
        ValueError,
        'PolynomialSchedule changes the number.*PeriodicSchedule',
    ),
    'a fraction': ({'drop_fraction_fn': lambda step: 2.0}, ValueError, r'\[0, 1\].*2\.0'),
    'a fraction that grows': (
        {
            'scheduler': sparsity_schedules.PeriodicSchedule(2),
            'drop_fraction_fn': lambda step: 0.3 + step,
        },
        ValueError,
        r'drop_fraction_fn\(2\).*\[0, 1\].*2\.3',
    ),
    'a fraction below 0 in the end': (
        {
            'scheduler': sparsity_schedules.PeriodicSchedule(2, update_end_step=100),
            'drop_fraction_fn': lambda step: 0.3 - step / 200,
        },
        ValueError,
        r'drop_fraction_fn\(94\).*\[0, 1\].*-0\.1',
    ),
    'a seed that is none': ({'rng_seed': 'eight'}, TypeError, "rng_seed.*'eight'"),
}


@pytest.mark.parametrize(('settings', 'error', 'words'), REFUSED.values(), ids=REFUSED)
def test_settings_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        made(**settings)


OPTIMIZERS = {
    'scale_by_factored_rms': optax.adafactor(1e-3),
    'scale_by_muon': optax.contrib.muon(1e-3),
    'scale_by_sm3': optax.sm3(1e-3),
    'scale_by_trust_ratio': optax.lamb(1e-3),
    'clip_by_block_rms': optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)),
}


@pytest.mark.parametrize('name', OPTIMIZERS)
@pytest.mark.parametrize('is_nested', [False, True])
def test_optimizers_that_look_at_more_than_single_weights_are_refused(name, is_nested):
    tx = OPTIMIZERS[name]
    if is_nested:
        tx = optax.chain(optax.clip(1.0), optax.MultiSteps(tx, 2).gradient_transformation())
    model = made()
    weights, topology = model.pack(PARAMS)
    with pytest.raises(ValueError, match=rf'this one \(.*{name}.*adamw'):
        model.wrap_optax(tx).init(weights)
    with pytest.raises(ValueError, match=rf'this one \(.*{name}.*adamw'):
        model.update(weights, topology, None, tx=tx, step=0)


def test_rigl_needs_norms_and_moments_that_can_be_zeroed():
    model = made(algorithm='rigl', scheduler=sparsity_schedules.PeriodicSchedule(1))
    weights, topology = model.pack(PARAMS)
    tx = optax.sgd(0.1)
    with pytest.raises(ValueError, match='rigl grows by block_norms'):
        model.update(weights, topology, tx.init(weights), tx=tx, step=0)
    with pytest.raises(ValueError, match='lbfgs'):
        model.wrap_optax(optax.lbfgs()).init(weights)


def test_an_unknown_way_to_select_is_refused():
    model = made()
    with pytest.raises(ValueError, match=r"select='magnitud'.*'magnitude'"):
        model.pack(PARAMS, select='magnitud')


def test_fractions_are_checked_at_the_step_of_an_update():
    # Far from the first steps, which are looked at beforehand.
    model = made(
        algorithm='set',
        scheduler=sparsity_schedules.PeriodicSchedule(1),
        drop_fraction_fn=lambda step: 0.3 + step / 100,
    )
    with pytest.raises(ValueError, match=r'drop_fraction_fn\(90\).*1\.2'):
        model.moves.drop_fraction(90)


def test_a_key_is_a_seed():
    first, again, other = (
        made(rng_seed=seed).pack(PARAMS)[1]
        for seed in (jax.random.key(3), jax.random.PRNGKey(3), jax.random.key(4))
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert any(np.any(first[name] != other[name]) for name in first)
    assert made(rng_seed=None).pack(PARAMS)[1].keys() == first.keys()


def test_inputs_that_no_block_reaches_are_said():
    with pytest.warns(
        UserWarning, match=r'reach all inputs of up/kernel \(33 %; blocks of at most'
    ):
        model = made(block=(4, 22), sparsity=0.7, only='up/*')
    assert 'reach 33 % of the inputs' in model.plan.leaves['up/kernel'].note
    assert made(block=(4, 22), sparsity=0.6, only='layers/*', low_rank=1).layouts


def test_blocks_that_are_too_coarse_for_the_sparsity_are_said():
    with pytest.warns(
        UserWarning, match=r'more weights are kept of up/kernel \(33 %: 1 of 3 blocks'
    ):
        made(sparsity=0.8, only='up/*', block=(4, 1))
