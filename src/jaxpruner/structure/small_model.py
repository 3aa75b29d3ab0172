"""The smaller model: runs the traced program with the shapes that a cut leaves, and is compared with the zeroed one.

An equation with an axis that gets smaller runs as its row of the table says. All other equations run as they were
traced, with their derivative rules.

A call with a derivative rule of its own (`jax.custom_jvp`, `jax.custom_vjp`) has a program and a rule, both made for
the old shapes. The program runs with smaller shapes, as the rest of the model does. The rule is a Python function and
cannot run like that. Instead, the derivative by the rule is traced as a second program, at the old shapes. The axes of
the second program are inferred, and it, too, runs with smaller shapes. A rule may pin an axis that gets smaller. Then
the call itself still runs, but taking its derivative is an error.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.axes import Axes, Axis, Pin, Ties, atoms, pick, product, sizes_of, total
from jaxpruner.structure.cut import Cut, KeepByGroup, Lists, check_keep, check_shape, cut_tree
from jaxpruner.structure.programs import ModelProgram, Trace, abstract
from jaxpruner.structure.rules import EquationCut
from jaxpruner.trace.program import RULED, RULED_BACKWARDS, Call, Position, Program, Run, Scan, bind
from jaxpruner.tree import Path, PyTree

Values = list[Any]
Trees = Sequence[PyTree]


class Replay(Run):
    """A run of a program on values that have been cut.

    Attributes:
      trace: of the whole program.
      cut: the channels that stay.
    """

    def __init__(self, trace: Trace, cut: Cut):
        self.trace = trace
        self.cut = cut

    def visit_constants(self, program: Program, position: Position) -> Values:
        return list(map(self.cut.take, program.constants, self.trace.constants[position.path]))

    def visit_equation(self, equation: Any, operands: Values, position: Position) -> Values:
        axes = self.trace.equations[position.path]
        is_cut = any(map(self.cut.shrinks, axes.values))
        run = self.enter if is_cut else super().visit_equation
        return run(equation, operands, position)

    def visit_plain(self, equation: Any, operands: Values, position: Position) -> Values:
        small = EquationCut(self.trace.equations[position.path], self.cut)
        run = small.axes.row.resized or EquationCut.run
        return run(small, operands)

    def visit_call(self, call: Call, operands: Values, position: Position) -> Values:
        name = call.equation.primitive.name
        if name not in RULED:
            return super().visit_call(call, operands, position)
        inner = position.inside(call.equation, 0, position.needed)
        small = EquationCut(self.trace.equations[position.path], self.cut)

        def run(*operands: Any) -> Values:
            return self.visit_program(call.program, operands, inner)

        def pull_back(operands: Values, cotangents: Values) -> tuple[Any, ...]:
            found = _derivatives(small, position, operands, cotangents)
            return tuple(map(found.get, range(len(operands))))

        def push_forward(operands: Values, tangents: Values) -> tuple[Values, Values]:
            results = function(*operands)
            found = _derivatives(small, position, operands, tangents)
            none = [np.zeros(result.shape, jax.dtypes.float0) for result in results]
            return results, [found.get(i, zeros) for i, zeros in enumerate(none)]

        function: Any
        if name in RULED_BACKWARDS:
            function = jax.custom_vjp(run)
            function.defvjp(lambda *operands: (run(*operands), operands), pull_back)
        else:
            function = jax.custom_jvp(run)
            function.defjvp(push_forward)
        return function(*operands)

    def slices(self, scan: Scan, position: Position) -> tuple[Any, int]:
        """The numbers of the trips that stay, if channels are listed for each trip."""
        trips = self.trace.trips[position.path]
        is_listed = not self.cut.owners.isdisjoint(atoms(trips))
        stay = self.cut.take(jnp.arange(scan.length), (trips,)) if is_listed else None
        return stay, self.cut.size(trips)

    def inside(self, position: Position, state: Any, element: Any = None) -> 'Replay':
        if element is None:
            return self
        trip_atoms = atoms(self.trace.trips[position.path])
        indices = jnp.unravel_index(element, sizes_of(trip_atoms))
        trips = {**self.cut.trips, **dict(zip(trip_atoms, indices, strict=True))}
        return Replay(self.trace, Cut(self.cut.lists, trips))


def _derivatives(
    small: EquationCut, position: Position, operands: Sequence[Any], seeds: Sequence[Any]
) -> dict[int, Any]:
    """The tangents of a call's results for those of its operands, or the cotangents of operands for those of results.

    They are returned by number. What has no derivative is left out.

    Raises:
      ValueError: the rule pins an axis that gets smaller, or ties it to one that is cut differently.
    """
    axes, cut = small
    equation = axes.equation
    is_backwards = equation.primitive.name in RULED_BACKWARDS

    def shapes(variables: Iterable[Any]) -> Values:
        return [abstract(variable.aval) for variable in variables]

    def derivative(values: Values, seeds: Values) -> Any:
        def call(*inexact: Any) -> Values:
            merged = list(values)
            for i, value in zip(inputs, inexact, strict=True):
                merged[i] = value
            return list(pick(bind(equation, merged), outputs))

        inexact = list(pick(values, inputs))
        if is_backwards:
            _, pull_back = jax.vjp(call, *inexact)
            return pull_back(seeds)
        return jax.jvp(call, inexact, seeds)[1]

    # At the old shapes.
    inputs, outputs = _differentiable(equation.invars), _differentiable(equation.outvars)
    of_inputs = inputs, pick(axes.operands, inputs), pick(equation.invars, inputs)
    of_outputs = outputs, pick(axes.results, outputs), pick(equation.outvars, outputs)
    ends = (of_outputs, of_inputs) if is_backwards else (of_inputs, of_outputs)
    (seeded, seed_axes, variables), (derived, axes_of_derived, _) = ends
    program = jax.make_jaxpr(derivative)(shapes(equation.invars), shapes(variables))
    copies: dict[Axis, Axis] = {}
    trace = Trace(program)
    given = [_copy(own, copies) for own in axes.operands + seed_axes]
    expected = [_copy(own, copies) for own in axes_of_derived]
    ties = Ties(lambda reason: Pin(position.reason(equation, reason)))
    ties.unify_values(trace.visit_all(program, given, (*position.callers, equation)), expected)
    copied = Counter([copy.resolved() for copy in copies.values()])
    lists: dict[Axis, Lists] = {}
    for atom in copies.keys() & cut.lists.keys():
        own = copies[atom].resolved()
        # The rule may have split a copy, or unified it with that of another atom.
        if own.form != 'atom' or own.pin is not None or copied[own] > 1:
            why = own.pin or 'it becomes another one'
            reason = f'its derivative rule does not follow the cut of an axis of {own.size} ({why})'
            raise ValueError(
                f'{position.reason(equation, reason)}; keep all channels of its group, or take no derivative'
            )
        owners, table = cut.lists[atom]
        owners = [(copies.get(owner) or owner).resolved() for owner in owners]
        lists[own] = Lists(tuple(owners), table)
    arguments = [*operands, *pick(seeds, seeded)]
    results = Replay(trace, Cut(lists, cut.trips)).visit_all(program, arguments)
    return dict(zip(derived, results, strict=True))


def _differentiable(variables: Sequence[Any]) -> list[int]:
    """The numbers of the variables that have a derivative."""
    dtypes = [variable.aval.dtype for variable in variables]
    return [i for i, dtype in enumerate(dtypes) if jnp.issubdtype(dtype, jnp.inexact)]


def _copy(axes: Axes, copies: dict[Axis, Axis]) -> Axes:
    """The axes made of copies of their atoms, so that a rule can unify them without changing the model."""

    def copy(axis: Axis) -> Axis:
        axis = axis.resolved()
        if axis.form == 'atom':
            return copies.setdefault(axis, Axis(axis.size))
        parts = map(copy, axis.parts)
        return product(parts) if axis.form == 'product' else total(parts)

    return tuple(map(copy, axes))


class Part(NamedTuple):
    """The parameters of a model, or the state of one of its programs.

    Attributes:
      name: in messages.
      treedef: its structure.
      leaves: path -> the axes of a leaf.
    """

    name: str
    treedef: Any
    leaves: Mapping[Path, Axes]

    def check(self, tree: PyTree, cut: Cut) -> PyTree:
        """Refuses a tree that is not what a cut leaves; returns the shapes before the cut."""
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            raise ValueError(
                f'the {self.name} has another structure than that of the model, {treedef} instead of {self.treedef}'
            )
        whole = []
        for (path, axes), leaf in zip(self.leaves.items(), leaves, strict=True):
            shape = jnp.shape(leaf)
            before, after = cut.shapes(axes, shape if self.name == 'state' else ())
            check_shape(path, shape, after)
            whole.append(jax.ShapeDtypeStruct(before, jnp.result_type(leaf)))
        return treedef.unflatten(whole)


def parts_of(graph: Any, number: int = 0) -> tuple[Part, Part]:
    """The parameters of a model, and the state of the program with this number."""
    trace = graph.traces[number]
    params, state = map(jax.tree.structure, (graph.params, trace.source.state))
    return Part('tree of parameters', params, trace.leaves), Part('state', state, trace.states)


Verdict = Literal['equal', 'different', 'unproven']


class Verification(NamedTuple):
    """How a smaller model compares with the zeroed one, the whole model whose removed channels are zero.

    Attributes:
      error: the largest difference between elements of their results.
      change: the largest difference that zeroing makes in the whole model's results.
      tolerance: the relative error up to which they count as equal.
      rounding: the largest error that rounding explains.

    >>> print(Verification(error=1e-9, change=0.5, tolerance=1e-3, rounding=1e-6))
    equal: the removal changes results by 0.5, the error is 1e-09, and rounding explains 1e-06
    >>> print(Verification(error=0.0, change=0.0, tolerance=1e-3, rounding=1e-6))
    unproven: the removal changes results by 0, the error is 0, and rounding explains 1e-06
    """

    error: float
    change: float
    tolerance: float
    rounding: float

    @property
    def relative_error(self) -> float:
        """The error over the change; infinite if there is no change."""
        return self.error / self.change if self.change else float('inf')

    @property
    def verdict(self) -> Verdict:
        """`'equal'` if the error is a small part of the change; else `'unproven'` if the error may be rounding."""
        if self.change > 0 and self.relative_error <= self.tolerance:
            return 'equal'
        return 'unproven' if self.error <= self.rounding else 'different'

    def __str__(self) -> str:
        return (
            f'{self.verdict}: the removal changes results by {self.change:.3g}, the error is {self.error:.3g}, and '
            f'rounding explains {self.rounding:.3g}'
        )


class SmallApply:
    """A program of a smaller model. Made by `ChannelGraph.small_apply`.

    For arguments of new shapes the model is traced anew.
    """

    def __init__(self, graph: Any, number: int, keep: KeepByGroup, allow_inexact: bool):
        self.cut = check_keep(graph.groups, keep, allow_inexact)
        self._graph = graph
        self._number = number
        self._keep = dict(keep)

    def __call__(self, params: PyTree, *arguments: Any) -> Any:
        """Runs the smaller model.

        Args:
          params: what `ChannelGraph.shrink` made of the parameters.
          *arguments: as the program takes them. The state is what `shrink` made of it, or what the last call returned.
        """
        graph, cut = self._graph, self.cut
        program: ModelProgram = graph.traces[self._number].source
        of_params, of_state = parts_of(graph, self._number)
        whole_params = of_params.check(params, cut)
        shapes = jax.tree.map(abstract, arguments)
        if program.has_state:
            if not arguments:
                raise TypeError(f'{program.name} takes a state after the parameters, got none')
            shapes = (of_state.check(arguments[0], cut), *shapes[1:])
        traced = graph.params, program.arguments
        if jax.tree.flatten((whole_params, shapes)) != jax.tree.flatten(traced):
            program = program._replace(arguments=shapes, examples=None)
            graph = graph.with_program(self._number, whole_params, program)
            cut = check_keep(graph.groups, self._keep, allow_inexact=True)
        trace = graph.traces[self._number]
        results = Replay(trace, cut).visit_all(trace.program, jax.tree.leaves((params, arguments)))
        return jax.tree.unflatten(trace.results, results)

    def verify(self, whole: Trees, inputs: Trees, small_apply: Any = None) -> Verification:
        """Compares the smaller model, or another function of its arrays, with the zeroed one.

        The bound for rounding allows a thousand operations on the largest element. They are in the coarsest dtype of
        the program.

        Args:
          whole: parameters of the whole model, and its state if it has one.
          inputs: the other arguments.
          small_apply: the other function.
        """
        traces, cut = self._graph.traces, self.cut
        trace = traces[self._number]
        with jax.default_matmul_precision('highest'):
            run = jax.jit(trace.source.apply_fn)
            zeroed = [cut_tree(tree, traces, cut, to_zero=True) for tree in whole]
            before, expected = (jax.tree.leaves(run(*trees, *inputs)) for trees in (whole, zeroed))
            for leaves in (before, expected):  # the state among the results is cut
                for number, path in trace.returned.items():
                    leaves[number] = cut.take(leaves[number], trace.states[path])
            small = [cut_tree(tree, traces, cut) for tree in whole]
            found = jax.tree.leaves(jax.jit(small_apply or self)(*small, *inputs))
        shapes, own_shapes = (list(map(jnp.shape, each)) for each in (expected, found))
        if own_shapes != shapes:
            raise ValueError(f'the smaller model returns {own_shapes} instead of {shapes}')
        equations = [axes.equation for axes in trace.equations.values()]
        dtypes = {variable.aval.dtype for equation in equations for variable in equation.outvars}
        inexact = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
        precision = max([float(jnp.finfo(dtype).eps) for dtype in inexact], default=0.0)
        sizes = [abs(_doubles(each)) for each in expected if each.dtype in inexact]
        largest = max([size[np.isfinite(size)].max(initial=0.0) for size in sizes], default=0.0)
        return Verification(
            error=max(map(_distance, expected, found), default=0.0),
            change=max(map(_distance, before, expected), default=0.0),
            tolerance=precision**0.5,
            rounding=1000 * precision * float(largest),
        )


def _doubles(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.complex128)


def _distance(first: Any, second: Any) -> float:
    """The largest difference of two elements; infinite if only one of them is finite."""
    first, second = _doubles(first), _doubles(second)
    is_same = (first == second) | (np.isnan(first) & np.isnan(second))
    with np.errstate(invalid='ignore'):
        differences = np.where(is_same, 0, np.abs(first - second))
    return float(np.nan_to_num(differences, nan=np.inf, posinf=np.inf).max(initial=0.0))
