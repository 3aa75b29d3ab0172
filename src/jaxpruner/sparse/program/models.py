"""What other packages use: the products of a model, and the model with operators in their place."""

import collections
import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf, RefusedLeafError, matrix_leaf_of
from jaxpruner.sparse.program.product_sites import multiply
from jaxpruner.trace import Use, param_uses
from jaxpruner.trace.interpreter import Position, Run
from jaxpruner.trace.program import RULED, Program, ProgramPath, Scan, inside


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

    Attributes:
      by_leaf: name -> leaf that is a matrix, in the order of the parameters. Each knows the sites where it is
        multiplied.
      refused: name -> why a leaf is no matrix.
      paths: name -> path of a leaf.
      params: the shapes of the parameters.

    Raises:
      ValueError: there are no inputs, or two leaves have one name.
      TypeError: a leaf of `params` is no array.
    """

    def __init__(self, apply_fn: Callable[..., Any], params: tree_lib.PyTree, *sample: Any):
        self._apply_fn = apply_fn
        self.params = _shapes(params)
        paths, self._shapes, self._treedef = tree_lib.flatten_with_paths(self.params)
        self.paths = {tree_lib.path_string(path): path for path in paths}
        if len(self.paths) < len(paths):
            (name, _), *_ = collections.Counter(map(tree_lib.path_string, paths)).most_common(1)
            raise ValueError(f'several leaves are called {name!r}; give the containers other keys')
        self._traced: dict[str, _Traced] = {}
        traced = self._trace(self._shapes, sample)
        self.by_leaf = {leaf.name: leaf for leaf in traced.matrix_leaves.values()}
        self.refused = traced.refused

    def by_name(self, params: tree_lib.PyTree) -> dict[str, Any]:
        """All leaves by name."""
        return dict(zip(self.paths, self._treedef.flatten_up_to(params), strict=True))

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
        """The parameters with operators, or other arrays, in the place of the leaves of these names."""
        return self.unflatten({**self.by_name(params), **operators})

    def unflatten(self, by_name: Mapping[str, Any]) -> tree_lib.PyTree:
        """The tree of the parameters with these leaves."""
        return jax.tree.unflatten(self._treedef, [by_name[name] for name in self.paths])

    def apply(self, weights: tree_lib.PyTree, *inputs: Any) -> Any:
        """Runs the model; call it inside `jax.jit`.

        Args:
          weights: the parameters, in which a leaf that is a matrix may be an `Operator`.
          *inputs: of any shapes; new shapes are traced anew.
        """
        leaves, shapes, operators = [], [], {}
        for number, leaf in enumerate(self._treedef.flatten_up_to(weights)):
            if hasattr(leaf, 'multiply'):
                operators[number] = leaf
                leaves.append(None)
                shapes.append(self._shapes[number])
            else:
                leaves.append(leaf)
                shapes.append(_shapes(leaf))
        traced = self._trace(shapes, inputs)
        uses: list[Use] = []
        for number in operators:
            uses += traced.matrix_leaves[number].uses
        run = _ProductRun(uses, operators)
        values = leaves + jax.tree.leaves(inputs)
        position = Position.of_whole(traced.program)
        results = run.visit_program(Program.of(traced.program), values, position)
        return jax.tree.unflatten(traced.results, results)

    def _trace(self, shapes: Iterable[Any], inputs: tuple[Any, ...]) -> _Traced:
        params, inputs = jax.tree.unflatten(self._treedef, shapes), _shapes(inputs)
        key = str((params, inputs))
        if key in self._traced:
            return self._traced[key]
        structures = []

        def flat(params: tree_lib.PyTree, *inputs: Any) -> list[Any]:
            leaves, structure = jax.tree.flatten(self._apply_fn(params, *inputs))
            structures.append(structure)
            return leaves

        graph = param_uses(flat, params, *inputs)
        matrix_leaves, refused = {}, {}
        for number, (name, path) in enumerate(self.paths.items()):
            try:
                matrix_leaves[number] = matrix_leaf_of(graph, path)
            except RefusedLeafError as error:
                refused[name] = str(error)
        traced = _Traced(graph.program, matrix_leaves, refused, structures[-1])
        if not tree_lib.has_traced(graph.program.consts):  # these live no longer than this call
            self._traced[key] = traced
        return traced


def _shapes(tree: tree_lib.PyTree) -> Any:
    """The shapes of arrays and numbers."""
    return jax.eval_shape(lambda tree: tree, tree)


class _ProductRun(Run):
    """A run of a program with operators in the place of some of its parameters.

    Such a parameter goes through the program as `None`, an empty tree. Equations that only move its elements return
    `None`, too. Where it meets data, its operator multiplies. A scan also scans over the arrays of operators, so each
    trip has the slices of its layer, and the derivatives of the arrays are put together trip by trip.

    Attributes:
      operators: by number of the leaf; inside of scans those of the layers of this trip.
      uses: path of an equation -> the use of a leaf there.
      opened: paths of the equations whose inner programs hold a product.
      sliced: path of a scan -> the leaves of which each trip reads one layer.
    """

    shows = True

    def __init__(self, uses: Iterable[Use], operators: Mapping[int, Any]):
        self.operators = operators
        self.uses: dict[ProgramPath, Use] = {}
        self.opened: set[ProgramPath] = set()
        self.sliced: dict[ProgramPath, set[int]] = collections.defaultdict(set)
        for use in uses:
            path, view = use.site.path, use.site.view
            self.uses[path] = use
            self.opened.update(path[:length] for length in range(1, len(path), 2))
            for entry in view.stack:
                self.sliced[entry.loop].add(view.leaf)

    def visit_equation(self, equation: Any, operands: list[Any], position: Position) -> list[Any]:
        use = self.uses.get(position.path)
        if use is not None:
            operator = self.operators[use.site.view.leaf]
            return [multiply(use, operands[1 - use.site.operand], operator)]
        is_missing = any(operand is None for operand in operands)
        # A call with a derivative rule of its own only moves a parameter: others are refused.
        is_ruled = equation.primitive.name in RULED
        is_entered = is_missing and not is_ruled and inside(equation) is not None
        if is_entered or position.path in self.opened:
            return self.enter(equation, operands, position)
        has_data = any(isinstance(operand, jax.Array) for operand in operands)
        if is_missing and not (is_ruled and has_data):
            return [None] * len(equation.outvars)
        return super().visit_equation(equation, operands, position)

    def slices(self, scan: Scan, position: Position) -> tuple[dict[int, Any], None]:
        sliced = self.sliced.get(position.path, ())
        return {leaf: self.operators[leaf] for leaf in sliced if leaf in self.operators}, None

    def inside(self, position: Position, state: Any, element: Any = None) -> '_ProductRun':
        inner = copy.copy(self)
        inner.operators = {**self.operators, **(element or {})}
        return inner
