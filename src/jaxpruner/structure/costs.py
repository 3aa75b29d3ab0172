"""The cost of a model as a function of how many channels stay, without tracing the smaller model.

The parameters of a leaf are a product of the sizes of its axes. So are the multiplications of a contraction. An axis is
an expression over atoms, and the atom of a group has one index for each channel that stays. So a cost is a sum of
products of counts, which is read off the trace once:

    x @ up @ down, 5 rows of 3, u units, 2 results:  3*u + u*2 parameters,  2 * (5*3*u + 5*u*2) operations
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import Axis, atoms, new_axes, size_with
from jaxpruner.structure.traces import Trace
from jaxpruner.trace import contractions
from jaxpruner.trace.program import (
    Call,
    Cond,
    Program,
    ProgramPath,
    Scan,
    ShardMap,
    While,
    inside,
    shape_of,
)


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


# Axes whose sizes are multiplied, in a fixed order -> how often this product counts.
_Products = Counter[tuple[Axis, ...]]


def cost_function(graph: Any) -> Callable[[Mapping[str, int]], Cost]:
    """Makes a function for the costs of a model's smaller versions.

    Args:
      graph: a `ChannelGraph`.

    Returns:
      `{name of a group: how many of its channels stay} -> Cost`. Groups that are not named stay whole. The function
      raises the errors of `check_counts`.

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
    work = _Work(trace, {group.atom.resolved() for group in graph.groups.values()})
    parameters, bytes_ = _Products(), _Products()
    for axes, variable in zip(trace.leaves, trace.program.jaxpr.invars, strict=False):
        factors, constant = work.product(axes)
        parameters[factors] += constant
        bytes_[factors] += constant * variable.aval.dtype.itemsize
    work.add(Program.of(trace.program))

    def cost(counts: Mapping[str, int]) -> Cost:
        check_counts(graph.groups, counts)
        sizes = {
            graph.groups[name].atom.resolved(): operator.index(count)
            for name, count in counts.items()
        }
        return Cost(_sum(parameters, sizes), work.count(sizes), _sum(bytes_, sizes))

    return cost


def check_counts(groups: Mapping[str, Any], counts: Mapping[str, int]) -> None:
    """Raises KeyError for an unknown group, TypeError or ValueError for an invalid count."""
    for name, count in counts.items():
        if name not in groups:
            nearest = tree_lib.nearest(str(name), groups)
            raise KeyError(f'there is no group {name!r}; {nearest}')
        if isinstance(count, bool) or not hasattr(count, '__index__'):
            raise TypeError(
                f'counts[{name!r}] is {count!r}; give how many channels stay, a whole number'
            )
        if not 1 <= count <= groups[name].size:
            raise ValueError(f'counts[{name!r}] is {count}; it can be 1 to {groups[name].size}')


class _Work:
    """What a program multiplies: products that are summed.

    Attributes:
      products: of all equations, but those in branches.
      choices: for each `cond` its branches, of which the most expensive one counts.
    """

    def __init__(self, trace: Trace, atoms_of_groups: set[Axis]):
        self._trace = trace
        self._atoms_of_groups = atoms_of_groups
        self.products = _Products()
        self.choices: list[list[_Work]] = []

    def add(
        self,
        program: Program,
        path: ProgramPath = (),
        times: Sequence[Axis] = (),
        has_axes: bool = True,
    ) -> None:
        """Adds what a program multiplies.

        Args:
          program: the program.
          path: of it.
          times: axes whose indices each run it once, such as the trips of the scans around it.
          has_axes: whether the axes of its values are known. Inside a `shard_map` they are not, and nothing is cut.
        """
        for number, equation in enumerate(program.jaxpr.eqns):
            at = (*path, number)
            # The results do not depend on equations without axes.
            if has_axes and at not in self._trace.equations:
                continue
            match inside(equation):
                case ShardMap() as shard_map:
                    self.add(shard_map.program, (*at, 0), (*times, Axis(shard_map.devices)), False)
                case Call() as call:
                    self.add(call.program, (*at, 0), times, has_axes)
                case Scan() as scan:
                    trips = self._trace.trips.get(at) or Axis(scan.length)
                    self.add(scan.body, (*at, 0), (*times, trips), has_axes)
                case While() as loop:
                    self.add(loop.condition, (*at, 0), times, has_axes)
                    self.add(loop.body, (*at, 1), times, has_axes)
                case Cond() as cond:
                    works = []
                    for i, branch in enumerate(cond.branches):
                        works.append(_Work(self._trace, self._atoms_of_groups))
                        works[-1].add(branch, (*at, i), times, has_axes)
                    self.choices.append(works)
                case _ if equation.primitive.name in contractions.OPERATIONS:
                    variables = [*equation.invars[:2], equation.outvars[0]]
                    values = [new_axes(shape_of(variable)) for variable in variables]
                    if has_axes:
                        axes = self._trace.equations[at]
                        values = [*axes.operands[:2], axes.results[0]]
                    # Each combination of the indices of these axes is one product.
                    multiplied = [values[i][axis] for i, axis in contractions.factors(equation)]
                    factors, constant = self.product([*times, *multiplied])
                    self.products[factors] += 2 * constant

    def product(self, axes: Sequence[Axis]) -> tuple[tuple[Axis, ...], int]:
        """Splits a product of sizes into the axes that may get shorter, and the product of the other sizes."""
        factors: list[Axis] = []
        constant = 1
        pending = list(axes)
        while pending:
            axis = pending.pop().resolved()
            if axis.form == 'product':
                pending += axis.parts
            elif self._atoms_of_groups.isdisjoint(atoms(axis)):
                constant *= axis.size
            else:
                factors.append(axis)
        # Sorted, so that equal products are counted together.
        return tuple(sorted(factors, key=id)), constant

    def count(self, sizes: dict[Axis, int]) -> int:
        """How much there is if axes have these sizes."""
        chosen = [max([work.count(sizes) for work in works]) for works in self.choices]
        return _sum(self.products, sizes) + sum(chosen)


def _sum(products: _Products, sizes: dict[Axis, int]) -> int:
    return sum(
        count * math.prod([size_with(axis, sizes) for axis in factors])
        for factors, count in products.items()
    )
