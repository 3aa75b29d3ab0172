"""What a model costs as a function of how many channels stay, without tracing the smaller model.

Each leaf has the product of its axes' sizes as parameters, and each contraction multiplies as often as a product of
sizes says. An axis is an expression over atoms, and the atom of a group has as many indices as channels stay. So a cost
is a sum of products of counts, read off the trace once:

    x @ up @ down, 5 rows of 3, u units, 2 results:  3*u + u*2 parameters,  2 * (5*3*u + 5*u*2) operations
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axis, atoms, new_axes
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.structure.cutting.keeping import Keep, check_keep
from jaxpruner.uses import contractions, shard_maps
from jaxpruner.uses.bodies import Call, Cond, Program, ProgramPath, Scan, ShardMap, While, inside
from jaxpruner.uses.moving_rules import shape_of


class Cost(NamedTuple):
    """What a model costs.

    Attributes:
      parameters: elements of its leaves.
      flops: floating point operations of its matrix products and convolutions: two for each product that is summed.
        Each trip of a scan counts. A `while` loop counts once, and a `cond` as its dearest branch. What is elementwise
        counts nothing, and so do operations that nothing is known of. Of several programs the first one counts.
      bytes: of the parameters, in their dtypes.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> channel_groups(lambda p, x: x @ p, jnp.ones((3, 2)), jnp.ones((5, 3))).cost()
    Cost(parameters=6, flops=60, bytes=24)
    """

    parameters: int
    flops: int
    bytes: int


CostFunction = Callable[[Mapping[str, int]], Cost]
# Axes whose sizes are multiplied, in a fixed order -> how often this product counts.
_Products = Counter[tuple[Axis, ...]]


class _Work(NamedTuple):
    """Products that are summed, and branches of which the dearest one counts."""

    products: _Products
    choices: list[list['_Work']]


def cost_function(graph: Any) -> CostFunction:
    """The costs of a model's smaller versions.

    Args:
      graph: a `ChannelGraph`.

    Returns:
      `{name of a group: how many of its channels stay} -> Cost`; groups that are not named stay whole. It raises
      KeyError for a group that there is not, TypeError and ValueError for a count that is none.

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
    reader = _Reader(graph)
    parameters, in_bytes = reader.leaves()
    flops = reader.work(Program.of(graph.trace.program), _Scope())
    atoms_of_groups = {name: group.atom.resolved() for name, group in graph.groups.items()}

    def cost(counts: Mapping[str, int]) -> Cost:
        sizes: dict[Axis, int] = {}
        check_counts(graph.groups, counts)
        for name, count in counts.items():
            sizes[atoms_of_groups[name]] = operator.index(count)
        return Cost(_sum(parameters, sizes), _evaluate(flops, sizes), _sum(in_bytes, sizes))

    return cost


def cost_of_keep(graph: Any, keep: Keep) -> Cost:
    """The cost of what a cut leaves."""
    check_keep(graph.groups, keep, allow_inexact=True)
    return cost_function(graph)(counts_of(keep))


def counts_of(keep: Keep) -> dict[str, int]:
    """How many channels stay of each group that is named; each of several lists has as many."""
    return {name: np.shape(indices)[-1] for name, indices in keep.items()}


def check_counts(groups: Mapping[str, Any], counts: Mapping[str, int]) -> None:
    """Raises KeyError for a group that there is not, TypeError and ValueError for a count that is none."""
    for name, count in counts.items():
        if name not in groups:
            raise KeyError(f'there is no group {name!r}; {tree_lib.nearest(str(name), groups)}')
        if isinstance(count, bool) or not hasattr(count, '__index__'):
            raise TypeError(
                f'counts[{name!r}] is {count!r}; give how many channels stay, a whole number'
            )
        if not 1 <= count <= groups[name].size:
            raise ValueError(f'counts[{name!r}] is {count}; it can be 1 to {groups[name].size}')


class _Scope(NamedTuple):
    """Where a program stands.

    Attributes:
      path: of the program.
      times: axes of which each index runs it once, such as trips of the scans around it.
      has_axes: whether the axes of its values are known; those inside of a `shard_map` are not, and stay.
    """

    path: ProgramPath = ()
    times: tuple[Axis, ...] = ()
    has_axes: bool = True

    def inside(self, *path: int, times: Sequence[Axis] = ()) -> '_Scope':
        """A program inside this one."""
        return self._replace(path=(*self.path, *path), times=(*self.times, *times))


