"""What other packages use: the products of a model, and the model with operators in their place."""

import collections
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf, RefusedLeafError, matrix_leaf_of
from jaxpruner.sparse.program.product_sites import ProductSite
from jaxpruner.sparse.program.running import run_with_operators
from jaxpruner.trace import param_uses


class _Traced(NamedTuple):
    """The model, traced with inputs of some shapes.

    Attributes:
      program: a closed jaxpr.
      matrix_leaves: by number of the leaf.
      refused: name -> reason.
      results: the structure of its results.
    """

    program: Any
    matrix_leaves: Mapping[int, MatrixLeaf]
    refused: dict[str, str]
    results: Any


class Products:
    """The products of a model with its parameters: the leaves that are matrices by which data are multiplied.

    Args:
      apply_fn: `(params, *inputs) -> results`.
      params: the parameters, arrays or shapes.
      *sample: inputs, arrays or shapes.
      constant_masks: whether the model may multiply a leaf with a constant mask. `to_matrix` applies the mask, and
        operators do not: that is right only for weights that are not trained.

    Attributes:
      by_leaf: name -> leaf that is a matrix, in the order of the parameters. Each knows the sites where it is
        multiplied.
      refused: name -> why a leaf is no matrix.
      params: the shapes of the parameters.

    Raises:
      ValueError: there are no inputs, or two leaves have one name.
      TypeError: a leaf of `params` is no array.
    """

    def __init__(
        self,
        apply_fn: Callable[..., Any],
        params: tree_lib.PyTree,
        *sample: Any,
        constant_masks: bool = False,
    ):
        self._apply_fn = apply_fn
        self._constant_masks = constant_masks
        self.params = jax.tree.map(_shape, params)
        self._paths, self._shapes, self._treedef = tree_lib.flatten_with_paths(self.params)
        self._names = list(map(tree_lib.path_string, self._paths))
        for name, count in collections.Counter(self._names).items():
            if count > 1:
                raise ValueError(
                    f'{count} leaves are called {name!r}; give the containers other keys'
                )
        traced = self._trace(self._shapes, sample)
        self._traced = {_signature(self._shapes, sample): traced}
        self.by_leaf = {leaf.name: leaf for leaf in traced.matrix_leaves.values()}
        self.refused = traced.refused

    def by_name(self, params: tree_lib.PyTree) -> dict[str, Any]:
        """All leaves by name."""
        leaves = self._treedef.flatten_up_to(params)
        return dict(zip(self._names, leaves, strict=True))

    def leaves(self, params: tree_lib.PyTree) -> dict[str, Any]:
        """The leaves that are matrices, by name.

        Raises:
          ValueError: one has another shape than in the model.
        """
        by_name, leaves = self.by_name(params), {}
        for name, matrix_leaf in self.by_leaf.items():
            leaves[name] = by_name[name]
            shape = jnp.shape(leaves[name])
            if shape != matrix_leaf.shape:
                raise ValueError(f'{name} has shape {shape}, and in the model {matrix_leaf.shape}')
        return leaves

    def put(self, params: tree_lib.PyTree, operators: Mapping[str, Any]) -> tree_lib.PyTree:
        """The parameters with operators, or other arrays, in the place of the leaves of these names.

        Raises:
          ValueError: a name is none of `by_leaf`.
        """
        for name in operators:
            if name not in self.by_leaf:
                raise ValueError(self._unknown(name))
        leaves = self.by_name(params)
        leaves.update(operators)
        return self.unflatten(leaves)

    def unflatten(self, by_name: Mapping[str, Any]) -> tree_lib.PyTree:
        """The tree of the parameters with these leaves."""
        leaves = [by_name[name] for name in self._names]
        return jax.tree.unflatten(self._treedef, leaves)

    def apply(self, weights: tree_lib.PyTree, *inputs: Any) -> Any:
        """Runs the model; call it inside `jax.jit`.

        Args:
          weights: the parameters, in which a leaf that is a matrix may be an `Operator`.
          *inputs: of any shapes; new shapes are traced anew.

        Raises:
          ValueError: a leaf that is no matrix is an operator.
        """
        leaves = self._treedef.flatten_up_to(weights)
        operators = {}
        shapes = list(self._shapes)
        for number, leaf in enumerate(leaves):
            if hasattr(leaf, 'multiply'):
                operators[number] = leaf
                leaves[number] = None
            else:
                shapes[number] = _shape(leaf)
        key = _signature(shapes, inputs)
        traced = self._traced.get(key) or self._trace(shapes, inputs)
        if not tree_lib.has_traced(traced.program.consts):  # these live no longer than this call
            self._traced[key] = traced
        product_sites: list[ProductSite] = []
        for number in operators:
            if number not in traced.matrix_leaves:
                raise ValueError(self._unknown(self._names[number]))
            product_sites += traced.matrix_leaves[number].product_sites
        values = leaves + jax.tree.leaves(inputs)
        results = run_with_operators(traced.program, product_sites, values, operators)
        return jax.tree.unflatten(traced.results, results)

    def _unknown(self, name: str) -> str:
        if name in self.refused:
            return f'{name}: no operator can take the place of this leaf: {self.refused[name]}'
        return f'no parameter {name!r}; {tree_lib.nearest(name, self.by_leaf)}'

    def _trace(self, shapes: Sequence[Any], inputs: tuple[Any, ...]) -> _Traced:
        structures = []

        def flat(params: tree_lib.PyTree, *inputs: Any) -> list[Any]:
            results = self._apply_fn(params, *inputs)
            leaves, structure = jax.tree.flatten(results)
            structures.append(structure)
            return leaves

        params = jax.tree.unflatten(self._treedef, shapes)
        input_shapes = jax.tree.map(_shape, inputs)
        graph = param_uses(flat, params, *input_shapes)
        matrix_leaves, refused = {}, {}
        for number, path in enumerate(self._paths):
            try:
                matrix_leaves[number] = matrix_leaf_of(graph, path, self._constant_masks)
            except RefusedLeafError as error:
                refused[self._names[number]] = str(error)
        return _Traced(graph.program, matrix_leaves, refused, structures[-1])


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, 'dtype'):
        return jax.ShapeDtypeStruct((), jnp.result_type(leaf), weak_type=True)
    is_weak = getattr(leaf, 'weak_type', False)
    return jax.ShapeDtypeStruct(leaf.shape, jnp.result_type(leaf), weak_type=is_weak)


def _signature(shapes: Sequence[Any], inputs: tuple[Any, ...]) -> Hashable:
    """What a trace depends on: the trees of parameters and inputs, with shapes and dtypes."""
    input_shapes = jax.tree.map(_shape, inputs)
    leaves, treedef = jax.tree.flatten((list(shapes), input_shapes))
    avals = []
    for leaf in leaves:
        avals.append((leaf.shape, leaf.dtype, leaf.weak_type))
    return treedef, tuple(avals)
