"""Leaves that are matrices to a model, and why the others are none."""

import dataclasses
import math
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
from jaxpruner.sparse.program.product_sites import Convolution
from jaxpruner.trace import Use, UseGraph, contractions
from jaxpruner.trace.program import RULED, Program, ProgramPath, inside

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
      layers: lengths of the axes along which there are several matrices: trips of scans, and experts. `()` if there is
        one matrix.
      inputs: rows of a matrix.
      outputs: its columns.
      op: `'dot'`, or `'conv'`, whose inputs are the elements of a window, channels innermost.
      uses: where the program multiplies data by it.
      shape: of the leaf.
      dtype: of the leaf.
    """

    path: tree_lib.Path
    layers: tuple[int, ...]
    inputs: int
    outputs: int
    op: str
    uses: tuple[Use, ...]
    shape: tuple[int, ...]
    dtype: jnp.dtype
    matrices: WeightMatrices = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """The path as text."""
        return tree_lib.path_string(self.path)

    @property
    def flops(self) -> int:
        """Floating point operations of all its products in one call of the model at the sample."""
        return sum(use.flops for use in self.uses)

    @property
    def window(self) -> int:
        """Elements of a window, each with all channels; 1 if nothing is convolved."""
        if self.op == 'dot':
            return 1
        return math.prod(Convolution(self.uses[0].site.equation).window)

    @property
    def computed_dtype(self) -> jnp.dtype:
        """The type to which the model casts the leaf before it multiplies."""
        site = self.uses[0].site
        return site.equation.invars[site.operand].aval.dtype

    def to_matrix(self, leaf: jax.Array) -> jax.Array:
        """The matrices `[*layers, inputs, outputs]` of the leaf, in its dtype."""
        return self.matrices.read(leaf)

    def from_matrix(self, matrices: jax.Array) -> jax.Array:
        """The leaf whose matrices these are, in their dtype."""
        like = jax.ShapeDtypeStruct(self.shape, matrices.dtype)
        return self.matrices.write(matrices, like).astype(matrices.dtype)


def matrix_leaf_of(graph: UseGraph, path: tree_lib.Path) -> MatrixLeaf:
    """Describes a leaf as a matrix.

    Raises:
      RefusedLeafError: the leaf is no matrix that data are multiplied by.
    """
    if path in graph.unused:
        raise RefusedLeafError('it has no part in the results')
    if path in graph.opaque:
        raise RefusedLeafError(graph.opaque[path])
    uses = graph[path]
    if not any(use.op in ('dot', 'conv') for use in uses):
        raise RefusedLeafError('no contraction reads it')
    for use in uses:
        _check_use(graph, use)
    leaf = graph.program.in_avals[uses[0].site.view.leaf]
    if not leaf.size:
        raise RefusedLeafError('it has no elements')
    try:
        parts = find_matrices(graph, path)
    except UnknownWeightsError as error:
        raise RefusedLeafError(error.reason) from error
    matrices, *others = parts
    if others:
        shapes = [part.shape for part in parts]
        raise RefusedLeafError(f'it is read in parts of the shapes {shapes}; split it into leaves')
    if not matrices.fills_stacks:
        raise RefusedLeafError('other parameters lie in the same stack')
    *layers, inputs, outputs = matrices.shape
    if math.prod(matrices.shape) != leaf.size:
        raise RefusedLeafError('only a part of it is multiplied')
    ops = {use.op for use in matrices.uses}
    if len(ops) > 1:
        raise RefusedLeafError('products and convolutions read it')
    return MatrixLeaf(
        path=path,
        layers=tuple(layers),
        inputs=inputs,
        outputs=outputs,
        op=ops.pop(),
        uses=matrices.uses,
        shape=leaf.shape,
        dtype=leaf.dtype,
        matrices=matrices,
    )


def _check_use(graph: UseGraph, use: Use) -> None:
    """Refuses a use in which no operator can take the place of the leaf."""
    if use.op not in ('dot', 'conv'):
        raise RefusedLeafError(f'{_OTHER_USES[use.op]} ({use.where})')
    site = use.site
    params, axes = site.equation.params, site.view.axes
    loops = [entry.loop for entry in site.view.stack]
    groups = [params.get(key, 1) for key in ('feature_group_count', 'batch_group_count')]
    reason = None
    if MASKS.intersection(map(step_name, site.view.steps)):
        reason = 'the model masks it with a constant; mask the parameters instead'
    elif site.equation.primitive.name in contractions.RAGGED:
        reason = 'groups of rows meet a matrix each'
    elif max(groups) > 1:
        reason = 'the convolution has groups'
    elif isinstance(params['precision'], lax.DotAlgorithm):
        reason = 'its algorithm has no name; take one of lax.DotAlgorithmPreset'
    elif site.view.shape != tuple([axis.size for axis in axes]):
        reason = 'other parameters are put beside it'
    elif _is_ruled(graph.program.jaxpr, site.path):
        reason = 'a call with a derivative rule of its own reads it'
    elif len(set(loops)) < len(loops) or loops != sorted(loops, key=len):
        reason = 'loops take it apart in another order'
    if reason:
        raise RefusedLeafError(f'{reason} ({use.where})')


def _is_ruled(program: Any, path: ProgramPath) -> bool:
    """Whether an equation lies in a call with a derivative rule of its own.

    Its path has the numbers of the equations around it, outermost first, and behind each that of the inner program.
    """
    for number, within in zip(path[:-1:2], path[1::2], strict=True):
        equation = program.eqns[number]
        if equation.primitive.name in RULED:
            return True
        around = vars(inside(equation))
        parts = [value for value in around.values() if isinstance(value, Program)]
        program = around.get('branches', parts)[within].jaxpr
    return False
