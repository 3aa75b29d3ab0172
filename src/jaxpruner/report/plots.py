"""Results as plots: the metric against the sparsity, and the sparsity of each layer. Needs matplotlib."""

import collections
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxpruner.core import atomic_files
from jaxpruner.report import experiments as experiments_lib
from jaxpruner.report import figures
from jaxpruner.report.figures import INK
from jaxpruner.report.results import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_IMAGE_ENDINGS = ('.png', '.pdf', '.svg')
_BAR_HEIGHT = 0.17  # inches a layer
_LETTER_WIDTH = 0.075  # inches a letter of a panel's title
_MOST_PANELS = 9  # in a row
_LEGEND_LINE = 0.22  # inches
_TEXT_HEIGHT = 0.05  # of a panel
_LABEL_WIDTH = 0.08  # of the label of a sparsity, as a share of its axis


def plot_metric_against_sparsity(cells: Iterable[Cell], path: Path) -> None:
    """Draws the metric over the sparsity: a line for each algorithm, a panel for each workload.

    Bands and bars are one standard deviation over seeds; the dense baseline is a horizontal line. Means that are not
    finite, since a run diverged, are left out; those that are far worse than all others are named at the edge.

    Args:
      cells: of any workloads.
      path: the image to write, .png, .pdf or .svg.

    Raises:
      ValueError: there is no cell of a sparse algorithm, or the path has another ending.
      ImportError: matplotlib is not installed.

    >>> import tempfile
    >>> cell = Cell('resnet', 'digits', 'rigl', 0.8, 0, 'accuracy', 'high', 0.97, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot_metric_against_sparsity([cell], Path(folder, 'sparsity.png'))
    ...     [path.name for path in Path(folder).iterdir()]
    ['sparsity.png']
    """
    path = figures.check_ending(path, _IMAGE_ENDINGS)
    experiments = [
        experiment for experiment in experiments_lib.group_cells(cells) if experiment.sparsities
    ]
    if not experiments:
        raise ValueError('no cell of a sparse algorithm to draw, only of the dense baseline')
    names = experiments_lib.in_order(
        name for experiment in experiments for name in experiment.algorithms
    )
    styles = figures.styles_of(names)
    columns = min(len(experiments), 2)
    rows = -(-len(experiments) // columns)
    figure = figures.new_figure(5 * columns + 1.8, max(3.8 * rows, _LEGEND_LINE * (len(names) + 1)))
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, experiment in zip(panels, experiments, strict=False):
        _draw_experiment(axes, experiment, styles)
    for axes in panels[len(experiments) :]:
        axes.axis('off')
    handles: dict[str, Any] = {}
    for axes in panels:
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)) | handles
    shown = [name for name in names if name in handles]
    figure.legend(
        [handles[name] for name in shown], shown, loc='outside right upper', frameon=False
    )
    atomic_files.replace_file(
        path, lambda temporary: figure.savefig(temporary, dpi=150), keeps_ending=True
    )


