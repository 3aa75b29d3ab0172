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
    """Keeps silent about leaves that stay dense whatever a filter selects, by their sparsity type.

    Args:
      paths: of these leaves.

    >>> with no_warnings_about([('query', 'bias')]):
    ...     pass
    """
    token = _dense_paths.set(frozenset(paths))
    try:
        yield
    finally:
        _dense_paths.reset(token)


def warn_about_vectors(
    paths: list[tree_lib.Path],
    leaves: list[Any],
    selected: Mapping[int, tuple[int, ...]],
    stacked: Sequence[str],
) -> None:
    """Warns once of leaves that the default filter selects and that look like biases or norms.

    Args:
      paths: of all leaves.
      leaves: arrays, or their shapes.
      selected: shape of one layer, by the number of each leaf that the filter selects.
      stacked: names of leaves that are stacks of layers.

    >>> import jax
    >>> leaves = [jax.ShapeDtypeStruct(shape, 'float32') for shape in [(4, 8), (16, 4, 8)]]
    >>> with no_warnings_about([('query', 'bias')]):
    ...     warn_about_vectors([('query', 'bias'), ('query', 'kernel')], leaves, {0: (4, 8), 1: (16, 4, 8)}, ())
    """
    biases = []
    for i in sorted(selected):
        if paths[i] in _dense_paths.get() or paths[i][-1] not in VECTOR_NAMES:
            continue
        siblings = [j for j in range(len(paths)) if paths[j][:-1] == paths[i][:-1]]
        if paths[i][-1] == 'b' and not any(
            _adds_to(leaves[i].shape, leaves[j].shape) for j in siblings
        ):
            continue  # as in LoRA, where `a` and `b` are kernels
        is_named = any(tree_lib.matches(name, paths[i]) for name in stacked)
        if not is_named and _look_stacked(leaves, siblings, leaves[i]):
            _warn_about_stacked_layers(paths[i], leaves[i])
            return
        if len(selected[i]) > 1:
            biases.append(i)
    if biases:
        names = ', '.join(
            f'{tree_lib.path_string(paths[i])} {tuple(leaves[i].shape)}'
            for i in biases[:_MOST_NAMED]
        )
        more = f' and {len(biases) - _MOST_NAMED} more' if len(biases) > _MOST_NAMED else ''
        caller_warnings.warn(
            f'{names}{more} looks like a bias or norm, but has more than one dimension, so that the default filter '
            'takes it for a kernel. filter_fn=sparsity_distributions.NOT_BIAS_FILTER leaves such leaves dense; any '
            'other filter_fn says that you have decided'
        )


def _look_stacked(leaves: list[Any], siblings: list[int], leaf: Any) -> bool:
    """Whether a leaf and all beside it begin with an axis of the same length: layers that are stacked for `scan`."""
    return leaf.shape[0] > 1 and all(
        leaves[j].ndim >= 2 and leaves[j].shape[0] == leaf.shape[0] for j in siblings
    )


def _adds_to(bias: tuple[int, ...], kernel: tuple[int, ...]) -> bool:
    """Whether a leaf has the shape of a bias for the outputs of another, in each layer where both are stacked."""
    if len(kernel) <= len(bias):
        return False
    is_stacked = kernel[0] == bias[0] and kernel[len(kernel) - len(bias) + 1 :] == bias[1:]
    return kernel[len(kernel) - len(bias) :] == bias or is_stacked


def _warn_about_stacked_layers(path: tree_lib.Path, leaf: Any) -> None:
    caller_warnings.warn(
        f'{tree_lib.path_string(path)} has shape {tuple(leaf.shape)} and looks like a bias or norm of {leaf.shape[0]} '
        f"stacked layers, which is now pruned; if so, name the stacked leaves: stacked='{path[0]}/*', "
        'otherwise leave it out with filter_fn=sparsity_distributions.NOT_BIAS_FILTER, or silence this with another '
        'filter_fn'
    )
