"""The cost of a model as a function of how many channels stay, without tracing the smaller model.

The parameters of a leaf are a product of the sizes of its axes. So are the multiplications of a contraction. An axis is
an expression over atoms, and the atom of a group has one index for each channel that stays. So a cost is a sum of
products of counts, which is read off the trace once:

    x @ up @ down, 5 rows of 3, u units, 2 results:  3*u + u*2 parameters,  2 * (5*3*u + 5*u*2) operations
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from jaxpruner.structure.axes import Axis, size_with
from jaxpruner.structure.programs import Trace
from jaxpruner.structure.traces import is_contraction
from jaxpruner.trace import contractions
from jaxpruner.trace.program import ProgramPath

Counts = Mapping[str, int]  # name of a group -> how many of its channels stay


class Cost(NamedTuple):
    """What a model costs.

    Attributes:
      parameters: elements of its leaves.
      flops: floating point operations of its matrix products and convolutions: two for each product that is summed.
        Each trip of a scan counts. A `while` loop counts once, and a `cond` counts as its most expensive branch. Other
        operations are not counted. Of several programs the first one counts.
      bytes: of the parameters, in their dtypes.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> channel_groups(lambda p, x: x @ p, jnp.ones((3, 2)), jnp.ones((5, 3))).cost()
    Cost(parameters=6, flops=60, bytes=24)
    """

    parameters: int
    flops: int
    bytes: int


def cost_function(graph: Any) -> Callable[[Counts], Cost]:
    """Makes a function for the costs of a model's smaller versions.

    Args:
      graph: a `ChannelGraph`.

    Returns:
      `{name of a group: how many of its channels stay} -> Cost`. Groups that are not named stay whole.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> params = {'up': jnp.ones((3, 8)), 'down': jnp.ones((8, 2))}
    >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], params, jnp.ones((5, 3)))
    >>> cost = cost_function(graph)
    >>> cost({})
    Cost(parameters=40, flops=400, bytes=160)
    >>> cost({'up[1]': 4})
    Cost(parameters=20, flops=200, bytes=80)
    """
    trace: Trace = graph.trace
    bytes_of_each = [leaf.dtype.itemsize for leaf in jax.tree.leaves(graph.params)]
    conds = [at for at, axes in trace.equations.items() if axes.equation.primitive.name == 'cond']

    def branch_around(path: ProgramPath) -> ProgramPath:
        """The innermost branch of a `cond` that a path lies in; `()` for the program itself."""
        ends = [end for end in range(2, len(path), 2) if path[: end - 1] in conds]
        return path[: max(ends, default=0)]

    # For each contraction its branch, and the axes whose indices number the products that it sums.
    contracted = []
    for path, axes in trace.equations.items():
        if is_contraction(axes.equation):
            values = [*axes.operands[:2], axes.results[0]]
            factors = [values[i][axis] for i, axis in contractions.factors(axes.equation)]
            contracted.append((branch_around(path), factors + trace.trips_around(path)))

    def cost(counts: Counts) -> Cost:
        sizes = {graph.groups[name].atom: int(count) for name, count in counts.items()}

        def count_elements(axes: Iterable[Axis]) -> int:
            return math.prod([size_with(axis, sizes) for axis in axes])

        elements = list(map(count_elements, trace.leaves.values()))
        flops: Counter[ProgramPath] = Counter()
        for branch, factors in contracted:
            flops[branch] += 2 * count_elements(factors)
        for cond in conds:  # those inside others come first
            of_branches = [count for branch, count in flops.items() if branch[:-1] == cond]
            flops[branch_around(cond)] += max(of_branches, default=0)
        return Cost(sum(elements), flops[()], sum(map(operator.mul, elements, bytes_of_each)))

    return cost
