"""Operators that multiply next to nothing, and read and write like those of the formats.

They show what a call takes beside its products. XLA must not see that there is nothing to compute, so matrices stand
behind barriers, or in the call of a kernel. These operators make their arrays themselves, so the arrays have no layers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.sparse.operators import csr_kernel
from jaxpruner.sparse.operators.blocks import BlockMatrix
from jaxpruner.sparse.program.convolutions import Convolution


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class EmptyDense:
    """Stands in the place of a dense matrix. It multiplies nothing: it reads its data and writes a result.

    Attributes:
      outputs: of the matrix.
      result_dtype: in which results are written; by default that of the data.
    """

    outputs: int
    result_dtype: Any = None

    def with_result_dtype(self, dtype: Any) -> 'EmptyDense':
        """The operator whose results are written in a type."""
        return dataclasses.replace(self, result_dtype=dtype)

    def multiply(self, rows: jax.Array) -> jax.Array:
        """`[n, inputs] -> [n, outputs]`."""
        shape = len(rows), self.outputs
        return _written(rows, shape, self.result_dtype)

    def convolve(self, image: jax.Array, convolution: Convolution) -> jax.Array:
        """`[batch, *space, channels] -> [batch, *space, outputs]`."""
        return _written(image, convolution.result_shape, self.result_dtype)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class EmptyCsr:
    """Stands in the place of a CSR matrix: a matrix of a single zero, which the kernel multiplies.

    The kernel takes columns. So rows are transposed before it and results after it, unless the layers before and after
    take columns, too.

    Attributes:
      outputs: of the matrix.
      dtype: of its values.
    """

    outputs: int
    dtype: Any

    def multiply(self, rows: jax.Array) -> jax.Array:
        """`[n, inputs] -> [n, outputs]`."""
        row_offsets = np.zeros(self.outputs + 1, np.int32)
        row_offsets[-1] = 1
        columns = csr_kernel.multiply(
            compressed=jnp.zeros(1, self.dtype),
            row_offsets=jnp.asarray(row_offsets),
            column_indices=jnp.zeros(1, jnp.int32),
            columns=rows.T,
        )
        return columns.T


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class EmptyBlocks:
    """Stands in the place of blocks: one block of zeros for each group of outputs.

    Attributes:
      outputs: of the matrix.
      block: inputs and outputs of a block.
      dtype: of its values.
      kernel: as in `BlockMatrix`.
      result_dtype: as in `BlockMatrix`.
    """

    outputs: int
    block: tuple[int, int]
    dtype: Any
    kernel: Any = None
    result_dtype: Any = None

    def with_result_dtype(self, dtype: Any) -> 'EmptyBlocks':
        """As `BlockMatrix` has it."""
        return dataclasses.replace(self, result_dtype=dtype, kernel=None)

    def multiply(self, rows: jax.Array) -> jax.Array:
        """`[n, inputs] -> [n, outputs]`."""
        block_inputs, block_outputs = self.block
        groups = -(-self.outputs // block_outputs)
        values = jnp.zeros((groups, 1, block_inputs, block_outputs), self.dtype)
        indices = jnp.zeros((groups, 1), jnp.int32)
        hidden_values, hidden_indices = lax.optimization_barrier((values, indices))
        matrix = BlockMatrix(
            hidden_values,
            hidden_indices,
            outputs=self.outputs,
            kernel=self.kernel,
            result_dtype=self.result_dtype,
        )
        return matrix.multiply(rows)


def _written(data: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Writes the first number of the data into all of an array, perhaps of another type.

    Without the barriers XLA would read that number alone, and would never write the array.
    """
    data = lax.optimization_barrier(data)
    first = data.reshape(-1)[0]
    if dtype is not None:
        first = first.astype(dtype)
    result = jnp.broadcast_to(first, shape)
    return lax.optimization_barrier(result)