def plot_layer_sparsity(cells: Iterable[Cell], path: Path) -> None:
    """Draws the sparsity of each layer as bars: a panel for each algorithm, a row of panels for each sparsity.

    Means over seeds; the dashed line is the sparsity asked for.

    Args:
      cells: of any workloads; dense ones are left out.
      path: the image to write, .png, .pdf or .svg.

    Raises:
      ValueError: no cell names its layers, or the path has another ending.
      ImportError: matplotlib is not installed.

    >>> import tempfile
    >>> layers = {'conv/kernel': 0.7, 'head/kernel': 0.9}
    >>> cell = Cell('vit', 'digits', 'rigl', 0.8, 0, 'accuracy', 'high', 0.9, {}, 0.8, layers, 1000, 12.3, '5d41402a')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot_layer_sparsity([cell], Path(folder, 'layers.png'))
    ...     [path.name for path in Path(folder).iterdir()]
    ['layers.png']
    """
    path = figures.check_ending(path, _IMAGE_ENDINGS)
    layers = [cell for cell in cells if cell.layers and cell.algorithm != experiments_lib.DENSE]
    if not layers:
        raise ValueError('no cell of a sparse algorithm that names its layers')
    experiments = experiments_lib.group_cells(layers)
    names = experiments_lib.in_order(cell.algorithm for cell in layers)
    styles = figures.styles_of(names)
    places = [
        (experiment, sparsity) for experiment in experiments for sparsity in experiment.sparsities
    ]
    columns, rows = min(len(names), _MOST_PANELS), -(-len(names) // _MOST_PANELS)
    heights = [
        rows * (_BAR_HEIGHT * len(_layer_names(experiment)) + 0.5) + 0.5 for experiment, _ in places
    ]
    width = max(1.35, _LETTER_WIDTH * max(map(len, names)))
    figure = figures.new_figure(2.4 + width * columns, sum(heights) + 0.3)
    blocks = figure.subfigures(len(places), 1, squeeze=False, height_ratios=heights)[:, 0]
    for block, (experiment, sparsity) in zip(blocks, places, strict=True):
        label = f'{experiment.label}, {100 * sparsity:.4g}% asked for (dashed)'
        block.suptitle(label, x=0.01, ha='left', fontsize=11, color=INK)
        block.supxlabel('sparsity of the layer (%), mean over seeds', fontsize=9, color=INK)
        panels = list(block.subplots(rows, columns, squeeze=False, sharey=True).flat)
        for axes, name in zip(panels, names, strict=False):
            _draw_layers(axes, experiment, name, sparsity, styles[name]['color'])
            axes.set_title(name, fontsize=9, color=INK)
        for axes in panels[len(names) :]:
            axes.axis('off')
    atomic_files.replace_file(
        path, lambda temporary: figure.savefig(temporary, dpi=150), keeps_ending=True
    )


class _Series(NamedTuple):
    """What one algorithm reached: a mean and deviation for each place on the axis of sparsities, NaN if not finite."""

    name: str
    xs: np.ndarray
    means: np.ndarray
    deviations: np.ndarray


def _draw_experiment(
    axes: 'Axes', experiment: experiments_lib.Experiment, styles: dict[str, dict[str, Any]]
) -> None:
    positions = _positions(experiment.sparsities)
    is_single = len(positions) == 1
    algorithms = [name for name in experiment.algorithms if name != experiments_lib.DENSE]
    series = [_series(experiment, name, positions) for name in algorithms]
    for number, (name, xs, means, deviations) in enumerate(series):
        if is_single:  # no lines to follow: side by side
            xs += number
        if np.isnan(means).all():
            continue
        if is_single:
            marks: dict[str, Any] = styles[name] | {'linestyle': ''}
            axes.errorbar(xs, means, deviations, label=name, capsize=3, ms=6, **marks)
        else:
            axes.plot(xs, means, label=name, ms=5, **styles[name])
            color = styles[name]['color']
            axes.fill_between(
                xs, means - deviations, means + deviations, color=color, alpha=0.15, lw=0
            )
    dense = _series(experiment, experiments_lib.DENSE, {0.0: 0.0})
    for mean, deviation in zip(dense.means, dense.deviations, strict=True):
        if math.isfinite(mean):
            axes.axhline(mean, color=INK, ls='--', lw=1.2, label=experiments_lib.DENSE, zorder=1)
            axes.axhspan(mean - deviation, mean + deviation, color=INK, alpha=0.08, lw=0, zorder=0)
    _cut_far_outliers(axes, experiment, [*series, dense], styles)
    if is_single:
        axes.set_xticks([])
        axes.set_xlabel(f'sparsity {100 * experiment.sparsities[0]:.4g}%')
    else:
        axes.set_xticks(list(positions.values()), _tick_labels(positions))
        axes.set_xlabel('sparsity (%)')
    axes.set_ylabel(f'{experiment.axis}, {experiment.better} is good')
    axes.set_title(experiment.label, loc='left', fontsize=11, color=INK)
    figures.clean(axes, 'y')


def _series(
    experiment: experiments_lib.Experiment, name: str, positions: dict[float, float]
) -> _Series:
    points = [
        (x, summary)
        for sparsity, x in positions.items()
        if (summary := experiment.summarize(name, sparsity))
    ]
    means = np.array([experiment.factor * summary.mean for _, summary in points])
    means[~np.isfinite(means)] = np.nan
    deviations = np.array([experiment.factor * (summary.deviation or 0.0) for _, summary in points])
    return _Series(name, np.array([x for x, _ in points]), means, deviations)


def _cut_far_outliers(
    axes: 'Axes',
    experiment: experiments_lib.Experiment,
    series: list[_Series],
    styles: dict[str, dict[str, Any]],
) -> None:
    """Ends the axis before means that are far worse than all others, which they would squeeze flat, and names them."""
    sign = 1 if experiment.better == 'high' else -1  # times the metric: more is better
    means = sign * np.concatenate([one.means for one in series])
    deviations = np.concatenate([one.deviations for one in series])
    shown = _range_without_outliers(means[~np.isnan(means)], deviations[~np.isnan(means)])
    if shown is None:
        return
    worst, best = shown
    far = [
        (x, name, y)
        for name, xs, ys, _ in series
        for x, y in zip(xs, ys, strict=True)
        if sign * y < worst
    ]
    left, right = axes.get_xlim()
    lines: collections.Counter[float] = collections.Counter()  # of text at each place
    for x, name, y in far:
        height, share = 0.02 + _TEXT_HEIGHT * lines[x], (x - left) / (right - left)
        lines[x] += 1
        axes.text(
            x,
            height if sign > 0 else 1 - height,
            f'{name} {y:.4g} {"↓" if sign > 0 else "↑"}',
            transform=axes.get_xaxis_transform(),
            ha='left' if share < 1 / 3 else 'right' if share > 2 / 3 else 'center',
            va='bottom' if sign > 0 else 'top',
            fontsize=8,
            color=styles[name]['color'],
        )
    margin, text = 0.05 * (best - worst), _TEXT_HEIGHT * max(lines.values()) * (best - worst)
    axes.set_ylim(*sorted((sign * (worst - margin - text), sign * (best + margin))))


def _range_without_outliers(
    means: np.ndarray, deviations: np.ndarray
) -> tuple[float, float] | None:
    """The range to show where some means, of which more is better, lie far below the others; None to show all.

    Far is beyond Tukey's outer fence: three times the distance between the quartiles from the lower one.
    """
    if not means.size:
        return None
    lower, upper = np.quantile(means, [0.25, 0.75])
    near = means >= lower - 3 * (upper - lower)
    worst, best = (means - deviations)[near].min(), (means + deviations)[near].max()
    is_worth_it = worst < best and worst - means.min() >= best - worst
    return (worst, best) if is_worth_it and not near.all() else None


def _positions(sparsities: Sequence[float]) -> dict[float, float]:
    """Where sparsities stand on their axis: each halving of what is kept is as long as the last, and so is the end."""
    positions = {sparsity: -math.log2(1 - sparsity) for sparsity in sparsities if sparsity < 1}
    end = max(positions.values(), default=0.0) + 1
    return {sparsity: positions.get(sparsity, end) for sparsity in sparsities}


def _tick_labels(positions: dict[float, float]) -> list[str]:
    """The sparsities in per cent, without those that would lie over the one before."""
    room = _LABEL_WIDTH * (max(positions.values()) - min(positions.values()))
    labels, last = [], -math.inf
    for sparsity, position in positions.items():
        fits = position - last >= room
        labels.append(f'{100 * sparsity:.4g}' if fits else '')
        last = position if fits else last
    return labels


def _layer_names(experiment: experiments_lib.Experiment) -> list[str]:
    return list(dict.fromkeys(name for cell in experiment.cells for name in cell.layers))


def _draw_layers(
    axes: 'Axes',
    experiment: experiments_lib.Experiment,
    algorithm: str,
    sparsity: float,
    color: str,
) -> None:
    cells, names = experiment.select(algorithm, sparsity), _layer_names(experiment)
    values = [[100 * cell.layers[name] for cell in cells if name in cell.layers] for name in names]
    for row, of_seeds in enumerate(values):
        if of_seeds:
            axes.barh(row, float(np.mean(of_seeds)), height=0.75, color=color)
    if not cells:
        axes.text(
            50, (len(names) - 1) / 2, 'not run', ha='center', va='center', color='grey', fontsize=8
        )
    axes.axvline(100 * sparsity, color=INK, ls='--', lw=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)  # the first layer on top
    axes.set_xlim(0, 102)
    axes.set_xticks([0, 50, 100], ['0', '50', '100'], fontsize=8)
    figures.clean(axes, 'x')
