"""Masks as images, once or while they change, and along which axes they are N:M. Pictures need matplotlib."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.files import atomic_files
from jaxpruner.report import figures
from jaxpruner.sparsity_types import NByM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_PIXELS = 256  # of each side; of a larger picture, pixels show shares of kept weights
_MOST_COLUMNS = 4  # of panels
_MOST_PANELS = 40
_MOST_FRAMES = 60  # of an animation


def plot_masks(
    masks: Any, path: Path | str | None = None, *, params: Any = None, leaves: Any = '*'
) -> 'Figure':
    """Draws masks as images, a panel for each leaf: kept weights dark, pruned ones light.

    A matrix is drawn with its first axis down, a convolution with its outputs across. Where weights outnumber pixels, a
    pixel shows the share that is kept around it.

    Args:
      masks: an optimizer state that holds a pruner's, or a tree of masks, as `jaxpruner.prune` returns it.
      path: the image to write, .png, .pdf or .svg; `None` writes none.
      params: the parameters or their shapes, needed where masks are packed.
      leaves: names or globs of the leaves to draw, such as `'*/kernel'`.

    Returns:
      The figure, to be changed, shown or saved.

    Raises:
      ValueError: nothing is masked, a name means no leaf, masks are packed and no parameters are given, there are more
        than 40 leaves, or the path has another ending.
      ImportError: matplotlib is not installed.

    >>> import jax.numpy as jnp, jaxpruner
    >>> params = {'dense': {'kernel': jnp.arange(128.0).reshape(8, 16), 'bias': jnp.zeros(16)}}
    >>> params, masks = jaxpruner.prune(params, algorithm='magnitude', sparsity=0.5)
    >>> print(plot_masks(masks).axes[0].get_title())
    dense/kernel
    8×16, 64 of 128 kept
    """
    figures.check_ending(path)
    stored: dict[tree_lib.Path, Any] = {}
    for state in sparse_state_lib.sparse_states(masks) or [sparse_state_lib.SparseState(masks)]:
        if params is None and state.sizes is not None:
            raise ValueError(
                'the masks are packed, and their shapes are those of the parameters: give params='
            )
        own = state.masks
        own = own if params is None else sparse_state_lib.unpack_masks(own, params)
        paths, arrays, _ = tree_lib.flatten_with_paths(own)
        stored |= zip(paths, arrays, strict=True)
    stored = {path: mask for path, mask in stored.items() if np.size(mask)}
    rules = list(map(tree_lib.rule_name, tree_lib.as_names(leaves)))
    if stored:
        tree_lib.check_names(rules, list(stored), 'leaves')
    chosen = {
        tree_lib.path_string(leaf_path): np.atleast_1d(np.asarray(mask) != 0)
        for leaf_path, mask in stored.items()
        if tree_lib.matches_any(rules, leaf_path)
    }
    if not 0 < len(chosen) <= _MOST_PANELS:
        raise ValueError(
            f'{len(chosen)} masks with weights to draw, and an image has room for 1 to {_MOST_PANELS}: choose some '
            f"with leaves=, such as leaves='{next(iter(chosen), '*')}'"
        )
    columns = min(math.ceil(math.sqrt(len(chosen))), _MOST_COLUMNS)
    figure = figures.new_figure(4.4 * columns, 3.8 * math.ceil(len(chosen) / columns) + 0.4)
    draw_masks(figure, chosen, columns)
    title = f'{_percent_pruned(chosen):.1f}% pruned: kept weights are dark, pruned ones light'
    figure.suptitle(title, fontsize=11, color=figures.INK)
    return figures.save(figure, path)


def _percent_pruned(masks: Mapping[str, np.ndarray]) -> float:
    weights = sum(mask.size for mask in masks.values())
    return 100 * (1 - sum(int(mask.sum()) for mask in masks.values()) / weights)


def draw_masks(figure: Any, masks: Mapping[str, np.ndarray], columns: int) -> dict[str, Any]:
    """Draws a panel for each mask, in rows of `columns`; returns the images."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list('masks', ['#dfe5ec', '#173f5f'])  # pruned, kept
    images = {}
    panels = figures.make_panels(figure, len(masks), columns)
    for axes, (name, mask) in zip(panels, masks.items(), strict=True):
        picture = lay_out(mask)
        is_long = max(picture.shape) > 3 * min(picture.shape)
        # Matplotlib averages where weights outnumber pixels; elsewhere each weight has sharp edges.
        interpolation = 'antialiased' if max(picture.shape) > _MOST_PIXELS else 'nearest'
        look = {'cmap': colors, 'vmin': 0, 'vmax': 1, 'interpolation': interpolation}
        images[name] = axes.imshow(picture, aspect='auto' if is_long else 'equal', **look)
        axes.axis('off')
        axes.set_title(_title(name, mask), fontsize=9, color=figures.INK)
        axes.set_anchor('N')
    return images


def lay_out(mask: np.ndarray) -> np.ndarray:
    """Lays a mask of any shape out as a picture.

    A matrix has its first axis down; a convolution has its outputs across. Returns float [height, width] in [0, 1].

    >>> lay_out(np.ones((3, 3, 2, 4))).shape
    (18, 4)
    """
    mask = np.asarray(mask, np.float32)
    if mask.ndim < 2:
        return mask.reshape(1, -1)
    return mask.reshape(len(mask), -1) if mask.ndim < 4 else mask.reshape(-1, mask.shape[-1])


