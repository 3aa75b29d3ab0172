"""The products of a traced model with its parameters, and the model with other products in their place.

A dense layer multiplies rows of data by a matrix that it reads from a leaf. It may read the leaf as it is, transposed,
reshaped, cast, or as one layer of a stack after the other. `Products` says which leaves are read so, in any
framework:

>>> import dataclasses, jax, jax.numpy as jnp
>>> from jaxpruner.sparse.products import Products
>>> def apply_fn(params, x):
...     hidden, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, params['layers'])
...     return hidden @ params['out'].T + params['bias']
>>> params = {'layers': jnp.ones((3, 4, 4)), 'out': jnp.ones((2, 4)), 'bias': jnp.ones(2)}
>>> products = Products(apply_fn, params, jnp.ones((5, 4)))
>>> products.by_leaf['layers'].layers, products.by_leaf['out'].to_matrix(params['out']).shape
((3,), (4, 2))
>>> products.refused
{'bias': 'no contraction reads it'}

The model then runs with operators in the place of leaves. An operator is a pytree with `multiply(rows, dtype)`, which
maps `[n, inputs]` to `[n, outputs]`, and adds products up in the type that the program asks for. Its arrays have the
axes of `layers` in front; inside the model it holds those of one layer. It may also have `convolve(image,
convolution)`, which maps `[batch, *space, channels]` to `[batch, *space, outputs]`; otherwise the windows of an image
are gathered into rows.

>>> @jax.tree_util.register_dataclass
... @dataclasses.dataclass
... class Halved:
...     matrix: jax.Array
...     def multiply(self, rows, dtype):
...         return rows @ self.matrix / 2
>>> out = Halved(products.by_leaf['out'].to_matrix(params['out']))
>>> weights = products.put(params, {'out': out})
>>> x = jnp.ones((7, 4))
>>> dense, halved = products.apply(params, x) - params['bias'], products.apply(weights, x) - params['bias']
>>> bool(jnp.allclose(halved, dense / 2))
True
"""

import collections
import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import tree as tree_lib
from jaxpruner.oneshot import leaves as leaves_lib
from jaxpruner.oneshot import matrices as matrices_lib
from jaxpruner.trace import Use, UseGraph, param_uses
from jaxpruner.trace.graph import roles_of
from jaxpruner.trace.program import RAGGED, RULED, Position, ProgramPath, Run, Scan, bind, inside


def multiply(use: Use, data: jax.Array, operator: Any) -> jax.Array:
    """Runs the operation in which a leaf is used on data, with an operator in the place of the leaf."""
    equation, steps = use.site.equation, use.site.view.steps
    dtype = equation.invars[use.site.operand].aval.dtype
    result_dtype = equation.outvars[0].aval.dtype
    # The numbers of an operator are rounded as the model rounds those of the leaf.
    casts = [step.equation for step in steps if matrices_lib.step_name(step) in matrices_lib.CASTS]

    def cast(array: jax.Array) -> jax.Array:
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return array
        for each in casts:
            (array,) = bind(each, [array])
        return array.astype(dtype)

    operator = jax.tree.map(cast, operator)
    precision, multiplied_so = equation.params['precision'], contextlib.nullcontext()
    if precision is not None:  # the operator multiplies as precisely as the program asks for
        first = precision[0] if isinstance(precision, tuple) else precision
        is_algorithm = isinstance(first, lax.DotAlgorithmPreset) and first.name != 'DEFAULT'
        name = first.name if is_algorithm else first.name.lower()
        multiplied_so = jax.default_matmul_precision(name)
    with multiplied_so:
        if use.op == 'conv':
            result = Convolution(equation).run_with(operator, data, result_dtype)
        else:
            result = _dot(equation, use.site.operand, data, operator, result_dtype)
    return result.astype(result_dtype)


