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

The product works on columns, which are the rows transposed: there the inputs of a block lie side by side in memory.
Each group gathers the columns of its blocks, and multiplies once. The derivative for the inputs is added up transposed
as well. Scattering whole columns is fast; scattering into rows takes 50 times as long on a CPU.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import tree as tree_lib

BlockShape = tuple[int, int]  # inputs and outputs of a block
_UNROLLED = 32  # groups that stand in the program one after another; a loop goes through more


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMatrix:
    """A matrix `[inputs, outputs]` of which blocks are stored, perhaps with a term of low rank.

    The probe changes no result. In place of its gradient, the backward pass returns block norms: the norm of each block
    of the dense gradient of this product, also of blocks that are not stored. RigL grows blocks by them. If one probe
    goes into several products, their norms are added; the norm of the added gradients would need the dense gradient.

    Attributes:
      values: `[groups, blocks, in, out]`.
      indices: int32`[groups, blocks]`, the blocks of inputs; none twice in a group.
      probe: zeros `[groups, inputs / in]`, or none.
      down: `[inputs, rank]`; `down @ up` is added to the matrix.
      up: `[rank, outputs]`.

    >>> matrix = BlockMatrix(jnp.ones((2, 1, 2, 2)), jnp.array([[1], [0]]))
    >>> matrix.multiply(jnp.array([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]))
    Array([[7., 7., 3., 3.]], dtype=float32)
    """

    values: jax.Array
    indices: jax.Array
    probe: jax.Array | None = None
    down: jax.Array | None = None
    up: jax.Array | None = None

    def multiply(self, rows: jax.Array, result_dtype: Any = None) -> jax.Array:
        """Multiplies rows `[n, inputs]`; returns `[n, outputs]`, added up in a type, such as float32 for bfloat16."""
        count, inputs = rows.shape
        block_inputs = self.values.shape[-2]
        dtype = jnp.result_type(rows, self.values)
        columns = rows.astype(dtype).T.reshape(inputs // block_inputs, block_inputs, count)
        values = self.values.astype(dtype)
        product = _product(result_dtype or dtype, columns, values, self.indices, self.probe)
        if self.down is None or self.up is None:
            return product
        # A wider type holds the sums between the two matrices, too.
        low = jnp.matmul(rows, self.down, preferred_element_type=result_dtype)
        return product + low @ self.up


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    dtype: Any, columns: jax.Array, values: jax.Array, indices: jax.Array, probe: jax.Array | None
) -> jax.Array:
    """The product `[n, groups * out]` of columns `[blocks of inputs, in, n]`, added up in a type."""
    del probe  # only its gradient counts

    def multiply_group(_: None, group: Any) -> tuple[None, jax.Array]:
        values, indices = group
        return None, _contract(_take(columns, indices), _merged(values), (0, 0), dtype)

    _, by_group = _scan_groups(multiply_group, None, (values, indices))
    groups, count, outputs = by_group.shape
    return by_group.transpose(1, 0, 2).reshape(count, groups * outputs)


def _backward(_: Any, operands: Any, cotangents: jax.Array) -> tuple[Any, ...]:
    """The derivatives. Columns are gathered again: the gathered columns of all groups would take much memory."""
    columns, values, indices, probe = operands
    groups, _, _, outputs = values.shape
    by_group = cotangents.reshape(len(cotangents), groups, outputs).transpose(1, 0, 2)
    # Each group adds to the derivative for the inputs: a sum of 16-bit floats would lose what is small.
    wide = tree_lib.at_least_float32(columns.dtype)

    def differentiate_group(total: jax.Array, group: Any) -> tuple[jax.Array, jax.Array]:
        values, indices, cotangent = group
        of_values = _contract(_take(columns, indices), cotangent, (1, 0), cotangent.dtype)
        addend = _contract(_merged(values), cotangent, (1, 1), wide)
        addend = addend.reshape(len(indices), *columns.shape[1:])
        return total.at[indices].add(addend, unique_indices=True), of_values

    total = jnp.zeros(columns.shape, wide)
    total, of_values = _scan_groups(differentiate_group, total, (values, indices, by_group))
    of_values = of_values.reshape(values.shape).astype(values.dtype)
    norms = None
    if probe is not None:

        def norms_of_group(_: None, cotangent: jax.Array) -> tuple[None, jax.Array]:
            gradient = _contract(_merged(columns), cotangent, (1, 0), cotangent.dtype)
            blocks = gradient.reshape(len(columns), -1).astype(wide)
            return None, jnp.linalg.norm(blocks, axis=1)

        _, norms = _scan_groups(norms_of_group, None, by_group)
        norms = norms.astype(probe.dtype)
    return total.astype(columns.dtype), of_values, None, norms


_product.defvjp(lambda dtype, *operands: (_product(dtype, *operands), operands), _backward)


def _scan_groups(function: Callable[..., Any], carry: Any, arrays: Any) -> Any:
    groups = len(jax.tree.leaves(arrays)[0])
    return lax.scan(function, carry, arrays, unroll=min(groups, _UNROLLED))


def _take(columns: jax.Array, indices: jax.Array) -> jax.Array:
    """The columns of these blocks, `[blocks * in, n]`."""
    return _merged(jnp.take(columns, indices, axis=0, mode='clip'))


def _merged(blocks: jax.Array) -> jax.Array:
    """`[blocks, in, …]` as `[blocks * in, …]`."""
    number, block_inputs, width = blocks.shape
    return blocks.reshape(number * block_inputs, width)


def _contract(left: jax.Array, right: jax.Array, axes: tuple[int, int], dtype: Any) -> jax.Array:
    """Adds products up along an axis of each, in a type."""
    contracted = (axes[0],), (axes[1],)
    return lax.dot_general(left, right, (contracted, ((), ())), preferred_element_type=dtype)
