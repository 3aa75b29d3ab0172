"""What a graph says of a model, against the model itself: the channels of every group are put in another order.

A program whose parameters are permuted along their groups computes permuted values, at each of its equations, if and
only if the axes that the graph has for these values are right. `check` runs a program and its permuted twin side by
side, equation by equation, and compares all values. What is made from nothing, constants and the numbers of `iota`, is
permuted as its axes say.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.analysis import positions
from jaxpruner.structure.analysis.records import TracePosition
from jaxpruner.trace.interpreter import Interpreter
from jaxpruner.trace.program import Program, bind

_FROM_NOTHING = frozenset('empty iota random_bits'.split())


class Twin(NamedTuple):
    """A value, and what it is in the permuted program."""

    value: object
    permuted: object


def order_of(axis, orders):
    """For each position of an axis the one whose element stands there after the groups are put in order."""
    order = np.arange(axis.size)
    for found in positions.occurrences(axis):
        if found.atom in orders:
            places = found.positions()
            order[places] = order[places[orders[found.atom]]]
    return order


def permute(value, axes, orders, trips=None):
    """The value with its elements where the permuted program has them.

    Args:
      value: of the program.
      axes: of the value.
      orders: atom of a group -> `Order`.
      trips: atom of a scan's trips -> the number of this trip, in the body of the scan.
    """
    if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        value = np.asarray(value)
    plain = {}
    for atom, order in sorted(orders.items(), key=lambda entry: -len(entry[1].owners)):
        if order.owners:  # the owners are not yet in their new order
            value = _permute_lists(value, axes, atom, order, trips or {})
        else:
            plain[atom] = order.order
    for i, axis in enumerate(axes):
        order = order_of(axis, plain)
        if (order != np.arange(axis.size)).any():
            value = np.take(value, order, axis=i)
    return value


class Order(NamedTuple):
    """An order of a group's channels, or one for each index of its owners."""

    owners: tuple[object, ...]
    order: np.ndarray


def _permute_lists(value, axes, atom, order, trips):
    """Puts channels in another order for each index of their owners."""
    for i, axis in enumerate(axes):
        index, stride = _index_along(axis, atom)
        if (index < 0).all():
            continue
        source = list(np.indices(value.shape))
        here = source[i]
        owner_indices = []
        for owner in order.owners:
            if owner in trips:
                owner_indices.append(np.full(value.shape, trips[owner]))
                continue
            along = [_index_along(each, owner)[0] for each in axes]
            (k,) = [k for k, found in enumerate(along) if (found >= 0).any()]
            owner_indices.append(along[k][source[k]])
        new = order.order[(*owner_indices, index[here])]
        source[i] = here + np.where(index[here] < 0, 0, (new - index[here]) * stride[here])
        value = value[tuple(source)]
    return value


def _index_along(axis, atom):
    """For each position of an axis the index of an atom, -1 where it has none, and the atom's stride there."""
    index, stride = np.full(axis.size, -1), np.zeros(axis.size, int)
    for found in positions.occurrences(axis):
        if found.atom is atom:
            places = found.positions()
            index[places] = np.arange(atom.size)[:, None]
            stride[places] = found.stride
    return index, stride


