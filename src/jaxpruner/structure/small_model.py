"""The smaller model: runs the traced program with the shapes that a cut leaves, and is compared with the zeroed one."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.axes import Axes
from jaxpruner.structure.cut import Cut, KeepByGroup, check_keep, check_shape
from jaxpruner.structure.programs import ModelProgram, shape_of_leaf, signature
from jaxpruner.structure.replay import Replay
from jaxpruner.structure.traces import Trace
from jaxpruner.tree import Path, PyTree

Verdict = Literal['equal', 'different', 'unproven']


class SmallApply:
    """A program of a smaller model. Made by `ChannelGraph.small_apply`.

    For arguments of new shapes the model is traced anew.
    """

    def __init__(self, graph: Any, number: int, keep: KeepByGroup, allow_inexact: bool):
        check_keep(graph.groups, keep, allow_inexact)
        self._graph = graph
        self._number = number
        self._keep = dict(keep)
        self._program: ModelProgram = graph.model.programs[number]

    def __call__(self, params: PyTree, *arguments: Any) -> Any:
        """Runs the smaller model.

        Args:
          params: what `ChannelGraph.shrink` made of the parameters.
          *arguments: as the program takes them. The state is what `shrink` made of it, or what the last call returned.
        """
        has_state = self._program.has_state
        if has_state and not arguments:
            raise TypeError(f'{self._program.name} takes a state after the parameters, got none')
        graph = self._graph_of(params, arguments)
        trace, cut = self._cut_trace(graph)
        check_small(params, trace.paths, trace.leaves, cut)
        if has_state:
            check_small(arguments[0], trace.state_paths, trace.states, cut)
        results = Replay(trace, cut).run(jax.tree.leaves((params, arguments)))
        return jax.tree.unflatten(graph.model.programs[self._number].results, results)

    def cut_results(self, results: Any) -> list[Any]:
        """The leaves of the whole program's results, with the state among them cut."""
        trace, cut = self._cut_trace(self._graph)
        leaves = jax.tree.leaves(results)
        for number, leaf in trace.returned.items():
            leaves[number] = cut.take(leaves[number], trace.states[leaf])
        return leaves

    def _cut_trace(self, graph: Any) -> tuple[Trace, Cut]:
        """The trace in a graph, and the cut of its axes."""
        return graph.traces[self._number], check_keep(graph.groups, self._keep, allow_inexact=True)

    def _graph_of(self, params: PyTree, arguments: tuple[Any, ...]) -> Any:
        """The graph for arguments of these structures, dtypes and shapes."""
        leaves, treedef = jax.tree.flatten(self._graph.model.params)
        small_leaves, structure = jax.tree.flatten(params)
        check_structure('tree of parameters', structure, treedef)
        whole = treedef.unflatten(
            [
                jax.ShapeDtypeStruct(leaf.shape, jnp.result_type(small))
                for leaf, small in zip(leaves, small_leaves, strict=True)
            ]
        )
        shapes = jax.tree.map(shape_of_leaf, arguments)
        if self._program.has_state:
            # The shapes that the state had before the cut. Axes that are not cut may have any size.
            trace, cut = self._cut_trace(self._graph)
            leaves, treedef = jax.tree.flatten(shapes[0])
            check_structure('state', treedef, jax.tree.structure(self._program.state))
            for number, (leaf, axes) in enumerate(zip(leaves, trace.states, strict=True)):
                shape = list(leaf.shape)
                for i, axis in enumerate(axes[: len(shape)]):
                    shape[i] = axis.size if cut.size(axis) == shape[i] else shape[i]
                leaves[number] = jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)
            shapes = (jax.tree.unflatten(treedef, leaves), *shapes[1:])
        own = self._graph.model.params, self._program.arguments
        if signature((whole, shapes)) == signature(own):
            return self._graph
        program = self._program._replace(arguments=shapes, examples=None)
        return self._graph.with_program(self._number, whole, program)


def check_small(
    tree: PyTree, paths: Sequence[Path], axes_of_leaves: Sequence[Axes], cut: Cut
) -> None:
    """Refuses parameters or a state that do not have the shapes that a cut leaves."""
    leaves = jax.tree.leaves(tree)
    for path, leaf, axes in zip(paths, leaves, axes_of_leaves, strict=True):
        check_shape(path, jnp.shape(leaf), cut.shape(axes))


def check_structure(what: str, given: Any, own: Any) -> None:
    """Refuses a tree whose structure differs from that of the model."""
    if given != own:
        raise ValueError(
            f'the {what} has another structure than that of the model, {given} instead of {own}'
        )


@dataclasses.dataclass(frozen=True)
class Verification:
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


def verify(
    apply_fn: Callable[..., Any],
    small_apply: Callable[..., Any],
    arguments: Sequence[Sequence[Any]],
    leaves_of: Callable[[Any], Sequence[Any]] = jax.tree.leaves,
) -> Verification:
    """Runs the whole model twice, and the smaller one, on arguments unchanged, zeroed and cut.

    The bound for rounding allows a thousand operations on the largest element. They are in the coarsest dtype of the
    program.

    Args:
      apply_fn: of the whole model.
      small_apply: of the smaller model.
      arguments: for the three runs.
      leaves_of: results of the whole model -> the leaves that those of the smaller one are compared with.
    """
    run = jax.jit(apply_fn)
    whole, zeroed = (leaves_of(run(*each)) for each in arguments[:2])
    small = jax.tree.leaves(jax.jit(small_apply)(*arguments[2]))
    expected, shapes = (list(map(jnp.shape, each)) for each in (zeroed, small))
    if shapes != expected:
        raise ValueError(f'the smaller model returns {shapes} instead of {expected}')
    precision = _coarsest_precision(jax.make_jaxpr(run)(*arguments[0]).jaxpr)
    largest = 0.0
    for result in zeroed:
        if jnp.issubdtype(result.dtype, jnp.inexact):
            array = np.abs(_doubles(result))
            largest = max(largest, float(array[np.isfinite(array)].max(initial=0.0)))
    return Verification(
        error=max(map(_distance, zeroed, small), default=0.0),
        change=max(map(_distance, whole, zeroed), default=0.0),
        tolerance=precision**0.5,
        rounding=1000 * precision * largest,
    )


def _coarsest_precision(jaxpr: Any) -> float:
    """The relative precision of the coarsest floating dtype in which a program computes."""
    coarsest = 0.0
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            dtype = getattr(variable.aval, 'dtype', None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
                coarsest = max(coarsest, float(jnp.finfo(dtype).eps))
        for parameter in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(parameter, 'jaxpr', parameter)
            if hasattr(inner, 'eqns'):
                coarsest = max(coarsest, _coarsest_precision(inner))
    return coarsest


def _doubles(array: Any) -> np.ndarray:
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return np.asarray(array).astype(np.complex128 if is_complex else np.float64)


def _distance(first: Any, second: Any) -> float:
    """The largest difference of two elements; infinite if only one of them is finite."""
    first, second = _doubles(first), _doubles(second)
    is_same = (first == second) | (np.isnan(first) & np.isnan(second))
    with np.errstate(invalid='ignore'):
        differences = np.where(is_same, 0, np.abs(first - second))
    return float(np.nan_to_num(differences, nan=np.inf, posinf=np.inf).max(initial=0.0))
