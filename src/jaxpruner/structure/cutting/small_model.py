"""The smaller model: runs the traced program with the shapes that a cut leaves."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axes
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.structure.cutting.keeping import KeepByGroup, check_keep
from jaxpruner.structure.cutting.replay import Replay
from jaxpruner.structure.programs import ModelProgram, shape_of_leaf, signature
from jaxpruner.tree import Path, PyTree


class SmallApply:
    """A program of a smaller model. Made by `ChannelGraph.small_apply`.

    For arguments of new shapes the model is traced anew.
    """

    def __init__(self, graph: Any, number: int, keep: KeepByGroup, allow_inexact: bool):
        check_keep(graph.groups, keep, allow_inexact)
        self._graph = graph
        self._number = number
        self._keep = dict(keep)
        self._allow_inexact = allow_inexact
        self._program: ModelProgram = graph.model.programs[number]
        shapes = (graph.model.params, self._program.arguments)
        self._graphs: dict[Hashable, Any] = {signature(shapes): graph}

    @property
    def program(self) -> Any:
        """The traced program of the whole model, a jaxpr."""
        return self._graph.traces[self._number].program.jaxpr

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
        trace: Trace = graph.traces[self._number]
        cut = self._cut(graph)
        check_small(params, trace.paths, trace.leaves, cut)
        if has_state:
            check_small(arguments[0], trace.state_paths, trace.states, cut)
        leaves = jax.tree.leaves((params, arguments))
        results = Replay(trace, cut).run(leaves)
        structure = graph.model.programs[self._number].results
        return jax.tree.unflatten(structure, results)

    def cut_results(self, results: Any) -> list[Any]:
        """The leaves of the whole program's results, with the state among them cut."""
        trace: Trace = self._graph.traces[self._number]
        cut = self._cut(self._graph)
        leaves = jax.tree.leaves(results)
        for number, leaf in trace.returned.items():
            axes = trace.states[leaf]
            leaves[number] = cut.take(leaves[number], axes)
        return leaves

    def _cut(self, graph: Any) -> Cut:
        return check_keep(graph.groups, self._keep, self._allow_inexact)

    def _graph_of(self, params: PyTree, arguments: tuple[Any, ...]) -> Any:
        """The graph for arguments of these structures, dtypes and shapes. Traces the model if they are new."""
        model = self._graph.model
        whole = _with_dtypes(model.params, params)
        shapes = jax.tree.map(shape_of_leaf, arguments)
        if self._program.has_state:
            state, *inputs = shapes
            shapes = (self._whole_state(state), *inputs)
        key = signature((whole, shapes))
        if key in self._graphs:
            return self._graphs[key]
        program = self._program._replace(arguments=shapes, examples=None)
        graph = model.with_program(self._number, whole, program)
        constants = graph.traces[self._number].program.consts
        if not tree_lib.has_traced(constants):  # tracers may be gone later
            self._graphs[key] = graph
        return graph

    def _whole_state(self, state: PyTree) -> PyTree:
        """The shapes that a state had before the cut. Axes that are not cut may have any size."""
        trace: Trace = self._graph.traces[self._number]
        cut = self._cut(self._graph)
        leaves, treedef = jax.tree.flatten(state)
        expected = jax.tree.structure(self._program.state)
        check_structure('state', treedef, expected)
        whole = []
        for leaf, axes in zip(leaves, trace.states, strict=True):
            shape = list(leaf.shape)
            for i, axis in enumerate(axes[: len(shape)]):
                if cut.size(axis) == shape[i]:
                    shape[i] = axis.size
            whole.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))
        return jax.tree.unflatten(treedef, whole)


def check_small(
    tree: PyTree, paths: Sequence[Path], axes_of_leaves: Sequence[Axes], cut: Cut
) -> None:
    """Refuses parameters or a state that do not have the shapes that a cut leaves."""
    leaves = jax.tree.leaves(tree)
    for path, leaf, axes in zip(paths, leaves, axes_of_leaves, strict=True):
        shape = jnp.shape(leaf)
        expected = cut.shape(axes)
        if shape != expected:
            raise ValueError(
                f'{tree_lib.path_string(path)} has shape {shape} where the smaller model has {expected}; give what '
                'graph.shrink(params, keep) returns'
            )


def check_structure(what: str, given: Any, own: Any) -> None:
    """Refuses a tree whose structure differs from that of the model."""
    if given != own:
        raise ValueError(
            f'the {what} has another structure than that of the model, {given} instead of {own}; give what '
            'graph.shrink returns'
        )


def _with_dtypes(whole: PyTree, params: PyTree) -> PyTree:
    """The shapes of the whole model's parameters, with the dtypes of the smaller model's."""
    leaves, treedef = jax.tree.flatten(whole)
    small_leaves, structure = jax.tree.flatten(params)
    check_structure('tree of parameters', structure, treedef)
    shapes = []
    for leaf, small_leaf in zip(leaves, small_leaves, strict=True):
        dtype = jnp.result_type(small_leaf)
        shapes.append(jax.ShapeDtypeStruct(leaf.shape, dtype))
    return jax.tree.unflatten(treedef, shapes)
