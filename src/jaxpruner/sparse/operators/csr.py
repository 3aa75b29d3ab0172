"""The product of rows with a matrix of which single weights are kept, in CSR.

    matrix [inputs, outputs]      compressed        3 5 7          row by row
        0 3 5                     row_offsets       0 2 3          where each row begins
        0 0 7                     column_indices    1 2 2

The kernel multiplies a matrix in CSR by dense columns. Two such products make a training step:

    result             [n, outputs]   (matrixᵀ @ rowsᵀ)ᵀ         needs the CSR of matrixᵀ
    gradient of rows   [n, inputs]    (matrix @ gradientᵀ)ᵀ       needs the CSR of matrix

Both share their values: `transposed_order` says where each value of the transposed CSR stands in the other. The
gradient of the weights is a dense product rowsᵀ @ gradient, gathered where weights are kept. That is faster than a
product for each kept weight, and RigL needs all of it. A `probe` changes no result. In place of its gradient, the
backward pass returns this dense product: the gradient of the dense matrix, also if a matrix is multiplied at several
places.

All positions are data. So a mask can change without a new compilation, as long as the number of kept weights stays.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse.operators import csr_kernel


class CsrPattern(NamedTuple):
    """Where the kept weights of a matrix [inputs, outputs] stand; int32 arrays.

    Attributes:
      positions: [weights], in the flattened matrix, ascending.
      row_offsets: [inputs + 1].
      transposed_order: [weights], for each weight of the transposed matrix, row by row, its place in `positions`.
      transposed_row_offsets: [outputs + 1].

    >>> csr_pattern(jnp.array([1, 2, 5]), inputs=2, outputs=3).transposed_column_indices
    Array([0, 0, 1], dtype=int32)
    """

    positions: jax.Array
    row_offsets: jax.Array
    transposed_order: jax.Array
    transposed_row_offsets: jax.Array

    @property
    def inputs(self) -> int:
        """Rows of the matrix."""
        return self.row_offsets.shape[-1] - 1

    @property
    def outputs(self) -> int:
        """Columns of the matrix."""
        return self.transposed_row_offsets.shape[-1] - 1

    @property
    def column_indices(self) -> jax.Array:
        """The column of each weight."""
        return self.positions % self.outputs

    @property
    def transposed_column_indices(self) -> jax.Array:
        """The row of each weight, in the order of the transposed matrix."""
        return self.positions[self.transposed_order] // self.outputs


def csr_pattern(positions: jax.Array, inputs: int, outputs: int) -> CsrPattern:
    """The pattern of a matrix from the positions of its kept weights.

    Args:
      positions: int32[weights], in the flattened matrix, ascending and without duplicates.
      inputs: rows of the matrix.
      outputs: its columns.

    Raises:
      ValueError: the matrix has too many weights for positions of 32 bits.

    >>> pattern = csr_pattern(jnp.array([1, 2, 5]), inputs=2, outputs=3)
    >>> pattern.row_offsets.tolist(), pattern.column_indices.tolist()
    ([0, 2, 3], [1, 2, 2])
    """
    if inputs * outputs > np.iinfo(np.int32).max:
        raise ValueError(
            f'positions have 32 bits, and a matrix of {inputs} by {outputs} has too many weights; divide the layer'
        )
    positions = positions.astype(jnp.int32)
    rows = positions // outputs
    columns = positions % outputs
    # Sorting one array and looking its entries up takes a sixth of the time of `argsort` on a CPU.
    transposed = jnp.sort(columns * inputs + rows)
    columns = transposed // inputs
    rows_of_columns = transposed % inputs
    order = jnp.searchsorted(positions, rows_of_columns * outputs + columns)
    return CsrPattern(
        positions=positions,
        row_offsets=_offsets(rows, inputs),
        transposed_order=order.astype(jnp.int32),
        transposed_row_offsets=_offsets(columns, outputs),
    )


def _offsets(ascending: jax.Array, number: int) -> jax.Array:
    """Where each of `number` rows begins among ascending row numbers."""
    rows = jnp.arange(number + 1)
    offsets = jnp.searchsorted(ascending, rows)
    return offsets.astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CsrMatrix:
    """A matrix in CSR that rows can be multiplied by.

    Attributes:
      compressed: float[weights], row by row.
      pattern: where they stand.
      probe: `None`, or zeros [inputs, outputs], for which the backward pass returns the gradient of the dense matrix.

    >>> pattern = csr_pattern(jnp.array([1, 2, 5]), inputs=2, outputs=3)
    >>> matrix = CsrMatrix(jnp.array([3.0, 5.0, 7.0]), pattern)
    >>> if csr_kernel.why_missing(jnp.float32) is None:
    ...     assert matrix.multiply(jnp.array([[1.0, 2.0]])).tolist() == [[0.0, 3.0, 19.0]]
    """

    compressed: jax.Array
    pattern: CsrPattern
    probe: jax.Array | None = None

    def multiply(self, rows: jax.Array) -> jax.Array:
        """Multiplies rows with the matrix."""
        return csr_product(rows, self.compressed, self.pattern, self.probe)


@jax.custom_vjp
def csr_product(
    rows: jax.Array, compressed: jax.Array, pattern: CsrPattern, probe: jax.Array | None = None
) -> jax.Array:
    """Multiplies rows with a matrix in CSR.

    Args:
      rows: float[n, inputs].
      compressed: float[weights], the kept weights, row by row.
      pattern: where they stand.
      probe: `None`, or zeros [inputs, outputs]. For it the backward pass returns the gradient of the dense matrix, also
        for pruned weights.

    Returns:
      float[n, outputs], in the dtype of the product of both.

    Raises:
      NotImplementedError: there is no kernel for this dtype, device or version of JAX; the message says what helps.

    >>> pattern = csr_pattern(jnp.array([1, 2, 5]), inputs=2, outputs=3)
    >>> rows, compressed = jnp.array([[1.0, 2.0]]), jnp.array([3.0, 5.0, 7.0])
    >>> if csr_kernel.why_missing(jnp.float32) is None:
    ...     assert csr_product(rows, compressed, pattern).tolist() == [[0.0, 3.0, 19.0]]
    """
    del probe  # only its gradient counts
    result = csr_kernel.multiply(
        compressed[pattern.transposed_order],
        pattern.transposed_row_offsets,
        pattern.transposed_column_indices,
        rows.T,
    )
    return result.T


def _forward(
    rows: jax.Array, compressed: jax.Array, pattern: CsrPattern, probe: jax.Array | None
) -> tuple[jax.Array, Any]:
    return csr_product(rows, compressed, pattern, probe), (rows, compressed, pattern, probe)


def _backward(saved: Any, gradient: jax.Array) -> tuple[Any, ...]:
    rows, compressed, pattern, probe = saved
    of_columns = csr_kernel.multiply(
        compressed,
        pattern.row_offsets,
        pattern.column_indices,
        gradient.T,
    )
    of_rows = of_columns.T.astype(rows.dtype)
    of_matrix = rows.T @ gradient
    of_kept = of_matrix.reshape(-1).at[pattern.positions]
    of_compressed = of_kept.get(mode='clip', unique_indices=True, indices_are_sorted=True)
    of_compressed = of_compressed.astype(compressed.dtype)
    of_probe = None if probe is None else of_matrix.astype(probe.dtype)
    return of_rows, of_compressed, None, of_probe


csr_product.defvjp(_forward, _backward)
