"""The largest scores of one array, of each of many, and of many together: counts in, masks out."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.mask_calculator.selection.ranking import select_each, select_jointly
from jaxpruner.mask_calculator.selection.scores import Scores, read


class Selected(NamedTuple):
    """What a selection found.

    >>> Selected(mask=jnp.array([1, 0]), threshold=jnp.float32(3)).threshold.shape
    ()
    """

    mask: jax.Array  # uint8, 1 = kept
    threshold: (
        jax.Array | None
    )  # one float for each ranking, at most the smallest score that is kept


def keep_largest(scores: jax.Array | Scores, count: jax.Array | int) -> jax.Array:
    """The mask of the `count` largest scores.

    Args:
      scores: float array of any shape, or `Scores`.
      count: unsigned scalar; 0 keeps nothing, the size or more keeps everything, NaN included. Otherwise NaN is never
        kept, even if fewer than `count` remain.

    Returns:
      uint8 array of the scores' shape, 1 = kept.

    Raises:
      ValueError: the count is negative; or the array is too large to count in 32 bits, and 64 are not enabled.

    >>> keep_largest(jnp.array([[3.0, 1.0], [2.0, 2.0]]), 2)
    Array([[1, 0],
           [1, 0]], dtype=uint8)
    """
    return keep_largest_each([scores], [count])[0].mask


def keep_largest_each(
    scores: Sequence[jax.Array | Scores],
    counts: Sequence[jax.Array | int],
    starts: Sequence[jax.Array | None] | None = None,
    in_rows: Sequence[bool] | None = None,
    apart: Sequence[bool] | None = None,
) -> list[Selected]:
    """The `count` largest scores of each of many arrays, which share their passes.

    Args:
      scores: float arrays of any shapes, or `Scores`.
      counts: for each array an unsigned scalar, as in `keep_largest`; for one in rows a scalar or one a row.
      starts: for each array where to look first: the threshold of an earlier selection (NaN or `None` for none). The
        result does not depend on it.
      in_rows: for each array whether each index of its first axis is a ranking of its own.
      apart: for each array whether devices that share it count their own parts, which needs it to be sharded along axes
        of the mesh as parameters are. What was pooled or reshaped is left to XLA, as everything is by default.

    Returns:
      For each array mask and threshold (a scalar, or a vector with one a row).

    Raises:
      ValueError: an array is too large to count in 32 bits, and 64 are not enabled.

    >>> first, second = keep_largest_each([jnp.array([1.0, 4.0]), jnp.array([[3.0, 2.0]])], [1, 2])
    >>> first.mask.tolist(), second.mask.tolist(), float(first.threshold) <= 4.0
    ([0, 1], [[1, 1]], True)
    """
    none = [None] * len(scores)
    flags = [tuple(map(bool, column or none)) for column in (in_rows, apart)]
    return _keep_largest_each(
        list(scores), [_as_count(count) for count in counts], list(starts or none), *flags
    )


@functools.partial(jax.jit, static_argnums=(3, 4))
def _keep_largest_each(
    scores: list, counts: list, starts: list, in_rows: tuple[bool, ...], apart: tuple[bool, ...]
) -> list[Selected]:
    arrays = [_with_rows(array, rows) for array, rows in zip(scores, in_rows, strict=True)]
    found: dict[int, tuple[jax.Array, jax.Array]] = {
        i: (jnp.zeros(array.shape, jnp.uint8), jnp.zeros(array.shape[0], array.dtype))
        for i, array in enumerate(arrays)
        if not array.size
    }
    # Arrays of one dtype are sought in one order of floats.
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        some = [i for i, array in enumerate(arrays) if array.dtype == dtype and array.size]
        if some:
            results = select_each(
                [arrays[i] for i in some],
                [counts[i] for i in some],
                [starts[i] for i in some],
                [apart[i] for i in some],
            )
            found.update(zip(some, results, strict=True))
    return [
        Selected(found[i][0].reshape(array.shape), found[i][1] if rows else found[i][1][0])
        for i, (array, rows) in enumerate(zip(scores, in_rows, strict=True))
    ]


def keep_largest_jointly(
    scores: Sequence[jax.Array | Scores],
    count: jax.Array | int,
    divisors: Sequence[jax.Array] | None = None,
    apart: bool = False,
) -> list[jax.Array]:
    """The masks of the `count` largest among the scores of many arrays, which are never put together.

    Args:
      scores: float arrays of any shapes, or `Scores`; ranked in their common dtype, ties in the order of the arrays.
      count: unsigned scalar, as in `keep_largest`.
      divisors: a positive, finite scalar for each array: they are ranked by `scores / divisor`, which is never written
        down: each pass translates its thresholds into those of each array.
      apart: as in `keep_largest_each`, for all arrays.

    Returns:
      A uint8 array for each array of scores.

    Raises:
      ValueError: the arrays are too large together to count in 32 bits, and 64 are not enabled.

    >>> keep_largest_jointly([jnp.array([1.0, 4.0]), jnp.array([3.0])], 2)
    [Array([0, 1], dtype=uint8), Array([1], dtype=uint8)]
    """
    return _keep_largest_jointly(
        list(scores), _as_count(count), None if divisors is None else list(divisors), apart
    )


@functools.partial(jax.jit, static_argnums=3)
def _keep_largest_jointly(
    scores: list, count: jax.Array | int, divisors: list | None, apart: bool
) -> list[jax.Array]:
    masks = [jnp.zeros(array.shape, jnp.uint8) for array in scores]
    filled = [i for i, array in enumerate(scores) if array.size]
    if not filled:
        return masks
    arrays = [_with_rows(scores[i], in_rows=False) for i in filled]
    scales = divisors and [lax.stop_gradient(divisors[i]) for i in filled]
    for i, mask in zip(filled, select_jointly(arrays, count, scales, apart), strict=True):
        masks[i] = mask.reshape(scores[i].shape)
    return masks


def _as_count(count: jax.Array | int) -> Any:
    """A count of Python's in as many bits as there are, since JAX would take it for an int32."""
    if not isinstance(count, int):
        return count
    if count < 0:
        raise ValueError(f'count must not be negative, got {count}')
    widest = jax.dtypes.canonicalize_dtype(np.uint64)
    return np.asarray(min(count, np.iinfo(widest).max), widest)


def _with_rows(array: jax.Array | Scores, in_rows: bool) -> jax.Array | Scores:
    array = lax.stop_gradient(array)  # masks have no derivative
    # Some floats of 8 bits have no infinity, which ends the search.
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize == 1:
        array = read(array).astype(jnp.float32)

    def with_axes(own: jax.Array) -> jax.Array:
        own = own if in_rows else own[None]
        return own if own.ndim > 1 else own[:, None]  # reductions need an axis

    return jax.tree.map(with_axes, array)
