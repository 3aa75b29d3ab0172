"""Products with a matrix of which only some blocks are stored.

The outputs of the matrix `[inputs, outputs]` are cut into groups of `out`, its inputs into blocks of `in`. Each group
stores as many blocks: `values[g, b]`, of shape `[in, out]`, leads from the inputs of block `indices[g, b]` to the
outputs of group `g`. Positions are data, so that blocks can move without a new compilation. Here is a matrix of 6
inputs and 4 outputs in blocks of 2 x 2, one for each group:

    . . c d
    . . e f        indices = [[1], [0]]
    a b . .        values = [[[[a, b], [., .]]], [[[c, d], [e, f]]]]
    . . . .
    . . . .
    . . . .

The simple version of the product is `rows @ scatter_blocks(values, indices, inputs, outputs)`; the tests compare with
it. The fast version works on columns, which are the rows transposed: there the inputs of a block lie side by side in
memory. Each group gathers the columns of its blocks, and multiplies once. The derivative for the inputs is added up
transposed as well. Scattering whole columns is fast; scattering into rows takes 50 times as long on a CPU.

A matrix that the block does not divide is padded. Values in the padding meet inputs that are zero, or are cut off with
the outputs that do not exist, so their derivative is zero.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# So many groups stand in the program one after another; of more groups a loop goes through as many at once.
_UNROLLED_GROUPS = 32


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['values', 'indices', 'probe', 'down', 'up'],
    meta_fields=['outputs', 'shards', 'kernel'],
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
    probe: jax.Array | None = None  # float[groups, blocks of inputs], zeros; see `multiply`
    down: jax.Array | None = None  # [inputs, rank]; down @ up is added to the matrix
    up: jax.Array | None = None  # [rank, outputs]
    shards: int = 1  # over so many devices the groups are spread
    # `block_kernels.product.multiply`, where a kernel computes it; without shards
    kernel: Callable[..., jax.Array] | None = None

    def multiply(self, rows: jax.Array) -> jax.Array:
        """Multiplies rows `[n, inputs]`, as `multiply` does, and adds the term of low rank."""
        product = self.kernel or functools.partial(multiply, shards=self.shards)
        result = product(rows, self.values, self.indices, outputs=self.outputs, probe=self.probe)
        if self.down is None or self.up is None:
            return result
        return result + (rows @ self.down) @ self.up


def multiply(
    rows: jax.Array,
    values: jax.Array,
    indices: jax.Array,
    *,
    outputs: int,
    probe: jax.Array | None = None,
    shards: int = 1,
) -> jax.Array:
    """Multiplies rows `[n, inputs]` with a matrix of which blocks are stored; returns `[n, outputs]`.

    The probe changes no result. Its cotangent is the norm of each block of the dense gradient, of those that are not
    stored, too. That is what RigL grows by.

    Args:
      rows: `[n, inputs]`.
      values: `[groups, blocks, in, out]`.
      indices: int32`[groups, blocks]`.
      outputs: of the matrix, at most groups times `out`.
      probe: zeros `[groups, ceil(inputs / in)]`, or none.
      shards: over how many devices the groups are spread. The product is then one for each of them, side by side.

    >>> probe, blocks = jnp.zeros((1, 2)), jnp.ones((1, 1, 1, 2))
    >>> def loss(probe):
    ...     return multiply(jnp.array([[3.0, 4.0]]), blocks, jnp.array([[0]]), outputs=2, probe=probe).sum()
    >>> jax.grad(loss)(probe).round(2)
    Array([[4.24, 5.66]], dtype=float32)
    """
    block_inputs = values.shape[-2]
    dtype = jnp.result_type(rows, values)
    columns = pad_to_multiple(rows.astype(dtype).T, 0, block_inputs)
    columns = columns.reshape(-1, block_inputs, len(rows))
    operands = values.astype(dtype), indices, probe
    if shards == 1:
        return _product(columns, *operands)[:, :outputs]
    of_shards = jax.tree.map(lambda x: x.reshape(shards, -1, *x.shape[1:]), operands)
    product = jax.vmap(_product, in_axes=(None, 0, 0, 0), out_axes=1)
    return product(columns, *of_shards).reshape(len(rows), -1)[:, :outputs]


@jax.custom_vjp
def _product(
    columns: jax.Array, values: jax.Array, indices: jax.Array, probe: jax.Array | None
) -> jax.Array:
    """The product of columns `[blocks of inputs, in, n]`: rows `[n, groups * out]`."""
    del probe

    def multiply_groups(_: None, operands: Any) -> tuple[None, jax.Array]:
        values, indices = operands
        rows = []
        for group in range(len(values)):
            gathered = _merged(_take(columns, indices[group]))
            rows.append(_contract(gathered, _merged(values[group]), 0, 0))
        return None, jnp.concatenate(rows, axis=1)

    chunks = _chunks(values), _chunks(indices)
    _, rows = _over_chunks(multiply_groups, None, chunks)
    return rows.transpose(1, 0, 2).reshape(columns.shape[-1], -1)


def _forward(
    columns: jax.Array, values: jax.Array, indices: jax.Array, probe: jax.Array | None
) -> tuple[jax.Array, Any]:
    operands = columns, values, indices, probe
    return _product(*operands), operands


def _backward(operands: Any, cotangents: jax.Array) -> Any:
    """The derivatives. Columns are gathered again, since those of all groups together take much memory."""
    columns, values, indices, probe = operands
    # Each group adds to it: a sum of 16-bit floats would lose what is small.
    total = jnp.zeros(columns.shape, jnp.promote_types(columns.dtype, jnp.float32))

    def differentiate_groups(total: jax.Array, operands: Any) -> tuple[jax.Array, jax.Array]:
        values, indices, cotangents = operands
        values_cotangents = []
        for group, cotangent in enumerate(jnp.split(cotangents, len(values), axis=1)):
            gathered = _take(columns, indices[group])
            values_cotangents.append(_contract(_merged(gathered), cotangent, 1, 0))
            addend = _contract(_merged(values[group]), cotangent, 1, 1).reshape(gathered.shape)
            total = total.at[indices[group]].add(addend.astype(total.dtype), unique_indices=True)
        return total, jnp.stack(values_cotangents)

    chunks = _chunks(values), _chunks(indices), _chunks_of_rows(cotangents, len(values))
    total, values_cotangents = _over_chunks(differentiate_groups, total, chunks)
    norms = None
    if probe is not None:
        norms = norms_of_dense_gradient(columns, cotangents, len(values)).astype(probe.dtype)
    return total.astype(columns.dtype), values_cotangents.reshape(values.shape), None, norms


_product.defvjp(_forward, _backward)


def norms_of_dense_gradient(columns: jax.Array, cotangents: jax.Array, groups: int) -> jax.Array:
    """The norm of each block of the gradient of the whole matrix: `[groups, blocks of inputs]`."""
    in_chunk = _groups_in_chunk(groups)
    dtype = jnp.promote_types(columns.dtype, jnp.float32)

    def norms_of_groups(_: None, cotangents: jax.Array) -> tuple[None, jax.Array]:
        norms = []
        for cotangent in jnp.split(cotangents, in_chunk, axis=1):
            gradient = _contract(_merged(columns), cotangent, 1, 0)
            blocks = gradient.reshape(len(columns), -1).astype(dtype)
            norms.append(jnp.linalg.norm(blocks, axis=1))
        return None, jnp.stack(norms)

    _, norms = _over_chunks(norms_of_groups, None, _chunks_of_rows(cotangents, groups))
    return norms.reshape(groups, len(columns))


def _over_chunks(function: Callable[..., Any], carry: Any, chunks: Any) -> tuple[Any, Any]:
    """A scan over chunks of groups; of a single chunk there is no loop."""
    if len(jax.tree.leaves(chunks)[0]) > 1:
        return lax.scan(function, carry, chunks)
    carry, result = function(carry, jax.tree.map(lambda x: x[0], chunks))
    return carry, result[None]


def _groups_in_chunk(groups: int) -> int:
    """The largest divisor that is not too large."""
    return max(n for n in range(1, _UNROLLED_GROUPS + 1) if groups % n == 0)


def _chunks(of_groups: jax.Array) -> jax.Array:
    in_chunk = _groups_in_chunk(len(of_groups))
    return of_groups.reshape(-1, in_chunk, *of_groups.shape[1:])


def _chunks_of_rows(rows: jax.Array, groups: int) -> jax.Array:
    """`[n, groups * out]` as `[chunks, n, …]`, the outputs of some groups side by side."""
    chunks = groups // _groups_in_chunk(groups)
    return rows.reshape(len(rows), chunks, -1).transpose(1, 0, 2)


def _take(columns: jax.Array, indices: jax.Array) -> jax.Array:
    return jnp.take(columns, indices, axis=0, mode='clip')


def _merged(blocks: jax.Array) -> jax.Array:
    """`[blocks, in, …]` as `[blocks * in, …]`."""
    return blocks.reshape(-1, blocks.shape[-1])


def _contract(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    return lax.dot_general(left, right, (((left_axis,), (right_axis,)), ((), ())))


def gather_blocks(matrix: jax.Array, indices: jax.Array, block: tuple[int, int]) -> jax.Array:
    """The stored blocks `[groups, blocks, in, out]` of a matrix `[inputs, outputs]`, zeros in the padding.

    >>> gather_blocks(jnp.arange(6).reshape(3, 2), jnp.array([[1], [0]]), (2, 1))
    Array([[[[4],
             [0]]],
    <BLANKLINE>
    <BLANKLINE>
           [[[1],
             [3]]]], dtype=int32)
    """
    block_inputs, block_outputs = block
    padded = pad_to_multiple(pad_to_multiple(matrix, 0, block_inputs), 1, block_outputs)
    cut = padded.reshape(-1, block_inputs, len(indices), block_outputs).transpose(2, 0, 1, 3)
    return jnp.take_along_axis(cut, indices[:, :, None, None], axis=1)


def scatter_blocks(values: jax.Array, indices: jax.Array, inputs: int, outputs: int) -> jax.Array:
    """The matrix `[inputs, outputs]` that has these blocks, and zeros elsewhere; the padding is cut off.

    >>> scatter_blocks(jnp.ones((2, 1, 1, 2), int), jnp.array([[1], [0]]), 2, 3)
    Array([[0, 0, 1],
           [1, 1, 0]], dtype=int32)
    """
    groups, _, block_inputs, block_outputs = values.shape
    blocks_of_inputs = -(-inputs // block_inputs)
    whole = jnp.zeros((groups, blocks_of_inputs, block_inputs, block_outputs), values.dtype)
    whole = whole.at[jnp.arange(groups)[:, None], indices].set(values)
    matrix = whole.transpose(1, 2, 0, 3).reshape(-1, groups * block_outputs)
    return matrix[:inputs, :outputs]


def pad_to_multiple(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    """The array with zeros at the end of an axis, up to a multiple of some length."""
    lacking = -array.shape[axis] % multiple
    if not lacking:
        return array
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, lacking)
    return jnp.pad(array, padding)
