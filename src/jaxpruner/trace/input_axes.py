"""N:M along the axis that a model sums over, in the layout of any framework."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from jaxpruner import sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.sparsity_types import normalize_setting, resolve_types
from jaxpruner.trace.graph import UseGraph, input_axes_of
from jaxpruner.trace.views import axes_of

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
    types = {}
    if not callable(setting):
        paths = [*graph, *graph.opaque, *graph.unused]
        types = dict(zip(paths, resolve_types(setting, paths, paths), strict=True))

    def resolve(path: tree_lib.Path, leaf: Any) -> sparsity_types.SparsityType | None:
        if callable(setting):
            leaf_type: Any = setting(path, leaf)
        elif path in types:
            leaf_type = types[path]
        else:
            name = tree_lib.path_string(path)
            raise ValueError(f'{name} is no leaf of the model that the graph was made of')
        is_n_by_m = isinstance(leaf_type, sparsity_types.NByM)
        if not is_n_by_m or leaf_type.axis != sparsity_types.INPUT_AXIS:
            return leaf_type
        axes: tuple[int, ...] = ()
        if path not in graph.unused:
            axes = _input_axes(path, graph, leaf.shape, leaf_type.m)
        if not axes:
            return None
        # Counted from the end, the axes are the same for one layer of a stack.
        first, *others = [axis - leaf.ndim for axis in axes]
        return dataclasses.replace(leaf_type, axis=(first, *others) if others else first)

    return resolve


def _input_axes(
    path: tree_lib.Path, graph: UseGraph, shape: tuple[int, ...], m: int
) -> tuple[int, ...]:
    """The leaf's axes along which groups of m lie; none if the leaf stays dense.

    They are the axis along which all contractions have their innermost inputs, or all axes that every contraction
    counts as one, innermost last.
    """
    contracting = [use for use in graph[path] if use.op in ('dot', 'conv') and use.contract]
    innermost, orders = set(), set()
    for use in contracting:
        numbers = input_axes_of(use.site.equation, use.site.operand)
        axes = [use.site.view.axes[number] for number in numbers]
        orders.add(tuple(factor for axis in axes for factor in axis.factors if factor.size > 1))
        # A kernel may sum only over windows, and have no axis of the leaf for input channels.
        last = axes[-1]
        has_no_channels = last.length == 1 and last.is_whole and not axes_of(last.factors)
        if use.op == 'dot' or not has_no_channels:
            innermost.add(use.input_axis)
    name = tree_lib.path_string(path)
    if not innermost:
        if contracting:
            logger.info('%s stays dense: a depthwise convolution sums over no channels', name)
        return ()
    axis = innermost.pop()
    if innermost or axis is None:
        contracted = sorted({axis for use in contracting for axis in use.contract})
        raise ValueError(
            f'{name}: the model sums it along several axes, {contracted} ({contracting[-1].where}); name one, or leave '
            f"it dense: sparsity_type={{'{name}': None, '*': …}}"
        )
    factors = orders.pop()
    as_one = tuple(axis for factor in factors for axis in factor.axes)
    are_whole = [shape[axis] for axis in as_one] == [factor.size for factor in factors]
    is_one = as_one and not orders and are_whole and len(set(as_one)) == len(as_one)
    return as_one if shape[axis] % m and is_one else (axis,)
