"""Results as plots: the metric against the sparsity, and the sparsity of each layer. Needs matplotlib."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpruner.report import figures
from jaxpruner.report.experiments import DENSE, Experiment, algorithms_of, group_cells
from jaxpruner.report.figures import INK
from jaxpruner.report.results import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR_HEIGHT = 0.17  # inches a layer
_LETTER_WIDTH = 0.075  # inches


def plot_metric_against_sparsity(cells: Iterable[Cell], path: Path) -> None:
    """Draws the metric over the sparsity: a line for each algorithm, a panel for each workload.

    Bars are one standard deviation over seeds. The dense baseline is a horizontal line. Means that are not finite,
    because a run diverged, are left out.

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
    figures.check_ending(path)
    experiments = [experiment for experiment in group_cells(cells) if experiment.sparsities]
    if not experiments:
        raise ValueError('no cell of a sparse algorithm to draw, only of the dense baseline')
    names = algorithms_of(cell for experiment in experiments for cell in experiment.cells)
    columns = min(len(experiments), 2)
    height = max(3.8 * math.ceil(len(experiments) / columns), 0.22 * (len(names) + 1))
    figure = figures.new_figure(5 * columns + 1.8, height)
    handles: dict[str, Any] = {}
    for axes, experiment in zip(
        figures.make_panels(figure, len(experiments), columns), experiments, strict=True
    ):
        draw_metric(axes, experiment, figures.styles_of(names))
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    shown = [name for name in names if name in handles]
    figure.legend(
        [handles[name] for name in shown], shown, loc='outside right upper', frameon=False
    )
    figures.save(figure, path)


def draw_metric(axes: 'Axes', experiment: Experiment, styles: dict[str, dict[str, Any]]) -> None:
    """Draws the algorithms of a workload over the sparsity; `styles` gives each a colour, mark and line."""
    factor = experiment.factor
    for number, name in enumerate(experiment.algorithms):
        points = []
        for position, sparsity in enumerate(experiment.sparsities):
            one = experiment.summarize(name, sparsity)
            if one is not None and math.isfinite(one.mean):
                points.append((position, factor * one.mean, factor * (one.deviation or 0)))
        if not points:
            continue
        positions, means, deviations = np.array(points).T
        if name == DENSE:
            axes.axhline(means[0], color=INK, ls='--', lw=1.2, label=DENSE, zorder=1)
        else:  # side by side, so that no bar hides another
            xs = positions + 0.02 * (number - len(experiment.algorithms) / 2)
            axes.errorbar(xs, means, deviations, label=name, capsize=3, ms=5, **styles[name])
    percents = [f'{100 * sparsity:.4g}' for sparsity in experiment.sparsities]
    axes.set_xticks(range(len(percents)), percents)
    axes.set_xlabel('sparsity (%)')
    axes.set_ylabel(f'{experiment.axis}, {experiment.better} is good')
    axes.set_title(experiment.label, loc='left', fontsize=11, color=INK)
    figures.clean(axes, 'y')


def plot_layer_sparsity(cells: Iterable[Cell], path: Path) -> None:
    """Draws the sparsity of each layer as bars: a panel for each algorithm, a row of panels for each sparsity.

    Bars are means over seeds. The marks are the sparsity asked for.

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
    figures.check_ending(path)
    sparse_cells = [cell for cell in cells if cell.layers and cell.algorithm != DENSE]
    if not sparse_cells:
        raise ValueError('no cell of a sparse algorithm that names its layers')
    names = algorithms_of(sparse_cells)
    blocks = [(one, sparsity) for one in group_cells(sparse_cells) for sparsity in one.sparsities]
    layers_of = [
        list(dict.fromkeys(layer for cell in one.cells for layer in cell.layers))
        for one, _ in blocks
    ]
    heights = [_BAR_HEIGHT * len(layers) + 0.9 for layers in layers_of]
    panel_width = max(1.35, _LETTER_WIDTH * max(map(len, names)))
    figure = figures.new_figure(2.4 + panel_width * len(names), sum(heights) + 0.3)
    count = len(blocks) * len(names)
    panels = figures.make_panels(figure, count, len(names), sharey='row', height_ratios=heights)
    styles = figures.styles_of(names)
    for row, ((one, sparsity), layers) in enumerate(zip(blocks, layers_of, strict=True)):
        row_of_panels = panels[row * len(names) : (row + 1) * len(names)]
        row_of_panels[0].set_ylabel(f'{one.label}\n{100 * sparsity:.4g}% asked for', color=INK)
        for axes, name in zip(row_of_panels, names, strict=True):
            selected = one.select(name, sparsity)
            means = []
            for layer in layers:
                found = [cell.layers[layer] for cell in selected if layer in cell.layers]
                means.append(float(np.mean(found)) if found else 0.0)
            targets = [sparsity] * len(layers)
            figures.draw_layers(axes, layers, means, targets, styles[name]['color'])
            axes.set_title(name if selected else f'{name}: not run', fontsize=9, color=INK)
    figure.supxlabel('sparsity of the layer (%), mean over seeds', fontsize=9, color=INK)
    figures.save(figure, path)
