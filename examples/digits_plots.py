"""The two plots of the digits demo: accuracy by algorithm, and the masks of the first layer."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use('Agg')  # files only: works without a display

import matplotlib.pyplot as plt
import numpy as np

from digits_report import Result

ACCURACY_NAME = 'accuracy.png'
MASKS_NAME = 'first_layer_masks.png'
INK = '#222222'
FAMILY_COLORS = {
    'dense': INK,
    'pruned while training': '#1b6ca8',
    'straight-through': '#c8553d',
    'sparse from the start': '#3a8f5c',
    'alternating': '#8e5ea2',
    'N:M and blocks': '#b8860b',
}
SHOWN_RANGE = 0.15  # the accuracy axis reaches this far below the best
PANEL_COLUMNS = 6
FILTER_GAP = 1  # empty pixels between the filters of a panel


def plot_accuracy(results: Sequence[Result], dataset_name: str, folder: Path) -> Path:
    """Writes the mean accuracy of each algorithm, best on top, with its seeds and their standard deviation."""
    ranked = sorted(results, key=lambda result: result.mean)
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.34 * len(ranked)), layout='constrained')
    floor = ranked[-1].mean - SHOWN_RANGE
    for row, result in enumerate(ranked):
        color = FAMILY_COLORS[result.family]
        if result.mean < floor:
            # One algorithm at chance would squeeze all others into a corner: it is named at the edge.
            axes.plot(100 * floor + 0.3, row, '<', ms=7, color=color)
            axes.text(100 * floor + 0.6, row, f'{100 * result.mean:.1f} %', va='center', color=color)
            continue
        axes.errorbar(100 * result.mean, row, xerr=100 * result.deviation, fmt='o', ms=6, capsize=4, color=color)
        axes.plot(100 * np.array(result.accuracies), [row] * len(result.accuracies), '|', ms=10, color=color, alpha=0.5)
    if ranked[0].mean < floor:
        axes.set_xlim(left=100 * floor)  # only now, when all others have set the right end
    dense = next((result for result in results if result.family == 'dense'), None)
    if dense:
        axes.axvline(100 * dense.mean, color=INK, lw=1, ls='--', zorder=0)
    axes.set_yticks(range(len(ranked)), [f'{result.label}  ({result.asked})' for result in ranked])
    axes.set_ylim(-0.6, len(ranked) - 0.4)
    axes.set_xlabel(f'test accuracy on {dataset_name} (%)')
    axes.grid(axis='x', color='#dddddd', lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)
    _add_legend(axes, results)
    axes.set_title(_accuracy_title(results, dense), loc='left', fontsize=11)
    return _save(figure, folder / ACCURACY_NAME)


def plot_first_layer_masks(results: Sequence[Result], folder: Path) -> Path:
    """Writes one panel per algorithm: the 3x3 filters of the first layer, dark where a weight is kept."""
    columns = min(PANEL_COLUMNS, len(results))
    rows = math.ceil(len(results) / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(2 * columns + 0.4, 2.25 * rows + 0.7), squeeze=False, layout='constrained'
    )
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    for axes in grid.flat:
        axes.axis('off')
    for axes, result in zip(grid.flat, results, strict=False):
        mask = np.array(result.first_layer_mask)
        # NaN shows as the white of the page, which keeps the filters apart.
        axes.imshow(tile_filters(mask), cmap=matplotlib.colors.ListedColormap(['#e3e6ea', '#173f5f']), vmin=0, vmax=1)
        axes.set_title(f'{result.label}\n{int(mask.sum())} of {mask.size} kept', fontsize=9, color=INK)
    filters = np.shape(results[0].first_layer_mask)[-1]
    figure.suptitle(
        f'Which weights of the first layer are left: {filters} filters of 3x3, dark = kept (first seed)', fontsize=11
    )
    return _save(figure, folder / MASKS_NAME)


def tile_filters(mask: np.ndarray) -> np.ndarray:
    """Lays the filters of a [height, width, channels, filters] mask out on a nearly square grid, NaN between them."""
    height, width = mask.shape[:2]
    tiles = np.moveaxis(mask.reshape(height, width, -1), -1, 0)
    columns = math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    canvas = np.full((rows * (height + FILTER_GAP) - FILTER_GAP, columns * (width + FILTER_GAP) - FILTER_GAP), np.nan)
    for number, tile in enumerate(tiles):
        top, left = (number // columns) * (height + FILTER_GAP), (number % columns) * (width + FILTER_GAP)
        canvas[top : top + height, left : left + width] = tile
    return canvas


def _add_legend(axes: plt.Axes, results: Sequence[Result]) -> None:
    """Explains the colours and marks, outside the plotted area."""
    present = {result.family for result in results}
    for family, color in FAMILY_COLORS.items():
        if family in present:
            axes.plot([], [], 'o', ms=6, color=color, label=family)
    axes.plot([], [], '|', ms=10, color='grey', label='one seed')
    axes.plot([], [], '_', ms=14, color='grey', label='standard deviation')
    axes.plot([], [], '--', lw=1, color=INK, label='mean of dense')
    axes.legend(loc='upper left', bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)


def _accuracy_title(results: Sequence[Result], dense: Result | None) -> str:
    """Says what the plot shows, from the results themselves."""
    by_name = {result.name: result for result in results}
    if not dense or not {'magnitude', 'random'} <= set(by_name):
        return 'Accuracy by algorithm (sparsity asked in brackets)'
    magnitude, chance = (100 * (by_name[name].mean - dense.mean) for name in ('magnitude', 'random'))
    return (
        f'With {by_name["magnitude"].asked} of the weights removed accuracy changes by {magnitude:+.1f} points\n'
        f'where magnitude chose them, and by {chance:+.1f} where chance did'
    )


def _save(figure: plt.Figure, path: Path) -> Path:
    """Writes beside the file and renames, then frees the figure."""
    beside = path.with_suffix('.new.png')
    figure.savefig(beside, dpi=150)
    beside.replace(path)
    plt.close(figure)
    return path
