"""Products with a matrix of which only some blocks are stored.

The outputs of the matrix `[inputs, outputs]` are cut into groups of `out`, and its inputs into blocks of `in`. Each
group stores the same number of blocks. `values[g, b]`, of shape `[in, out]`, leads from the inputs of block
`indices[g, b]` to the outputs of group `g`. The indices are data, so blocks can move without a new compilation. Here is
a matrix of 6 inputs and 4 outputs in blocks of 2 x 2, one for each group:

    . . c d
    . . e f        indices = [[1], [0]]
    a b . .        values = [[[[a, b], [., .]]], [[[c, d], [e, f]]]]
    . . . .
    . . . .
    . . . .

The simple version of the product is `rows @ block_layout.scatter_blocks(values, indices, inputs, outputs)`; the tests
compare with it. The fast version works on columns, which are the rows transposed: there the inputs of a block lie side
by side in memory. Each group gathers the columns of its blocks, and multiplies once. The derivative for the inputs is
added up transposed as well. Scattering whole columns is fast; scattering into rows takes 50 times as long on a CPU.

If the block does not divide the matrix, the matrix is padded. Values in the padding have a derivative of zero: they
meet inputs that are zero, or lead to outputs that are cut off.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import tree as tree_lib
from jaxpruner.sparse.operators import block_layout
from jaxpruner.sparse.operators.group_chunks import (
    chunks_of_groups,
    chunks_of_outputs,
    groups_in_chunk,
    scan_chunks,
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['values', 'indices', 'probe', 'down', 'up'],
    meta_fields=['outputs', 'result_dtype'],
)
@dataclasses.dataclass(frozen=True)
class BlockMatrix:
    """A matrix `[inputs, outputs]` of which blocks are stored, perhaps with a term of low rank.

    >>> matrix = BlockMatrix(jnp.ones((2, 1, 2, 2)), jnp.array([[1], [0]]), outputs=4)
    >>> matrix.multiply(jnp.array([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]))
    Array([[7., 7., 3., 3.]], dtype=float32)
    """

    values: jax.Array  # [groups, blocks, in, out]
    indices: jax.Array  # int32[groups, blocks], the blocks of inputs; none twice in a group
    outputs: int
    # float[groups, blocks of inputs], zeros; `multiply` says what it is for
    probe: jax.Array | None = None
    down: jax.Array | None = None  # [inputs, rank]; down @ up is added to the matrix
    up: jax.Array | None = None  # [rank, outputs]
    result_dtype: Any = None  # in which products are added up; by default that of rows and values

    def with_result_dtype(self, dtype: Any) -> 'BlockMatrix':
        """Adds products up in another type."""
        return dataclasses.replace(self, result_dtype=dtype)

    def multiply(self, rows: jax.Array) -> jax.Array:
        """Multiplies rows `[n, inputs]`, as `multiply` does, and adds the term of low rank."""
        product = multiply(
            rows,
            self.values,
            self.indices,
            outputs=self.outputs,
            probe=self.probe,
            result_dtype=self.result_dtype,
        )
        if self.down is None or self.up is None:
            return product
        # A wider type holds the sums between the two matrices, too.
        low = jnp.matmul(rows, self.down, preferred_element_type=self.result_dtype)
        return product + low @ self.up


def multiply(
    rows: jax.Array,
    values: jax.Array,
    indices: jax.Array,
    *,
    outputs: int,
    probe: jax.Array | None = None,
    result_dtype: Any = None,
) -> jax.Array:
    """Multiplies rows `[n, inputs]` with a matrix of which blocks are stored; returns `[n, outputs]`.

    The probe changes no result. In place of its gradient, the backward pass returns block norms: the norm of each block
    of the dense gradient of this product, also of blocks that are not stored. RigL grows blocks by them. If one probe
    goes into several products, their norms are added; the norm of the added gradients would need the dense gradient.

    Args:
      rows: `[n, inputs]`.
      values: `[groups, blocks, in, out]`.
      indices: int32`[groups, blocks]`.
      outputs: of the matrix, at most groups times `out`.
      probe: zeros `[groups, ceil(inputs / in)]`, or none.
      result_dtype: in which products are added up and returned, such as float32 for bfloat16; by default that of rows
        and values.

    >>> probe, blocks = jnp.zeros((1, 2)), jnp.ones((1, 1, 1, 2))
    >>> def loss(probe):
    ...     return multiply(jnp.array([[3.0, 4.0]]), blocks, jnp.array([[0]]), outputs=2, probe=probe).sum()
    >>> jax.grad(loss)(probe).round(2)
    Array([[4.24, 5.66]], dtype=float32)
    """
    dtype = jnp.result_type(rows, values)
    rows = rows.astype(dtype)
    values = values.astype(dtype)
    columns = _columns_of(rows, block_inputs=values.shape[-2])
    operands = _Operands(columns, values, indices, probe)
    result: Any = _product(result_dtype or dtype, operands)
    return result[:, :outputs]


class _Operands(NamedTuple):
    """What a product is made of.

    Attributes:
      columns: `[blocks of inputs, in, n]`.
      values: `[groups, blocks, in, out]`.
      indices: int32`[groups, blocks]`.
      probe: `[groups, blocks of inputs]`, or none.
    """

    columns: jax.Array
    values: jax.Array
    indices: jax.Array
    probe: jax.Array | None


def _columns_of(rows: jax.Array, block_inputs: int) -> jax.Array:
    """Rows `[n, inputs]` as columns `[blocks of inputs, in, n]`."""
    columns = rows.T
    padded = block_layout.pad_to_multiple(columns, 0, block_inputs)
    inputs, count = padded.shape
    blocks_of_inputs = inputs // block_inputs
    return padded.reshape(blocks_of_inputs, block_inputs, count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dtype: Any, operands: _Operands) -> jax.Array:
    """The product `[n, groups * out]`, added up in a type."""
    columns = operands.columns

    def multiply_chunk(_: None, chunk: Any) -> tuple[None, jax.Array]:
        results = []
        for values, indices in zip(*chunk, strict=True):
            gathered = _take(columns, indices)
            matrix = _merged(values)
            result = _contract(gathered, matrix, (0, 0), dtype)
            results.append(result)
        return None, jnp.concatenate(results, axis=1)

    values = chunks_of_groups(operands.values)
    indices = chunks_of_groups(operands.indices)
    _, of_chunks = scan_chunks(multiply_chunk, None, (values, indices))
    number, count, outputs = of_chunks.shape
    side_by_side = of_chunks.transpose(1, 0, 2)
    return side_by_side.reshape(count, number * outputs)


def _forward(dtype: Any, operands: _Operands) -> tuple[jax.Array, _Operands]:
    return _product(dtype, operands), operands


def _backward(_: Any, operands: _Operands, cotangents: jax.Array) -> tuple[_Operands]:
    """The derivatives. Columns are gathered again: the gathered columns of all groups would take much memory."""
    columns, values, indices, probe = operands
    groups = len(values)

    def differentiate_chunk(total: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        values, indices, cotangents = chunk
        by_group = jnp.split(cotangents, len(values), axis=1)
        of_values = []
        for stored, places, cotangent in zip(values, indices, by_group, strict=True):
            gathered = _take(columns, places)
            of_stored = _contract(gathered, cotangent, (1, 0), cotangent.dtype)
            of_values.append(of_stored)
            matrix = _merged(stored)
            addend = _contract(matrix, cotangent, (1, 1), cotangent.dtype)
            addend = addend.reshape(len(places), *columns.shape[1:])
            addend = addend.astype(total.dtype)
            total = total.at[places].add(addend, unique_indices=True)
        return total, jnp.stack(of_values)

    chunks = (
        chunks_of_groups(values),
        chunks_of_groups(indices),
        chunks_of_outputs(cotangents, groups),
    )
    # Each group adds to it: a sum of 16-bit floats would lose what is small.
    dtype = tree_lib.at_least_float32(columns.dtype)
    total = jnp.zeros(columns.shape, dtype)
    total, of_values = scan_chunks(differentiate_chunk, total, chunks)
    of_columns = total.astype(columns.dtype)
    of_values = of_values.reshape(values.shape)
    of_values = of_values.astype(values.dtype)
    norms = None
    if probe is not None:
        norms = _norms_of_dense_gradient(columns, cotangents, groups)
        norms = norms.astype(probe.dtype)
    derivatives = _Operands._make((of_columns, of_values, None, norms))
    return (derivatives,)


_product.defvjp(_forward, _backward)


def _norms_of_dense_gradient(columns: jax.Array, cotangents: jax.Array, groups: int) -> jax.Array:
    """The norm of each block of the gradient of the dense matrix: `[groups, blocks of inputs]`."""
    in_chunk = groups_in_chunk(groups)
    blocks_of_inputs = len(columns)
    inputs = _merged(columns)
    dtype = tree_lib.at_least_float32(columns.dtype)

    def norms_of_chunk(_: None, cotangents: jax.Array) -> tuple[None, jax.Array]:
        by_group = jnp.split(cotangents, in_chunk, axis=1)
        norms = []
        for cotangent in by_group:
            gradient = _contract(inputs, cotangent, (1, 0), cotangent.dtype)
            blocks = gradient.reshape(blocks_of_inputs, -1)
            blocks = blocks.astype(dtype)
            norms.append(jnp.linalg.norm(blocks, axis=1))
        return None, jnp.stack(norms)

    chunks = chunks_of_outputs(cotangents, groups)
    _, norms = scan_chunks(norms_of_chunk, None, chunks)
    return norms.reshape(groups, blocks_of_inputs)


def _take(columns: jax.Array, indices: jax.Array) -> jax.Array:
    """The columns of these blocks, `[blocks * in, n]`."""
    taken = jnp.take(columns, indices, axis=0, mode='clip')
    return _merged(taken)


def _merged(blocks: jax.Array) -> jax.Array:
    """`[blocks, in, …]` as `[blocks * in, …]`."""
    number, block_inputs, width = blocks.shape
    return blocks.reshape(number * block_inputs, width)


def _contract(left: jax.Array, right: jax.Array, axes: tuple[int, int], dtype: Any) -> jax.Array:
    """Adds products up along an axis of each, in a type."""
    left_axis, right_axis = axes
    contracted = (left_axis,), (right_axis,)
    no_batch = (), ()
    dimension_numbers = contracted, no_batch
    return lax.dot_general(left, right, dimension_numbers, preferred_element_type=dtype)
