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
from jaxpruner.report.history import choose_leaves
from jaxpruner.sparsity_types import NByM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_CHANNELS = 32  # of each axis that are shown of a convolution
_MOST_PIXELS = 256  # of each side; of a larger picture, pixels show shares of kept weights
_MOST_COLUMNS = 4  # of panels
_MOST_PANELS = 40
_MOST_FRAMES = 60  # of an animation


def plot_masks(
    masks: Any, path: Path | str | None = None, *, params: Any = None, leaves: Any = '*'
) -> 'Figure':
    """Draws masks as images, a panel for each leaf: kept weights dark, pruned ones light.

    A matrix is drawn with its first axis down. Of a convolution each filter is drawn, inputs down and outputs across,
    up to 32 of each. Where weights outnumber pixels, a pixel shows the share that is kept around it.

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
    figures.check_ending(path)
    stored: dict[str, Any] = {}
    for state in sparse_state_lib.sparse_states(masks) or [sparse_state_lib.SparseState(masks)]:
        if params is None and state.sizes is not None:
            raise ValueError(
                'the masks are packed, and their shapes are those of the parameters: give params='
            )
        own = state.masks
        own = own if params is None else sparse_state_lib.unpack_masks(own, params)
        paths, arrays, _ = tree_lib.flatten_with_paths(own)
        stored |= zip(map(tree_lib.path_string, paths), arrays, strict=True)
    stored = {name: mask for name, mask in stored.items() if np.size(mask)}
    names = list(stored)
    names = [names[number] for number in choose_leaves(names, leaves)] if names else []
    if not 0 < len(names) <= _MOST_PANELS:
        raise ValueError(
            f'{len(names)} masks with weights to draw, and an image has room for 1 to {_MOST_PANELS}: choose some with '
            f"leaves=, such as leaves='{next(iter(names), '*')}'"
        )
    chosen = {}
    for name in names:
        if not getattr(stored[name], 'is_fully_addressable', True):
            raise ValueError(
                f'{name}: its mask lies on devices of several processes; gather it first, with '
                'jax.experimental.multihost_utils.process_allgather(masks, tiled=True)'
            )
        chosen[name] = np.atleast_1d(np.asarray(stored[name]) != 0)
    columns = min(math.ceil(math.sqrt(len(chosen))), _MOST_COLUMNS)
    figure = figures.new_figure(4.4 * columns, 3.8 * math.ceil(len(chosen) / columns) + 0.4)
    draw_masks(figure, chosen, columns)
    title = f'{percent_pruned(chosen):.1f}% pruned: kept weights are dark, pruned ones light'
    figure.suptitle(title, fontsize=11, color=figures.INK)
    return figures.save(figure, path)


def percent_pruned(masks: Mapping[str, np.ndarray]) -> float:
    """Computes how much masks prune together.

    >>> percent_pruned({'a': np.array([1, 0]), 'b': np.array([0, 0])})
    75.0
    """
    weights = sum(mask.size for mask in masks.values())
    return 100 * (1 - sum(int(mask.sum()) for mask in masks.values()) / weights)


def draw_masks(figure: Any, masks: Mapping[str, np.ndarray], columns: int) -> dict[str, Any]:
    """Draws a panel for each mask, in rows of `columns`; returns the images."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list('masks', ['#dfe5ec', '#173f5f'])  # pruned, kept
    images = {}
    for axes, (name, mask) in zip(
        figures.make_panels(figure, len(masks), columns), masks.items(), strict=True
    ):
        picture = lay_out(mask)
        is_long = mask.ndim < 4 and max(picture.shape) > 3 * min(picture.shape)
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

    With four axes or more the last two are inputs and outputs, as in a convolution. Returns float [height, width] in
    [0, 1], NaN between the filters of a convolution.

    >>> lay_out(np.ones((3, 3, 2, 4))).shape  # 2 x 4 filters of 3 x 3 with gaps of 1
    (7, 15)
    """
    mask = np.asarray(mask, np.float32)
    if mask.ndim < 4:
        return mask.reshape(len(mask) if mask.ndim > 1 else 1, -1)
    height, *middle, inputs, outputs = mask.shape
    filters = mask.reshape(height, math.prod(middle), inputs, outputs)
    filters = filters[..., :_MOST_CHANNELS, :_MOST_CHANNELS]
    # Each filter is a tile with a gap below it and on its right; the last gaps are cut off.
    tiles = np.pad(filters, [(0, 1), (0, 1), (0, 0), (0, 0)], constant_values=np.nan)
    height, width, rows, columns = tiles.shape
    return tiles.transpose(2, 0, 3, 1).reshape(rows * height, columns * width)[:-1, :-1]


def _title(name: str, mask: np.ndarray) -> str:
    """Writes the title of a kernel: its name, its shape, what is shown of it, and how much is kept."""
    shape = '×'.join(map(str, mask.shape))
    is_cut = mask.ndim >= 4 and max(mask.shape[-2:]) > _MOST_CHANNELS
    detail = f'first {_MOST_CHANNELS} channels shown, ' if is_cut else ''
    return f'{name}\n{shape}, {detail}{int(mask.sum()):,} of {mask.size:,} kept'


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
    figures.check_ending(path, ('.gif',))
    steps, kernels = _read_masks(Path(folder), cell_name)
    evenly = np.linspace(0, len(steps) - 1, min(len(steps), _MOST_FRAMES))
    frames = np.unique(evenly.round().astype(int)).tolist()
    frames_per_second = min(max(round(len(frames) / 6), 2), 10)  # six seconds, if possible
    frames += frames[-1:] * round(1.5 * frames_per_second)
    figure = figures.new_figure(4.4 * len(kernels), 4.9)
    images = draw_masks(figure, {name: masks[0] for name, masks in kernels.items()}, len(kernels))

    def show(frame: int) -> None:
        masks = {name: masks[frame] for name, masks in kernels.items()}
        for name, mask in masks.items():
            images[name].set_data(lay_out(mask))
            images[name].axes.set_title(_title(name, mask), fontsize=9, color=figures.INK)
        title = f'{cell_name}   step {steps[frame]:,}   {percent_pruned(masks):.1f}% pruned'
        figure.suptitle(title, color=figures.INK)

    def write(temporary: Path) -> None:
        from matplotlib.animation import PillowWriter

        writer = PillowWriter(fps=frames_per_second)
        with writer.saving(figure, str(temporary), dpi=100):
            for frame in frames:
                show(frame)
                writer.grab_frame()

    show(frames[0])
    figure.draw_without_rendering()
    figure.set_layout_engine('none')  # laid out once: nothing moves from picture to picture
    atomic_files.replace_file(Path(path), write, keeps_ending=True)


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
            sparse = []
            for start in range(leaf.ndim - length + 1):
                axes = tuple(range(start, start + length))
                after = math.prod(leaf.shape[start + length :])
                if math.prod(leaf.shape[start : start + length]) % m == 0:
                    groups = np.count_nonzero(leaf.reshape(-1, m, after), axis=1)
                    sparse += [axes[0] if length == 1 else axes] * bool((groups <= n).all())
            if sparse:
                found[name] = tuple(sparse)
                break
    return found
