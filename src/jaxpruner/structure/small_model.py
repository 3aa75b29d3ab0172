"""The smaller model: runs the traced program with the shapes that a cut leaves, and is compared with the zeroed one."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.structure import trees
from jaxpruner.structure.axes import Axes, sizes_of
from jaxpruner.structure.cut import Cut, KeepByGroup, check_keep, check_shape
from jaxpruner.structure.programs import ModelProgram, Trace, shape_of_leaf
from jaxpruner.structure.replay import Replay
from jaxpruner.tree import Path, PyTree

Verdict = Literal['equal', 'different', 'unproven']


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

    def check(self, tree: PyTree, cut: Cut, has_free_axes: bool = False) -> PyTree:
        """Refuses a tree that is not what a cut leaves; returns the shapes before the cut.

        Args:
          tree: of arrays.
          cut: the channels that stay.
          has_free_axes: whether axes that are not cut may have any size, such as the batch of a cache.
        """
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            raise ValueError(
                f'the {self.name} has another structure than that of the model, {treedef} instead of {self.treedef}'
            )
        whole = []
        for (path, axes), leaf in zip(self.leaves.items(), leaves, strict=True):
            shape, before, after = jnp.shape(leaf), list(sizes_of(axes)), list(cut.shape(axes))
            for i, (axis, size) in enumerate(zip(axes, shape, strict=False)):
                if has_free_axes and not cut.shortens(axis):
                    before[i] = after[i] = size
            check_shape(path, shape, tuple(after))
            whole.append(jax.ShapeDtypeStruct(tuple(before), jnp.result_type(leaf)))
        return treedef.unflatten(whole)


def parts_of(graph: Any, number: int = 0) -> tuple[Part, Part]:
    """The parameters of a model, and the state of the program with this number."""
    trace = graph.traces[number]
    params, state = map(jax.tree.structure, (graph.params, trace.source.state))
    return (
        Part('tree of parameters', params, trace.leaves),
        Part('state', state, trace.states),
    )


class SmallApply:
    """A program of a smaller model. Made by `ChannelGraph.small_apply`.

    For arguments of new shapes the model is traced anew.
    """

    def __init__(self, graph: Any, number: int, keep: KeepByGroup, allow_inexact: bool):
        self._cut = check_keep(graph.groups, keep, allow_inexact)
        self._graph = graph
        self._number = number
        self._keep = dict(keep)

    def __call__(self, params: PyTree, *arguments: Any) -> Any:
        """Runs the smaller model.

        Args:
          params: what `ChannelGraph.shrink` made of the parameters.
          *arguments: as the program takes them. The state is what `shrink` made of it, or what the last call returned.
        """
        graph, cut = self._graph, self._cut
        program: ModelProgram = graph.traces[self._number].source
        of_params, of_state = parts_of(graph, self._number)
        whole_params = of_params.check(params, cut)
        shapes = jax.tree.map(shape_of_leaf, arguments)
        if program.has_state:
            if not arguments:
                raise TypeError(f'{program.name} takes a state after the parameters, got none')
            shapes = (of_state.check(arguments[0], cut, has_free_axes=True), *shapes[1:])
        traced = graph.params, program.arguments
        if jax.tree.flatten((whole_params, shapes)) != jax.tree.flatten(traced):
            program = program._replace(arguments=shapes, examples=None)
            graph = graph.with_program(self._number, whole_params, program)
            cut = check_keep(graph.groups, self._keep, allow_inexact=True)
        trace = graph.traces[self._number]
        results = Replay(trace, cut).run(jax.tree.leaves((params, arguments)))
        return jax.tree.unflatten(trace.results, results)

    def cut_results(self, results: Any) -> list[Any]:
        """The leaves of the whole program's results, with the state among them cut."""
        trace = self._graph.traces[self._number]
        leaves = jax.tree.leaves(results)
        for number, path in trace.returned.items():
            leaves[number] = self._cut.take(leaves[number], trace.states[path])
        return leaves

    def verify(
        self,
        whole: Sequence[PyTree],
        inputs: Sequence[Any],
        small_apply: Callable[..., Any] | None = None,
    ) -> 'Verification':
        """Compares the smaller model, or another function of its arrays, with the zeroed one.

        Args:
          whole: parameters of the whole model, and its state if it has one.
          inputs: the other arguments.
          small_apply: the other function.
        """
        graph, cut = self._graph, self._cut
        zeroed = [trees.cut_tree(tree, graph.traces, cut, to_zero=True) for tree in whole]
        small = [trees.cut_tree(tree, graph.traces, cut) for tree in whole]
        arguments = [(*each, *inputs) for each in (whole, zeroed, small)]
        trace = graph.traces[self._number]
        return verify(trace, small_apply or self, arguments, self.cut_results)


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
    trace: Trace,
    small_apply: Callable[..., Any],
    arguments: Sequence[Sequence[Any]],
    leaves_of: Callable[[Any], Sequence[Any]] = jax.tree.leaves,
) -> Verification:
    """Runs the whole model twice, and the smaller one, on arguments unchanged, zeroed and cut.

    The bound for rounding allows a thousand operations on the largest element. They are in the coarsest dtype of the
    program.

    Args:
      trace: of the whole model.
      small_apply: of the smaller model.
      arguments: for the three runs.
      leaves_of: results of the whole model -> the leaves that those of the smaller one are compared with.
    """
    with jax.default_matmul_precision('highest'):
        run = jax.jit(trace.source.apply_fn)
        whole, zeroed = (leaves_of(run(*each)) for each in arguments[:2])
        small = jax.tree.leaves(jax.jit(small_apply)(*arguments[2]))
    expected, shapes = (list(map(jnp.shape, each)) for each in (zeroed, small))
    if shapes != expected:
        raise ValueError(f'the smaller model returns {shapes} instead of {expected}')
    equations = [axes.equation for axes in trace.equations.values()]
    dtypes = {variable.aval.dtype for equation in equations for variable in equation.outvars}
    inexact = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    precision = max([float(jnp.finfo(dtype).eps) for dtype in inexact], default=0.0)
    sizes = [
        abs(_doubles(result)) for result in zeroed if jnp.issubdtype(result.dtype, jnp.inexact)
    ]
    largest = max([size[np.isfinite(size)].max(initial=0.0) for size in sizes], default=0.0)
    return Verification(
        error=max(map(_distance, zeroed, small), default=0.0),
        change=max(map(_distance, whole, zeroed), default=0.0),
        tolerance=precision**0.5,
        rounding=1000 * precision * float(largest),
    )


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
