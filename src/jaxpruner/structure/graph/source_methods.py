"""`old_numbers`, `fold` and `compare`: the smaller model beside a module built from source with the new widths."""

from collections.abc import Callable
from typing import Any

import jax

from jaxpruner.structure.cutting import trees
from jaxpruner.structure.cutting.keeping import KeepByGroup, check_keep
from jaxpruner.structure.cutting.small_model import SmallApply
from jaxpruner.structure.graph.record import GraphRecord
from jaxpruner.structure.programs import ModelProgram
from jaxpruner.structure.widths.folding import Folded, fold
from jaxpruner.structure.widths.old_numbers import OldNumbers
from jaxpruner.structure.widths.source_models import (
    SourceComparison,
    SourceVersions,
    compare_with_source,
    find_old_numbers,
)
from jaxpruner.tree import PyTree


class SourceMethods(GraphRecord):
    """Finds numbers of old widths, folds them into parameters, and compares the module."""

    def old_numbers(
        self,
        keep: KeepByGroup,
        small_fn: Callable[..., Any] | None = None,
        allow_inexact: bool = False,
        *,
        of: Callable[..., Any] | None = None,
    ) -> OldNumbers:
        """Lists the numbers in the smaller program that come from an old width, such as `1 / width`, with their lines.

        If `small_fn` is given, the smaller program and that of the module are compared operation by operation, and the
        numbers that differ are listed. Otherwise numbers are listed that meet a cut axis, or a sum over one, and have
        the value of its old width, of its root, or of the inverse of either.

        Args:
          keep: as in `shrink`.
          small_fn: the function of a module with the new widths, for parameters that `shrink` returned.
            `constructor_arguments` finds with which arguments to build it.
          allow_inexact: as in `shrink`.
          of: as in `small_apply`.

        Raises:
          TypeError, KeyError, IndexError, ValueError: as in `shrink`; or what `small_fn` raises for the parameters.

        >>> import jax, jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> def apply(p, x):
        ...     h = x @ p['up']
        ...     return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) @ p['down']
        >>> params = {'up': jnp.ones((2, 8)), 'down': jnp.ones((8, 1))}
        >>> graph = channel_groups(apply, params, jnp.ones((5, 2)))
        >>> (number,) = graph.old_numbers({'up[1]': range(4)}, apply).numbers
        >>> number.primitive, float(number.old), float(number.new), number.groups
        ('div', 8.0, 4.0, ('up[1]',))
        """
        cut = check_keep(self.groups, keep, allow_inexact)
        number = self.model.number_of(of)
        return find_old_numbers(self, cut, small_fn, number)

    def fold(
        self,
        small_params: PyTree,
        keep: KeepByGroup,
        small_fn: Callable[..., Any],
        allow_inexact: bool = False,
        *,
        weights_only: bool = False,
        of: Callable[..., Any] | None = None,
    ) -> Folded:
        """Scales parameters so that a module of the new widths gives the same results as the smaller program.

        Factors are followed through the program. An RMSNorm over D' channels instead of D has a mean that is D / D'
        times as large. Its scale takes up the square root of that, and the module needs an epsilon that is D / D' times
        as large, too. A query kernel takes up the difference of `1 / sqrt(d)`. No parameter takes up the mean that a
        LayerNorm subtracts.

        Args:
          small_params: what `shrink` returned.
          keep: as in `shrink`.
          small_fn: as in `old_numbers`.
          allow_inexact: as in `shrink`.
          weights_only: leave epsilons as they are. They need no change if all kernels and biases that add to a
            residual stream can be scaled instead.
          of: as in `small_apply`.

        Returns:
          The parameters, their factors, the constants that the module still has to get, and the numbers that no
          parameter takes up.

        Raises:
          TypeError, KeyError, IndexError, ValueError: as in `shrink`; ValueError if the module's program differs in
            more than numbers.

        >>> import jax, jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> def apply(p, x):
        ...     h = x @ p['up']
        ...     h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * p['scale']
        ...     return jnp.tanh(h @ p['down'])
        >>> params = {'up': jnp.ones((2, 8)), 'scale': jnp.ones(8), 'down': jnp.ones((8, 1))}
        >>> graph = channel_groups(apply, params, jnp.ones((5, 2)))
        >>> keep = {'up[1]': range(4)}
        >>> folded = graph.fold(graph.shrink(params, keep), keep, apply)
        >>> {name: round(factor, 4) for name, factor in folded.factors.items()}
        {'scale': 1.4142}
        >>> (epsilon,) = folded.constants
        >>> print(f'{epsilon.old:.2g} has to be {epsilon.new:.2g}')
        1e-06 has to be 2e-06
        """
        old_numbers = self.old_numbers(keep, small_fn, allow_inexact, of=of)
        trace = self.traces[self.model.number_of(of)]
        return fold(trace, old_numbers, small_params, weights_only)

    def compare(
        self,
        params: PyTree,
        keep: KeepByGroup,
        small_fn: Callable[..., Any],
        *inputs: Any,
        state: PyTree | None = None,
        folded: Folded | None = None,
        allow_inexact: bool = False,
    ) -> SourceComparison:
        """Compares a module of the new widths with the smaller model, for the first program.

        They are equal if their results are equal and no number of an old width is left. Otherwise these numbers are
        listed, and the difference of the results beside the change that the cut makes.

        Args:
          params: of the whole model, arrays.
          keep: as in `shrink`.
          small_fn: as in `old_numbers`.
          *inputs: arrays.
          state: as in `verify`.
          folded: what `fold` returned. Without it the module gets the parameters as they are.
          allow_inexact: as in `shrink`.

        Raises:
          TypeError, KeyError, IndexError, ValueError: as in `shrink`.

        >>> import jax, jax.numpy as jnp
        >>> from jaxpruner.structure import channel_groups
        >>> def apply(p, x):
        ...     return jnp.mean(x @ p['up'], -1, keepdims=True) @ p['down']
        >>> params = {'up': jnp.arange(8.0).reshape(2, 4), 'down': jnp.ones((1, 1))}
        >>> x, keep = jnp.ones((5, 2)), {'up[1]': [0, 1]}
        >>> graph = channel_groups(apply, params, x)
        >>> graph.compare(params, keep, apply, x).verdict
        'different'
        >>> folded = graph.fold(graph.shrink(params, keep), keep, apply)
        >>> graph.compare(params, keep, apply, x, folded=folded).verdict
        'equal'
        """
        whole = [params] if state is None else [params, state]
        cut = check_keep(self.groups, keep, allow_inexact)
        small = [trees.shrink(tree, self.traces, cut) for tree in whole]
        old_numbers = self.old_numbers(keep, small_fn, allow_inexact)
        if folded is None:
            source = small
            numbers = old_numbers.numbers
        else:
            source = [folded.params, *small[1:]]
            numbers = folded.constants + folded.left
        versions = SourceVersions(
            whole=(*whole, *inputs),
            small=(*small, *inputs),
            source=(*source, *inputs),
        )
        apply_fn = self.model.apply_fn
        with jax.default_matmul_precision('highest'):
            program = ModelProgram.of(apply_fn, state, inputs)
            graph = self.model.with_program(0, params, program)
            small_apply = SmallApply(graph, 0, keep, allow_inexact)
            verification = compare_with_source(apply_fn, small_apply, small_fn, versions)
        return SourceComparison(verification, numbers, old_numbers.other_difference)
