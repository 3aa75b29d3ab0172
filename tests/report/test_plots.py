"""Plots: what is drawn where, and how the files are written. How they look, people judge."""

import subprocess
import sys
from pathlib import Path

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
    monkeypatch.setattr(
        matplotlib.figure.Figure,
        'savefig',
        lambda f, *args, **kw: (saved.append(f), save(f, *args, **kw)),
    )
    return lambda: saved[-1]


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def overlaps(figure):
    """Pairs of visible texts and legends of a figure that lie over one another."""
    figure.draw_without_rendering()
    texts = [
        t for t in figure.findobj(matplotlib.text.Text) if t.get_visible() and t.get_text().strip()
    ]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    return [
        (a, b)
        for n, (a, first) in enumerate(boxes)
        for b, second in boxes[:n]
        if first.overlaps(second)
    ]


@pytest.mark.parametrize('ending', ['.png', '.pdf', '.svg'])
@pytest.mark.parametrize('draw', [plot_metric_against_sparsity, plot_layer_sparsity])
def test_a_file_is_written_whole(tmp_path, draw, ending):
    path = tmp_path / 'new folder' / f'plot{ending}'
    draw(BOTH, path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.stat().st_size > 1000


def test_a_panel_for_each_workload_and_a_line_for_each_algorithm(tmp_path, figure):
    plot_metric_against_sparsity(BOTH, tmp_path / 'plot.png')
    panels = figure().axes
    assert [axes.get_title('left') for axes in panels] == ['resnet (digits)', 't5 (digits)']
    assert [axes.get_ylabel() for axes in panels] == [
        'accuracy (%), high is good',
        'loss, low is good',
    ]
    assert labels(figure()) == ['no_prune', 'random', 'magnitude', 'acdc']
    lines = {line.get_label(): line for line in panels[0].lines}
    np.testing.assert_allclose(lines['random'].get_ydata(), [90.5, 81.0])
    np.testing.assert_allclose(lines['no_prune'].get_ydata(), [98.5, 98.5])
    band = next(c for c in panels[0].collections if len(c.get_paths()))
    ys = band.get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([ys.min(), ys.max()], [81 - 2**0.5, 90.5 + 0.5**0.5])
    assert [tick.get_text() for tick in panels[0].get_xticklabels()] == ['80', '95']
    assert overlaps(figure()) == []


def test_one_sparsity_stands_side_by_side(tmp_path, figure):
    plot_metric_against_sparsity(
        make_cells(VALUES | {('magnitude', 0.95): [], ('random', 0.95): [], ('acdc', 0.95): []}),
        tmp_path / 'a.png',
    )
    positions = [
        line.get_xdata()[0] for line in figure().axes[0].lines if line.get_marker() in 'os'
    ]
    assert len(set(positions)) == len(positions) == 2
    assert overlaps(figure()) == []


def test_more_algorithms_than_colours_still_differ(tmp_path, figure):
    names = [f'own_{number}' for number in range(20)]
    plot_metric_against_sparsity(
        make_cells({(name, s): [0.5] for name in names for s in (0.8, 0.9)}), tmp_path / 'a.png'
    )
    lines = figure().axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(names)


def test_own_algorithms_look_like_none_beside_them(tmp_path, figure):
    names = ['magnitude', 'wanda', 'ria', 'sparsegpt']
    plot_metric_against_sparsity(
        make_cells({(name, s): [0.5] for name in names for s in (0.5, 0.6)}), tmp_path / 'a.png'
    )
    assert len({line.get_color() for line in figure().axes[0].lines}) == len(names)


def test_the_legend_of_many_algorithms_fits(tmp_path, figure):
    names = [f'a_rather_long_own_name_{number}' for number in range(25)]
    plot_metric_against_sparsity(
        [make_cell(name, s) for name in names for s in (0.8, 0.9)], tmp_path / 'a.png'
    )
    figure().draw_without_rendering()
    legend, whole = figure().legends[0].get_window_extent(), figure().bbox
    assert whole.y0 <= legend.y0 < legend.y1 <= whole.y1
    assert whole.x0 <= legend.x0 < legend.x1 <= whole.x1


def test_places_without_a_workload_stay_empty(tmp_path, figure):
    plot_metric_against_sparsity(
        [make_cell(workload=name) for name in ('resnet', 'vit', 't5')], tmp_path / 'a.png'
    )
    assert [axes.axison for axes in figure().axes] == [True, True, True, False]


def test_sparsities_have_their_places(tmp_path, figure):
    sparsities = (0.0, 0.05, 0.5, 0.75, 1.0)
    plot_metric_against_sparsity([make_cell(sparsity=s) for s in sparsities], tmp_path / 'a.png')
    (axes,) = figure().axes
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [0, 0.074, 1, 2, 3], atol=1e-3)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ['0', '', '50', '75', '100']
    assert overlaps(figure()) == []


