"""Warnings of biases and norms of more than one dimension, which the default filter takes for kernels."""

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxpruner.core import caller_warnings
from jaxpruner.core import tree as tree_lib

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
    stacked: Sequence[str | tree_lib.Path],
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
        if not tree_lib.matches_any(stacked, paths[i]) and _look_stacked(siblings, leaf):
            _warn_about_stacked_layers(paths[i], leaf)
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


def _look_stacked(siblings: list[Any], leaf: Any) -> bool:
    """Whether a leaf and all beside it begin with an axis of the same length: layers that are stacked for `scan`."""
    layers = leaf.shape[0]
    return layers > 1 and all(other.ndim >= 2 and other.shape[0] == layers for other in siblings)


def _adds_to(bias: tuple[int, ...], kernel: tuple[int, ...]) -> bool:
    """Whether a leaf has the shape of a bias for the outputs of another, in each layer where both are stacked."""
    if len(kernel) <= len(bias):
        return False
    last = kernel[len(kernel) - len(bias) :]
    is_stacked = kernel[0] == bias[0] and last[1:] == bias[1:]
    return last == bias or is_stacked


def _warn_about_stacked_layers(path: tree_lib.Path, leaf: Any) -> None:
    caller_warnings.warn(
        f'{tree_lib.path_string(path)} has shape {tuple(leaf.shape)} and looks like a bias or norm of {leaf.shape[0]} '
        f"stacked layers, which is now pruned; if so, name the stacked leaves: stacked='{path[0]}/*', "
        'otherwise leave it out with filter_fn=sparsity_distributions.NOT_BIAS_FILTER, or silence this with another '
        'filter_fn'
    )
