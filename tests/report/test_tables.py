"""Tables: what stands where, what is bold, and the three ways to write them."""

import csv
import io
import math

import numpy as np
import pytest
import rich.console

from helpers.made_up_cells import make_cell, make_cells
from jaxpruner.report import group_cells, make_table, to_csv, to_markdown, to_rich
from jaxpruner.report.tables import Row

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


def shown(row):
    return [entry and entry.text for entry in row.entries]


def bold(table, row):
    return [
        name for name, entry in zip(table.columns, row.entries, strict=True) if entry and entry.best
    ]


def test_rows_and_columns_are_in_the_originals_order():
    table = make_table(BOTH)
    assert table.columns == ('no_prune', 'random', 'magnitude', 'set', 'rigl', 'acdc')
    assert [(row.workload, row.data, row.sparsity) for row in table.rows] == [
        ('resnet', 'digits', 0.8),
        ('t5', 'text', 0.8),
        ('resnet', 'digits', 0.95),
    ]
    assert [row.label for row in table.rows[:2]] == [
        'resnet (digits): accuracy (%) ↑',
        't5 (text): loss ↓',
    ]


def test_entries_are_means_and_deviations_of_a_sample():
    table = make_table(BOTH)
    assert shown(table.rows[0]) == [
        '98.50 ± 0.71',
        None,
        '90.00',
        None,
        '91.00 ± 1.00',
        '94.00 ± 1.41',
    ]
    assert shown(table.rows[1]) == [
        '2.500 ± 0.000',
        '3.000 ± 0.000',
        None,
        '2.800 ± 0.071',
        None,
        None,
    ]
    assert shown(table.rows[2]) == ['98.50 ± 0.71', None, None, None, '75.00 ± 7.07', None]
    entry = table.rows[0].entries[4]
    assert entry is not None
    assert math.isclose(entry.mean, np.mean(VALUES['rigl', 0.8]))
    assert entry.deviation is not None
    assert math.isclose(entry.deviation, np.std(VALUES['rigl', 0.8], ddof=1))
    assert [row.seeds for row in table.rows] == ['1–3', '2', '2']


@pytest.mark.parametrize(
    ('better', 'values', 'expected'),
    [
        ('high', {'random': 1.0, 'set': 2.0, 'rigl': 3.0}, ['rigl']),
        ('low', {'random': 1.0, 'set': 2.0, 'rigl': 3.0}, ['random']),
        (
            'high',
            {'set': 3.00001, 'rigl': 3.00002, 'random': 2.0},
            ['set', 'rigl'],
        ),  # that show equal
        ('high', {'no_prune': 4.0, 'rigl': 3.0}, ['rigl']),  # dense is no contestant
        ('low', {'set': float('nan'), 'rigl': 3.0}, ['rigl']),  # nor is what diverged
        ('low', {'set': float('inf'), 'rigl': 3.0}, ['rigl']),
        ('high', {'set': float('nan')}, []),
        ('high', {'no_prune': 4.0}, []),
    ],
)
def test_the_best_sparse_value_is_bold(better, values, expected):
    sparsity = {'no_prune': 0.0}
    cells = [
        make_cell(name, sparsity.get(name, 0.8), value=v, metric='x', better=better)
        for name, v in values.items()
    ]
    table = make_table(cells)
    assert bold(table, table.rows[0]) == expected


@pytest.mark.parametrize(
    ('value', 'text'),
    [
        (2588.82, '2589'),
        (12.345, '12.35'),
        (0.0123456, '0.01235'),
        (1e-9, '0.00000000'),
        (0.0, '0.000'),
        (-3.0, '-3.000'),
    ],
)
def test_four_digits_of_the_largest_value_are_shown(value, text):
    assert shown(make_table([make_cell(value=value, metric='return')]).rows[0]) == [text]


def test_recipes_are_not_mixed_and_a_folder_named_twice_counts_once():
    first, second = make_cell(recipe='1' * 64, value=0.9), make_cell(recipe='2' * 64, value=0.8)
    table = make_table([first, second, first])
    labels = [row.label for row in table.rows]
    assert labels == [f'resnet (digits, recipe {digit * 6}): accuracy (%) ↑' for digit in '12']
    assert [shown(row) for row in table.rows] == [['90.00'], ['80.00']]
    diverged = make_cell(value=float('nan'))
    assert shown(make_table([diverged, make_cell(value=float('nan'))]).rows[0]) == ['nan']