def _dot(
    equation: Any, operand: int, data: jax.Array, operator: Any, result_dtype: Any
) -> jax.Array:
    inputs, batch = matrices_lib.data_axes(equation, operand)
    free = [axis for axis in range(data.ndim) if axis not in {*batch, *inputs}]
    outputs = roles_of(equation, operand).free
    batch_shape, free_shape = _lengths(data, batch), _lengths(data, free)
    input_size = math.prod(_lengths(data, inputs))
    arranged = data.transpose(*batch, *free, *inputs)
    rows = arranged.reshape(*batch_shape, math.prod(free_shape), input_size)

    def multiply_rows(operator: Any, rows: jax.Array) -> jax.Array:
        return operator.multiply(rows, result_dtype)

    for _ in batch:
        multiply_rows = jax.vmap(multiply_rows)
    output_shape = _lengths(equation.invars[operand].aval, outputs)
    products = multiply_rows(operator, rows).reshape(*batch_shape, *free_shape, *output_shape)
    if operand == 1:
        return products
    # The program has the outputs before the free axes of the data.
    first, last = len(batch), len(batch) + len(free)
    order = [*range(first), *range(last, products.ndim), *range(first, last)]
    return products.transpose(order)


def _lengths(array: Any, axes: Sequence[int]) -> list[int]:
    return [array.shape[axis] for axis in axes]


class Convolution(NamedTuple):
    """A convolution of images `[batch, *space, channels]` with kernels `[*window, channels, outputs]`."""

    equation: Any

    @property
    def _numbers(self) -> lax.ConvDimensionNumbers:
        return self.equation.params['dimension_numbers']

    @property
    def window(self) -> tuple[int, ...]:
        """The shape of the window."""
        return tuple(_lengths(self.equation.invars[1].aval, self._numbers.rhs_spec[2:]))

    def run(self, image: jax.Array, kernel: jax.Array) -> jax.Array:
        """Convolves; image and kernel may have other numbers of channels than in the program."""
        outputs, channels, *window = self._numbers.rhs_spec
        image = image.transpose(_inverse(matrices_lib.channels_last(self._numbers.lhs_spec)))
        kernel = kernel.transpose(_inverse([*window, channels, outputs]))
        (result,) = bind(self.equation, [image, kernel])
        return result.transpose(matrices_lib.channels_last(self._numbers.out_spec))

    def run_with(self, operator: Any, data: jax.Array, result_dtype: Any) -> jax.Array:
        """Convolves data in the axes of the program, with an operator in the place of the kernel."""
        image = data.transpose(matrices_lib.channels_last(self._numbers.lhs_spec))
        if hasattr(operator, 'convolve'):
            result = operator.convolve(image, self)
        else:
            windows = matrices_lib.windows_of(self.equation, image)
            *image_shape, elements = windows.shape
            rows = windows.reshape(math.prod(image_shape), elements)
            result = operator.multiply(rows, result_dtype).reshape(*image_shape, -1)
        return result.transpose(_inverse(matrices_lib.channels_last(self._numbers.out_spec)))


def _inverse(order: Sequence[int]) -> list[int]:
    """The order that moves axes back to where they were."""
    return [order.index(axis) for axis in range(len(order))]


_OTHER_USES = {
    'gather': 'data look up its rows',
    'elementwise': 'it meets data element by element, in a sum or product, or is joined with them',
    'output': 'the model returns it, or something computed from it',
}


@dataclasses.dataclass(frozen=True)
class MatrixLeaf:
    """A leaf that is a matrix by which data are multiplied, or one matrix for each layer.

    Attributes:
      matrices: how the model reads it, and where it multiplies data by it.
      shape: of the leaf.
      dtype: of the leaf.
      op: `'dot'`, or `'conv'`, whose inputs are the elements of a window, channels innermost.
      layers: lengths of the axes along which there are several matrices: trips of scans, and experts. `()` if there is
        one matrix.
      inputs: rows of a matrix.
      outputs: its columns.
    """

    matrices: matrices_lib.WeightMatrices = dataclasses.field(repr=False)
    shape: tuple[int, ...]
    dtype: jnp.dtype
    op: str
    layers: tuple[int, ...]
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        """Floating point operations of all its products in one call of the model at the sample."""
        return sum(use.flops for use in self.matrices.uses)

    @property
    def window(self) -> int:
        """Elements of a window, each with all channels; 1 if nothing is convolved."""
        if self.op == 'dot':
            return 1
        return math.prod(Convolution(self.matrices.uses[0].site.equation).window)

    @property
    def computed_dtype(self) -> jnp.dtype:
        """The type to which the model casts the leaf before it multiplies."""
        site = self.matrices.uses[0].site
        return site.equation.invars[site.operand].aval.dtype

    def to_matrix(self, leaf: jax.Array) -> jax.Array:
        """The matrices `[*layers, inputs, outputs]` of the leaf, in its dtype."""
        return self.matrices.read(leaf)

    def from_matrix(self, matrices: jax.Array) -> jax.Array:
        """The leaf whose matrices these are, in their dtype."""
        like = jax.ShapeDtypeStruct(self.shape, matrices.dtype)
        return self.matrices.write(matrices, like).astype(matrices.dtype)


