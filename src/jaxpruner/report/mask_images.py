"""Masks as images: kept weights dark, pruned ones light. Needs matplotlib."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpruner.report import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_CHANNELS = 32  # of each axis that are shown of a convolution
_MOST_PIXELS = 256  # of each side of a matrix; of a larger one, pixels show shares of kept weights
_LONGEST = 3  # ratio of the sides up to which a pixel is a square
_COLORS = ['#dfe5ec', '#173f5f']  # pruned, kept
_MOST_COLUMNS = 4  # of panels
_MOST_PANELS = 40


def plot_masks(
    masks: Any, path: Path | str | None = None, *, params: Any = None, leaves: Any = '*'
) -> 'Figure':
    """Draws masks as images, a panel for each leaf: kept weights dark, pruned ones light.

    A matrix is drawn with its first axis down. Of a convolution each filter is drawn, inputs down and outputs across,
    up to 32 of each. Of a matrix with a side above 256, a pixel is the share of a block of weights that is kept.

    Args:
      masks: an optimizer state that holds a pruner's, or a tree of masks, as `jaxpruner.prune` returns it.
      path: the image to write, .png, .pdf or .svg; `None` writes none.
      params: the parameters or their shapes, needed where masks are packed.
      leaves: names or globs of the leaves to draw, such as `'*/kernel'`.

    Returns:
      The figure, to be changed, shown or saved.

    Raises:
      ValueError: nothing is masked, a name means no leaf, masks are packed and no parameters are given, they do not lie
        within this process, there are more than 40 leaves, or the path has another ending.
      ImportError: matplotlib is not installed.

    >>> import jax.numpy as jnp, jaxpruner
    >>> params = {'dense': {'kernel': jnp.arange(128.0).reshape(8, 16), 'bias': jnp.zeros(16)}}
    >>> params, masks = jaxpruner.prune(params, algorithm='magnitude', sparsity=0.5)
    >>> print(plot_masks(masks).axes[0].get_title())
    dense/kernel
    8×16, 64 of 128 kept
    """
    if path is not None:
        path = figures.check_ending(Path(path), figures.IMAGE_ENDINGS)
    chosen = _chosen_masks(masks, params, leaves)
    side = math.ceil(math.sqrt(len(chosen)))
    columns = min(side, _MOST_COLUMNS)
    rows = math.ceil(len(chosen) / columns)
    figure = figures.new_figure(4.4 * columns, 3.8 * rows + 0.4)
    draw(figure, chosen, columns)
    percent = percent_pruned(chosen.values())
    title = f'{percent:.1f}% pruned: kept weights are dark, pruned ones light'
    figure.suptitle(title, fontsize=11, color=figures.INK)
    if path is not None:
        figures.save(figure, path)
    return figure


def percent_pruned(masks: Iterable[np.ndarray]) -> float:
    """Computes how much masks prune together.

    >>> percent_pruned([np.array([1, 0]), np.array([0, 0])])
    75.0
    """
    weights = 0
    kept = 0
    for mask in masks:
        weights += mask.size
        kept += int(mask.sum())
    return 100 * (1 - kept / weights)


def lay_out(mask: np.ndarray) -> np.ndarray:
    """Lays a mask of any shape out as a picture.

    With four axes or more the last two are inputs and outputs, as in a convolution. Returns float [height, width] in
    [0, 1], NaN between the filters of a convolution. Where a matrix has more than 256 rows or columns, each pixel is
    the share of a block of weights that is kept.

    >>> lay_out(np.ones((3, 3, 2, 4))).shape  # 2 x 4 filters of 3 x 3 with gaps of 1
    (7, 15)
    >>> lay_out(np.ones((784, 300))).shape
    (196, 150)
    """
    mask = np.asarray(mask, float)
    if mask.ndim < 4:
        rows = len(mask) if mask.ndim > 1 else 1
        return _pool(mask.reshape(rows, -1))
    height, *middle, inputs, outputs = mask.shape
    filters = mask.reshape(height, math.prod(middle), inputs, outputs)
    if inputs == 1:
        filters = _fold_into_square(filters)
    filters = filters[..., :_MOST_CHANNELS, :_MOST_CHANNELS]
    height, width, rows, columns = filters.shape
    # Each filter is a tile with a gap below it and on its right; the last gaps are cut off.
    tiles = np.full((rows, height + 1, columns, width + 1), np.nan)
    tiles[:, :height, :, :width] = filters.transpose(2, 0, 3, 1)
    all_rows = rows * (height + 1)
    all_columns = columns * (width + 1)
    picture = tiles.reshape(all_rows, all_columns)
    return picture[:-1, :-1]


def _fold_into_square(filters: np.ndarray) -> np.ndarray:
    """Folds one row of filters, [height, width, 1, n], into rows that make a square; NaN where no filter is left."""
    height, width, _, count = filters.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    folded = np.full((height, width, rows * columns), np.nan)
    folded[..., :count] = filters[:, :, 0]
    return folded.reshape(height, width, rows, columns)


def draw(figure: Any, masks: dict[str, np.ndarray], columns: int | None = None) -> dict[str, Any]:
    """Draws a panel for each mask, in rows of `columns`; returns the images."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list('masks', _COLORS)
    panels = figures.make_panels(figure, len(masks), columns or len(masks))
    images = {}
    for axes, (name, mask) in zip(panels, masks.items(), strict=True):
        picture = lay_out(mask)
        is_long = max(picture.shape) > _LONGEST * min(picture.shape)
        aspect = 'auto' if is_long else 'equal'
        axes.axis('off')
        axes.set_title(describe(name, mask), fontsize=9, color=figures.INK)
        axes.set_anchor('N')
        images[name] = axes.imshow(
            picture, cmap=colors, vmin=0, vmax=1, aspect=aspect, interpolation='nearest'
        )
    return images


