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
_MOST_PIXELS = (
    256  # of each side of a matrix; a larger one is drawn as shares of weights that are kept
)
_LONGEST = 3  # ratio of the sides up to which a pixel is a square
_COLORS = ['#dfe5ec', '#173f5f']  # pruned, kept


def animate_masks(folder: Path, cell_name: str, path: Path) -> None:
    """Draws the evolution of the masks of one cell, `masks/<cell>.npz` in a folder of results.

    A matrix is drawn with its first axis down; of a convolution each filter is drawn, inputs down and outputs across,
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
    frames = np.unique(
        np.linspace(0, len(steps) - 1, min(len(steps), _MOST_FRAMES)).round().astype(int)
    )
    frames_per_second = min(max(round(len(frames) / _SECONDS), 2), 10)
    held = [frames[-1]] * round(_HOLD * frames_per_second)
    figure = figures.new_figure(4.4 * len(kernels), 4.9)
    figure.set_layout_engine('constrained', w_pad=0.15)
    images = _draw_first(figure, kernels)

    def show(frame: int) -> None:
        kept = sum(int(masks[frame].sum()) for masks in kernels.values())
        pruned = 1 - kept / sum(masks[frame].size for masks in kernels.values())
        figure.suptitle(
            f'{cell_name}   step {steps[frame]:,}   {100 * pruned:.1f}% pruned', color=figures.INK
        )
        for image, (name, masks) in zip(images, kernels.items(), strict=True):
            image.set_data(lay_out(masks[frame]))
            image.axes.set_title(_describe(name, masks[frame]), fontsize=9, color=figures.INK)

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

    Args:
      folder: the folder of results.
      cell_name: as `Cell.name`.

    Returns:
      The steps, int [n], and by path of the leaf its masks, 0 or 1, [n, ...shape of the leaf].

    Raises:
      FileNotFoundError: there are none.
      ValueError: the file holds something else.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, 'masks').mkdir()
    ...     masks = {'steps': np.array([0]), 'dense/kernel': np.ones((1, 3, 4), np.uint8)}
    ...     np.savez(Path(folder, 'masks', 'rigl_0.5_0.npz'), **masks)
    ...     read_masks(Path(folder), 'rigl_0.5_0')[1]['dense/kernel'].shape
    (1, 3, 4)
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
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # of a dozen classes, if a zip file is damaged
        raise ValueError(f'{path} is no file of masks: {error}') from error
    steps = arrays.pop('steps', None)
    if steps is None or steps.ndim != 1 or not len(steps) or not arrays:
        raise ValueError(
            f"{path} must hold 'steps' [n] of at least one step and an array of masks, got {list(arrays)}"
        )
    for name, masks in arrays.items():
        if (
            masks.ndim < 2
            or len(masks) != len(steps)
            or not masks.size
            or not np.isin(masks, (0, 1)).all()
        ):
            raise ValueError(
                f'{path}: {name} must hold a mask of 0 and 1 for each of {len(steps)} steps, '
                f'got {masks.dtype} of shape {masks.shape}'
            )
    return steps, arrays


def mask_names(folder: Path) -> list[str]:
    """Returns the names of the cells of a folder of results whose masks were kept.

    >>> mask_names(Path('no such folder'))
    []
    """
    return sorted(path.stem for path in Path(folder).glob('masks/*.npz'))


def lay_out(mask: np.ndarray) -> np.ndarray:
    """Lays a mask out as a picture.

    Args:
      mask: of any shape; with four axes or more the last two are inputs and outputs, as in a convolution.

    Returns:
      float [height, width] in [0, 1], NaN between the filters of a convolution; the share that is kept of each block
      of weights where a matrix has more than 256 rows or columns.

    >>> lay_out(np.ones((3, 3, 2, 4))).shape  # 2 x 4 filters of 3 x 3 with gaps of 1
    (7, 15)
    >>> lay_out(np.ones((784, 300))).shape
    (196, 150)
    """
    mask = np.asarray(mask, float)
    if mask.ndim < 4:
        return _pool(mask.reshape(len(mask) if mask.ndim > 1 else 1, -1))
    shape = mask.shape
    filters = mask.reshape(shape[0], math.prod(shape[1:-2]), *shape[-2:])
    if shape[-2] == 1:  # one row of filters is folded into a square
        columns = math.ceil(math.sqrt(shape[-1]))
        missing = -shape[-1] % columns
        filters = np.pad(filters, ((0, 0), (0, 0), (0, 0), (0, missing)), constant_values=np.nan)
        filters = filters.reshape(*filters.shape[:2], -1, columns)
    filters = filters[..., :_MOST_CHANNELS, :_MOST_CHANNELS]
    # A gap after each filter, then [rows, height, columns, width] as a matrix without the last gaps.
    gapped = np.pad(filters, ((0, 1), (0, 1), (0, 0), (0, 0)), constant_values=np.nan)
    height, width, rows, columns = gapped.shape
    return gapped.transpose(2, 0, 3, 1).reshape(rows * height, columns * width)[:-1, :-1]


def _draw_first(figure: Any, kernels: dict[str, np.ndarray]) -> list[Any]:
    """A panel for each kernel, with the picture of its first mask."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list('masks', _COLORS)
    images = []
    for axes, masks in zip(
        figure.subplots(1, len(kernels), squeeze=False).flat, kernels.values(), strict=True
    ):
        picture = lay_out(masks[0])
        aspect = 'equal' if max(picture.shape) <= _LONGEST * min(picture.shape) else 'auto'
        axes.axis('off')
        axes.set_anchor('N')
        images.append(
            axes.imshow(
                picture, cmap=colors, vmin=0, vmax=1, aspect=aspect, interpolation='nearest'
            )
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
    shape, detail = '×'.join(map(str, mask.shape)), ''
    sides = len(mask), mask.size // len(mask)
    if mask.ndim >= 4 and max(mask.shape[-2:]) > _MOST_CHANNELS and mask.shape[-2] > 1:
        detail = f'first {_MOST_CHANNELS} channels shown, '
    elif 1 < mask.ndim < 4 and max(sides) > _MOST_PIXELS:
        detail = f'a pixel is {_block(sides[0])}×{_block(sides[1])} weights, '
    return f'{name}\n{shape}, {detail}{int(mask.sum()):,} of {mask.size:,} kept'
