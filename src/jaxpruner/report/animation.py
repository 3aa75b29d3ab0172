"""How masks change while a model trains, as an animated GIF: kept weights dark, pruned ones light. Needs matplotlib."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxpruner.core import atomic_files
from jaxpruner.report import figures, results

_MOST_FRAMES = 60
_SECONDS = 6.0  # that the whole animation takes, its last picture apart
_HOLD = 1.5  # seconds that the last picture stays
_MOST_CHANNELS = 32  # of each axis that are shown of a convolution
_MOST_PIXELS = 256  # of each side of a matrix; of a larger one, pixels show shares of kept weights
_LONGEST = 3  # ratio of the sides up to which a pixel is a square
_COLORS = ['#dfe5ec', '#173f5f']  # pruned, kept


def animate_masks(folder: Path, cell_name: str, path: Path) -> None:
    """Draws the evolution of the masks of one cell, `masks/<cell>.npz` in a folder of results.

    A matrix is drawn with its first axis down. Of a convolution each filter is drawn, inputs down and outputs across,
    up to 32 of each. Kept weights are dark.

    Args:
      folder: the folder of results.
      cell_name: as `Cell.name`, `'magnitude_0.8_0'`.
      path: the .gif to write.

    Raises:
      FileNotFoundError: no masks were kept for this cell.
      ValueError: the file holds something else than masks by step, or the path has another ending.
      ImportError: matplotlib is not installed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, 'masks').mkdir()
    ...     masks = {'steps': np.array([0, 10]), 'dense/kernel': np.array([[[1, 1]], [[1, 0]]], np.uint8)}
    ...     np.savez(Path(folder, 'masks', 'rigl_0.5_0.npz'), **masks)
    ...     animate_masks(Path(folder), 'rigl_0.5_0', Path(folder, 'masks.gif'))
    ...     Path(folder, 'masks.gif').exists()
    True
    """
    path = figures.check_ending(path, ('.gif',))
    steps, kernels = read_masks(folder, cell_name)
    frames = _frames(len(steps))
    frames_per_second = min(max(round(len(frames) / _SECONDS), 2), 10)
    held = [frames[-1]] * round(_HOLD * frames_per_second)
    figure = figures.new_figure(4.4 * len(kernels), 4.9)
    figure.set_layout_engine('constrained', w_pad=0.15)
    images = _draw_first(figure, kernels)

    def show(frame: int) -> None:
        kept, size = 0, 0
        for name, masks in kernels.items():
            mask = masks[frame]
            kept += int(mask.sum())
            size += mask.size
            images[name].set_data(lay_out(mask))
            images[name].axes.set_title(_describe(name, mask), fontsize=9, color=figures.INK)
        title = f'{cell_name}   step {steps[frame]:,}   {100 * (1 - kept / size):.1f}% pruned'
        figure.suptitle(title, color=figures.INK)

    def write(temporary: Path) -> None:
        from matplotlib.animation import PillowWriter

        writer = PillowWriter(fps=frames_per_second)
        with writer.saving(figure, str(temporary), dpi=100):
            for frame in [*frames, *held]:
                show(frame)
                writer.grab_frame()

    show(frames[0])
    figure.draw_without_rendering()
    figure.set_layout_engine('none')  # laid out once: nothing moves from picture to picture
    atomic_files.replace_file(path, write, keeps_ending=True)


def read_masks(folder: Path, cell_name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Reads the masks that were kept while a cell was trained.

    Returns the steps, int [n], and by path of the leaf its masks, 0 or 1, [n, ...shape of the leaf]. Raises
    FileNotFoundError if there are none, and ValueError if the file holds something else.
    """
    path = Path(folder) / 'masks' / f'{cell_name}.npz'
    if not path.is_file():
        kept = ', '.join(mask_names(folder)) or 'none'
        raise FileNotFoundError(
            f'no masks of {cell_name}: looked for {path}; cells with masks there: {kept}'
        )
    if results.has_changed(Path(folder), cell_name, path):
        raise ValueError(
            f'{path} has changed since it was written: its checksum does not match; run its cell again'
        )
    try:
        with path.open('rb') as stream, np.load(stream, allow_pickle=False) as file:
            arrays = dict(file)
    except Exception as error:  # a damaged zip file raises one of a dozen classes
        raise ValueError(f'{path} is no file of masks: {error}') from error
    steps = arrays.pop('steps', None)
    if steps is None or steps.ndim != 1 or not len(steps) or not arrays:
        raise ValueError(
            f"{path} must hold 'steps' [n] of at least one step and an array of masks, got {list(arrays)}"
        )
    for name, masks in arrays.items():
        if not _are_masks(masks, len(steps)):
            raise ValueError(
                f'{path}: {name} must hold a mask of 0 and 1 for each of {len(steps)} steps, '
                f'got {masks.dtype} of shape {masks.shape}'
            )
    return steps, arrays


