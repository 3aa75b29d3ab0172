"""Tables and differences: what stands where, what is marked, and the three ways to write them."""

import math

import numpy as np
import pytest
import scipy.stats

from helpers.made_up_cells import make_cell, make_cells
from jaxpruner.report import (
    Difference,
    group_cells,
    paired_difference,
    to_markdown,
    to_text,
)

VALUES = {
    ('rigl', 0.95): [0.7, 0.8],
    ('rigl', 0.8): [0.9, 0.91, 0.92],
    ('acdc', 0.8): [0.93, 0.95],
    ('magnitude', 0.8): [0.9],
    ('no_prune', 0.0): [0.98, 0.99],
}
LOSSES = {('no_prune', 0.0): [2.5, 2.5], ('set', 0.8): [2.75, 2.85], ('random', 0.8): [3.0, 3.0]}
BOTH = [
    *make_cells(LOSSES, workload='t5', data='text', metric='loss', better='low'),
    *make_cells(VALUES),
]


def rows_of(cells):
    """The rows of a table in Markdown below its heading, as lists of texts."""
    heading, _, *rows = to_markdown(cells).splitlines()
    texts = [[text.strip() for text in row.split('|')[1:-1]] for row in (heading, *rows)]
    return texts[0], texts[1:]


def test_rows_and_columns_are_in_the_originals_order_and_entries_are_means_and_deviations():
    heading, rows = rows_of(BOTH)
    algorithms = ['no_prune', 'random', 'magnitude', 'set', 'rigl', 'acdc']
    assert heading == ['', 'sparsity', *algorithms, 'seeds']
    digits, text = 'resnet (digits): accuracy (%) ↑', 't5 (text): loss ↓'
    dense, best = '98.50 ± 0.71', '**94.00 ± 1.41**'
    assert rows == [
        [digits, '80%', dense, '-', '90.00', '-', '91.00 ± 1.00', best, '1–3'],
        [text, '80%', '2.500 ± 0.000', '3.000 ± 0.000', '-', '**2.800 ± 0.071**', '-', '-', '2'],
        [digits, '95%', dense, '-', '-', '-', '**75.00 ± 7.07**', '-', '2'],
    ]


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ('better', 'values', 'expected'),
    [
        # `set` is ahead of `rigl` in one seed, behind in another; `random` is behind by the same in each.
        (
            'high',
            {'rigl': [2, 3, 4], 'set': [2, 2.5, 4.2], 'random': [1, 2, 3]},
            {'rigl': '*', 'set': '~'},
        ),
        ('low', {'rigl': [2, 3], 'random': [1, 2]}, {'random': '*'}),
        ('high', {'set': [3.00001], 'rigl': [3.00002]}, {'set': '*', 'rigl': '*'}),  # look equal
        ('high', {'set': [3], 'rigl': [4]}, {'rigl': '*', 'set': '~'}),  # one seed says nothing
        ('high', {'no_prune': [4, 4], 'rigl': [3, 3]}, {'rigl': '*'}),  # dense is no contestant
        ('low', {'set': [NAN, 1], 'rigl': [3, 3]}, {'rigl': '*'}),  # nor is what diverged
        ('low', {'set': [INF, 1], 'rigl': [3, 3]}, {'rigl': '*', 'set': '~'}),
        ('high', {'set': [NAN]}, {}),
    ],
)
def test_the_best_and_what_may_be_as_good_are_marked(better, values, expected):
    sparsity = {'no_prune': 0.0}
    by_key = {(name, sparsity.get(name, 0.8)): of_seeds for name, of_seeds in values.items()}
    _, table = to_text(make_cells(by_key, metric='x', better=better)).split('\n\n')
    lines = [line.split() for line in table.splitlines()[2:-2]]
    assert {line[0]: line[-1] for line in lines if line[-1] in '*~'} == expected


def test_recipes_are_not_mixed_and_a_folder_named_twice_counts_once():
    first, second = make_cell(recipe='1' * 64, value=0.9), make_cell(recipe='2' * 64, value=0.8)
    _, rows = rows_of([first, second, first])
    label = 'resnet (digits, recipe {}): accuracy (%) ↑'
    assert rows == [
        [label.format('1' * 6), '80%', '**90.00**', '1'],
        [label.format('2' * 6), '80%', '**80.00**', '1'],
    ]
    assert rows_of([make_cell(value=NAN), make_cell(value=NAN)])[1][0][2:] == ['nan', '1']
    with pytest.raises(ValueError, match=r'has magnitude_0.8_0 twice .* accuracy 0.9 and 0.8'):
        group_cells([make_cell(value=0.9), make_cell(value=0.8)])
    with pytest.raises(ValueError, match='no readable cell'):
        to_text([])


TEXT = """
vit (a): return ↑

algorithm      80% pruned      95% pruned
-----------------------------------------
no_prune   98.50 ± 0.71    98.50 ± 0.71
magnitude         90.00 ~             -
rigl       91.00 ± 1.00 ~  75.00 ± 7.07 *
acdc       94.00 ± 1.41 *             -
-----------------------------------------
seeds               1–3               2
"""


def test_the_two_ways_to_write_a_table():
    percents = {key: [100 * value for value in of_seeds] for key, of_seeds in VALUES.items()}
    table = make_cells(percents, workload='vit', data='a', metric='return')
    assert to_text(table) == TEXT.strip()
    narrow = to_text(table, width=40)
    assert narrow.count('seeds') == 2  # a table for each sparsity
    assert max(map(len, narrow.splitlines())) <= 40
    assert r'resnet (a\|b)' in to_markdown([make_cell(data='a|b')])


@pytest.mark.parametrize('better', ['high', 'low'])
def test_the_interval_is_students(better):
    first, second = np.random.default_rng(0).normal(size=(2, 7))
    cells = make_cells(
        {('rigl', 0.8): first.tolist(), ('set', 0.8): second.tolist()}, better=better
    )
    ours = paired_difference(*group_cells(cells), 'rigl', 'set', 0.8)
    differences = (1 if better == 'high' else -1) * (first - second)
    half = scipy.stats.t.ppf(0.975, 6) * differences.std(ddof=1) / math.sqrt(7)
    expected = differences.mean() + half * np.array([0, -1, 1])
    np.testing.assert_allclose([ours.mean, ours.low, ours.high], expected, rtol=1e-6)
    assert ours.seeds == 7


def test_only_shared_seeds_count_and_dense_is_compared_at_every_sparsity():
    cells = [make_cell('rigl', seed=seed, value=seed) for seed in (0, 1, 2)]
    cells += [make_cell('set', seed=seed, value=0.0) for seed in (2, 3)]
    cells += [make_cell('no_prune', 0.0, value=1.0), make_cell('rigl', 0.95, value=0.5)]
    (experiment,) = group_cells(cells)
    difference = paired_difference(experiment, 'rigl', 'set', 0.8)
    assert difference == Difference(2.0, -math.inf, math.inf, 1)
    assert not difference.is_certain
    assert paired_difference(experiment, 'no_prune', 'rigl', 0.95).mean == 0.5
    with pytest.raises(
        ValueError, match=r'no seed with both rigl and set at sparsity 0.95: .*none'
    ):
        paired_difference(experiment, 'rigl', 'set', 0.95)