def test_one_cell_with_two_values_is_refused():
    with pytest.raises(
        ValueError, match=r'resnet \(digits\) has magnitude_0.8_0 twice .* accuracy 0.9 and 0.8'
    ):
        group_cells([make_cell(value=0.9), make_cell(value=0.8)])


def test_no_cells_are_refused():
    with pytest.raises(ValueError, match='no readable cell'):
        make_table([])


def test_infinite_losses_are_shown():
    cells = make_cells({('set', 0.8): [float('inf'), 1.0]}, metric='loss')
    assert shown(make_table(cells).rows[0]) == ['inf ± nan']


def test_a_row_without_entries_has_no_seeds():
    assert Row('x', 'x', 'x', 'x', 'x', 'high', 0.8, (None,)).seeds == '-'


MARKDOWN = """
|                   | sparsity |     no_prune | magnitude |             rigl |             acdc | seeds |
|:------------------|---------:|-------------:|----------:|-----------------:|-----------------:|------:|
| vit (a): return ↑ |      80% | 98.50 ± 0.71 |     90.00 |     91.00 ± 1.00 | **94.00 ± 1.41** |   1–3 |
| vit (a): return ↑ |      95% | 98.50 ± 0.71 |         - | **75.00 ± 7.07** |                - |     2 |
"""


def test_markdown():
    percents = {key: [100 * value for value in of_seeds] for key, of_seeds in VALUES.items()}
    table = make_table(make_cells(percents, workload='vit', data='a', metric='return'))
    assert to_markdown(table) == MARKDOWN.removeprefix('\n')


def test_bars_in_names_do_not_break_markdown():
    assert r'resnet (a\|b)' in to_markdown(make_table([make_cell(data='a|b')]))


def test_csv_has_a_line_for_each_mean_and_dense_once():
    lines = list(csv.DictReader(to_csv(make_table(make_cells(VALUES))).splitlines()))
    assert [(line['algorithm'], line['sparsity'], line['n']) for line in lines] == [
        ('no_prune', '0.0', '2'),
        ('magnitude', '0.8', '1'),
        ('rigl', '0.8', '3'),
        ('acdc', '0.8', '2'),
        ('rigl', '0.95', '2'),
    ]
    assert float(lines[2]['mean']) == np.mean(
        VALUES['rigl', 0.8]
    )  # unrounded, in the metric's own unit
    assert lines[1]['std'] == ''
    assert {line['workload'] for line in lines} == {'resnet'}


@pytest.mark.parametrize(
    ('width', 'first', 'parts'),
    [
        (200, 'resnet (digits): accuracy (%) ↑ │ 80% │ 98.50 ± 0.71', 1),
        (70, 'sparsity │ 80% │ 95%', 1),
        (40, 'sparsity │ 80%', 2),
    ],
)
def test_a_terminal_gets_the_table_on_its_side_where_it_is_narrow(width, first, parts):
    console = rich.console.Console(width=width, record=True, file=io.StringIO())
    group = to_rich(make_table(make_cells(VALUES)), width)
    console.print(group)
    text = console.export_text()
    rows = [line.strip('│ ') for line in text.splitlines() if line.startswith('│')]
    assert ' │ '.join(text.strip() for text in rows[0].split('│')).startswith(first)
    assert len(group.renderables) == parts
    assert max(map(len, text.splitlines())) <= width
    for entry in ('94.00 ± 1.41', '98.50 ± 0.71', '1–3', 'accuracy'):
        assert entry in text
    assert '…' not in text


def test_the_best_is_bold_in_a_terminal():
    (table,) = to_rich(make_table(make_cells(VALUES)), 200).renderables
    cells = {str(cell): str(cell.style) for column in table.columns for cell in column.cells}
    assert [text for text, style in cells.items() if style == 'bold'] == [
        '75.00 ± 7.07',
        '94.00 ± 1.41',
    ]