def test_runs_that_diverged_are_left_out(tmp_path, figure):
    nan, inf = float('nan'), float('inf')
    values = {
        ('rigl', 0.5): [1.0],
        ('rigl', 0.8): [inf, 1.0],
        ('rigl', 0.9): [3.0],
        ('set', 0.8): [nan],
    }
    dense = {('no_prune', 0.0): [inf, 1.0]}
    plot_metric_against_sparsity(
        make_cells(values | dense, metric='loss', better='low'), tmp_path / 'a.png'
    )
    assert labels(figure()) == ['rigl']
    np.testing.assert_array_equal(figure().axes[0].lines[0].get_ydata(), [1, nan, 3])
    plot_metric_against_sparsity(make_cells({('set', 0.8): [nan]}), tmp_path / 'a.png')
    assert labels(figure()) == []


@pytest.mark.parametrize('better', ['high', 'low'])
@pytest.mark.parametrize('sparsities', [(0.8,), (0.8, 0.9)])
def test_one_that_is_far_worse_is_named_at_the_edge(tmp_path, figure, better, sparsities):
    sign = 1 if better == 'high' else -1
    good = {
        (name, s): [sign * (90.0 + n - 10 * s)]
        for n, name in enumerate(('set', 'rigl', 'acdc'))
        for s in sparsities
    }
    bad = {('random', 0.8): [sign * 10.0], ('no_prune', 0.0): [sign * 93.0]}
    plot_metric_against_sparsity(
        make_cells(good | bad, metric='return', better=better), tmp_path / 'a.png'
    )
    (axes,) = figure().axes
    assert [text.get_text() for text in axes.texts] == [
        'random 10 ↓' if sign > 0 else 'random -10 ↑'
    ]
    low, high = sorted(sign * end for end in axes.get_ylim())
    assert 70 < low < 82
    assert 93 < high < 95
    assert overlaps(figure()) == []


def test_layers_have_a_row_for_each_sparsity_and_a_column_for_each_algorithm(tmp_path, figure):
    own = [
        make_cell('magnitude', 0.8, seed, layers={'a/kernel': share, 'b/kernel': 1.0})
        for seed, share in enumerate([0.6, 0.8])
    ]
    own += [
        make_cell('rigl', 0.8, layers={'a/kernel': 0.7}),
        make_cell('magnitude', 0.95, layers={'a/kernel': 0.9}),
    ]
    plot_layer_sparsity([*own, make_cell('no_prune', 0.0)], tmp_path / 'a.png')
    panels = figure().axes
    assert [axes.get_title() for axes in panels] == ['magnitude', 'rigl'] * 2
    widths = [[round(bar.get_width()) for bar in axes.patches] for axes in panels]
    assert widths == [[70, 100], [70], [90], []]
    assert [text.get_text() for text in panels[3].texts] == ['not run']
    assert [tick.get_text() for tick in panels[0].get_yticklabels()] == ['a/kernel', 'b/kernel']
    assert overlaps(figure()) == []


def test_panels_of_many_algorithms_stand_in_rows(tmp_path, figure):
    names = [f'a_rather_long_own_name_{number}' for number in range(11)]
    plot_layer_sparsity([make_cell(name) for name in names], tmp_path / 'a.png')
    assert len({axes.get_position().y0 for axes in figure().axes}) == 2
    assert [axes.get_title() for axes in figure().axes if axes.axison] == sorted(names)
    assert overlaps(figure()) == []


@pytest.mark.parametrize(
    ('draw', 'cells', 'name', 'message'),
    [
        (
            plot_metric_against_sparsity,
            BOTH,
            'plot.gif',
            r'cannot write .*plot.gif: .* end in .png or .pdf or .svg',
        ),
        (plot_layer_sparsity, BOTH, 'plot', 'must end in .png or .pdf or .svg'),
        (
            plot_metric_against_sparsity,
            [make_cell('no_prune', 0.0)],
            'a.png',
            'only of the dense baseline',
        ),
        (plot_metric_against_sparsity, [], 'a.png', 'no readable cell'),
        (
            plot_layer_sparsity,
            [make_cell('no_prune', 0.0)],
            'a.png',
            'no cell of a sparse algorithm that names its layers',
        ),
        (plot_layer_sparsity, [make_cell(layers={})], 'a.png', 'names its layers'),
    ],
)
def test_errors_come_before_any_file(tmp_path, draw, cells, name, message):
    with pytest.raises(ValueError, match=message):
        draw(cells, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(ImportError, match=r"pip install 'jaxpruner\[plot\]'"):
        plot_layer_sparsity(BOTH, tmp_path / 'a.png')


# In a process of its own, for other tests load what they like.
DRAW = """
import sys, tempfile
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy as np
from jaxpruner import report
from helpers.made_up_cells import make_cell
with tempfile.TemporaryDirectory() as folder:
    report.plot_layer_sparsity([make_cell()], Path(folder, 'a.png'))
    Path(folder, 'masks').mkdir()
    np.savez(Path(folder, 'masks', 'a.npz'), steps=np.arange(1), kernel=np.ones((1, 2, 2), np.uint8))
    report.animate_masks(Path(folder), 'a', Path(folder, 'a.gif'))
print('matplotlib.pyplot' in sys.modules)
"""


def test_no_global_state_of_matplotlib_is_touched():
    command = [sys.executable, '-c', DRAW, str(Path(__file__).resolve().parents[1])]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ['False']
