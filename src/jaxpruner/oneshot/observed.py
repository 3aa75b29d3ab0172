"""Which values a calibration has to look at: leaves that are multiplied with the same value share its statistics."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxpruner.core import tree as tree_lib
from jaxpruner.oneshot import moments
from jaxpruner.oneshot.followed_leaves import FollowedLeaves, follow_leaves
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.weight_matrices import WeightMatrices, contracted_axes, find_matrices
from jaxpruner.uses import Use, UseGraph
from jaxpruner.uses.taps import Taps


class Part(NamedTuple):
    """Weight matrices of a leaf, and which value they meet.

    >>> Part(('w',), None, 0).value
    0
    """

    path: tree_lib.Path
    matrices: WeightMatrices
    value: int


class Observed(NamedTuple):
    """What is calibrated.

    Attributes:
      parts: weight matrices, in the order of the leaves.
      values: for each value the uses that meet it.
      followed: what is known of all leaves that were asked for, those that have no part included.

    >>> Observed([], []).values
    []
    """

    parts: list[Part]
    values: list[tuple[Use, ...]]
    followed: FollowedLeaves = FollowedLeaves({}, {}, (), (), frozenset())


def find_observed(
    graph: UseGraph, only: Sequence[str | tree_lib.Path] | str | None = None
) -> Observed:
    """The weight matrices of a model, and the values that they meet.

    Args:
      graph: of the model.
      only: names, globs or paths of leaves; by default all that are contracted with data.

    Raises:
      ValueError: a name matches no leaf, or weights of a leaf cannot be told that `only` names itself, or of any.
      UnsupportedPrimitive: a leaf that `only` names itself goes through an operation that is not understood.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.uses import param_uses
    >>> params = {'a': jnp.ones((3, 2)), 'b': jnp.ones((3, 2))}
    >>> graph = param_uses(lambda params, x: x @ params['a'] + x @ params['b'], params, jnp.ones((4, 3)))
    >>> [part.value for part in find_observed(graph).parts]
    [0, 0]
    """
    leaves = [*graph, *graph.opaque, *graph.unused]
    names: Sequence[str | tree_lib.Path] = (
        ('*',) if only is None else (only,) if isinstance(only, str) else only
    )
    if only is not None:
        tree_lib.check_names(names, leaves, 'only')
    chosen = [path for path in leaves if any(tree_lib.matches(name, path) for name in names)]
    followed = follow_leaves(graph, chosen)
    itself = {path for path in chosen if path in names or tree_lib.path_string(path) in names}
    for path in followed.unclear:
        if path in itself or not followed.matrices:
            find_matrices(graph, path)  # raises, with the reason and the remedy
    parts, values = [], {}
    for path, found in followed.matrices.items():
        for matrices in found:
            # Leaves of which all uses meet the same values share a place.
            key = tuple(_value_key(use) for use in matrices.uses)
            values.setdefault(key, matrices.uses)
            parts.append(Part(path, matrices, list(values).index(key)))
    return Observed(parts, list(values.values()), followed)


def check_alike(first: Observed, other: Observed) -> None:
    """Refuses a model that with other shapes of its inputs uses its leaves in another way.

    Args:
      first: with the inputs of some shape.
      other: with those of another.

    Raises:
      ValueError: leaves differ, or which of them meet the same value.

    >>> check_alike(Observed([], []), Observed([], []))
    """
    if [(part.path, part.matrices.key, part.value) for part in first.parts] != [
        (part.path, part.matrices.key, part.value) for part in other.parts
    ]:
        raise ValueError(
            'with batches of different shapes the model uses its leaves in different ways, or other leaves meet the '
            'same value, so that their statistics cannot be added up; give batches of one shape'
        )


def _value_key(use: Use) -> Any:
    """What the statistics of a use depend on."""
    site = use.site
    equation = site.equation
    data = equation.invars[1 - site.operand]
    stack = tuple(entry.loop for entry in site.view.stack)
    if use.op == 'dot':
        groups = tuple(map(id, equation.invars[2:]))
        return site.path[:-1], id(data), groups, contracted_axes(equation, site.operand)[2:], stack
    same = {name: value for name, value in equation.params.items() if name != 'precision'}
    kernel = [
        equation.invars[1].aval.shape[axis]
        for axis in equation.params['dimension_numbers'].rhs_spec[1:]
    ]
    return site.path[:-1], id(data), str(same), tuple(kernel), stack


def input_taps(values: Sequence[Sequence[Use]], with_gram: bool) -> Taps:
    """Takes the statistics of values.

    Args:
      values: for each value the uses that meet it.
      with_gram: whether to take Gram matrices.

    >>> input_taps([], with_gram=False).zeros()
    []
    """

    def statistic(use: Use, operands: list[jax.Array]) -> InputStatistics:
        operand = use.site.operand
        return moments.statistics_of(
            use.site.equation, operand, operands[1 - operand], with_gram, *operands[2:]
        )

    return Taps(values, statistic)
