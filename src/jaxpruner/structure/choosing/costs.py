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

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axis, atoms, new_axes, resolve_each
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.structure.cutting.keeping import KeepByGroup, check_keep
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


CostFunction = Callable[[Mapping[str, int]], Cost]
# Axes whose sizes are multiplied, in a fixed order -> how often this product counts.
_Products = Counter[tuple[Axis, ...]]


class _Work(NamedTuple):
    """Products that are summed, and for each `cond` its branches, of which the most expensive one counts."""

    products: _Products
    choices: list[list['_Work']]


def cost_function(graph: Any) -> CostFunction:
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
    reader = _Reader(graph)
    of_leaves = reader.leaves()
    whole = Program.of(graph.trace.program)
    work = reader.work(whole, _Scope())

    def cost(counts: Mapping[str, int]) -> Cost:
        check_counts(graph.groups, counts)
        sizes: dict[Axis, int] = {}
        for name, count in counts.items():
            atom = graph.groups[name].atom.resolved()
            sizes[atom] = operator.index(count)
        return Cost(
            parameters=_sum(of_leaves.parameters, sizes),
            flops=_evaluate(work, sizes),
            bytes=_sum(of_leaves.bytes, sizes),
        )

    return cost


def cost_of_keep(graph: Any, keep: KeepByGroup) -> Cost:
    """The cost of the model after a cut."""
    check_keep(graph.groups, keep, allow_inexact=True)
    return cost_function(graph)(counts_of(keep))


def counts_of(keep: KeepByGroup) -> dict[str, int]:
    """How many channels of each named group stay. All lists of a group have the same length."""
    counts = {}
    for name, indices in keep.items():
        *_, count = np.shape(indices)
        counts[name] = count
    return counts


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
        size = groups[name].size
        if not 1 <= count <= size:
            raise ValueError(f'counts[{name!r}] is {count}; it can be 1 to {size}')


class _Scope(NamedTuple):
    """Where a program lies.

    Attributes:
      path: of the program.
      times: axes whose indices each run it once, such as the trips of the scans around it.
      has_axes: whether the axes of its values are known. Inside a `shard_map` they are not, and nothing is cut.
    """

    path: ProgramPath = ()
    times: tuple[Axis, ...] = ()
    has_axes: bool = True

    def inside(self, *path: int, times: Sequence[Axis] = ()) -> '_Scope':
        """A program inside this one."""
        inner_path = (*self.path, *path)
        inner_times = (*self.times, *times)
        return self._replace(path=inner_path, times=inner_times)


class _LeafProducts(NamedTuple):
    """The sizes of all leaves."""

    parameters: _Products
    bytes: _Products


class _Reader:
    """Reads products of sizes off a trace."""

    def __init__(self, graph: Any):
        self._trace: Trace = graph.trace
        atoms_of_groups = [group.atom for group in graph.groups.values()]
        self._atoms_of_groups = set(resolve_each(atoms_of_groups))

    def leaves(self) -> _LeafProducts:
        """Parameters and bytes of all leaves."""
        products = _LeafProducts(_Products(), _Products())
        variables = self._trace.program.jaxpr.invars
        for axes, variable in zip(self._trace.leaves, variables, strict=False):
            factors, constant = self._product(axes)
            itemsize = variable.aval.dtype.itemsize
            products.parameters[factors] += constant
            products.bytes[factors] += constant * itemsize
        return products

    def work(self, program: Program, scope: _Scope) -> _Work:
        """What a program multiplies."""
        work = _Work(_Products(), [])
        for number, equation in enumerate(program.jaxpr.eqns):
            at = scope.inside(number)
            # The results do not depend on equations without axes.
            if at.path in self._trace.equations or not scope.has_axes:
                self._add(work, equation, at)
        return work

    def _add(self, work: _Work, equation: Any, at: _Scope) -> None:
        match inside(equation):
            case ShardMap() as shard_map:
                count = shard_map.devices
                on_each_device = at.inside(0, times=[Axis(count)])
                part = on_each_device._replace(has_axes=False)
                self._extend(work, shard_map.program, part)
            case Call() as call:
                self._extend(work, call.program, at.inside(0))
            case Scan() as scan:
                trips = self._trace.trips.get(at.path) or Axis(scan.length)
                body = at.inside(0, times=[trips])
                self._extend(work, scan.body, body)
            case While() as loop:
                self._extend(work, loop.condition, at.inside(0))
                self._extend(work, loop.body, at.inside(1))
            case Cond() as cond:
                branches = []
                for number, branch in enumerate(cond.branches):
                    work_of_branch = self.work(branch, at.inside(number))
                    branches.append(work_of_branch)
                work.choices.append(branches)
            case _ if equation.primitive.name in contractions.OPERATIONS:
                multiplied = self._multiplied(equation, at)
                factors, constant = self._product([*at.times, *multiplied])
                work.products[factors] += 2 * constant

    def _extend(self, work: _Work, program: Program, scope: _Scope) -> None:
        more = self.work(program, scope)
        work.products.update(more.products)
        work.choices.extend(more.choices)

    def _multiplied(self, equation: Any, at: _Scope) -> list[Axis]:
        """The axes of a contraction, each combination of whose indices is one product."""
        if at.has_axes:
            operands, results = self._trace.equations[at.path]
            values = [*operands[:2], results[0]]
        else:
            variables = [*equation.invars[:2], equation.outvars[0]]
            values = list(map(new_axes, map(shape_of, variables)))
        factors = contractions.factors(equation)
        return [values[number][axis] for number, axis in factors]

    def _product(self, axes: Sequence[Axis]) -> tuple[tuple[Axis, ...], int]:
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
        factors.sort(key=id)  # so that equal products are counted together
        return tuple(factors), constant


def _evaluate(work: _Work, sizes: dict[Axis, int]) -> int:
    count = _sum(work.products, sizes)
    for branches in work.choices:
        counts = [_evaluate(branch, sizes) for branch in branches]
        count += max(counts)
    return count


def _sum(products: _Products, sizes: dict[Axis, int]) -> int:
    total = 0
    for factors, count in products.items():
        for axis in factors:
            count *= _size(axis, sizes)
        total += count
    return total


def _size(axis: Axis, sizes: dict[Axis, int]) -> int:
    """How many indices of an axis stay. The size is noted in `sizes`."""
    if axis in sizes:
        return sizes[axis]
    sizes_of_parts = [_size(part, sizes) for part in axis.parts]
    match axis.form:
        case 'atom':
            size = axis.size
        case 'product':
            size = math.prod(sizes_of_parts)
        case 'sum':
            size = sum(sizes_of_parts)
    sizes[axis] = size
    return size
