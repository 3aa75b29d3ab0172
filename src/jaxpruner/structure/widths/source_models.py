"""A smaller model beside one that is built from source with smaller widths."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpruner.structure.cutting import verifying
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.structure.cutting.small_model import SmallApply
from jaxpruner.structure.cutting.verifying import Verdict, Verification
from jaxpruner.structure.widths.old_numbers import OldNumber, OldNumbers, to_table
from jaxpruner.structure.widths.source_programs import Comparison, OtherDifferenceError
from jaxpruner.structure.widths.width_flow import WidthFlow


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


@dataclasses.dataclass(frozen=True)
class SourceComparison:
    """How a module of the new widths compares with the smaller model. Made by `ChannelGraph.compare`.

    Attributes:
      verification: the error is the difference of their results, the change the one that the cut makes.
      numbers: what still differs in the module's program: numbers of old widths that nothing takes up, and constants.
      other_difference: where the two programs differ in more than numbers; empty if they do not.

    >>> print(SourceComparison(Verification(error=0.1, change=0.5, tolerance=1e-3, rounding=1e-6), (), ''))
    different: the error is 0.2 of the change of 0.5 that the removal makes
    """

    verification: Verification
    numbers: tuple[OldNumber, ...]
    other_difference: str

    @property
    def verdict(self) -> Verdict:
        """`'equal'` where results are equal and no number is left; `'unproven'` where they are equal all the same."""
        is_same = not (self.numbers or self.other_difference)
        verdict = self.verification.verdict
        return 'unproven' if verdict == 'equal' and not is_same else verdict

    def __str__(self) -> str:
        lines = [str(self.verification)]
        if self.verdict != self.verification.verdict:
            lines = [
                f'unproven: the results are equal for these inputs, and the programs are not ({lines[0]})'
            ]
        if self.numbers:
            lines.append(to_table(self.numbers))
        if self.other_difference:
            lines.append(f'the programs differ in more than numbers: {self.other_difference}')
        return '\n'.join(lines)


def compare_with_source(
    apply_fn: Callable[..., Any],
    small_apply: SmallApply,
    small_fn: Callable[..., Any],
    versions: Sequence[Sequence[Any]],
) -> Verification:
    """Runs the whole model, the smaller one, and the module.

    Args:
      apply_fn: of the whole model.
      small_apply: of the smaller one.
      small_fn: of the module with the new widths.
      versions: the arguments of the whole model, of the smaller one, and of the module.
    """
    whole = small_apply.cut_results(jax.jit(apply_fn)(*versions[0]))
    small = jax.tree.leaves(jax.jit(small_apply)(*versions[1]))
    source = jax.tree.leaves(jax.jit(small_fn)(*versions[2]))
    return verifying.compare(whole, small, source)


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
