"""Paired differences, their intervals, and the original's order."""

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats

from helpers.made_up_cells import make_cell, make_cells
from jaxpruner.report import (
    ORIGINAL,
    Difference,
    check_original_order,
    group_cells,
    paired_difference,
)
from jaxpruner.report.differences import student_quantile
from jaxpruner.report.experiments import ALGORITHM_ORDER

values = st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=2, max_size=15)


@hypothesis.given(values, st.sampled_from(['high', 'low']))
def test_the_interval_is_students(pairs, better):
    first, second = map(list, zip(*pairs, strict=True))
    (experiment,) = group_cells(
        make_cells({('rigl', 0.8): first, ('set', 0.8): second}, better=better)
    )
    ours = paired_difference(experiment, 'rigl', 'set', 0.8)
    differences = (1 if better == 'high' else -1) * (np.array(first) - np.array(second))
    spread = differences.std(ddof=1) / math.sqrt(len(pairs))
    quantile = scipy.stats.t.ppf(0.975, len(pairs) - 1)
    assert ours.seeds == len(pairs)
    np.testing.assert_allclose(
        [ours.mean, ours.low, ours.high],
        differences.mean() + spread * quantile * np.array([0, -1, 1]),
        rtol=1e-4,
        atol=1e-4 * spread + 1e-12,
    )


@pytest.mark.parametrize('degrees', [*range(1, 41), 100, 1000])
def test_quantiles(degrees):
    assert math.isclose(student_quantile(degrees), scipy.stats.t.ppf(0.975, degrees), rel_tol=1e-4)


@pytest.mark.parametrize(
    ('difference', 'holds', 'certain'),
    [
        (Difference(1.0, 0.5, 1.5, 3), True, True),
        (Difference(1.0, -0.5, 2.5, 3), True, False),
        (Difference(-1.0, -2.5, 0.5, 3), True, False),
        (Difference(-1.0, -1.5, -0.5, 3), False, False),
        (Difference(0.0, 0.0, 0.0, 3), True, False),
        (Difference(math.nan, math.nan, math.nan, 3), True, False),
    ],
)
def test_an_order_holds_unless_the_interval_contradicts_it(difference, holds, certain):
    assert (difference.holds, difference.is_certain) == (holds, certain)


def test_only_shared_seeds_count():
    cells = [make_cell('rigl', seed=seed, value=seed) for seed in (0, 1, 2)]
    cells += [make_cell('set', seed=seed, value=0.0) for seed in (2, 3)]
    (experiment,) = group_cells(cells)
    assert paired_difference(experiment, 'rigl', 'set', 0.8) == Difference(
        2.0, -math.inf, math.inf, 1
    )


def test_dense_is_compared_at_every_sparsity():
    (experiment,) = group_cells(
        [make_cell('no_prune', 0.0, value=1.0), make_cell('rigl', 0.95, value=0.5)]
    )
    assert paired_difference(experiment, 'no_prune', 'rigl', 0.95).mean == 0.5


@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_runs_that_diverged_contradict_nothing(value):
    values = {('random', 0.8): [3.0, 3.1, 3.2], ('magnitude', 0.8): [2.5, value, 2.7]}
    (check,) = check_original_order(make_cells(values, workload='t5', better='low'))
    assert check.verdict == 'differs'


def test_no_shared_seed_is_refused():
    (experiment,) = group_cells([make_cell('rigl', seed=0), make_cell('set', seed=1)])
    with pytest.raises(
        ValueError,
        match=r'no seed with both rigl and set at sparsity 0.8: rigl has \[0\], set \[1\]',
    ):
        paired_difference(experiment, 'rigl', 'set', 0.8)
    with pytest.raises(ValueError, match='set none'):
        paired_difference(experiment, 'rigl', 'set', 0.95)


def test_the_original_table():
    assert {row.workload for row in ORIGINAL.values()} == {
        'resnet',
        'vit',
        'federated',
        't5',
        'dqn',
    }
    for name, row in ORIGINAL.items():
        assert set(row.values) <= set(ALGORITHM_ORDER), name
        assert row.better == ('low' if row.workload == 't5' else 'high')
        if row.workload != 'dqn':
            assert tuple(row.values) == ALGORITHM_ORDER


def test_the_original_agrees_with_itself():
    for name, row in ORIGINAL.items():
        means = {
            (algorithm, 0.0 if algorithm == 'no_prune' else 0.8): [v, v]
            for algorithm, v in row.values.items()
        }
        checks = check_original_order(make_cells(means, workload=row.workload, better=row.better))
        ours = [check for check in checks if check.row == name]
        assert len(ours) == math.comb(len(row.values), 2)
        assert {check.verdict for check in ours} == {'agrees'}
        assert all(math.isclose(check.ours.mean, check.original) for check in ours)


@pytest.mark.parametrize(
    ('random', 'verdict'),
    [([3.0, 3.1, 3.2], 'agrees'), ([2.0, 2.1, 3.2], 'differs'), ([2.0, 2.1, 2.2], 'contradicts')],
)
def test_verdicts_where_low_is_good(random, verdict):
    values = {
        ('random', 0.8): random,
        ('magnitude', 0.8): [2.5, 2.6, 2.7],
        ('acdc', 0.8): [1.0, 1.0, 1.0],
    }
    (check,) = check_original_order(make_cells(values, workload='t5', better='low'))
    assert (check.row, check.first, check.second, check.verdict) == (
        't5-Base (C4)',
        'magnitude',
        'random',
        verdict,
    )
    assert math.isclose(check.original, 3.28813 - 2.95402)
    assert str(check).endswith(verdict)


def test_workloads_that_the_original_lacks_are_refused():
    cells = make_cells({('random', 0.8): [1.0], ('magnitude', 0.8): [1.0]}, workload='lenet')
    with pytest.raises(
        ValueError,
        match=r'no two algorithms .* at sparsity 0.8; .* are resnet, vit, federated, t5, dqn',
    ):
        check_original_order(cells)
