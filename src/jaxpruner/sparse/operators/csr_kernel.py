"""JAX's kernel for a matrix in CSR on CPUs, behind one function.

The kernel is in `jax.experimental.sparse`, which is no longer actively developed, so no other product uses that module.
The kernel came with JAX 0.6.1. Without a kernel JAX computes with scattered sums, a hundred times slower, so such a
product is refused.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching, lax

DTYPES = ('float32', 'float64')
_CALL = 'custom_call'  # how a kernel shows in a lowered program


def why_missing(dtype: Any) -> str | None:
    """Why there is no kernel for values of this type on the default device; `None` if there is one.

    >>> why_missing(jnp.bfloat16)
    'there is a CSR kernel for float32 and float64, and not for bfloat16; cast rows and values to float32'
    """
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return f'there is a CSR kernel for {" and ".join(DTYPES)}, and not for {name}; cast rows and values to float32'
    platform = _platform()
    if platform != 'cpu':
        return (
            f'there is a CSR kernel for CPUs, and not for {platform}; run on a CPU (jax.default_device), or '
            'keep the matrix dense or in blocks'
        )
    if not _is_lowered_to_a_kernel():
        return (
            f'JAX has a CSR kernel from 0.6.1 on, and this is {jax.__version__}; upgrade jax and jaxlib, or keep the '
            'matrix dense or in blocks'
        )
    return None


def multiply(
    compressed: jax.Array, row_offsets: jax.Array, column_indices: jax.Array, columns: jax.Array
) -> jax.Array:
    """Multiplies a matrix in CSR [m, inner] with a dense one [inner, n].

    Args:
      compressed: float[weights], row by row.
      row_offsets: int32[m + 1], where each row begins.
      column_indices: int32[weights].
      columns: float[inner, n] of the same dtype.

    Returns:
      float[m, n].

    Raises:
      NotImplementedError: there is no kernel for this product; the message says what would help.
    """
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


@custom_batching.custom_vmap
def _multiply(
    compressed: jax.Array, row_offsets: jax.Array, column_indices: jax.Array, columns: jax.Array
) -> jax.Array:
    return _plain(compressed, row_offsets, column_indices, columns)


@_multiply.def_vmap
def _multiply_batched(size: int, is_batched: list[bool], *arguments: jax.Array) -> Any:
    """Multiplies a batch. JAX's own rule has no kernel for batches.

    If all members share a matrix, this is one product with more columns. Otherwise one product follows the other.
    """
    *matrix, columns = arguments
    if not any(is_batched[:-1]):
        _, inner, number = columns.shape
        side_by_side = jnp.moveaxis(columns, 0, 1)
        joined = side_by_side.reshape(inner, size * number)
        result = _multiply(*matrix, joined)
        by_member = result.reshape(-1, size, number)
        return jnp.moveaxis(by_member, 1, 0), True

    def multiply_member(member: jax.Array) -> jax.Array:
        operands = []
        for array, has_batch in zip(arguments, is_batched, strict=True):
            if has_batch:
                array = lax.dynamic_index_in_dim(array, member, keepdims=False)
            operands.append(array)
        return _multiply(*operands)

    members = jnp.arange(size)
    return lax.map(multiply_member, members), True


def _platform() -> str:
    """The platform on which arrays are put by default. Under a mesh these are several devices of one platform."""
    with jax.ensure_compile_time_eval():
        device, *_ = jnp.zeros(()).devices()
    return device.platform


@functools.cache
def _is_lowered_to_a_kernel() -> bool:
    """Whether this JAX calls a kernel for a matrix in CSR on a CPU."""
    shape = jax.ShapeDtypeStruct
    operands = (
        shape((1,), jnp.float32),
        shape((2,), jnp.int32),
        shape((1,), jnp.int32),
        shape((1, 1), jnp.float32),
    )
    cpu, *_ = jax.local_devices(backend='cpu')
    with jax.default_device(cpu):
        lowered = jax.jit(_plain).lower(*operands)
    return _CALL in lowered.as_text()
