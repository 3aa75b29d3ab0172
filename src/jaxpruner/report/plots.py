"""Results as plots: the metric against the sparsity, and the sparsity of each layer. Needs matplotlib.

No display is needed, and nothing of matplotlib's global state is touched.
"""

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpruner.report import experiments as experiments_lib
from jaxpruner.report.results import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = '#222222'
_GRID = '#dddddd'
# Paul Tol's 'muted' colours, which differ for colour-blind eyes, too; marks tell them apart in grey.
_COLORS = '#332288 #cc6677 #117733 #999933 #88ccee #882255 #44aa99 #aa4499 #ddaa33'.split()
_MARKS = 'osD^vPX*h'
_IMAGE_ENDINGS = ('.png', '.pdf', '.svg')
_BAR_HEIGHT = 0.17  # inches a layer


def plot_metric_against_sparsity(cells: Iterable[Cell], path: Path) -> None:
    """Draws the metric over the sparsity: a line for each algorithm, a panel for each workload.

    Bands and bars are one standard deviation over seeds; the dense baseline is a horizontal line.

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
    path = check_ending(path, _IMAGE_ENDINGS)
    experiments = [experiment for experiment in experiments_lib.group_cells(cells) if experiment.sparsities]
    if not experiments:
        raise ValueError('no cell of a sparse algorithm to draw, only of the dense baseline')
    names = experiments_lib.in_order(name for experiment in experiments for name in experiment.algorithms)
    styles = _styles(names)
    columns = min(len(experiments), 2)
    rows = -(-len(experiments) // columns)
    figure = new_figure(5 * columns + 1.8, 3.8 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, experiment in zip(panels, experiments, strict=False):
        _draw_experiment(axes, experiment, styles)
    for axes in list(panels)[len(experiments) :]:
        axes.axis('off')
    handles = {}
    for axes in figure.axes:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    shown = [name for name in names if name in handles]
    figure.legend([handles[name] for name in shown], shown, loc='outside right upper', frameon=False)
    replace_whole(path, lambda beside: figure.savefig(beside, dpi=150))


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
    path = check_ending(path, _IMAGE_ENDINGS)
    layers = [cell for cell in cells if cell.layers and cell.algorithm != experiments_lib.DENSE]
    if not layers:
        raise ValueError('no cell of a sparse algorithm that names its layers')
    experiments = experiments_lib.group_cells(layers)
    names = experiments_lib.in_order(cell.algorithm for cell in layers)
    styles = _styles(names)
    places = [(experiment, sparsity) for experiment in experiments for sparsity in experiment.sparsities]
    heights = [_BAR_HEIGHT * len(_layer_names(experiment)) + 1 for experiment, _ in places]
    figure = new_figure(2.4 + 1.35 * len(names), sum(heights) + 0.3)
    blocks = figure.subfigures(len(places), 1, squeeze=False, height_ratios=heights)[:, 0]
    for block, (experiment, sparsity) in zip(blocks, places, strict=True):
        label = f'{experiment.label}, {100 * sparsity:.4g}% asked for (dashed)'
        block.suptitle(label, x=0.01, ha='left', fontsize=11, color=INK)
        block.supxlabel('sparsity of the layer (%), mean over seeds', fontsize=9, color=INK)
        for axes, name in zip(block.subplots(1, len(names), squeeze=False, sharey=True)[0], names, strict=True):
            _draw_layers(axes, experiment, name, sparsity, styles[name]['color'])
            axes.set_title(name, fontsize=9, color=INK)
    replace_whole(path, lambda beside: figure.savefig(beside, dpi=150))


def check_ending(path: Path, endings: tuple[str, ...]) -> Path:
    """Returns the path of an image if its ending says a format that can be written.

    Raises:
      ValueError: it does not.

    >>> check_ending(Path('masks.gif'), ('.gif',)).name
    'masks.gif'
    """
    if Path(path).suffix not in endings:
        raise ValueError(f'cannot write {path}: its name must end in {" or ".join(endings)}')
    return Path(path)


def new_figure(width: float, height: float) -> 'Figure':
    """Returns an empty figure of a size in inches, made without matplotlib's global state.

    Raises:
      ImportError: matplotlib is not installed.

    >>> new_figure(4, 3).axes
    []
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'jaxpruner[plot]'") from error
    return Figure(figsize=(width, height), layout='constrained')


