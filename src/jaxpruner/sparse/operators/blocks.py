"""Products with a matrix of which only some blocks are stored.

The outputs of the matrix `[inputs, outputs]` are cut into groups of `out`, its inputs into blocks of `in`. Each group
stores the same number of blocks: `values[g, b]`, of shape `[in, out]`, leads from the inputs of block `indices[g, b]`
to the outputs of group `g`. Positions are data, so that blocks can move without a new compilation. Here is a matrix of
6 inputs and 4 outputs in blocks of 2 x 2, one for each group:

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

A matrix that the block does not divide is padded. Values in the padding meet inputs that are zero, or are cut off with
the outputs that do not exist, so their derivative is zero.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.sparse.operators import block_layout

# Up to this number of groups stand in the program one after another; of more, a loop takes equal parts.
_UNROLLED_GROUPS = 32


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['values', 'indices', 'probe', 'down', 'up'],
    meta_fields=['outputs', 'shards', 'kernel', 'result_dtype'],
)
@dataclasses.dataclass(frozen=True)
class BlockMatrix:
    """A matrix `[inputs, outputs]` of which blocks are stored, perhaps with a term of low rank, as one call needs it.

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
    shards: int = 1  # the number of devices over which the groups are spread
    # `block_kernels.product.multiply`, where a kernel computes it; without shards
    kernel: Callable[..., jax.Array] | None = None
    result_dtype: Any = None  # in which products are added up; by default that of rows and values

    def with_result_dtype(self, dtype: Any) -> 'BlockMatrix':
        """The matrix whose products are added up in a type; without a kernel, which rounds to that of the rows."""
        return dataclasses.replace(self, result_dtype=dtype, kernel=None)

    def multiply(self, rows: jax.Array) -> jax.Array:
        """Multiplies rows `[n, inputs]`, as `multiply` does, and adds the term of low rank."""
        product = self.kernel or functools.partial(
            multiply, shards=self.shards, result_dtype=self.result_dtype
        )
        result = product(rows, self.values, self.indices, outputs=self.outputs, probe=self.probe)
        if self.down is None or self.up is None:
            return result
        # In a wider type the sums stay in it between the two matrices.
        low = jnp.matmul(rows, self.down, preferred_element_type=self.result_dtype)
        return result + low @ self.up


