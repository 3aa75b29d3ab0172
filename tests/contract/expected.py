"""What a mask has to look like, counted with NumPy alone and on its own.

A new sparsity type is one row of `MASK_CHECKS`, named by its config string.
"""

import functools
import math
from collections.abc import Callable, Mapping

import numpy as np


def number_kept(total: int, sparsity: float) -> int:
    """`max(1, round(total * (1 - sparsity)))` in float32; of nothing to remove, all."""
    return max(1, int(np.round(np.float32(total) * (np.float32(1) - np.float32(sparsity)))))


def targets(
    shapes: Mapping[str, tuple[int, ...]], distribution: str, sparsity: float
) -> dict[str, float]:
    """The sparsity of each leaf. ERK here is for layers of which none gets so dense that it stays whole."""
    if distribution == 'uniform':
        return dict.fromkeys(shapes, sparsity)
    sizes = {path: math.prod(shape) for path, shape in shapes.items()}
    budget = sum(size - math.floor(sparsity * size) for size in sizes.values())
    scale = budget / sum(sum(shape) for shape in shapes.values())
    densities = {path: scale * sum(shape) / sizes[path] for path, shape in shapes.items()}
    assert max(densities.values()) < 1, 'choose layers that ERK does not leave whole'
    return {path: 1 - density for path, density in densities.items()}


def check_unstructured(mask: np.ndarray, sparsity: float) -> None:
    assert mask.sum() == number_kept(mask.size, sparsity)


def check_n_by_m(mask: np.ndarray, sparsity: float, n: int, m: int, axis: int) -> None:
    del sparsity  # the type says it
    groups = np.moveaxis(mask, axis, -1).reshape(-1, m)
    assert (groups.sum(axis=1) == n).all()


def check_blocks(mask: np.ndarray, sparsity: float, height: int, width: int) -> None:
    rows, columns = mask.shape
    corners = [
        (row, column) for row in range(0, rows, height) for column in range(0, columns, width)
    ]
    blocks = [mask[row : row + height, column : column + width] for row, column in corners]
    assert all(block.min() == block.max() for block in blocks)
    assert sum(block.max() for block in blocks) == number_kept(len(blocks), sparsity)


def check_channels(mask: np.ndarray, sparsity: float, axis: int) -> None:
    channels = np.moveaxis(mask, axis, 0).reshape(mask.shape[axis], -1)
    assert (channels.min(axis=1) == channels.max(axis=1)).all()
    assert channels[:, 0].sum() == number_kept(len(channels), sparsity)


MASK_CHECKS: dict[str, Callable[[np.ndarray, float], None]] = {
    'unstructured': check_unstructured,
    '2:4': functools.partial(check_n_by_m, n=2, m=4, axis=-1),
    'nm_1,4,0': functools.partial(check_n_by_m, n=1, m=4, axis=0),
    'block_4,3': functools.partial(
        check_blocks, height=4, width=3
    ),  # 3 does not divide 4 nor 16: partial edges
    'channel_-1': functools.partial(check_channels, axis=-1),
    'channel_0': functools.partial(check_channels, axis=0),
}


def check_masks(
    masks: Mapping[str, np.ndarray], sparsity_type: str, sparsities: Mapping[str, float]
) -> None:
    """Leaf by leaf: the number kept, and that what belongs together is kept together."""
    assert masks.keys() == sparsities.keys()
    for path, mask in masks.items():
        MASK_CHECKS[sparsity_type](mask, sparsities[path])


def check_joint_masks(masks: Mapping[str, np.ndarray], sparsities: Mapping[str, float]) -> None:
    """All leaves together: the number kept at the mean sparsity, weighted by size."""
    assert masks.keys() == sparsities.keys()
    total = sum(mask.size for mask in masks.values())
    mean = sum(sparsities[path] * mask.size for path, mask in masks.items()) / total
    assert sum(int(mask.sum()) for mask in masks.values()) == number_kept(total, mean)
