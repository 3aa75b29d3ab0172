"""N:M along the axis that a model sums over, in the layout of any framework."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxpruner import sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.sparsity_types import normalize_setting, resolve_types
from jaxpruner.uses import contractions
from jaxpruner.uses.contractions import AxisNumbers
from jaxpruner.uses.graph import Use, UseGraph

logger = logging.getLogger(__name__)


def with_input_axes(
    sparsity_type: Any, graph: UseGraph
) -> Callable[[tree_lib.Path, Any], sparsity_types.SparsityType | None]:
    """Makes a `sparsity_type` setting in which `NByM(…, axis='input')` lies along the axis that the model sums over.

    Hardware needs the groups of N:M there. For a matrix that is its input axis. Several axes, such as heads and
    features of an attention's output, count as one axis. Groups lie along the innermost one if m divides it (for a
    convolution the input channels), and along a tuple of all of them otherwise. Leaves in no contraction stay dense,
    such as biases and embeddings that are only looked up. So do kernels of depthwise convolutions without an axis of
    input channels, `(height, width, channels, 1)`, with a log line.

    Args:
      sparsity_type: a type, a string, a mapping from names to types, or a function, as for any algorithm.
      graph: from `param_uses`.

    Returns:
      A function of a leaf's path and the leaf, which is a `sparsity_type` setting as well. It raises
      `UnsupportedPrimitive` for an opaque leaf, and `ValueError` for a leaf that is summed along several axes. To leave
      them out, give a mapping with `None` for them, or with a number as their axis.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.uses import param_uses
    >>> params = {'out_by_in': jnp.ones((8, 4)), 'bias': jnp.ones(8)}
    >>> graph = param_uses(lambda p, x: x @ p['out_by_in'].T + p['bias'], params, jnp.ones((2, 4)))
    >>> setting = with_input_axes(sparsity_types.NByM(2, 4, axis='input'), graph)
    >>> setting(('out_by_in',), params['out_by_in'])
    NByM(n=2, m=4, axis=-1, allow_partial=False)
    """
    setting = normalize_setting(sparsity_type)
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
        # Counted from the end, the axis is the same for one layer of a stack.
        along = dataclasses.replace(leaf_type, axis=axis - leaf.ndim)
        if leaf.shape[axis] % leaf_type.m:
            axes = _axes_as_one(graph[path], leaf.shape)
            if len(axes) > 1:
                from_the_end = [axis - leaf.ndim for axis in axes]
                return dataclasses.replace(along, axis=tuple(from_the_end))
        return along

    return resolve


def _types_of_leaves(setting: Any, graph: UseGraph) -> Callable[[tree_lib.Path, Any], Any]:
    """Reads a setting that names leaves as a function of a path and a leaf of the graph."""
    paths = [*graph, *graph.opaque, *graph.unused]
    resolved = resolve_types(setting, paths, paths)
    types = dict(zip(paths, resolved, strict=True))

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
    for use in _contractions(graph[path]):
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


def _contractions(uses: Iterable[Use]) -> list[Use]:
    return [use for use in uses if use.op in ('dot', 'conv') and use.contract]


def _axes_as_one(uses: Iterable[Use], shape: Sequence[int]) -> AxisNumbers:
    """The leaf's axes that all contractions count as one, in order; none if they are not whole, or differ."""
    orders = set(map(_order_of_inputs, _contractions(uses)))
    if len(orders) != 1:
        return ()
    axes, sizes = orders.pop()
    whole_sizes = [shape[axis] for axis in axes]
    are_whole = list(sizes) == whole_sizes
    are_distinct = len(set(axes)) == len(axes)
    return axes if are_whole and are_distinct else ()


def _order_of_inputs(use: Use) -> tuple[AxisNumbers, AxisNumbers]:
    """The leaf's axes along which the inputs of a contraction lie, and their sizes, the innermost last."""
    axes, sizes = [], []
    for operand_axis in contractions.input_axes(use.site.equation, use.site.operand):
        for factor in use.site.view.axes[operand_axis].factors:
            if factor.size == 1:
                continue
            if len(factor.axes) != 1:
                return (), ()
            axes += factor.axes
            sizes.append(factor.size)
    return tuple(axes), tuple(sizes)


def _has_no_channels(use: Use) -> bool:
    """Whether a kernel sums only over windows, and has no axis of the leaf for input channels."""
    if use.op != 'conv':
        return False
    channels = contractions.innermost(use.site.equation, use.site.operand)
    axis = use.site.view.axes[channels]
    return not axis.along and axis.is_whole and axis.length == 1
