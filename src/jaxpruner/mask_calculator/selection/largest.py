"""The largest scores of one array, of each of many, and of many together: counts in, masks out."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import passes, row_by_row, whole_numbers
from jaxpruner.mask_calculator.selection.masks import Selected
from jaxpruner.mask_calculator.selection.passes import LeafByLeaf, OverModel
from jaxpruner.mask_calculator.selection.scores import ScoresLike, read, sizes_of_rows
from jaxpruner.mask_calculator.selection.search import ToKeep


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['scores', 'count', 'start'],
    meta_fields=['is_stacked', 'count_per_device'],
)
@dataclasses.dataclass(frozen=True)
class Request:
    """Asks for the `count` largest scores of one array.

    Attributes:
      scores: float array of any shape, or `Scores`.
      count: unsigned scalar, as in `keep_largest`; for a stacked array a scalar or one a layer.
      start: where to look first on a CPU: the threshold of an earlier selection, NaN or `None` for none. The result
        does not depend on it.
      is_stacked: whether the first axis counts layers, each of which is a ranking of its own.
      count_per_device: whether devices that share the array count their own shards. It needs to be sharded along axes
        of the mesh, as parameters are. By default XLA divides the work, also of what was pooled or reshaped.

    >>> Request(jnp.array([1.0, 4.0]), 1).is_stacked
    False
    """

    scores: ScoresLike
    count: jax.Array | int
    start: jax.Array | None = None
    is_stacked: bool = False
    count_per_device: bool = False


def keep_largest(scores: ScoresLike, count: jax.Array | int) -> jax.Array:
    """Makes the mask of the `count` largest scores.

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
    return keep_largest_each([Request(scores, count)])[0].mask


def keep_largest_each(requests: Sequence[Request]) -> list[Selected]:
    """Selects the largest scores of each of many arrays.

    Args:
      requests: scores and counts.

    Returns:
      For each request mask and threshold (a scalar, or a vector with one a layer).

    Raises:
      ValueError: an array is too large to count in 32 bits, and 64 are not enabled.

    >>> requests = [Request(jnp.array([1.0, 4.0]), 1), Request(jnp.array([[3.0, 2.0]]), 2)]
    >>> first, second = keep_largest_each(requests)
    >>> first.mask.tolist(), second.mask.tolist(), float(first.threshold) <= 4.0
    ([0, 1], [[1, 1]], True)
    """
    counted = []
    for request in requests:
        counted.append(dataclasses.replace(request, count=_as_count(request.count)))
    return _keep_largest_each(counted)


@jax.jit
def _keep_largest_each(requests: list[Request]) -> list[Selected]:
    results: dict[int, Selected] = {}
    # Arrays of one dtype share their order of floats.
    by_dtype: dict[Any, dict[int, Request]] = {}
    for i, request in enumerate(requests):
        array = _with_rows(request.scores, request.is_stacked)
        if array.size:
            same_dtype = by_dtype.setdefault(array.dtype, {})
            same_dtype[i] = dataclasses.replace(request, scores=array)
        else:
            mask = jnp.zeros(array.shape, jnp.uint8)
            thresholds = jnp.zeros(array.shape[0], array.dtype)
            results[i] = Selected(mask, thresholds)
    for same_dtype in by_dtype.values():
        selected = _select_in_one_dtype(list(same_dtype.values()))
        results.update(zip(same_dtype, selected, strict=True))
    return [_like_request(request, results[i]) for i, request in enumerate(requests)]


def _like_request(request: Request, selected: Selected) -> Selected:
    """Gives a mask the shape of the scores, and one array one threshold."""
    mask = selected.mask.reshape(request.scores.shape)
    thresholds = selected.threshold
    return Selected(mask, thresholds if request.is_stacked else thresholds[0])


def _select_in_one_dtype(requests: list[Request]) -> list[Selected]:
    """Selects in arrays `[rows, …]` of one dtype, with a threshold for each row."""
    row_count = sum(request.scores.shape[0] for request in requests)
    # On a GPU, each trip of a `while_loop` waits for the host to read its condition. That takes longer than to read a
    # row.
    can_go_row_by_row = jax.default_backend() == 'cpu' or row_count == 1
    if jax.device_count() > 1 or not can_go_row_by_row:
        return _select_in_passes(requests)
    short_rows: dict[int, Request] = {}
    other: dict[int, Request] = {}
    for i, request in enumerate(requests):
        if row_by_row.has_many_short_rows(request.scores):
            short_rows[i] = request
        else:
            other[i] = request
    selected: dict[int, Selected] = {}
    if short_rows:
        results = _select_in_passes(list(short_rows.values()))
        selected.update(zip(short_rows, results, strict=True))
    if other:
        results = _select_row_by_row(list(other.values()))
        selected.update(zip(other, results, strict=True))
    return [selected[i] for i in range(len(requests))]