class Check(Interpreter):
    """Runs both programs and compares each value."""

    def __init__(self, trace, orders):
        self.trace = trace
        self.orders = orders
        self.trips = {}
        self.compared = 0
        self.moved = 0

    def twin(self, value, axes):
        return Twin(value, jnp.asarray(permute(value, axes, self.orders, self.trips)))

    def constant(self, value, aval):
        return value if isinstance(value, Twin) else self.twin(jnp.asarray(value, aval.dtype), ())

    def unneeded(self, equation, operands):
        return [Twin(None, None)] * len(equation.outvars)

    def visit_program(self, program, inputs, position):
        axes = self.trace.constants[position.path]
        constants = tuple(map(self.twin, program.constants, axes))
        return super().visit_program(Program(program.jaxpr, constants), inputs, position)

    def visit_equation(self, equation, operands, position):
        axes = self.trace.equations[position.path]
        for variable, operand_axes in zip(equation.invars, axes.operands, strict=True):
            assert tuple(axis.size for axis in operand_axes) == variable.aval.shape, equation
        results = super().visit_equation(equation, operands, position)
        for twin, variable, result in zip(results, equation.outvars, axes.results, strict=True):
            assert tuple(axis.size for axis in result) == variable.aval.shape, equation
            self.compare(twin, result, f'{position.path} {equation}')
        return results

    def compare(self, twin, axes, place):
        if twin.value is None or jax.dtypes.issubdtype(twin.value.dtype, jax.dtypes.extended):
            return
        expected = np.asarray(permute(twin.value, axes, self.orders, self.trips))
        permuted = np.asarray(twin.permuted)
        assert_close(permuted, expected, place)
        self.compared += 1
        self.moved += not np.array_equal(expected, np.asarray(twin.value))

    def visit_plain(self, equation, operands, position):
        values = bind(equation, [twin.value for twin in operands])
        if equation.primitive.name in _FROM_NOTHING:
            return list(map(self.twin, values, self.trace.equations[position.path].results))
        permuted = bind(equation, [twin.permuted for twin in operands])
        return list(map(Twin, values, permuted))

    def visit_scan(self, scan, operands, position):
        constants, carried, sliced = scan.split(operands)
        inside = position.in_scan(scan)
        trips = range(scan.length)
        stacks = []
        counted = self.trace.trips[position.path].resolved()
        before = dict(self.trips)
        for trip in reversed(trips) if scan.reverse else trips:
            self.trips[counted] = trip
            taken = [_take(twin, trip) for twin in sliced]
            results = self.visit_program(scan.body, [*constants, *carried, *taken], inside)
            carried, stacked = scan.split_results(results)
            stacks.append(stacked)
        self.trips = before
        if scan.reverse:
            stacks.reverse()
        return carried + [_stack(each) for each in zip(*stacks, strict=True)]

    def visit_while(self, loop, operands, position):
        condition_constants, body_constants, carried = loop.split(operands)
        in_condition, in_body = position.in_condition(loop), position.in_body(loop)
        while True:
            inputs = condition_constants + carried
            (again,) = self.visit_program(loop.condition, inputs, in_condition)
            assert again.value == again.permuted
            if not again.value:
                return carried
            carried = self.visit_program(loop.body, body_constants + carried, in_body)

    def visit_cond(self, cond, operands, position):
        index, *operands = operands
        assert index.value == index.permuted
        number = int(np.clip(index.value, 0, len(cond.branches) - 1))
        inside = position.inside(cond.equation, number, position.needed)
        return self.visit_program(cond.branches[number], operands, inside)


def _take(twin, trip):
    return twin if twin.value is None else Twin(twin.value[trip], twin.permuted[trip])


def _stack(twins):
    if twins[0].value is None:
        return Twin(None, None)
    return Twin(
        jnp.stack([twin.value for twin in twins]), jnp.stack([twin.permuted for twin in twins])
    )


def assert_close(actual, expected, place):
    """Sums in another order are rounded in another way; a wrong order differs by more than the rounding."""
    kind = np.complex128 if np.iscomplexobj(expected) else np.float64
    actual, expected = actual.astype(kind), expected.astype(kind)
    finite = np.abs(expected[np.isfinite(expected)])
    tolerance = 1e-3 * finite.max() if finite.size else 0
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance, err_msg=place)


def check(graph, params, inputs, seed=0, state=()):
    """Raises AssertionError where a value's axes are wrong; returns how many values were compared, and how many moved.

    Args:
      graph: of the model.
      params: its parameters.
      inputs: its inputs.
      seed: of the orders.
      state: its state.
    """
    rng = np.random.default_rng(seed)
    orders = {}
    for group in graph.groups.values():
        if group.is_depth:  # layers follow one another
            continue
        sizes = [owner.size for owner in group.lists]
        cycle = rng.permuted(np.broadcast_to(np.arange(group.size), (*sizes, group.size)), axis=-1)
        order = np.empty_like(cycle)  # each channel goes to another place
        np.put_along_axis(order, cycle, np.roll(cycle, 1, axis=-1), axis=-1)
        orders[group.atom] = Order(group.lists, order)
    trace = graph.trace
    leaves = jax.tree.leaves((params, state))
    arguments = []
    for leaf, axes in zip(leaves, (*trace.leaves, *trace.states), strict=True):
        permuted = jnp.asarray(permute(jnp.asarray(leaf), axes, orders))
        arguments.append(Twin(jnp.asarray(leaf), permuted))
    for leaf in jax.tree.leaves(inputs):
        arguments.append(Twin(jnp.asarray(leaf), jnp.asarray(leaf)))
    program = Program.of(trace.program)
    needed = (True,) * len(trace.program.jaxpr.outvars)
    run = Check(trace, orders)
    results = run.visit_program(program, arguments, TracePosition(needed=needed))
    for number, result in enumerate(results):
        expected = np.asarray(result.value)
        if number in trace.returned:
            expected = permute(expected, trace.states[trace.returned[number]], orders)
        assert_close(np.asarray(result.permuted), expected, 'result')
    return run.compared, run.moved
