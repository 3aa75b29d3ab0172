"""Which leaves of a tree are N:M sparse, and along which axes."""

import math
from typing import Any

import numpy as np


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
    from jaxpruner import tree as tree_lib
    from jaxpruner.sparsity_types import NByM

    NByM(n, m)  # checks both
    paths, leaves, _ = tree_lib.flatten_with_paths(tree_lib.as_arrays(tree))
    found = {}
    for path, leaf in zip(paths, leaves, strict=True):
        name = tree_lib.path_string(path)
        values = np.asarray(leaf)
        if values.dtype == np.uint8 and values.max(initial=0) > 1:
            raise ValueError(
                f'{name} has uint8 values above 1, so it looks like a packed mask; give '
                'jaxpruner.unpack_masks(masks, params)'
            )
        nonzero = values != 0
        found[name] = ()
        for length in range(1, nonzero.ndim + 1):
            starts = range(nonzero.ndim - length + 1)
            runs = [tuple(range(start, start + length)) for start in starts]
            sparse = [run for run in runs if _is_n_by_m(nonzero, run, n, m)]
            if sparse:
                found[name] = tuple(run[0] if length == 1 else run for run in sparse)
                break
    return found


def _is_n_by_m(nonzero: np.ndarray, axes: tuple[int, ...], n: int, m: int) -> bool:
    """Whether each group of m along neighbouring axes, taken as one, has at most n true flags."""
    after = axes[-1] + 1
    if math.prod(nonzero.shape[axes[0] : after]) % m:
        return False
    groups = nonzero.reshape(-1, m, math.prod(nonzero.shape[after:]))
    return bool((np.count_nonzero(groups, axis=1) <= n).all())