def _select_row_by_row(requests: list[Request]) -> list[Selected]:
    """Selects as `_select_in_one_dtype` does, each row by itself."""
    arrays = [request.scores for request in requests]
    counter = whole_numbers.counter_for(max(sizes_of_rows(arrays)))
    return row_by_row.select(arrays, _to_keep(requests, counter))


def _select_in_passes(requests: list[Request]) -> list[Selected]:
    """Selects as `_select_in_one_dtype` does, in passes that all rows share."""
    arrays = [request.scores for request in requests]
    per_device = [request.count_per_device for request in requests]
    ranking = LeafByLeaf(arrays, per_device)
    return passes.select(ranking, _to_keep(requests, ranking.counter))


def _to_keep(requests: list[Request], counter: jnp.dtype) -> ToKeep:
    """Makes vectors `[all rows]` of how many to keep, and of where to look first if any request says so."""
    counts, starts = [], []
    for request in requests:
        shape = request.scores.shape[:1]
        start = jnp.nan if request.start is None else request.start
        own_counts = jnp.asarray(request.count).astype(counter)
        own_starts = jnp.asarray(start).astype(request.scores.dtype)
        counts.append(jnp.broadcast_to(own_counts, shape))
        starts.append(jnp.broadcast_to(own_starts, shape))
    has_start = any(request.start is not None for request in requests)
    earlier = jnp.concatenate(starts) if has_start else None
    return ToKeep(jnp.concatenate(counts), earlier)


def keep_largest_jointly(
    scores: Sequence[ScoresLike],
    count: jax.Array | int,
    divisors: jax.Array | Sequence[jax.Array] | None = None,
    count_per_device: bool = False,
) -> list[jax.Array]:
    """Makes the masks of the `count` largest among the scores of many arrays, which are never concatenated.

    Args:
      scores: float arrays of any shapes, or `Scores`; ranked in their common dtype, ties in the order of the arrays.
      count: unsigned scalar, as in `keep_largest`.
      divisors: a positive, finite number for each array, which is ranked by `scores / divisor`. The quotients are never
        materialised: each pass translates its thresholds into those of each array.
      count_per_device: as in `Request`, for all arrays.

    Returns:
      A uint8 array for each array of scores.

    Raises:
      ValueError: the arrays are too large together to count in 32 bits, and 64 are not enabled.

    >>> keep_largest_jointly([jnp.array([1.0, 4.0]), jnp.array([3.0])], 2)
    [Array([0, 1], dtype=uint8), Array([1], dtype=uint8)]
    """
    if divisors is not None:
        divisors = jnp.asarray(divisors)
    return _keep_largest_jointly(list(scores), _as_count(count), divisors, count_per_device)


@functools.partial(jax.jit, static_argnums=3)
def _keep_largest_jointly(
    scores: list,
    count: jax.Array | int,
    divisors: jax.Array | None,
    count_per_device: bool,
) -> list[jax.Array]:
    masks = [jnp.zeros(array.shape, jnp.uint8) for array in scores]
    indices = [i for i, array in enumerate(scores) if array.size]
    arrays = [_with_rows(scores[i], is_stacked=False) for i in indices]
    if not arrays:
        return masks
    if divisors is not None:
        divisors = lax.stop_gradient(divisors[np.array(indices)])
        # XLA would compute them anew in the loop that reads them.
        divisors = control.compute_apart(jnp.positive, divisors)
    ranking = OverModel(arrays, divisors, count_per_device)
    target = jnp.asarray(count).astype(ranking.counter)[None]
    results = passes.select(ranking, ToKeep(target, earlier=None))
    for i, selected in zip(indices, results, strict=True):
        masks[i] = selected.mask.reshape(scores[i].shape)
    return masks


def _as_count(count: jax.Array | int) -> Any:
    """Gives a count of Python as many bits as there are, since JAX would take it for an int32."""
    if not isinstance(count, int):
        return count
    if count < 0:
        raise ValueError(f'count must not be negative, got {count}')
    widest = jax.dtypes.canonicalize_dtype(np.uint64)
    most = np.iinfo(widest).max
    return np.asarray(min(count, most), widest)


def _with_rows(array: ScoresLike, is_stacked: bool) -> ScoresLike:
    """Makes floats `[rows, …]` that have infinities, of at least two axes: reductions need one beside the rows."""
    array = lax.stop_gradient(array)  # masks have no derivative
    # Some floats of 8 bits have no infinity, which ends the search.
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize == 1:
        array = read(array).astype(jnp.float32)

    def with_axes(leaf: jax.Array) -> jax.Array:
        rows = leaf if is_stacked else leaf[None]
        return rows if rows.ndim > 1 else rows[:, None]

    return jax.tree.map(with_axes, array)
