"""Operators that multiply next to nothing: they read and write as those of the formats do.

With them is timed what a call takes beside its products. XLA must not see that there is nothing to compute: matrices
stand behind barriers, or in the call of a kernel. They make their arrays themselves, so that they have no layers.
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
    """An operator in the place of a dense matrix that multiplies nothing: it reads its data and writes a result.

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
        return _written(rows, (len(rows), self.outputs), self.result_dtype)

    def convolve(self, image: jax.Array, convolution: Convolution) -> jax.Array:
        """`[batch, *space, channels] -> [batch, *space, outputs]`."""
        return _written(image, convolution.result_shape, self.result_dtype)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class EmptyCsr:
    """An operator in the place of a CSR matrix: one of a single zero, which the kernel multiplies.

    The kernel wants columns, so rows are transposed for it and its results back, unless layers before and after it want
    columns as well.

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
        compressed = jnp.zeros(1, self.dtype)
        column_indices = jnp.zeros(1, jnp.int32)
        columns = csr_kernel.multiply(compressed, jnp.asarray(row_offsets), column_indices, rows.T)
        return columns.T


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class EmptyBlocks:
    """An operator in the place of blocks: one block of zeros for each group of outputs.

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
        groups = -(-self.outputs // self.block[1])
        values = jnp.zeros((groups, 1, *self.block), self.dtype)
        indices = jnp.zeros((groups, 1), jnp.int32)
        hidden = lax.optimization_barrier((values, indices))
        matrix = BlockMatrix(
            *hidden, outputs=self.outputs, kernel=self.kernel, result_dtype=self.result_dtype
        )
        return matrix.multiply(rows)


def _written(data: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """A number of the data in an array of some shape, and perhaps of another type.

    Without the barriers XLA would compute that number alone, and would never write the array.
    """
    numbers = lax.optimization_barrier(data).reshape(-1)
    number = numbers[0] if dtype is None else numbers[0].astype(dtype)
    result = jnp.broadcast_to(number, shape)
    return lax.optimization_barrier(result)