def _pool(matrix: np.ndarray) -> np.ndarray:
    """Averages over blocks, so that no side is longer than can be shown; last blocks may be smaller."""
    for axis in (0, 1):
        side = matrix.shape[axis]
        starts = np.arange(0, side, _block(side))
        lengths = np.diff(starts, append=side)
        sums = np.add.reduceat(matrix, starts, axis)
        matrix = sums / np.expand_dims(lengths, 1 - axis)
    return matrix


def _block(length: int) -> int:
    return math.ceil(length / _MOST_PIXELS)


def describe(name: str, mask: np.ndarray) -> str:
    """Writes the title of a kernel: its name, its shape, what is shown of it, and how much is kept."""
    rows = len(mask)
    columns = mask.size // rows
    detail = ''
    if mask.ndim >= 4:
        *_, inputs, outputs = mask.shape
        if inputs > 1 and max(inputs, outputs) > _MOST_CHANNELS:
            detail = f'first {_MOST_CHANNELS} channels shown, '
    elif mask.ndim > 1 and max(rows, columns) > _MOST_PIXELS:
        detail = f'a pixel is {_block(rows)}×{_block(columns)} weights, '
    shape = '×'.join(map(str, mask.shape))
    kept = int(mask.sum())
    return f'{name}\n{shape}, {detail}{kept:,} of {mask.size:,} kept'


def _chosen_masks(masks: Any, params: Any, leaves: Any) -> dict[str, np.ndarray]:
    """Chooses the masks to draw, on the host: each of its leaf's shape, or of one dimension where that is zero."""
    from jaxpruner.report import stored_masks  # loads JAX, which other pictures do without

    stored = stored_masks.masks_by_name(masks, params)
    if not stored:
        raise ValueError('no leaf is masked: there is nothing to draw')
    names = list(stored)
    chosen = {}
    for number in stored_masks.chosen_names(names, leaves):
        name = names[number]
        mask = stored[name]
        if not getattr(mask, 'is_fully_addressable', True):
            raise ValueError(
                f'{name}: its mask lies on devices of several processes; gather it first, with '
                'jax.experimental.multihost_utils.process_allgather(masks, tiled=True)'
            )
        if np.size(mask):  # of an empty leaf there is nothing to see
            chosen[name] = np.atleast_1d(np.asarray(mask) != 0)
    if not chosen:
        raise ValueError('the masks are of leaves without weights: there is nothing to draw')
    if len(chosen) > _MOST_PANELS:
        raise ValueError(
            f'{len(chosen)} masks are too many for one image, at most {_MOST_PANELS}: choose some with '
            f"leaves=, such as leaves='{next(iter(chosen))}'"
        )
    return chosen