class _Reader:
    """Reads products of sizes off a trace."""

    def __init__(self, graph: Any):
        self._trace: Trace = graph.trace
        self._of_groups = {group.atom.resolved() for group in graph.groups.values()}

    def leaves(self) -> tuple[_Products, _Products]:
        """Parameters and bytes of all leaves."""
        parameters, in_bytes = _Products(), _Products()
        variables = self._trace.program.jaxpr.invars
        for axes, variable in zip(self._trace.leaves, variables, strict=False):
            factors, constant = self._product(axes)
            parameters[factors] += constant
            in_bytes[factors] += constant * variable.aval.dtype.itemsize
        return parameters, in_bytes

    def work(self, program: Program, scope: _Scope) -> _Work:
        """What a program multiplies."""
        work = _Work(_Products(), [])
        for number, equation in enumerate(program.jaxpr.eqns):
            at = scope.inside(number)
            # Equations that are not there have no part in the results.
            if at.path in self._trace.equations or not scope.has_axes:
                self._add(work, equation, at)
        return work

    def _add(self, work: _Work, equation: Any, at: _Scope) -> None:
        match inside(equation):
            case ShardMap() as shard_map:
                devices = Axis(shard_maps.device_count(equation.params))
                part = at.inside(0, times=[devices])._replace(has_axes=False)
                self._extend(work, shard_map.program, part)
            case Call() as call:
                self._extend(work, call.program, at.inside(0))
            case Scan() as scan:
                trips = self._trace.trips.get(at.path) or Axis(scan.length)
                self._extend(work, scan.body, at.inside(0, times=[trips]))
            case While() as loop:
                self._extend(work, loop.condition, at.inside(0))
                self._extend(work, loop.body, at.inside(1))
            case Cond() as cond:
                branches = []
                for number, branch in enumerate(cond.branches):
                    branches.append(self.work(branch, at.inside(number)))
                work.choices.append(branches)
            case _ if equation.primitive.name in contractions.OPERATIONS:
                factors, constant = self._product([*at.times, *self._multiplied(equation, at)])
                work.products[factors] += 2 * constant

    def _extend(self, work: _Work, program: Program, scope: _Scope) -> None:
        more = self.work(program, scope)
        work.products.update(more.products)
        work.choices.extend(more.choices)

    def _multiplied(self, equation: Any, at: _Scope) -> list[Axis]:
        """The axes of a contraction of which each combination of indices is one product."""
        if at.has_axes:
            operands, results = self._trace.equations[at.path]
            values = [*operands[:2], results[0]]
        else:
            variables = [*equation.invars[:2], equation.outvars[0]]
            values = [new_axes(shape_of(variable)) for variable in variables]
        return [values[number][axis] for number, axis in contractions.factors(equation)]

    def _product(self, axes: Sequence[Axis]) -> tuple[tuple[Axis, ...], int]:
        """The factors of a product of sizes that depend on what stays, and the product of the others."""
        factors: list[Axis] = []
        constant = 1
        pending = list(axes)
        while pending:
            axis = pending.pop().resolved()
            if axis.form == 'product':
                pending += axis.parts
            elif self._of_groups.isdisjoint(atoms(axis)):
                constant *= axis.size
            else:
                factors.append(axis)
        factors.sort(key=id)  # so that equal products are counted together
        return tuple(factors), constant


def _evaluate(work: _Work, sizes: dict[Axis, int]) -> int:
    count = _sum(work.products, sizes)
    for branches in work.choices:
        count += max(_evaluate(branch, sizes) for branch in branches)
    return count


def _sum(products: _Products, sizes: dict[Axis, int]) -> int:
    count = 0
    for factors, times in products.items():
        for axis in factors:
            times *= _size(axis, sizes)
        count += times
    return count


def _size(axis: Axis, sizes: dict[Axis, int]) -> int:
    """How many indices of an axis stay; adds it to the sizes."""
    size = sizes.get(axis)
    if size is None:
        parts = [_size(part, sizes) for part in axis.parts]
        match axis.form:
            case 'atom':
                size = axis.size
            case 'product':
                size = math.prod(parts)
            case 'sum':
                size = sum(parts)
        sizes[axis] = size
    return size