def _title(name: str, mask: np.ndarray) -> str:
    """Writes the title of a kernel: its name, its shape, and how much is kept."""
    shape = '×'.join(map(str, mask.shape))
    return f'{name}\n{shape}, {int(mask.sum()):,} of {mask.size:,} kept'


def animate_masks(folder: Path, cell_name: str, path: Path) -> None:
    """Draws the evolution of the masks of one cell, `masks/<cell>.npz` in a folder of results.

    A matrix is drawn with its first axis down, a convolution with its outputs across. Kept weights are dark.

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
    figures.check_ending(path, ('.gif',))
    steps, kernels = _read_masks(Path(folder), cell_name)
    evenly = np.linspace(0, len(steps) - 1, min(len(steps), _MOST_FRAMES))
    frames = evenly.round().astype(int).tolist()
    frames_per_second = min(max(round(len(frames) / 6), 2), 10)  # six seconds, if possible
    frames += frames[-1:] * round(1.5 * frames_per_second)
    figure = figures.new_figure(4.4 * len(kernels), 4.9)
    from matplotlib.animation import FuncAnimation, PillowWriter

    images = draw_masks(figure, {name: masks[0] for name, masks in kernels.items()}, len(kernels))

    def show(frame: int) -> None:
        masks = {name: masks[frame] for name, masks in kernels.items()}
        for name, mask in masks.items():
            images[name].set_data(lay_out(mask))
            images[name].axes.set_title(_title(name, mask), fontsize=9, color=figures.INK)
        title = f'{cell_name}   step {steps[frame]:,}   {_percent_pruned(masks):.1f}% pruned'
        figure.suptitle(title, color=figures.INK)

    show(frames[0])
    figure.draw_without_rendering()
    figure.set_layout_engine('none')  # laid out once: nothing moves from picture to picture
    animation = FuncAnimation(figure, show, frames)
    writer = PillowWriter(fps=frames_per_second)
    atomic_files.replace_file(
        Path(path), lambda temporary: animation.save(str(temporary), writer, dpi=100)
    )


def _read_masks(folder: Path, cell_name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Reads the steps, int [n], and by path of the leaf the masks of a cell, 0 or 1, [n, ...shape of the leaf]."""
    path = folder / 'masks' / f'{cell_name}.npz'
    if not path.is_file():
        kept = ', '.join(sorted(other.stem for other in path.parent.glob('*.npz'))) or 'none'
        raise FileNotFoundError(
            f'no masks of {cell_name}: looked for {path}; cells with masks there: {kept}'
        )
    try:
        with path.open('rb') as stream, np.load(stream, allow_pickle=False) as file:
            arrays = dict(file)
        steps = arrays.pop('steps')
        shapes = {name: masks.shape for name, masks in arrays.items()}
        if not shapes or any(shape[:1] != steps.shape for shape in shapes.values()):
            raise ValueError(f'got masks of shapes {shapes} for {len(steps)} steps')
    except Exception as error:  # a damaged zip file raises one of a dozen classes
        raise ValueError(f'{path} is no file of masks: {error}') from error
    return steps, arrays


def n_by_m_axes(tree: Any, n: int = 2, m: int = 4) -> dict[str, tuple[int | tuple[int, ...], ...]]:
    """Finds the axes along which leaves are N:M sparse: of each m consecutive weights at most n are not zero.

    Hardware needs the axis that a layer sums over, the first of a dense kernel in Flax and the last in PyTorch.

    Args:
      tree: any pytree of weights, or of masks that are not packed.
      n: the most nonzero weights in a group.
      m: weights in a group, which divides the axis.

    Returns:
      `{'a/b/kernel': axes}` for each leaf; `()` if it is not N:M. Zeros fit every axis. If no single axis is N:M,
      neighbouring axes are taken as one, as `NByM(n, m, axis=(0, 1))` takes them.

    Raises:
      ValueError: n > m, one of them is not positive, or masks are packed.

    >>> n_by_m_axes({'up': np.tile([0, 1, 1, 0], (3, 2)), 'down': np.ones((8, 3))})
    {'down': (), 'up': (1,)}
    """
    NByM(n, m)  # checks both
    paths, leaves, _ = tree_lib.flatten_with_paths(tree_lib.as_arrays(tree))
    found = {}
    for path, leaf in zip(paths, map(np.asarray, jax.device_get(leaves)), strict=True):
        name = tree_lib.path_string(path)
        if leaf.dtype == np.uint8 and leaf.max(initial=0) > 1:
            raise ValueError(
                f'{name} has uint8 values above 1, so it looks like a packed mask; give '
                'jaxpruner.unpack_masks(masks, params)'
            )
        found[name] = ()
        for length in range(1, leaf.ndim + 1):
            for start in range(leaf.ndim - length + 1):
                joined = math.prod(leaf.shape[start : start + length])
                after = math.prod(leaf.shape[start + length :])
                if joined % m == 0:
                    counts = np.count_nonzero(leaf.reshape(-1, m, after), axis=1)
                    if (counts <= n).all():
                        axes = tuple(range(start, start + length))
                        found[name] += (start if length == 1 else axes,)
            if found[name]:
                break
    return found
