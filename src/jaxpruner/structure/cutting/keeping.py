"""Checks the channels that users want to keep, and makes a cut of them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axis, resolve_each, sizes_of
from jaxpruner.structure.cutting.cut import Cut, Lists

# Name of a group -> the indices of its channels that stay, ascending; or such a list for each trip, expert or head.
KeepByGroup = Mapping[str, Any]


def check_keep(groups: Mapping[str, Any], keep: KeepByGroup, allow_inexact: bool = False) -> Cut:
    """The cut that leaves these channels.

    Args:
      groups: of the model, by name.
      keep: as in `ChannelGraph.shrink`.
      allow_inexact: as in `ChannelGraph.shrink`.

    Raises:
      TypeError: `keep` is no mapping, or indices are no whole numbers.
      KeyError: there is no such group.
      IndexError: a group has no such index.
      ValueError: indices are missing, repeated or not in order, or a group is not exact.
    """
    if not isinstance(keep, Mapping):
        raise TypeError(f'keep has to be {{name of a group: indices that stay}}, got {keep!r}')
    lists: dict[Axis, Lists] = {}
    for name, indices in keep.items():
        if name not in groups:
            raise KeyError(f'there is no group {name!r}; {tree_lib.nearest(str(name), groups)}')
        group = groups[name]
        table = _checked_indices(name, group, indices)
        if table.shape[-1] == group.size:
            continue
        if not (group.exact or allow_inexact):
            raise ValueError(
                f'removing channels of {name!r} is not the same as zeroing them: {group.reason}; keep all '
                f'{group.size} of them, or pass allow_inexact=True and train the smaller model'
            )
        lists[group.atom.resolved()] = lists_of(group, table)
    return Cut(lists)


def lists_of(group: Any, table: np.ndarray) -> Lists:
    """The lists of a group: one for all, or one for each trip, expert or head."""
    owners = resolve_each(group.lists) if table.ndim > 1 else ()
    return Lists(tuple(owners), table)


def _checked_indices(name: str, group: Any, indices: Any) -> np.ndarray:
    size = group.size
    entry = f'keep[{name!r}]'
    if tree_lib.is_traced(indices):
        raise TypeError(
            f'{entry} is traced, but shapes depend on it; choose indices outside of jit'
        )
    positions = np.asarray(indices)
    if positions.dtype == bool:
        raise TypeError(f'{entry} is a mask; give the indices that stay, np.flatnonzero(mask)')
    owners = sizes_of(group.lists)
    is_one_list = positions.ndim == 1
    are_lists = bool(owners) and positions.shape[:-1] == owners
    if not (is_one_list or are_lists):
        lists = f', or an array of lists of shape {(*owners, "kept")}' if owners else ''
        raise ValueError(f'{entry} has shape {positions.shape}; give one list of indices{lists}')
    if not positions.size:
        raise ValueError(f'{entry} is empty; a group keeps at least one channel')
    if not np.issubdtype(positions.dtype, np.integer):
        raise TypeError(f'{entry} has {positions.flat[0]!r}; indices are whole numbers')
    is_beyond = (positions < 0) | (positions >= size)
    foreign = positions[is_beyond]
    if len(foreign):
        raise IndexError(f'{entry} has {foreign[0]}; the group has indices from 0 to {size - 1}')
    rows = positions.reshape(-1, positions.shape[-1])
    for channels in rows.astype(np.int64):
        is_fall = np.diff(channels) <= 0
        if is_fall.any():
            first_fall = np.argmax(is_fall) + 1
            channel = channels[first_fall]
            is_repeated = channel in channels[:first_fall]
            fault = 'twice' if is_repeated else 'not in ascending order'
            raise ValueError(f'{entry} has {channel} {fault}; give np.unique(indices)')
    return positions
