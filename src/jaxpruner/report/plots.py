"""Results as plots: the metric against the sparsity, and the sparsity of each layer. Needs matplotlib."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxpruner.report import figures, metric_panels
from jaxpruner.report.experiments import DENSE, Experiment, algorithms_of, group_cells
from jaxpruner.report.figures import INK
from jaxpruner.report.results import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR_HEIGHT = 0.17  # inches a layer
_LETTER_WIDTH = 0.075  # inches a letter of a panel's title
_MOST_PANELS = 9  # in a row
_LEGEND_LINE = 0.22  # inches


def plot_metric_against_sparsity(cells: Iterable[Cell], path: Path) -> None:
    """Draws the metric over the sparsity: a line for each algorithm, a panel for each workload.

    Bands and bars are one standard deviation over seeds. The dense baseline is a horizontal line. Means that are not
    finite, because a run diverged, are left out. Means that are far worse than all others are named at the edge.

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
    path = figures.check_ending(path, figures.IMAGE_ENDINGS)
    experiments = [experiment for experiment in group_cells(cells) if experiment.sparsities]
    if not experiments:
        raise ValueError('no cell of a sparse algorithm to draw, only of the dense baseline')
    drawn_cells = []
    for experiment in experiments:
        drawn_cells += experiment.cells
    names = algorithms_of(drawn_cells)
    columns = min(len(experiments), 2)
    rows = math.ceil(len(experiments) / columns)
    legend_height = _LEGEND_LINE * (len(names) + 1)
    height = max(3.8 * rows, legend_height)
    figure = figures.new_figure(5 * columns + 1.8, height)
    panels = figures.make_panels(figure, len(experiments), columns)
    styles = figures.styles_of(names)
    handles: dict[str, Any] = {}
    for axes, experiment in zip(panels, experiments, strict=True):
        metric_panels.draw(axes, experiment, styles)
        own_handles, labels = axes.get_legend_handles_labels()
        for handle, label in zip(own_handles, labels, strict=True):
            handles.setdefault(label, handle)
    labels = [name for name in names if name in handles]
    figure.legend(
        [handles[label] for label in labels],
        labels,
        loc='outside right upper',
        frameon=False,
    )
    figures.save(figure, path)


def plot_layer_sparsity(cells: Iterable[Cell], path: Path) -> None:
    """Draws the sparsity of each layer as bars: a panel for each algorithm, a row of panels for each sparsity.

    Bars are means over seeds. The dashed line is the sparsity asked for.

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
    path = figures.check_ending(path, figures.IMAGE_ENDINGS)
    sparse_cells = [cell for cell in cells if cell.layers and cell.algorithm != DENSE]
    if not sparse_cells:
        raise ValueError('no cell of a sparse algorithm that names its layers')
    names = algorithms_of(sparse_cells)
    columns = min(len(names), _MOST_PANELS)
    rows = math.ceil(len(names) / columns)
    blocks = []
    for experiment in group_cells(sparse_cells):
        layers = _layer_names(experiment)
        panel_height = _BAR_HEIGHT * len(layers) + 0.5
        height = rows * panel_height + 0.5
        for sparsity in experiment.sparsities:
            blocks.append(_LayerBlock(experiment, sparsity, layers, height))
    heights = [block.height for block in blocks]
    longest_name = max(map(len, names))
    panel_width = max(1.35, _LETTER_WIDTH * longest_name)
    width = 2.4 + panel_width * columns
    figure = figures.new_figure(width, sum(heights) + 0.3)
    grid = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=heights)
    subfigures = grid[:, 0]
    styles = figures.styles_of(names)
    for subfigure, block in zip(subfigures, blocks, strict=True):
        percent = 100 * block.sparsity
        label = f'{block.experiment.label}, {percent:.4g}% asked for (dashed)'
        subfigure.suptitle(label, x=0.01, ha='left', fontsize=11, color=INK)
        subfigure.supxlabel('sparsity of the layer (%), mean over seeds', fontsize=9, color=INK)
        panels = figures.make_panels(subfigure, len(names), columns, sharey=True)
        for axes, name in zip(panels, names, strict=True):
            _draw_layers(axes, block, name, styles[name]['color'])
            axes.set_title(name, fontsize=9, color=INK)
    figures.save(figure, path)


class _LayerBlock(NamedTuple):
    """The panels of one workload at one sparsity."""

    experiment: Experiment
    sparsity: float
    layers: list[str]
    height: float  # inches


def _layer_names(experiment: Experiment) -> list[str]:
    names: dict[str, None] = {}
    for cell in experiment.cells:
        names |= dict.fromkeys(cell.layers)
    return list(names)


def _draw_layers(axes: 'Axes', block: _LayerBlock, algorithm: str, color: str) -> None:
    cells = block.experiment.select(algorithm, block.sparsity)
    for row, name in enumerate(block.layers):
        sparsities = []
        for cell in cells:
            if name in cell.layers:
                sparsities.append(cell.layers[name])
        if sparsities:
            percent = 100 * float(np.mean(sparsities))
            axes.barh(row, percent, height=0.75, color=color)
    count = len(block.layers)
    if not cells:
        middle = (count - 1) / 2
        axes.text(50, middle, 'not run', ha='center', va='center', color='grey', fontsize=8)
    axes.axvline(100 * block.sparsity, color=INK, ls='--', lw=0.8)
    axes.set_yticks(range(count), block.layers, fontsize=8)
    axes.set_ylim(count - 0.4, -0.6)  # the first layer on top
    axes.set_xlim(0, 102)
    axes.set_xticks([0, 50, 100], ['0', '50', '100'], fontsize=8)
    figures.clean(axes, 'x')
