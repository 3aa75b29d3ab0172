"""Compares a smaller model with a module that is built from source with smaller widths."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    """Finds the numbers of old widths in a graph's smaller program.

    Args:
      graph: a `ChannelGraph`.
      cut: the channels that stay.
      small_fn: of the module with the new widths; `None` to look for values of old widths.
      number: of the program.
    """
    group_names = {}
    for name, group in graph.groups.items():
        group_names[group.atom.resolved()] = name
    trace = graph.traces[number]
    flow = WidthFlow(trace, cut, group_names)
    flow.run()
    if small_fn is None:
        return OldNumbers(tuple(flow.numbers), is_compared=False)
    small_shapes = _small_shapes(graph, cut, number)
    source = jax.make_jaxpr(small_fn)(*small_shapes)
    comparison = Comparison(trace, cut, flow.groups_at)
    other_difference = ''
    try:
        comparison.run(source)
    except OtherDifferenceError as error:
        other_difference = str(error)
    numbers = tuple(comparison.numbers)
    return OldNumbers(numbers, True, other_difference)


@dataclasses.dataclass(frozen=True)
class SourceComparison:
    """How a module of the new widths compares with the smaller model. Made by `ChannelGraph.compare`.

    Attributes:
      verification: its error is the difference of their results, its change the one that the cut makes.
      numbers: those that still differ in the module's program: constants, and numbers that no parameter takes up.
      other_difference: where the two programs differ in more than numbers; empty if they do not.

    >>> print(SourceComparison(Verification(error=0.1, change=0.5, tolerance=1e-3, rounding=1e-6), (), ''))
    different: the error is 0.2 of the change of 0.5 that the removal makes
    """

    verification: Verification
    numbers: tuple[OldNumber, ...]
    other_difference: str

    @property
    def verdict(self) -> Verdict:
        """As that of the results; but `'unproven'` if these are equal, and the programs differ."""
        verdict = self.verification.verdict
        programs_differ = bool(self.numbers or self.other_difference)
        if verdict == 'equal' and programs_differ:
            return 'unproven'
        return verdict

    def __str__(self) -> str:
        comparison = str(self.verification)
        if self.verdict != self.verification.verdict:
            comparison = f'unproven: the results are equal for these inputs, and the programs are not ({comparison})'
        lines = [comparison]
        if self.numbers:
            lines.append(to_table(self.numbers))
        if self.other_difference:
            lines.append(f'the programs differ in more than numbers: {self.other_difference}')
        return '\n'.join(lines)


class SourceVersions(NamedTuple):
    """The arguments of the whole model, of the smaller one, and of the module from source."""

    whole: Sequence[Any]
    small: Sequence[Any]
    source: Sequence[Any]


def compare_with_source(
    apply_fn: Callable[..., Any],
    small_apply: SmallApply,
    small_fn: Callable[..., Any],
    versions: SourceVersions,
) -> Verification:
    """Runs the whole model, the smaller one and the module, `small_fn`, and compares their results."""
    results = jax.jit(apply_fn)(*versions.whole)
    whole = small_apply.cut_results(results)
    small = jax.jit(small_apply)(*versions.small)
    source = jax.jit(small_fn)(*versions.source)
    small, source = map(jax.tree.leaves, (small, source))
    return verifying.compare(whole, small, source)


def _small_shapes(graph: Any, cut: Cut, number: int) -> tuple[Any, ...]:
    """The shapes of the smaller model's parameters and other arguments."""
    program = graph.model.programs[number]
    trace = graph.traces[number]
    whole = (graph.model.params, *program.arguments)
    shapes, treedef = jax.tree.flatten(whole)
    axes_of_leaves = [*trace.leaves, *trace.states]
    for i, axes in enumerate(axes_of_leaves):  # the inputs behind them keep their shapes
        small_shape = cut.shape(axes)
        shapes[i] = jax.ShapeDtypeStruct(small_shape, shapes[i].dtype)
    return jax.tree.unflatten(treedef, shapes)
