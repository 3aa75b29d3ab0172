"""Activations pruned by magnitude inside a model: the largest of each example, or N of each M consecutive ones."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import (
    caller_warnings,
    mask_calculator,
    selection,
    sparsity_distributions,
    sparsity_types,
)
from jaxpruner import sparse_state as sparse_state_lib


def prune_act_unstruct(
    x: jax.Array,
    density: Any,
    *,
    batch_axes: int | Sequence[int] | None = 0,
    straight_through: bool = False,
) -> jax.Array:
    """Keeps the activations of largest magnitude in each example.

    Of an example's `size` activations `max(1, round(size * (1 - sparsity)))` are kept, where `sparsity = 1 - density`,
    in float32, as weights are counted: 1 of 10 at a density of 0.15, which float32 puts just below a half. Each index
    along the batch axes is an example of its own. Of equal magnitudes the lower index is kept, and NaN ranks lowest. A
    batch that is sharded along its batch axes stays where it is.

    Args:
      x: float array, the batch along axis 0 unless `batch_axes` says otherwise. An array of one dimension, or none, is
        one example.
      density: share kept, scalar in (0, 1]; 0.9 removes a tenth.
      batch_axes: the axis or axes that count examples; `None` where the whole array is one example, as inside
        `jax.vmap` and Equinox modules.
      straight_through: gradients pass everywhere, not only through what was kept.

    Returns:
      An array like `x`, zero where it was pruned.

    Raises:
      ValueError: a density outside (0, 1], an axis that does not exist, or batch axes that leave nothing to an example.
      TypeError: `x` holds no floats, the density is no number, or an axis no whole number.

    >>> prune_act_unstruct(jnp.array([[-4.0, 1.0, 3.0, 2.0], [1.0, -1.0, 0.5, 2.0]]), 0.5)
    Array([[-4.,  0.,  3.,  0.],
           [ 1.,  0.,  0.,  2.]], dtype=float32)
    """
    x = _as_floats(x)
    sparsity_distributions.check_density(density, 'density')
    given, rank = read_axes(batch_axes), max(x.ndim, 1)
    axes = tuple(sorted({axis % rank for axis in given})) if x.ndim > 1 else ()
    if any(not -rank <= axis < rank for axis in given) or (axes and len(axes) == rank):
        raise ValueError(
            f'batch_axes={batch_axes} must be axes of activations of shape {x.shape}, and leave one to each example'
        )
    mask = _largest_of_each(jax.lax.stop_gradient(x), 1 - density, axes)
    return _masked(x, mask, straight_through)


@functools.partial(jax.jit, static_argnames='axes')
def _largest_of_each(x: jax.Array, sparsity: Any, axes: tuple[int, ...]) -> jax.Array:
    """Makes the mask of the largest magnitudes, one ranking for each index of the batch axes."""
    scores = jnp.moveaxis(jnp.abs(x), axes, range(len(axes)))
    batch, example = scores.shape[: len(axes)], scores.shape[len(axes) :]
    rows = scores.reshape(math.prod(batch), *example)
    count = selection.number_to_keep(math.prod(example), sparsity)
    mask = selection.keep_largest(rows, jnp.broadcast_to(count, rows.shape[:1]))
    return jnp.moveaxis(mask.reshape(scores.shape), range(len(axes)), axes)


def prune_act_struct(
    x: jax.Array, sparsity_pattern: Any, *, axis: int | None = None, straight_through: bool = False
) -> jax.Array:
    """Keeps the n activations of largest magnitude of each m consecutive ones along an axis.

    Of equal magnitudes the higher index is kept, and NaN ranks lowest. Where m does not divide the axis, the last group
    is shorter and keeps min(n, its length), with a warning.

    Args:
      x: float array of at least one dimension.
      sparsity_pattern: `(n, m)`, `'n:m'` or an `NByM`; (2, 4) keeps half.
      axis: the axis along which groups lie; by default that of the `NByM`, or the last, the features.
      straight_through: gradients pass everywhere, not only through what was kept.

    Returns:
      An array like `x`, zero where it was pruned.

    Raises:
      ValueError: n > m, one of them is not positive, the axis does not exist or is not that of the `NByM`.
      TypeError: `x` holds no floats, or the pattern is no pair of whole numbers.

    >>> prune_act_struct(jnp.array([[-4.0, 1.0, 3.0, 2.0]]), (2, 4))
    Array([[-4.,  0.,  3.,  0.]], dtype=float32)
    """
    return keep_groups(x, sparsity_types.parse_n_by_m(sparsity_pattern, axis), straight_through)


def keep_groups(
    x: Any, pattern: sparsity_types.NByM, straight_through: bool, where: str = ''
) -> jax.Array:
    """Prunes as `prune_act_struct`, with settings that have been checked; the warning begins with `where`."""
    x = _as_floats(x)
    if rest := pattern.partial_group(x.shape, 'x'):
        caller_warnings.warn(
            f'{where}activations of shape {x.shape} have length {x.shape[pattern.axis]} along axis {pattern.axis}, '
            f'which m={pattern.m} does not divide: the last group keeps {min(pattern.n, rest)} of {rest}'
        )
    scores = jnp.abs(jax.lax.stop_gradient(x))
    # Any sparsity but 0 means N:M.
    mask = mask_calculator.topk_n_by_m_mask_calculator(scores, 1.0, pattern)
    return _masked(x, mask, straight_through)


def read_axes(batch_axes: Any) -> tuple[int, ...]:
    """Reads the axes that count examples; `None` means none."""
    if batch_axes is None:
        return ()
    axes = batch_axes if isinstance(batch_axes, list | tuple) else [batch_axes]
    return tuple(map(operator.index, axes))


def _as_floats(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(
            f'activations must be floats, got {x.dtype}{list(x.shape)}; convert them with x.astype(…)'
        )
    return x


def _masked(x: jax.Array, mask: jax.Array, straight_through: bool) -> jax.Array:
    if straight_through:
        return sparse_state_lib.straight_through(x, mask)
    return jnp.where(mask != 0, x, jnp.zeros_like(x))


# The spellings of JAX-Pruning's document.
puning_act_unstruct = prune_act_unstruct
pruning_act_struct = prune_act_struct