def matrix_leaf_of(
    graph: UseGraph, followed: leaves_lib.FollowedLeaves, path: tree_lib.Path
) -> MatrixLeaf | str:
    """Describes a leaf as a matrix, or says why it is none that data are multiplied by."""
    if path not in followed.matrices:
        return followed.reasons[path]
    for use in graph[path]:
        if reason := _why_refused(use):
            return f'{reason} ({use.where})'
    matrices, *others = followed.matrices[path]
    if others:
        shapes = [part.shape for part in (matrices, *others)]
        return f'it is read in parts of the shapes {shapes}; split it into leaves'
    if not matrices.fills_stacks:
        return 'other parameters lie in the same stack'
    leaf = graph.program.in_avals[matrices.uses[0].site.view.leaf]
    *layers, inputs, outputs = matrices.shape
    if math.prod(matrices.shape) != leaf.size:
        return 'only a part of it is multiplied'
    ops = {use.op for use in matrices.uses}
    if len(ops) > 1:
        return 'products and convolutions read it'
    return MatrixLeaf(matrices, leaf.shape, leaf.dtype, ops.pop(), tuple(layers), inputs, outputs)


def _why_refused(use: Use) -> str | None:
    """Why no operator can take the place of a leaf in a use; `None` if one can."""
    if use.op not in ('dot', 'conv'):
        return _OTHER_USES[use.op]
    site = use.site
    params, axes = site.equation.params, site.view.axes
    loops = [entry.loop for entry in site.view.stack]
    groups = [params.get(key, 1) for key in ('feature_group_count', 'batch_group_count')]
    if use.op == 'dot' and not use.contract:
        return 'a product only scales by it'
    if matrices_lib.MASKS.intersection(map(matrices_lib.step_name, site.view.steps)):
        return 'the model masks it with a constant; mask the parameters instead'
    if site.equation.primitive.name in RAGGED:
        return 'groups of rows meet a matrix each'
    if max(groups) > 1:
        return 'the convolution has groups'
    if isinstance(params['precision'], lax.DotAlgorithm):
        return 'its algorithm has no name; take one of lax.DotAlgorithmPreset'
    if site.view.shape != tuple([axis.size for axis in axes]):
        return 'other parameters are put beside it'
    if any(caller.primitive.name in RULED for caller in site.callers):
        return 'a call with a derivative rule of its own reads it'
    if len(set(loops)) < len(loops) or loops != sorted(loops, key=len):
        return 'loops take it apart in another order'
    return None


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
        self.by_leaf = {leaf.matrices.where: leaf for leaf in traced.matrix_leaves.values()}
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
        leaves = self._treedef.flatten_up_to(weights)
        operators = {n: leaf for n, leaf in enumerate(leaves) if hasattr(leaf, 'multiply')}
        leaves = [None if n in operators else leaf for n, leaf in enumerate(leaves)]
        shapes = [
            self._shapes[n] if n in operators else _shapes(leaf) for n, leaf in enumerate(leaves)
        ]
        traced = self._trace(shapes, inputs)
        uses = [use for n in operators for use in traced.matrix_leaves[n].matrices.uses]
        run = _ProductRun(uses, operators)
        values = leaves + jax.tree.leaves(inputs)
        results = run.visit_all(traced.program, values)
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
        followed = leaves_lib.follow_leaves(graph, self.paths.values())
        matrix_leaves, refused = {}, {}
        for number, (name, path) in enumerate(self.paths.items()):
            leaf = matrix_leaf_of(graph, followed, path)
            if isinstance(leaf, str):
                refused[name] = leaf
            else:
                matrix_leaves[number] = leaf
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

    def slices(self, scan: Scan, position: Position) -> tuple[dict[int, Any], int]:
        sliced = self.sliced.get(position.path, ())
        own = {leaf: self.operators[leaf] for leaf in sliced if leaf in self.operators}
        return own, scan.length

    def inside(self, position: Position, state: Any, element: Any = None) -> '_ProductRun':
        inner = copy.copy(self)
        inner.operators = {**self.operators, **(element or {})}
        return inner
