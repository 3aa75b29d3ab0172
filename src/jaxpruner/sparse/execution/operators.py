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

    `operators.csr.CsrOperator` is for training: it keeps the order of both directions, and sorts values in each call.
    Here a derivative goes through the dense matrix.

    Attributes:
      compressed: [weights]. Those behind the last row fill the layers of a stack up to one length.
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
    return csr_kernel.multiply(compressed, row_offsets, column_indices, rows.T).T


def _forward(rows, compressed, row_offsets, column_indices):
    operands = rows, compressed, row_offsets, column_indices
    return _csr_product(*operands), operands


def _backward(operands, gradient):
    rows, compressed, row_offsets, column_indices = operands
    is_read = jnp.arange(len(compressed)) < row_offsets[-1]
    compressed = jnp.where(is_read, compressed, 0)
    outputs = jnp.repeat(
        jnp.arange(len(row_offsets) - 1),
        jnp.diff(row_offsets),
        total_repeat_length=len(compressed),
    )
    transposed = jnp.zeros((len(row_offsets) - 1, rows.shape[1]), compressed.dtype)
    transposed = transposed.at[outputs, column_indices].add(compressed)
    of_matrix = gradient.T @ rows
    of_compressed = jnp.where(is_read, of_matrix[outputs, column_indices], 0)
    of_compressed = of_compressed.astype(compressed.dtype)
    return (gradient @ transposed).astype(rows.dtype), of_compressed, None, None


_csr_product.defvjp(_forward, _backward)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['matrix', 'inputs', 'outputs'],
    meta_fields=['result_dtype'],
)
@dataclasses.dataclass(frozen=True)
class Smaller:
    """A dense matrix without inputs and outputs that are zero; of a convolution without such channels.

    Attributes:
      matrix: [kept inputs, kept outputs].
      inputs: int32[kept inputs], or channels; `None` if all stay.
      outputs: int32[outputs], for each output its column of the matrix, or the number of columns where it is zero;
        `None` if all stay.
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
        product = jnp.matmul(
            self._kept(rows), self.matrix, preferred_element_type=self.result_dtype
        )
        return self._spread(product)

    def convolve(self, image: jax.Array, convolution: Convolution) -> jax.Array:
        """`[batch, *space, channels] -> [batch, *space, outputs]`."""
        image = self._kept(image)
        kernel = self.matrix.reshape(*convolution.window, image.shape[-1], -1)
        return self._spread(convolution.run(image, kernel))

    def _kept(self, values: jax.Array) -> jax.Array:
        if self.inputs is None:
            return values
        return jnp.take(values, self.inputs, axis=-1, mode='clip')

    def _spread(self, values: jax.Array) -> jax.Array:
        """Scattering columns is slow on CPUs; they are gathered, from a further one of zeros where there is none."""
        if self.outputs is None:
            return values
        padding = [(0, 0)] * (values.ndim - 1) + [(0, 1)]
        return jnp.take(jnp.pad(values, padding), self.outputs, axis=-1, mode='clip')
