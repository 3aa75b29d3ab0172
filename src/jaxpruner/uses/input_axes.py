"""N:M along the axis over which a model sums, whatever the layout of its framework."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from jaxpruner import sparsity_types
from jaxpruner.core import tree as tree_lib
from jaxpruner.sparsity_types import settings as type_settings
from jaxpruner.uses import contractions
from jaxpruner.uses.graph import Use, UseGraph

logger = logging.getLogger(__name__)


def with_input_axes(
    sparsity_type: Any, graph: UseGraph
) -> Callable[[tree_lib.Path, Any], sparsity_types.SparsityType | None]:
    """A `sparsity_type` setting in which each `NByM(…, axis='input')` lies along the axis that the model sums over.

    Hardware wants the groups of N:M there. For a matrix that is its input axis; for a convolution the input channels;
    of several axes the innermost. Leaves that are in no contraction (embeddings that are only looked up, biases) stay
    dense, and with a log line kernels of depthwise convolutions that have no axis of input channels, `(height, width,
    channels, 1)`.

    Args:
      sparsity_type: a type, a string, a mapping from names to types, or a function, as for any algorithm.
      graph: from `param_uses`.

    Returns:
      A function of a leaf's path and the leaf, which is a `sparsity_type` setting as well. It raises
      `UnsupportedPrimitive` for a leaf of which the graph says nothing, and `ValueError` for one that is summed along
      several axes; a mapping with `None` or a number as their axis leaves them out.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.uses import param_uses
    >>> params = {'out_by_in': jnp.ones((8, 4)), 'bias': jnp.ones(8)}
    >>> graph = param_uses(lambda p, x: x @ p['out_by_in'].T + p['bias'], params, jnp.ones((2, 4)))
    >>> setting = with_input_axes(sparsity_types.NByM(2, 4, axis='input'), graph)
    >>> setting(('out_by_in',), params['out_by_in'])
    NByM(n=2, m=4, axis=-1, allow_partial=False)
    """
    setting = type_settings.normalize_setting(sparsity_type)
    type_of: Any = setting if callable(setting) else _types_of_leaves(setting, graph)

    def resolve(path: tree_lib.Path, leaf: Any) -> sparsity_types.SparsityType | None:
        leaf_type = type_of(path, leaf)
        if not isinstance(leaf_type, sparsity_types.NByM):
            return leaf_type
        if leaf_type.axis != sparsity_types.INPUT_AXIS:
            return leaf_type
        axis = None if path in graph.unused else _input_axis(path, graph)
        if axis is None:
            return None
        # Counted from the end, the axis is the same in one layer of a stack.
        return dataclasses.replace(leaf_type, axis=axis - leaf.ndim)

    return resolve


def _types_of_leaves(setting: Any, graph: UseGraph) -> Callable[[tree_lib.Path, Any], Any]:
    """What a setting that names leaves says of each leaf of the graph."""
    paths = [*graph, *graph.opaque, *graph.unused]
    types = dict(zip(paths, type_settings.resolve(setting, paths, paths), strict=True))

    def type_of(path: tree_lib.Path, leaf: Any) -> Any:
        if path not in types:
            name = tree_lib.path_string(path)
            raise ValueError(f'{name} is no leaf of the model that the graph was made of')
        return types[path]

    return type_of


def _input_axis(path: tree_lib.Path, graph: UseGraph) -> int | None:
    name = tree_lib.path_string(path)
    input_axes: set[int | None] = set()
    contracted_axes: set[int] = set()
    where = ''
    for use in graph[path]:
        if use.op in ('dot', 'conv') and use.contract:
            contracted_axes.update(use.contract)
            where = use.where
            if not _has_no_channels(use):
                input_axes.add(use.input_axis)
    if not contracted_axes:
        return None
    if not input_axes:
        logger.info('%s stays dense: a depthwise convolution sums over no channels', name)
        return None
    axis = input_axes.pop()
    if input_axes or axis is None:
        raise ValueError(
            f'{name}: the model sums it along several axes, {sorted(contracted_axes)} ({where}); name one, or leave it '
            f"dense: sparsity_type={{'{name}': None, '*': …}}"
        )
    return axis


def _has_no_channels(use: Use) -> bool:
    """Whether a kernel sums over windows alone, and the axis of its input channels is none of the leaf's."""
    if use.op != 'conv':
        return False
    channels = contractions.innermost(use.site.equation, use.site.operand)
    axis = use.site.view.axes[channels]
    return not axis.along and axis.is_whole and axis.length == 1
