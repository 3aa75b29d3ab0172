"""The product of rows with a matrix of which single weights are kept, in CSR.

What is stored is the matrix transposed, `[outputs, inputs]`, since the kernel multiplies a matrix in CSR by dense
columns, and a product of rows is `(transposed @ rowsᵀ)ᵀ`:

    matrix [inputs, outputs]    transposed     compressed   5 3 7      row by row
        0 3                       0 5          positions    1 2 3      in the flattened matrix
        5 7                       3 7          row_offsets  0 1 3      where each row begins

The gradient of rows is `(matrix @ gradientᵀ)ᵀ`. In training it is a product in CSR, too: `transposed_order` says where
each value of the CSR of the matrix itself stands. A model that is compiled for inference lacks these arrays; its
gradient goes through the dense matrix.

The gradient of the weights is a dense product gradientᵀ @ rows, gathered where weights are kept. That is faster than a
product for each kept weight, and RigL needs all of it: the backward pass returns it in place of the gradient of a
`probe`, which changes no result.

All positions are data. So a mask can change without a new compilation, as long as the number of kept weights stays.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CsrMatrix:
    """A matrix in CSR that rows can be multiplied by.

    Attributes:
      compressed: float[weights], row by row of the matrix transposed.
      positions: int32[weights], in that matrix, flattened; ascending.
      row_offsets: int32[outputs + 1].
      transposed_order: int32[weights], for each weight row by row of the matrix itself, its place among the others.
      transposed_row_offsets: int32[inputs + 1], where those rows begin.
      probe: `None`, or zeros [outputs, inputs], for which the backward pass returns the gradient of all weights.

    >>> matrix = CsrMatrix(jnp.array([5.0, 3.0, 7.0]), **csr_arrays(jnp.array([1, 2, 3]), inputs=2, outputs=2))
    >>> if why_missing(jnp.float32) is None:
    ...     assert matrix.multiply(jnp.array([[1.0, 2.0]])).tolist() == [[10.0, 17.0]]
    """

    compressed: jax.Array
    positions: jax.Array
    row_offsets: jax.Array
    transposed_order: jax.Array | None = None
    transposed_row_offsets: jax.Array | None = None
    probe: jax.Array | None = None

    def multiply(self, rows: jax.Array, result_dtype: Any = None) -> jax.Array:
        """Multiplies rows `[n, inputs]`, cast to a type; returns `[n, outputs]`.

        Raises:
          NotImplementedError: there is no kernel for this dtype, device or version of JAX; the message says what helps.
        """
        return _product(rows.astype(result_dtype or rows.dtype), self)


@jax.custom_vjp
def _product(rows: jax.Array, matrix: CsrMatrix) -> jax.Array:
    _, inputs = rows.shape
    columns = matrix.positions % inputs
    return _kernel(matrix.compressed, matrix.row_offsets, columns, rows.T).T


def _backward(saved: Any, gradient: jax.Array) -> tuple[Any, CsrMatrix]:
    rows, matrix = saved
    compressed, positions = matrix.compressed, matrix.positions
    (_, inputs), (_, outputs) = rows.shape, gradient.shape
    if matrix.transposed_order is None:
        zeros = jnp.zeros(outputs * inputs, compressed.dtype)
        transposed = zeros.at[positions].set(compressed)
        of_rows = gradient @ transposed.reshape(outputs, inputs)
    else:
        order = matrix.transposed_order
        columns = positions[order] // inputs
        of_columns = _kernel(compressed[order], matrix.transposed_row_offsets, columns, gradient.T)
        of_rows = of_columns.T
    of_all = gradient.T @ rows
    of_kept = of_all.reshape(-1).at[positions]
    of_kept = of_kept.get(mode='fill', fill_value=0, indices_are_sorted=True)
    of_probe = None if matrix.probe is None else of_all.astype(matrix.probe.dtype)
    derivatives: Any = of_kept.astype(compressed.dtype), None, None, None, None, of_probe
    return of_rows.astype(rows.dtype), CsrMatrix(*derivatives)


_product.defvjp(lambda *operands: (_product(*operands), operands), _backward)


def csr_arrays(positions: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    """The whole numbers of a `CsrMatrix` for training, by name.

    Args:
      positions: int32[weights], in the flattened matrix [outputs, inputs], ascending and without duplicates.
      inputs: of the product.
      outputs: of the product.

    Raises:
      ValueError: the matrix has too many weights for positions of 32 bits.

    >>> arrays = csr_arrays(jnp.array([1, 2, 3]), inputs=2, outputs=2)
    >>> {name: array.tolist() for name, array in arrays.items() if name != 'positions'}
    {'row_offsets': [0, 1, 3], 'transposed_order': [1, 0, 2], 'transposed_row_offsets': [0, 1, 3]}
    """
    if inputs * outputs > np.iinfo(np.int32).max:
        raise ValueError(
            f'positions have 32 bits, and a matrix of {inputs} by {outputs} has too many weights; divide the layer'
        )
    positions = positions.astype(jnp.int32)
    rows, columns = positions // inputs, positions % inputs
    # Sorting one array and looking its entries up takes a sixth of the time of `argsort` on a CPU.
    transposed = jnp.sort(columns * outputs + rows)
    columns, rows_of_columns = transposed // outputs, transposed % outputs
    order = jnp.searchsorted(positions, rows_of_columns * inputs + columns)

    def offsets(ascending: jax.Array, number: int) -> jax.Array:
        return jnp.searchsorted(ascending, jnp.arange(number + 1)).astype(jnp.int32)

    return {
        'positions': positions,
        'row_offsets': offsets(rows, outputs),
        'transposed_order': order.astype(jnp.int32),
        'transposed_row_offsets': offsets(columns, inputs),
    }


# JAX's kernel for a matrix in CSR on CPUs is in `jax.experimental.sparse`, which is no longer actively developed, so
# no other product uses that module. The kernel came with JAX 0.6.1. Without a kernel JAX computes with scattered sums,
# a hundred times slower, so such a product is refused.
def why_missing(dtype: Any) -> str | None:
    """Why there is no kernel for values of this type on the default device; `None` if there is one.

    >>> why_missing(jnp.bfloat16)
    'there is a CSR kernel for float32 and float64, and not for bfloat16; cast rows and values to float32'
    """
    name = jnp.dtype(dtype).name
    if name not in ('float32', 'float64'):
        return f'there is a CSR kernel for float32 and float64, and not for {name}; cast rows and values to float32'
    with jax.ensure_compile_time_eval():
        device, *_ = jnp.zeros(()).devices()  # under a mesh there are several of one platform
    if device.platform != 'cpu':
        return (
            f'there is a CSR kernel for CPUs, and not for {device.platform}; run on a CPU (jax.default_device), or '
            'keep the matrix dense or in blocks'
        )
    if jax.__version_info__ < (0, 6, 1):
        return (
            f'JAX has a CSR kernel from 0.6.1 on, and this is {jax.__version__}; upgrade jax and jaxlib, or keep the '
            'matrix dense or in blocks'
        )
    return None


def _kernel(
    compressed: jax.Array, row_offsets: jax.Array, column_indices: jax.Array, columns: jax.Array
) -> jax.Array:
    """Multiplies a matrix in CSR `[m, inner]` with a dense one `[inner, n]`; returns `[m, n]`."""
    dtype = jnp.result_type(compressed, columns)
    missing = why_missing(dtype)
    if missing:
        raise NotImplementedError(f'a matrix in CSR cannot be multiplied here: {missing}')
    return _multiply(compressed.astype(dtype), row_offsets, column_indices, columns.astype(dtype))


def _plain(
    compressed: jax.Array, row_offsets: jax.Array, column_indices: jax.Array, columns: jax.Array
) -> jax.Array:
    from jax.experimental import sparse  # loads scipy, in some versions

    shape = (row_offsets.shape[0] - 1, columns.shape[0])
    return sparse.BCSR((compressed, column_indices, row_offsets), shape=shape) @ columns


# JAX's own rule has no kernel for batches: one product follows the other.
_multiply = custom_batching.sequential_vmap(_plain)
