"""Leaves that are matrices to a model, and why the others are none.

A leaf may be read in parts, such as queries, keys and values that are split before they are multiplied. Parts of one
shape are layers like those of a stack. Their axis stands behind the layers of loops, and in front of experts.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import tree as tree_lib
from jaxpruner.oneshot.matrices import (
    MASKS,
    UnknownWeightsError,
    WeightMatrices,
    find_matrices,
    step_name,
)
from jaxpruner.sparse.program.product_sites import ProductSite
from jaxpruner.trace import Use, UseGraph, contractions
from jaxpruner.trace.program import RULED, ProgramPath, inside

NOT_CONTRACTED = 'no contraction reads it'
_OTHER_USES = {
    'gather': 'data look up its rows',
    'elementwise': 'it meets data element by element, in a sum or product, or is joined with them',
    'output': 'the model returns it, or something computed from it',
}


class RefusedLeafError(ValueError):
    """A leaf is no matrix that data are multiplied by; its text is the reason, without the name of the leaf."""


@dataclasses.dataclass(frozen=True)
class MatrixLeaf:
    """A leaf that is a matrix by which data are multiplied, or one matrix for each layer.

    Attributes:
      path: of the leaf.
      layers: lengths of the axes along which there are several matrices: trips of scans, equal parts that are
        multiplied separately, and experts. `()` if there is one matrix.
      inputs: rows of a matrix.
      outputs: its columns.
      op: `'dot'`, `'1x1 conv'`, or `'conv'`, whose inputs are the elements of a window, channels innermost.
      product_sites: where the program multiplies data by it.
      shape: of the leaf.
      dtype: of the leaf.
    """

    path: tree_lib.Path
    layers: tuple[int, ...]
    inputs: int
    outputs: int
    op: str
    product_sites: tuple[ProductSite, ...]
    shape: tuple[int, ...]
    dtype: jnp.dtype
    parts: tuple[WeightMatrices, ...] = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """The path as text."""
        return tree_lib.path_string(self.path)

    @property
    def rows(self) -> tuple[int, ...]:
        """How many rows one matrix multiplies at the sample, for each product site."""
        return tuple([product_site.rows for product_site in self.product_sites])

    @property
    def multiplications(self) -> int:
        """How many numbers are multiplied in one call of the model."""
        rows = 0
        for product_site in self.product_sites:
            rows += product_site.rows * product_site.trips
        return rows * self.inputs * self.outputs

    @property
    def window(self) -> int:
        """Elements of a window, each with all channels; 1 if nothing is convolved."""
        return self.product_sites[0].window

    @property
    def computed_dtype(self) -> jnp.dtype:
        """The type to which the model casts the leaf before it multiplies."""
        site = self.product_sites[0].use.site
        return site.equation.invars[site.operand].aval.dtype

    @property
    def result_dtype(self) -> jnp.dtype:
        """The type in which the model adds products up: the widest of all product sites."""
        dtypes = [product_site.result_dtype for product_site in self.product_sites]
        return functools.reduce(jnp.promote_types, dtypes)

    def to_matrix(self, leaf: jax.Array) -> jax.Array:
        """The matrices `[*layers, inputs, outputs]` of the leaf, in its dtype."""
        matrices = [part.read(leaf) for part in self.parts]
        if len(matrices) == 1:
            return matrices[0]
        return jnp.stack(matrices, self._parts_axis)

    def from_matrix(self, matrices: jax.Array) -> jax.Array:
        """The leaf whose matrices these are, in their dtype."""
        like = jax.ShapeDtypeStruct(self.shape, matrices.dtype)
        if len(self.parts) == 1:
            return self.parts[0].write(matrices, like).astype(matrices.dtype)
        leaf = jnp.zeros(self.shape, matrices.dtype)
        for number, part in enumerate(self.parts):
            matrix = jnp.take(matrices, number, self._parts_axis)
            leaf += part.write(matrix, like).astype(matrices.dtype)
        return leaf

    @property
    def _parts_axis(self) -> int:
        return len(self.parts[0].stack)


def matrix_leaf_of(
    graph: UseGraph, path: tree_lib.Path, constant_masks: bool = False
) -> MatrixLeaf:
    """Describes a leaf as a matrix.

    Args:
      graph: of the model.
      path: of the leaf.
      constant_masks: whether the model may multiply the leaf with a constant mask. `to_matrix` applies the mask, and
        operators do not: that is right only for weights that are not trained.

    Raises:
      RefusedLeafError: the leaf is no matrix that data are multiplied by.
    """
    if path in graph.unused:
        raise RefusedLeafError('it has no part in the results')
    if path in graph.opaque:
        raise RefusedLeafError(graph.opaque[path])
    uses = graph[path]
    if not any(use.op in ('dot', 'conv') for use in uses):
        raise RefusedLeafError(NOT_CONTRACTED)
    for use in uses:
        _check_use(graph, use)
        steps = [step_name(step) for step in use.site.view.steps]
        if not constant_masks and MASKS.intersection(steps):
            raise RefusedLeafError(
                f'the model masks it with a constant ({use.where}); mask the parameters instead'
            )
    leaf = graph.program.in_avals[uses[0].site.view.leaf]
    if not leaf.size:
        raise RefusedLeafError('it has no elements')
    try:
        parts = find_matrices(graph, path)
    except UnknownWeightsError as error:
        raise RefusedLeafError(error.reason) from error
    _check_parts(parts, leaf)
    count, product_sites = len(parts), []
    for number, part in enumerate(parts):
        for use in part.uses:
            product_sites.append(ProductSite(use, number if count > 1 else None))
    *layers, inputs, outputs = parts[0].shape
    if count > 1:
        layers.insert(len(parts[0].stack), count)
    ops = {product_site.op for product_site in product_sites}
    if len(ops) > 1:
        raise RefusedLeafError('products and convolutions read it')
    return MatrixLeaf(
        path=path,
        layers=tuple(layers),
        inputs=inputs,
        outputs=outputs,
        op=ops.pop(),
        product_sites=tuple(product_sites),
        shape=leaf.shape,
        dtype=leaf.dtype,
        parts=parts,
    )


def _check_use(graph: UseGraph, use: Use) -> None:
    """Refuses a use in which no operator can take the place of the leaf."""
    if use.op not in ('dot', 'conv'):
        raise RefusedLeafError(f'{_OTHER_USES[use.op]} ({use.where})')
    site = use.site
    name, params = site.equation.primitive.name, site.equation.params
    if name in contractions.RAGGED:
        raise RefusedLeafError(f'groups of rows meet a matrix each ({use.where})')
    if params.get('feature_group_count', 1) > 1 or params.get('batch_group_count', 1) > 1:
        raise RefusedLeafError(f'the convolution has groups ({use.where})')
    if isinstance(params['precision'], lax.DotAlgorithm):
        raise RefusedLeafError(
            f'it is multiplied by an algorithm that has no name ({use.where}); take one of lax.DotAlgorithmPreset'
        )
    own_shape = tuple([axis.size for axis in site.view.axes])
    if site.view.shape != own_shape:
        raise RefusedLeafError(f'other parameters are put beside it ({use.where})')
    if _is_ruled(graph.program.jaxpr, site.path):
        raise RefusedLeafError(f'a call with a derivative rule of its own reads it ({use.where})')
    loops = [entry.loop for entry in site.view.stack]
    if len(set(loops)) < len(loops) or loops != sorted(loops, key=len):
        raise RefusedLeafError(f'loops take it apart in another order ({use.where})')


def _is_ruled(program: Any, path: ProgramPath) -> bool:
    """Whether an equation lies in a call with a derivative rule of its own.

    Its path has the numbers of the equations around it, outermost first, and behind each that of the inner program.
    """
    for number, within in zip(path[:-1:2], path[1::2], strict=True):
        equation = program.eqns[number]
        if equation.primitive.name in RULED:
            return True
        around = vars(inside(equation))
        parts = [around[key] for key in ('condition', 'body', 'program') if key in around]
        program = around.get('branches', parts)[within].jaxpr
    return False


def _check_parts(parts: Sequence[WeightMatrices], leaf: Any) -> None:
    """Refuses a leaf that is not made of whole matrices of one shape."""
    shapes = {part.shape for part in parts}
    depths = {len(part.stack) for part in parts}
    if len(shapes) > 1 or len(depths) > 1:
        raise RefusedLeafError(f'it is read in parts of the shapes {sorted(shapes)}')
    if not all(part.fills_stacks for part in parts):
        raise RefusedLeafError('other parameters lie in the same stack')
    size_of_part = math.prod(parts[0].shape)
    if len(parts) * size_of_part != leaf.size:
        raise RefusedLeafError('only a part of it is multiplied')