def replace_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Has a file written beside its place and renamed, so that nobody meets half of it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_whole(Path(folder, 'a.txt'), lambda beside: beside.write_text('whole'))
    ...     Path(folder, 'a.txt').read_text()
    'whole'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f'.new{path.suffix}')  # the ending says the format
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour and mark for each algorithm, the same in every plot for those of the original's table."""
    known = [name for name in experiments_lib.ALGORITHM_ORDER if name != experiments_lib.DENSE]
    others = [name for name in names if name not in experiments_lib.ALGORITHM_ORDER]
    styles = {experiments_lib.DENSE: {'color': INK, 'marker': ''}}
    for number, name in enumerate(known + others):
        style = {'color': _COLORS[number % len(_COLORS)], 'marker': _MARKS[number % len(_MARKS)]}
        # Beyond the colours there are, lines differ.
        styles[name] = style | {'linestyle': ('-', '--', ':')[number // len(_COLORS) % 3]}
    return styles


def _draw_experiment(axes: 'Axes', experiment: experiments_lib.Experiment, styles: dict[str, dict[str, Any]]) -> None:
    sparsities = experiment.sparsities
    names = [name for name in experiment.algorithms if name != experiments_lib.DENSE]
    for number, name in enumerate(names):
        points = [(s, summary) for s in sparsities if (summary := experiment.summarize(name, s))]
        xs = np.array([_position(sparsity) for sparsity, _ in points])
        means = np.array([experiment.factor * summary.mean for _, summary in points])
        deviations = np.array([experiment.factor * (summary.deviation or 0.0) for _, summary in points])
        if len(sparsities) == 1:  # no lines to follow: side by side
            xs = xs + number - (len(names) - 1) / 2
            marks: dict[str, Any] = styles[name] | {'linestyle': ''}
            axes.errorbar(xs, means, deviations, label=name, capsize=3, ms=6, **marks)
        else:
            axes.plot(xs, means, label=name, ms=5, **styles[name])
            color = styles[name]['color']
            axes.fill_between(xs, means - deviations, means + deviations, color=color, alpha=0.15, lw=0)
    dense = experiment.summarize(experiments_lib.DENSE, 0.0)
    if dense:
        mean, deviation = experiment.factor * dense.mean, experiment.factor * (dense.deviation or 0.0)
        axes.axhline(mean, color=INK, ls='--', lw=1.2, label=experiments_lib.DENSE, zorder=1)
        axes.axhspan(mean - deviation, mean + deviation, color=INK, alpha=0.08, lw=0, zorder=0)
    axes.set_xticks([_position(sparsity) for sparsity in sparsities], [f'{100 * s:.4g}' for s in sparsities])
    axes.set_xlabel('sparsity (%)')
    axes.set_ylabel(f'{experiment.axis}, {experiment.better} is good')
    axes.set_title(experiment.label, loc='left', fontsize=11, color=INK)
    _clean(axes, 'y')


def _position(sparsity: float) -> float:
    """Where a sparsity stands on its axis: each halving of what is kept is as long as the last."""
    return -math.log2(max(1 - sparsity, 1e-6))


def _layer_names(experiment: experiments_lib.Experiment) -> list[str]:
    return list(dict.fromkeys(name for cell in experiment.cells for name in cell.layers))


def _draw_layers(
    axes: 'Axes', experiment: experiments_lib.Experiment, algorithm: str, sparsity: float, color: str
) -> None:
    cells, names = experiment.select(algorithm, sparsity), _layer_names(experiment)
    values = [[100 * cell.layers[name] for cell in cells if name in cell.layers] for name in names]
    for row, of_seeds in enumerate(values):
        if of_seeds:
            axes.barh(row, float(np.mean(of_seeds)), height=0.75, color=color)
    if not cells:
        axes.text(50, (len(names) - 1) / 2, 'not run', ha='center', va='center', color='grey', fontsize=8)
    axes.axvline(100 * sparsity, color=INK, ls='--', lw=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)  # the first layer on top
    axes.set_xlim(0, 102)
    axes.set_xticks([0, 50, 100], ['0', '50', '100'], fontsize=8)
    _clean(axes, 'x')


def _clean(axes: 'Axes', grid: Any) -> None:
    axes.grid(axis=grid, color=_GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)
