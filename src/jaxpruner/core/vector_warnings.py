"""Warnings of biases and norms of more than one dimension, which the default filter takes for kernels."""

import contextlib
import contextvars
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxpruner import tree as tree_lib
from jaxpruner.core import caller_warnings

# Last names of parameters that are vectors in one layer: 2-D means that layers are stacked.
VECTOR_NAMES = frozenset({'bias', 'b', 'scale', 'offset', 'beta', 'gamma'})
_MOST_NAMED = 3

_dense_paths: contextvars.ContextVar[frozenset[tree_lib.Path]] = contextvars.ContextVar(
    'dense_paths', default=frozenset()
)


@contextlib.contextmanager
def no_warnings_about(paths: Iterable[tree_lib.Path]) -> Iterator[None]:
    """Keeps silent about leaves that stay dense whatever a filter selects, by their sparsity type."""
    token = _dense_paths.set(frozenset(paths))
    try:
        yield
    finally:
        _dense_paths.reset(token)


def warn_about_vectors(
    paths: list[tree_lib.Path],
    leaves: list[Any],
    selected: Mapping[int, tuple[int, ...]],
    stacked: tree_lib.Stacked,
) -> None:
    """Warns once of leaves that the default filter selects and that look like biases or norms.

    `selected` has the shape of one layer, by the index of each leaf that the filter selects; `stacked` names the leaves
    that are stacks of layers.
    """
    biases = []
    for i in sorted(selected):
        leaf, name = leaves[i], paths[i][-1]
        if paths[i] in _dense_paths.get() or name not in VECTOR_NAMES:
            continue
        siblings = [leaves[j] for j in range(len(paths)) if paths[j][:-1] == paths[i][:-1]]
        # In LoRA `a` and `b` are kernels.
        if name == 'b' and not any(_adds_to(leaf.shape, other.shape) for other in siblings):
            continue
        if tree_lib.layer_axis(stacked, paths[i], leaf.shape) is None:
            suspected = _suspected_stack(paths, leaves, i)
            if suspected is not None:
                _warn_about_stacked_layers(paths[i], leaf, *suspected)
                return
        if len(selected[i]) > 1:
            biases.append(f'{tree_lib.path_string(paths[i])} {tuple(leaf.shape)}')
    if biases:
        more = f' and {len(biases) - _MOST_NAMED} more' if len(biases) > _MOST_NAMED else ''
        caller_warnings.warn(
            f'{", ".join(biases[:_MOST_NAMED])}{more} looks like a bias or norm, but has more than one dimension, so '
            'that the default filter takes it for a kernel. filter_fn=sparsity_distributions.NOT_BIAS_FILTER leaves '
            'such leaves dense; any other filter_fn says that you have decided'
        )


def _suspected_stack(
    paths: list[tree_lib.Path], leaves: list[Any], index: int
) -> tuple[int, str] | None:
    """Finds the axis that may count layers, stacked for `scan`, and a glob of the leaves that have it.

    It is an axis of a length above 1 that a leaf has in common with all leaves beside it, and with those of as large a
    subtree as there is. Of several such axes it is the shortest: layers are fewer than channels.
    """
    path, shape, found = paths[index], leaves[index].shape, None
    # A vector between axes of length 1 is one layer.
    axes = [i for i, n in enumerate(shape) if n > 1 and (i == 0 or math.prod(shape) > n)]
    for depth in range(len(path) - 1, min(1, len(path) - 1) - 1, -1):
        inside = [leaves[i] for i in range(len(paths)) if paths[i][:depth] == path[:depth]]
        axes = _common_axes(axes, shape, inside)
        if not axes:
            break
        axis = min(axes, key=shape.__getitem__)
        found = axis, '/'.join((*path[:depth], '*'))
    return found


def _common_axes(axes: list[int], shape: tuple[int, ...], leaves: list[Any]) -> list[int]:
    """Lists the axes whose length is the same in all leaves, which have another axis besides."""
    if any(leaf.ndim < 2 for leaf in leaves):
        return []
    common = []
    for axis in axes:
        if all(leaf.ndim > axis and leaf.shape[axis] == shape[axis] for leaf in leaves):
            common.append(axis)
    return common


def warn_of_other_axes(
    paths: Sequence[tree_lib.Path], leaves: Sequence[Any], stacked: tree_lib.Stacked
) -> None:
    """Warns where a name means leaves of different numbers of layers, and a shorter axis is equally long in all."""
    for name, given in tree_lib.axes_of_layers(stacked).items():
        meant = [i for i, path in enumerate(paths) if tree_lib.matches(name, path)]
        stacks = [leaves[i] for i in meant if leaves[i].ndim >= 2]
        lengths = {leaf.shape[given] for leaf in stacks}
        if len(lengths) < 2:
            continue
        shape = stacks[0].shape
        shorter = [axis for axis, length in enumerate(shape) if 1 < length < min(lengths)]
        for axis in _common_axes(shorter, shape, stacks)[:1]:
            caller_warnings.warn(
                f'stacked: {name!r} takes axis {given} for that of layers, of which there are then {min(lengths)} in '
                f'one leaf and {max(lengths)} in another; axis {axis} has length {shape[axis]} in all of them. If that '
                f'one counts layers, write stacked={{{name!r}: {axis}}}'
            )


def _adds_to(bias: tuple[int, ...], kernel: tuple[int, ...]) -> bool:
    """Whether a leaf has the shape of a bias for the outputs of another, in each layer where both are stacked."""
    if len(kernel) <= len(bias):
        return False
    last = kernel[len(kernel) - len(bias) :]
    is_stacked = kernel[0] == bias[0] and last[1:] == bias[1:]
    return last == bias or is_stacked


def _warn_about_stacked_layers(path: tree_lib.Path, leaf: Any, axis: int, glob: str) -> None:
    setting = f'{{{glob!r}: {axis}}}' if axis else repr(glob)
    caller_warnings.warn(
        f'{tree_lib.path_string(path)} has shape {tuple(leaf.shape)} and looks like a bias or norm of '
        f'{leaf.shape[axis]} stacked layers (axis {axis}), which is now pruned; if so, name the stacked leaves: '
        f'stacked={setting}, '
        'otherwise leave it out with filter_fn=sparsity_distributions.NOT_BIAS_FILTER, or silence this with another '
        'filter_fn'
    )
