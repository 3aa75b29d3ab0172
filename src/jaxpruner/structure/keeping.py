"""Checks what users want to keep, before anything is cut."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.axes import Axis
from jaxpruner.structure.cut import Cut

# Name of a group -> the indices of its channels that stay, ascending.
Keep = Mapping[str, Any]


def check_keep(groups: Mapping[str, Any], keep: Keep, allow_inexact: bool = False) -> Cut:
    """The cut that leaves these channels.

    Args:
      groups: of the model, by name.
      keep: name of a group -> the indices that stay, ascending; a group that is not named stays whole.
      allow_inexact: whether groups may be cut although that is not the same as zeroing them.

    Raises:
      TypeError: `keep` is no mapping, or indices are no whole numbers.
      KeyError: there is no such group.
      IndexError: a group has no such index.
      ValueError: no index, one that is there twice, indices that are not in order, or a group that is not exact.
    """
    if not isinstance(keep, Mapping):
        raise TypeError(f'keep is {{name of a group: indices that stay}}, got {keep!r}')
    kept: dict[Axis, np.ndarray] = {}
    for name, indices in keep.items():
        if name not in groups:
            raise KeyError(f'there is no group {name!r}; {tree_lib.nearest(str(name), groups)}')
        group = groups[name]
        positions = _checked_indices(name, group.size, indices)
        if len(positions) == group.size:
            continue
        if not (group.exact or allow_inexact):
            raise ValueError(
                f'removing channels of {name!r} is not the same as zeroing them: {group.reason}; keep all '
                f'{group.size} of them, or pass allow_inexact=True and train the smaller model'
            )
        kept[group.atom.resolved()] = positions
    return Cut(kept)


def _checked_indices(name: str, size: int, indices: Any) -> np.ndarray:
    place = f'keep[{name!r}]'
    if tree_lib.is_traced(indices):
        raise TypeError(
            f'{place} is traced, but shapes depend on it; choose indices outside of jit'
        )
    positions = np.asarray(indices)
    if positions.dtype == bool:
        raise TypeError(f'{place} is a mask; give the indices that stay, np.flatnonzero(mask)')
    if positions.ndim != 1:
        raise ValueError(f'{place} has shape {positions.shape}; give one list of indices')
    if not len(positions):
        raise ValueError(f'{place} is empty; a group keeps one channel at least')
    if not np.issubdtype(positions.dtype, np.integer):
        raise TypeError(f'{place} has {positions[0]!r}; indices are whole numbers')
    foreign = positions[(positions < 0) | (positions >= size)]
    if len(foreign):
        raise IndexError(f'{place} has {foreign[0]}; the group has indices from 0 to {size - 1}')
    steps = np.diff(positions.astype(np.int64))
    if (steps <= 0).any():
        where = int(np.argmax(steps <= 0)) + 1
        fault = 'twice' if positions[where] in positions[:where] else 'not in ascending order'
        raise ValueError(f'{place} has {positions[where]} {fault}; give np.unique(indices)')
    return positions
