"""A smaller model beside one that is built from source with smaller widths."""

from collections.abc import Callable
from typing import Any

import jax

from jaxpruner.structure.cut import Cut
from jaxpruner.structure.old_numbers import OldNumbers
from jaxpruner.structure.source_programs import Comparison, OtherDifferenceError
from jaxpruner.structure.width_flow import WidthFlow


def find_old_numbers(
    graph: Any, cut: Cut, small_fn: Callable[..., Any] | None, number: int = 0
) -> OldNumbers:
    """The numbers of old widths in a graph's smaller program.

    Args:
      graph: a `ChannelGraph`.
      cut: what stays of it.
      small_fn: of the module with the new widths; `None` to look for values of old widths.
      number: of the program.
    """
    names = {group.atom.resolved(): name for name, group in graph.groups.items()}
    trace = graph.traces[number]
    flow = WidthFlow(trace, cut, names)
    flow.run()
    if small_fn is None:
        return OldNumbers(tuple(flow.numbers), is_compared=False)
    source = jax.make_jaxpr(small_fn)(*_small_shapes(graph, cut, number))
    comparison = Comparison(trace, cut, flow.groups_at)
    difference = ''
    try:
        comparison.run(source)
    except OtherDifferenceError as error:
        difference = str(error)
    return OldNumbers(tuple(comparison.numbers), True, difference)


def _small_shapes(graph: Any, cut: Cut, number: int) -> tuple[Any, ...]:
    """The shapes of the smaller model's parameters and other arguments."""
    program = graph.model.programs[number]
    trace = graph.traces[number]
    leaves, treedef = jax.tree.flatten((graph.model.params, program.arguments))
    axes_of_leaves = [*trace.leaves, *trace.states]
    shapes = []
    for i, leaf in enumerate(leaves):
        is_cut = i < len(axes_of_leaves)
        shape = cut.shape(axes_of_leaves[i]) if is_cut else leaf.shape
        shapes.append(jax.ShapeDtypeStruct(shape, leaf.dtype))
    params, arguments = jax.tree.unflatten(treedef, shapes)
    return params, *arguments