def multiply(
    rows: jax.Array,
    values: jax.Array,
    indices: jax.Array,
    *,
    outputs: int,
    probe: jax.Array | None = None,
    shards: int = 1,
    result_dtype: Any = None,
) -> jax.Array:
    """Multiplies rows `[n, inputs]` with a matrix of which blocks are stored; returns `[n, outputs]`.

    The probe changes no result. The backward pass returns block norms in place of its gradient: the norm of each block
    of the dense gradient of this product, of those that are not stored, too. RigL grows blocks by them. If one probe
    goes into several products, their norms are added; the norm of the added gradients would need the dense gradient.

    Args:
      rows: `[n, inputs]`.
      values: `[groups, blocks, in, out]`.
      indices: int32`[groups, blocks]`.
      outputs: of the matrix, at most groups times `out`.
      probe: zeros `[groups, ceil(inputs / in)]`, or none.
      shards: over how many devices the groups are spread. The product is then one for each of them, side by side.
      result_dtype: in which products are added up and returned, such as float32 for bfloat16; by default that of rows
        and values.

    >>> probe, blocks = jnp.zeros((1, 2)), jnp.ones((1, 1, 1, 2))
    >>> def loss(probe):
    ...     return multiply(jnp.array([[3.0, 4.0]]), blocks, jnp.array([[0]]), outputs=2, probe=probe).sum()
    >>> jax.grad(loss)(probe).round(2)
    Array([[4.24, 5.66]], dtype=float32)
    """
    dtype = jnp.result_type(rows, values)
    columns = _columns_of(rows.astype(dtype), block_inputs=values.shape[-2])
    operands = _Operands(columns, values.astype(dtype), indices, probe)
    product = _product if shards == 1 else functools.partial(_product_of_shards, shards)
    result: Any = product(result_dtype or dtype, operands)
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
    padded = block_layout.pad_to_multiple(rows.T, 0, block_inputs)
    inputs, count = padded.shape
    return padded.reshape(inputs // block_inputs, block_inputs, count)


def _product_of_shards(shards: int, dtype: Any, operands: _Operands) -> jax.Array:
    """One product for each shard of the groups; their outputs stand side by side."""

    def cut(array: jax.Array) -> jax.Array:
        return array.reshape(shards, -1, *array.shape[1:])

    columns, *of_groups = operands
    of_shards = _Operands(columns, *jax.tree.map(cut, of_groups))
    axes = _Operands._make((None, 0, 0, 0))
    product: Any = functools.partial(_product, dtype)
    results = jax.vmap(product, in_axes=(axes,), out_axes=1)(of_shards)
    count, _, outputs = results.shape
    return results.reshape(count, shards * outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dtype: Any, operands: _Operands) -> jax.Array:
    """Rows `[n, groups * out]` of a type, in which products are added up."""
    columns = operands.columns

    def multiply_chunk(_: None, chunk: Any) -> tuple[None, jax.Array]:
        values, indices = chunk
        results = []
        for group in range(len(values)):
            gathered = _take(columns, indices[group])
            result = _contract(_merged(gathered), _merged(values[group]), (0, 0), dtype)
            results.append(result)
        return None, jnp.concatenate(results, axis=1)

    chunks = _chunks(operands.values), _chunks(operands.indices)
    _, of_chunks = _over_chunks(multiply_chunk, None, chunks)
    number, count, outputs = of_chunks.shape
    side_by_side = of_chunks.transpose(1, 0, 2)
    return side_by_side.reshape(count, number * outputs)


def _forward(dtype: Any, operands: _Operands) -> tuple[jax.Array, _Operands]:
    return _product(dtype, operands), operands


def _backward(_: Any, operands: _Operands, cotangents: jax.Array) -> tuple[_Operands]:
    """The derivatives. Columns are gathered again, since those of all groups together take much memory."""
    columns, values, indices, probe = operands
    groups = len(values)

    def differentiate_chunk(total: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        values, indices, cotangents = chunk
        of_values = []
        for group, cotangent in enumerate(jnp.split(cotangents, len(values), axis=1)):
            stored, places = values[group], indices[group]
            gathered = _take(columns, places)
            dtype = cotangent.dtype
            of_values.append(_contract(_merged(gathered), cotangent, (1, 0), dtype))
            addend = _contract(_merged(stored), cotangent, (1, 1), dtype)
            addend = addend.reshape(gathered.shape).astype(total.dtype)
            total = total.at[places].add(addend, unique_indices=True)
        return total, jnp.stack(of_values)

    chunks = _chunks(values), _chunks(indices), _chunks_of_rows(cotangents, groups)
    # Each group adds to it: a sum of 16-bit floats would lose what is small.
    total = jnp.zeros(columns.shape, jnp.promote_types(columns.dtype, jnp.float32))
    total, of_values = _over_chunks(differentiate_chunk, total, chunks)
    norms = None
    if probe is not None:
        norms = norms_of_dense_gradient(columns, cotangents, groups)
        norms = norms.astype(probe.dtype)
    of_columns = total.astype(columns.dtype)
    of_values = of_values.reshape(values.shape).astype(values.dtype)
    return (_Operands._make((of_columns, of_values, None, norms)),)


_product.defvjp(_forward, _backward)


def norms_of_dense_gradient(columns: jax.Array, cotangents: jax.Array, groups: int) -> jax.Array:
    """The norm of each block of the gradient of the dense matrix: `[groups, blocks of inputs]`."""
    in_chunk = _groups_in_chunk(groups)
    blocks_of_inputs = len(columns)
    dtype = jnp.promote_types(columns.dtype, jnp.float32)

    def norms_of_chunk(_: None, cotangents: jax.Array) -> tuple[None, jax.Array]:
        norms = []
        for cotangent in jnp.split(cotangents, in_chunk, axis=1):
            gradient = _contract(_merged(columns), cotangent, (1, 0), cotangent.dtype)
            blocks = gradient.reshape(blocks_of_inputs, -1)
            norms.append(jnp.linalg.norm(blocks.astype(dtype), axis=1))
        return None, jnp.stack(norms)

    chunks = _chunks_of_rows(cotangents, groups)
    _, norms = _over_chunks(norms_of_chunk, None, chunks)
    return norms.reshape(groups, blocks_of_inputs)


def _over_chunks(function: Callable[..., Any], carry: Any, chunks: Any) -> tuple[Any, Any]:
    """A scan over chunks of groups; of a single chunk there is no loop."""
    first, *_ = jax.tree.leaves(chunks)
    if len(first) > 1:
        return lax.scan(function, carry, chunks)
    only = jax.tree.map(lambda of_chunks: of_chunks[0], chunks)
    carry, result = function(carry, only)
    return carry, result[None]


def _groups_in_chunk(groups: int) -> int:
    """The largest divisor that is not too large."""
    number = min(groups, _UNROLLED_GROUPS)
    while groups % number:
        number -= 1
    return number


def _chunks(of_groups: jax.Array) -> jax.Array:
    """`[groups, …]` as `[chunks, groups in a chunk, …]`."""
    in_chunk = _groups_in_chunk(len(of_groups))
    return of_groups.reshape(-1, in_chunk, *of_groups.shape[1:])


def _chunks_of_rows(rows: jax.Array, groups: int) -> jax.Array:
    """`[n, groups * out]` as `[chunks, n, …]`, the outputs of some groups side by side."""
    count, outputs = rows.shape
    chunks = groups // _groups_in_chunk(groups)
    cut = rows.reshape(count, chunks, outputs // chunks)
    return cut.transpose(1, 0, 2)


def _take(columns: jax.Array, indices: jax.Array) -> jax.Array:
    return jnp.take(columns, indices, axis=0, mode='clip')


def _merged(blocks: jax.Array) -> jax.Array:
    """`[blocks, in, …]` as `[blocks * in, …]`."""
    number, block_inputs, width = blocks.shape
    return blocks.reshape(number * block_inputs, width)


def _contract(left: jax.Array, right: jax.Array, axes: tuple[int, int], dtype: Any) -> jax.Array:
    """Adds products up along an axis of each, in a type."""
    left_axis, right_axis = axes
    contracted = (left_axis,), (right_axis,)
    no_batch = (), ()
    return lax.dot_general(left, right, (contracted, no_batch), preferred_element_type=dtype)
