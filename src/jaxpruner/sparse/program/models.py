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
from jaxpruner.trace import UseGraph, param_uses


def find_products(
    apply_fn: Callable[..., Any],
    params: tree_lib.PyTree,
    *sample: Any,
    constant_masks: bool = False,
) -> 'Products':
    """Finds the leaves of a model that are matrices by which data are multiplied.

    Args:
      apply_fn: `(params, *inputs) -> results`.
      params: the parameters, arrays or shapes.
      *sample: inputs, arrays or shapes.
      constant_masks: whether the model may multiply a leaf with a constant mask. `to_matrix` applies the mask, and
        operators do not: that is right only for weights that are not trained.

    Raises:
      ValueError: there are no inputs, or two leaves have one name.
      TypeError: a leaf of `params` is no array.
    """
    return Products(apply_fn, params, sample, constant_masks)


class _Traced(NamedTuple):
    """The model, traced with inputs of some shapes.

    Attributes:
      program: a closed jaxpr.
      matrix_leaves: by number of the leaf.
      refused: path -> reason.
      results: the structure of its results.
    """

    program: Any
    matrix_leaves: Mapping[int, MatrixLeaf]
    refused: Mapping[tree_lib.Path, str]
    results: Any


class Products:
    """The products of a model with its parameters.

    Attributes:
      by_leaf: name -> leaf that is a matrix, in the order of the parameters. Each knows the sites where it is
        multiplied.
      refused: name -> why a leaf is no matrix.
      params: the shapes of the parameters.
    """

    def __init__(
        self,
        apply_fn: Callable[..., Any],
        params: tree_lib.PyTree,
        sample: Sequence[Any],
        constant_masks: bool = False,
    ):
        self._apply_fn = apply_fn
        self._constant_masks = constant_masks
        self.params = jax.tree.map(_shape, params)
        self._paths, self._shapes, self._treedef = tree_lib.flatten_with_paths(self.params)
        self._names = list(map(tree_lib.path_string, self._paths))
        _check_different(self._names)
        sample = tuple(sample)
        traced = self._trace(self._shapes, sample)
        key = _signature(self._shapes, sample)
        self._traced = {key: traced}
        self.by_leaf: dict[str, MatrixLeaf] = {}
        for matrix_leaf in traced.matrix_leaves.values():
            self.by_leaf[matrix_leaf.name] = matrix_leaf
        self.refused: dict[str, str] = {}
        for path, reason in traced.refused.items():
            self.refused[tree_lib.path_string(path)] = reason

    def by_name(self, params: tree_lib.PyTree) -> dict[str, Any]:
        """All leaves by name."""
        leaves = self._treedef.flatten_up_to(params)
        return dict(zip(self._names, leaves, strict=True))

    def leaves(self, params: tree_lib.PyTree) -> dict[str, Any]:
        """The leaves that are matrices, by name."""
        by_name = self.by_name(params)
        return {name: by_name[name] for name in self.by_leaf}

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
        traced = self._trace_of(shapes, inputs)
        product_sites: list[ProductSite] = []
        for number in operators:
            matrix_leaf = traced.matrix_leaves.get(number)
            if matrix_leaf is None:
                name = self._names[number]
                raise ValueError(self._unknown(name))
            product_sites += matrix_leaf.product_sites
        values = leaves + jax.tree.leaves(inputs)
        results = run_with_operators(traced.program, product_sites, values, operators)
        return jax.tree.unflatten(traced.results, results)

    def _unknown(self, name: str) -> str:
        if name in self.refused:
            return f'{name}: no operator can take the place of this leaf: {self.refused[name]}'
        return f'no parameter {name!r}; {tree_lib.nearest(name, self.by_leaf)}'

    def _trace_of(self, shapes: Sequence[Any], inputs: tuple[Any, ...]) -> _Traced:
        """The model at these shapes, traced anew if they are new."""
        key = _signature(shapes, inputs)
        if key in self._traced:
            return self._traced[key]
        traced = self._trace(shapes, inputs)
        if not tree_lib.has_traced(traced.program.consts):  # these live no longer than this call
            self._traced[key] = traced
        return traced

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
        matrix_leaves, refused = _matrix_leaves_of(graph, self._paths, self._constant_masks)
        return _Traced(
            program=graph.program,
            matrix_leaves=matrix_leaves,
            refused=refused,
            results=structures[-1],
        )


def _check_different(names: Sequence[str]) -> None:
    """Refuses a name that two leaves have."""
    for name, count in collections.Counter(names).items():
        if count > 1:
            raise ValueError(f'{count} leaves are called {name!r}; give the containers other keys')


def _matrix_leaves_of(
    graph: UseGraph, paths: Sequence[tree_lib.Path], constant_masks: bool
) -> tuple[dict[int, MatrixLeaf], dict[tree_lib.Path, str]]:
    """The leaves that are matrices, by number, and why the others are not."""
    matrix_leaves, refused = {}, {}
    for number, path in enumerate(paths):
        try:
            matrix_leaves[number] = matrix_leaf_of(graph, path, constant_masks)
        except RefusedLeafError as error:
            refused[path] = str(error)
    return matrix_leaves, refused


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
