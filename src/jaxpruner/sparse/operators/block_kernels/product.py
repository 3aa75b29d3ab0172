"""The product of rows with stored blocks in a kernel, and its derivatives: what `blocks.multiply` computes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner.sparse.operators import block_layout, blocks
from jaxpruner.sparse.operators.block_kernels import choosing, steps
from jaxpruner.sparse.operators.block_kernels.steps import Kernels


def multiply(
    rows: jax.Array,
    values: jax.Array,
    indices: jax.Array,
    *,
    outputs: int,
    probe: jax.Array | None = None,
    kernels: Kernels | None = None,
) -> jax.Array:
    """Multiplies rows `[n, inputs]` with a matrix of which blocks are stored; returns `[n, outputs]`.

    Products are added up in float32. Under `vmap` all products are one call of a kernel.

    Args:
      rows: `[n, inputs]`.
      values: `[groups, blocks, in, out]`.
      indices: int32`[groups, blocks]`.
      outputs: of the matrix, at most groups times `out`.
      probe: as in `blocks.multiply`; its norms are computed without a kernel.
      kernels: by default those for the default device.

    Raises:
      NotImplementedError: there is no kernel for it; `why_missing` says so beforehand.
    """
    dtype = jnp.result_type(rows, values)
    _, _, block_inputs, block_outputs = values.shape
    if kernels is None:
        block = block_inputs, block_outputs
        kernels = choosing.default_kernels(dtype, block, indices.size)
    rows = rows.astype(dtype)
    values = values.astype(dtype)
    padded = block_layout.pad_to_multiple(rows, 1, block_inputs)
    result: Any = _product(kernels, padded, values, indices, probe)
    return result[:, :outputs]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    kernels: Kernels,
    rows: jax.Array,
    values: jax.Array,
    indices: jax.Array,
    probe: jax.Array | None,
) -> jax.Array:
    """The product of rows `[n, blocks of inputs * in]`: `[n, groups * out]`."""
    del probe
    forward = steps.forward_steps(indices)
    return steps.product(kernels, rows, _flat(values), forward, len(values))


def _forward(kernels: Kernels, *operands: Any) -> tuple[jax.Array, Any]:
    return _product(kernels, *operands), operands


def _backward(kernels: Kernels, operands: Any, cotangents: jax.Array) -> Any:
    rows, values, indices, probe = operands
    groups, _, *block = values.shape
    block_inputs, block_outputs = block
    count, inputs = rows.shape
    blocks_of_inputs = inputs // block_inputs
    forward = steps.forward_steps(indices)
    of_blocks = steps.blocks_gradient(
        kernels, rows, cotangents, forward, (block_inputs, block_outputs)
    )
    of_values = of_blocks.reshape(values.shape)
    of_rows = _rows_gradient(kernels, cotangents, values, indices, blocks_of_inputs)
    norms = None
    if probe is not None:
        columns = rows.T.reshape(blocks_of_inputs, block_inputs, count)
        norms = blocks.norms_of_dense_gradient(columns, cotangents, groups)
        norms = norms.astype(probe.dtype)
    return of_rows, of_values, None, norms


_product.defvjp(_forward, _backward)


def _rows_gradient(
    kernels: Kernels,
    cotangents: jax.Array,
    values: jax.Array,
    indices: jax.Array,
    blocks_of_inputs: int,
) -> jax.Array:
    """The product with the transposed matrix. The blocks are transposed beforehand; they are few."""
    forward = steps.forward_steps(indices)
    backward = steps.transposed_steps(forward)
    transposed = _flat(values).swapaxes(1, 2)
    gradient = steps.product(kernels, cotangents, transposed, backward, blocks_of_inputs)
    # No step leads to inputs that no block reads, so a kernel leaves there what was in memory.
    none_read = jnp.zeros(blocks_of_inputs, bool)
    is_block_read = none_read.at[indices].set(True)
    block_inputs = values.shape[2]
    is_read = jnp.repeat(is_block_read, block_inputs)
    return jnp.where(is_read, gradient, 0)


def _flat(values: jax.Array) -> jax.Array:
    """`[groups, blocks, in, out]` as `[groups * blocks, in, out]`."""
    _, _, *block = values.shape
    return values.reshape(-1, *block)