def mask_names(folder: Path) -> list[str]:
    """The names of the cells of a folder of results whose masks were kept."""
    return sorted(path.stem for path in Path(folder).glob('masks/*.npz'))


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
        return _pool(mask.reshape(len(mask) if mask.ndim > 1 else 1, -1))
    height, *middle, inputs, outputs = mask.shape
    filters = mask.reshape(height, math.prod(middle), inputs, outputs)
    if inputs == 1:
        filters = _fold_into_square(filters)
    filters = filters[..., :_MOST_CHANNELS, :_MOST_CHANNELS]
    height, width, rows, columns = filters.shape
    # Each filter is a tile with a gap below it and on its right; the last gaps are cut off.
    tiles = np.full((rows, height + 1, columns, width + 1), np.nan)
    tiles[:, :height, :, :width] = filters.transpose(2, 0, 3, 1)
    picture = tiles.reshape(rows * (height + 1), columns * (width + 1))
    return picture[:-1, :-1]


def _fold_into_square(filters: np.ndarray) -> np.ndarray:
    """One row of filters, [height, width, 1, n], as rows that make a square; NaN where no filter is left."""
    height, width, _, count = filters.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    folded = np.full((height, width, rows * columns), np.nan)
    folded[..., :count] = filters[:, :, 0]
    return folded.reshape(height, width, rows, columns)


def _frames(count: int) -> np.ndarray:
    """The numbers of the masks that are shown, evenly spaced."""
    evenly = np.linspace(0, count - 1, min(count, _MOST_FRAMES))
    return np.unique(evenly.round().astype(int))


def _are_masks(masks: np.ndarray, steps: int) -> bool:
    if masks.ndim < 2 or len(masks) != steps or not masks.size:
        return False
    return bool(np.isin(masks, (0, 1)).all())


def _draw_first(figure: Any, kernels: dict[str, np.ndarray]) -> dict[str, Any]:
    """A panel for each kernel, with the picture of its first mask."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list('masks', _COLORS)
    panels = figures.make_panels(figure, len(kernels), len(kernels))
    images = {}
    for axes, (name, masks) in zip(panels, kernels.items(), strict=True):
        picture = lay_out(masks[0])
        aspect = 'equal' if max(picture.shape) <= _LONGEST * min(picture.shape) else 'auto'
        axes.axis('off')
        axes.set_anchor('N')
        images[name] = axes.imshow(
            picture, cmap=colors, vmin=0, vmax=1, aspect=aspect, interpolation='nearest'
        )
    return images


def _pool(matrix: np.ndarray) -> np.ndarray:
    """Means over blocks, so that no side is longer than can be shown; last blocks may be smaller."""
    for axis in (0, 1):
        starts = np.arange(0, matrix.shape[axis], _block(matrix.shape[axis]))
        lengths = np.diff(starts, append=matrix.shape[axis])
        matrix = np.add.reduceat(matrix, starts, axis) / np.expand_dims(lengths, 1 - axis)
    return matrix


def _block(length: int) -> int:
    return math.ceil(length / _MOST_PIXELS)


def _describe(name: str, mask: np.ndarray) -> str:
    """The title of a kernel: its name, its shape, what is shown of it, and how much is kept."""
    rows, columns = len(mask), mask.size // len(mask)
    detail = ''
    if mask.ndim >= 4 and max(mask.shape[-2:]) > _MOST_CHANNELS and mask.shape[-2] > 1:
        detail = f'first {_MOST_CHANNELS} channels shown, '
    elif 1 < mask.ndim < 4 and max(rows, columns) > _MOST_PIXELS:
        detail = f'a pixel is {_block(rows)}×{_block(columns)} weights, '
    shape = '×'.join(map(str, mask.shape))
    return f'{name}\n{shape}, {detail}{int(mask.sum()):,} of {mask.size:,} kept'
