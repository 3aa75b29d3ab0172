"""The operators of a compiled model beside those of blocks: CSR for inference, and smaller dense matrices."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner.sparse.operators import csr_kernel
from jaxpruner.sparse.program.convolutions import Convolution


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['compressed', 'row_offsets', 'column_indices'],
    meta_fields=['inputs'],
)
@dataclasses.dataclass(frozen=True)
class TransposedCsr:
    """The CSR of the matrix transposed, which is what a product of rows reads.

    `operators.csr.CsrMatrix` is for training: it keeps the order of both directions, and sorts values in each call.
    Here a derivative goes through the dense matrix.

    Attributes:
      compressed: [weights]. Those behind the last row fill the layers of a stack up, so that all have one length.
      row_offsets: int32[outputs + 1].
      column_indices: int32[weights], the input of each weight.
      inputs: how many there are.
    """

    compressed: jax.Array
    row_offsets: jax.Array
    column_indices: jax.Array
    inputs: int

    def multiply(self, rows: jax.Array) -> jax.Array:
        """`[n, inputs] -> [n, outputs]`."""
        return _csr_product(rows, self.compressed, self.row_offsets, self.column_indices)


@jax.custom_vjp
def _csr_product(
    rows: jax.Array, compressed: jax.Array, row_offsets: jax.Array, column_indices: jax.Array
) -> jax.Array:
    columns = csr_kernel.multiply(compressed, row_offsets, column_indices, rows.T)
    return columns.T


def _forward(*operands: Any) -> tuple[jax.Array, Any]:
    return _csr_product(*operands), operands


def _backward(operands: Any, gradient: jax.Array) -> tuple[Any, ...]:
    rows, compressed, row_offsets, column_indices = operands
    stored = len(compressed)
    outputs = len(row_offsets) - 1
    _, inputs = rows.shape
    is_read = jnp.arange(stored) < row_offsets[-1]
    compressed = jnp.where(is_read, compressed, 0)
    counts = jnp.diff(row_offsets)
    row_indices = jnp.repeat(jnp.arange(outputs), counts, total_repeat_length=stored)
    places = row_indices, column_indices
    zeros = jnp.zeros((outputs, inputs), compressed.dtype)
    transposed = zeros.at[places].add(compressed)
    of_rows = gradient @ transposed
    of_matrix = gradient.T @ rows
    of_compressed = jnp.where(is_read, of_matrix[places], 0)
    of_compressed = of_compressed.astype(compressed.dtype)
    return of_rows.astype(rows.dtype), of_compressed, None, None


_csr_product.defvjp(_forward, _backward)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['matrix', 'inputs', 'outputs'],
    meta_fields=['result_dtype'],
)
@dataclasses.dataclass(frozen=True)
class Smaller:
    """A dense matrix without inputs and outputs that are zero; for a convolution, without such channels.

    Attributes:
      matrix: [kept inputs, kept outputs].
      inputs: int32[kept inputs], or channels; `None` if all stay.
      outputs: int32[outputs], for each output its column of the matrix; the number of columns, if it is zero. `None` if
        all stay.
      result_dtype: in which products are added up; by default that of rows and matrix.
    """

    matrix: jax.Array
    inputs: jax.Array | None
    outputs: jax.Array | None
    result_dtype: Any = None

    def with_result_dtype(self, dtype: Any) -> 'Smaller':
        """The operator whose products are added up in a type."""
        return dataclasses.replace(self, result_dtype=dtype)

    def multiply(self, rows: jax.Array) -> jax.Array:
        """`[n, inputs] -> [n, outputs]`."""
        rows = self._kept(rows)
        product = jnp.matmul(rows, self.matrix, preferred_element_type=self.result_dtype)
        return self._spread(product)

    def convolve(self, image: jax.Array, convolution: Convolution) -> jax.Array:
        """`[batch, *space, channels] -> [batch, *space, outputs]`."""
        image = self._kept(image)
        *_, channels = image.shape
        kernel = self.matrix.reshape(*convolution.window, channels, -1)
        result = convolution.run(image, kernel)
        return self._spread(result)

    def _kept(self, values: jax.Array) -> jax.Array:
        if self.inputs is None:
            return values
        return jnp.take(values, self.inputs, axis=-1, mode='clip')

    def _spread(self, values: jax.Array) -> jax.Array:
        """Puts outputs in their places, and zeros in the others.

        Scattering columns is slow on CPUs. So they are gathered, and those of zeros come from an additional column.
        """
        if self.outputs is None:
            return values
        padding = [(0, 0)] * values.ndim
        padding[-1] = 0, 1
        with_zeros = jnp.pad(values, padding)
        return jnp.take(with_zeros, self.outputs, axis=-1, mode='clip')
