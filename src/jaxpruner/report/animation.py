"""How masks change while a model trains, as an animated GIF: kept weights dark, pruned ones light. Needs matplotlib."""

from pathlib import Path

import numpy as np

from jaxpruner.files import atomic_files
from jaxpruner.report import figures, mask_images, results

_MOST_FRAMES = 60
_SECONDS = 6.0  # that the whole animation takes, its last picture apart
_HOLD = 1.5  # seconds that the last picture stays


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
    frames_per_second = round(len(frames) / _SECONDS)
    frames_per_second = min(max(frames_per_second, 2), 10)
    held = [frames[-1]] * round(_HOLD * frames_per_second)
    figure = figures.new_figure(4.4 * len(kernels), 4.9)
    figure.set_layout_engine('constrained', w_pad=0.15)
    first_masks = {name: masks[0] for name, masks in kernels.items()}
    images = mask_images.draw(figure, first_masks)

    def show(frame: int) -> None:
        shown = []
        for name, masks in kernels.items():
            mask = masks[frame]
            shown.append(mask)
            images[name].set_data(mask_images.lay_out(mask))
            description = mask_images.describe(name, mask)
            images[name].axes.set_title(description, fontsize=9, color=figures.INK)
        percent = mask_images.percent_pruned(shown)
        title = f'{cell_name}   step {steps[frame]:,}   {percent:.1f}% pruned'
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
    """Lists the names of the cells of a folder of results whose masks were kept."""
    paths = Path(folder).glob('masks/*.npz')
    return sorted(path.stem for path in paths)


def _frames(count: int) -> np.ndarray:
    """Chooses the numbers of the masks that are shown, evenly spaced."""
    evenly = np.linspace(0, count - 1, min(count, _MOST_FRAMES))
    return np.unique(evenly.round().astype(int))


def _are_masks(masks: np.ndarray, steps: int) -> bool:
    if masks.ndim < 2 or len(masks) != steps or not masks.size:
        return False
    return bool(np.isin(masks, (0, 1)).all())
