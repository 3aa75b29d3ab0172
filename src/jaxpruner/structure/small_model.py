"""The smaller model: the traced program, run with the shapes that a cut leaves."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.keeping import Keep, check_keep
from jaxpruner.structure.replay import Replay


class Model(NamedTuple):
    """What a graph was made of.

    Attributes:
      apply_fn: of the model.
      params: of the model, `jax.ShapeDtypeStruct` for arrays.
      inputs: likewise.
      examples: the inputs themselves; `None` where they were shapes, or traced.
      results: structure of the results.
      analyse: `(params, *inputs) -> ChannelGraph` of the same model with others.
    """

    apply_fn: Callable[..., Any]
    params: tree_lib.PyTree
    inputs: tuple[Any, ...]
    examples: tuple[Any, ...] | None
    results: Any
    analyse: Callable[..., Any]

    def can_run(self, params: tree_lib.PyTree) -> bool:
        """Whether there are inputs, and these are parameters: arrays of the structure and the dtypes of the model's."""
        if self.examples is None or jax.tree.structure(params) != jax.tree.structure(self.params):
            return False
        for leaf, own in zip(jax.tree.leaves(params), jax.tree.leaves(self.params), strict=True):
            if not is_array(leaf) or jnp.result_type(leaf) != own.dtype:
                return False
        return True


class SmallApply:
    """The apply function of a smaller model; made by `ChannelGraph.small_apply`.

    For inputs of other shapes than those of the graph the model is traced anew.
    """

    def __init__(self, graph: Any, keep: Keep, allow_inexact: bool):
        check_keep(graph.groups, keep, allow_inexact)
        self._graph = graph
        self._keep = dict(keep)
        self._allow_inexact = allow_inexact
        self._graphs: dict[Hashable, Any] = {
            _signature(graph.model.params, graph.model.inputs): graph
        }

    def __call__(self, params: tree_lib.PyTree, *inputs: Any) -> Any:
        """Runs the smaller model.

        Args:
          params: what `ChannelGraph.shrink` made of the parameters.
          *inputs: as the model takes them.
        """
        graph = self._graph_of(params, inputs)
        cut = check_keep(graph.groups, self._keep, self._allow_inexact)
        leaves = jax.tree.leaves(params)
        trace = graph.trace
        for path, leaf, axes in zip(trace.paths, leaves, trace.leaves, strict=True):
            if jnp.shape(leaf) != cut.shape(axes):
                raise ValueError(
                    f'{tree_lib.path_string(path)} has shape {jnp.shape(leaf)} where the smaller model has '
                    f'{cut.shape(axes)}; give what graph.shrink(params, keep) returns'
                )
        results = Replay(trace, cut).run([*leaves, *jax.tree.leaves(inputs)])
        return jax.tree.unflatten(graph.model.results, results)

    def _graph_of(self, params: tree_lib.PyTree, inputs: tuple[Any, ...]) -> Any:
        """The graph for parameters and inputs of these structures, dtypes and shapes of inputs."""
        model = self._graph.model
        whole = _with_dtypes(model.params, params)
        key = _signature(whole, inputs)
        if key not in self._graphs:
            graph = model.analyse(whole, *jax.tree.map(shape_of_leaf, inputs))
            if tree_lib.has_traced(graph.trace.program.consts):
                return graph  # what the model closes over lives no longer than this call
            self._graphs[key] = graph
        return self._graphs[key]


def is_array(leaf: Any) -> bool:
    """Whether a leaf has values, which the host can ask for."""
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    return not is_shape and not tree_lib.is_traced(leaf)


def shape_of_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and the dtype of an array or a number."""
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def _with_dtypes(whole: tree_lib.PyTree, params: tree_lib.PyTree) -> tree_lib.PyTree:
    """The shapes of the whole model's parameters with the dtypes of those of the smaller one."""
    leaves, treedef = jax.tree.flatten(whole)
    given, structure = jax.tree.flatten(params)
    if structure != treedef:
        raise ValueError(
            f'the parameters have another structure than those of the model, {structure} instead of {treedef}; give '
            'what graph.shrink(params, keep) returns'
        )
    shapes = []
    for leaf, other in zip(leaves, given, strict=True):
        shapes.append(jax.ShapeDtypeStruct(leaf.shape, jnp.result_type(other)))
    return jax.tree.unflatten(treedef, shapes)


def _signature(params: tree_lib.PyTree, inputs: tuple[Any, ...]) -> Hashable:
    leaves, treedef = jax.tree.flatten((params, inputs))
    return treedef, tuple([(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves])
