"""Plots: what is drawn where, and how the files are written. How they look, people judge."""

import sys

import matplotlib.figure
import numpy as np
import pytest

from helpers.made_up_cells import make_cell, make_cells
from jaxpruner.report import plot_layer_sparsity, plot_metric_against_sparsity

VALUES = {
    ('no_prune', 0.0): [0.98, 0.99],
    ('random', 0.8): [0.9, 0.91],
    ('random', 0.95): [0.8, 0.82],
    ('magnitude', 0.8): [0.95, 0.96],
    ('magnitude', 0.95): [0.94, 0.94],
    ('acdc', 0.95): [0.93],
}
BOTH = [*make_cells(VALUES), *make_cells(VALUES, workload='t5', metric='loss', better='low')]


@pytest.fixture
def figure(monkeypatch):
    """The figure that was saved last."""
    saved = []
    save = matplotlib.figure.Figure.savefig

    def keep(figure, *arguments, **settings):
        saved.append(figure)
        save(figure, *arguments, **settings)

    monkeypatch.setattr(matplotlib.figure.Figure, 'savefig', keep)
    return lambda: saved[-1]


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_panel_for_each_workload_and_a_line_for_each_algorithm(tmp_path, figure):
    path = tmp_path / 'new folder' / 'plot.svg'
    plot_metric_against_sparsity(BOTH, path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # whole
    panels = figure().axes
    assert [axes.get_title('left') for axes in panels] == ['resnet (digits)', 't5 (digits)']
    assert [axes.get_ylabel() for axes in panels] == [
        'accuracy (%), high is good',
        'loss, low is good',
    ]
    assert labels(figure()) == ['no_prune', 'random', 'magnitude', 'acdc']
    bars = {bar.get_label(): bar.lines[0] for bar in panels[0].containers}
    np.testing.assert_allclose(bars['random'].get_ydata(), [90.5, 81.0])
    (dense,) = [line for line in panels[0].lines if line.get_label() == 'no_prune']
    np.testing.assert_allclose(dense.get_ydata(), [98.5, 98.5])
    assert [tick.get_text() for tick in panels[0].get_xticklabels()] == ['80', '95']


def test_runs_that_diverged_are_left_out(tmp_path, figure):
    nan, inf = float('nan'), float('inf')
    losses = {('rigl', 0.5): [1.0], ('rigl', 0.8): [inf, 1.0], ('rigl', 0.9): [3.0]}
    others = {('set', 0.8): [nan], ('no_prune', 0.0): [inf, 1.0]}
    plot_metric_against_sparsity(
        make_cells(losses | others, metric='loss', better='low'), tmp_path / 'a.png'
    )
    assert labels(figure()) == ['rigl']
    np.testing.assert_array_equal(figure().axes[0].containers[0].lines[0].get_ydata(), [1, 3])


def test_layers_have_a_row_for_each_sparsity_and_a_column_for_each_algorithm(tmp_path, figure):
    shares = enumerate([0.6, 0.8])
    own = [make_cell(seed=s, layers={'a/kernel': share, 'b/kernel': 1.0}) for s, share in shares]
    own += [
        make_cell('rigl', 0.8, layers={'a/kernel': 0.7}),
        make_cell('magnitude', 0.95, layers={'a/kernel': 0.9}),
    ]
    plot_layer_sparsity([*own, make_cell('no_prune', 0.0)], tmp_path / 'a.png')
    panels = figure().axes
    titles = ['magnitude', 'rigl', 'magnitude', 'rigl: not run']
    assert [axes.get_title() for axes in panels] == titles
    widths = [[round(bar.get_width()) for bar in axes.patches] for axes in panels]
    assert widths == [[70, 100], [70, 0], [90, 0], [0, 0]]
    assert [tick.get_text() for tick in panels[0].get_yticklabels()] == ['a/kernel', 'b/kernel']


ONLY_DENSE = [make_cell('no_prune', 0.0)]
REFUSED = [
    (plot_metric_against_sparsity, BOTH, 'plot.gif', r'cannot write .*plot.gif: .* end in .png or'),
    (plot_layer_sparsity, BOTH, 'plot', 'must end in .png or .pdf or .svg'),
    (plot_metric_against_sparsity, ONLY_DENSE, 'a.png', 'only of the dense baseline'),
    (plot_layer_sparsity, [make_cell(layers={}), *ONLY_DENSE], 'a.png', 'that names its layers'),
]


@pytest.mark.parametrize(('draw', 'cells', 'name', 'message'), REFUSED)
def test_errors_come_before_any_file(tmp_path, draw, cells, name, message):
    with pytest.raises(ValueError, match=message):
        draw(cells, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(ImportError, match=r"pip install 'jaxpruner\[plot\]'"):
        plot_layer_sparsity(BOTH, tmp_path / 'a.png')
