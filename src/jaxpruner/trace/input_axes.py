"""N:M along the axis that a model sums over, in the layout of any framework."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxpruner import sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.sparsity_types import normalize_setting, resolve_types
from jaxpruner.trace import contractions
from jaxpruner.trace.graph import Use, UseGraph
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
        axis = None if path in graph.unused else _input_axis(path, graph)
        if axis is None:
            return None
        axes: tuple[int, ...] = (axis,)
        if leaf.shape[axis] % leaf_type.m:
            axes = _axes_as_one(_contractions(graph[path]), leaf.shape) or axes
        # Counted from the end, the axes are the same for one layer of a stack.
        first, *others = [axis - leaf.ndim for axis in axes]
        return dataclasses.replace(leaf_type, axis=(first, *others) if others else first)

    return resolve


def _contractions(uses: Iterable[Use]) -> list[Use]:
    return [use for use in uses if use.op in ('dot', 'conv') and use.contract]


def _input_axis(path: tree_lib.Path, graph: UseGraph) -> int | None:
    """The leaf's axis along which all contractions have their innermost inputs; `None` if the leaf stays dense."""
    name = tree_lib.path_string(path)
    contracting = _contractions(graph[path])
    input_axes = set()
    for use in contracting:
        *_, innermost = contractions.input_axes(use.site.equation, use.site.operand)
        axis = use.site.view.axes[innermost]
        # A kernel may sum only over windows, and have no axis of the leaf for input channels.
        has_no_channels = axis.length == 1 and axis.is_whole and not axes_of(axis.factors)
        if use.op == 'dot' or not has_no_channels:
            input_axes.add(use.input_axis)
    if not input_axes:
        if contracting:
            logger.info('%s stays dense: a depthwise convolution sums over no channels', name)
        return None
    axis = input_axes.pop()
    if input_axes or axis is None:
        contracted = sorted({axis for use in contracting for axis in use.contract})
        raise ValueError(
            f'{name}: the model sums it along several axes, {contracted} ({contracting[-1].where}); name one, or leave '
            f"it dense: sparsity_type={{'{name}': None, '*': …}}"
        )
    return axis


def _axes_as_one(contracting: Sequence[Use], shape: Sequence[int]) -> tuple[int, ...]:
    """The leaf's axes that all contractions count as one, innermost last; none if they are not whole, or differ."""
    orders = set()
    for use in contracting:
        axes = contractions.input_axes(use.site.equation, use.site.operand)
        factors = [factor for axis in axes for factor in use.site.view.axes[axis].factors]
        orders.add(tuple(factor for factor in factors if factor.size > 1))
    factors = orders.pop()
    axes = tuple(axis for factor in factors for axis in factor.axes)
    are_whole = [shape[axis] for axis in axes] == [factor.size for factor in factors]
    return axes if not orders and are_whole and len(set(axes)) == len(axes) else ()
