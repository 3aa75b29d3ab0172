"""A row of a table of masks: the library's against the same mask as one would write it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.compiled import temporary_bytes
from benchmarks.report import Row
from benchmarks.timing import bound, interleaved, ratio

SECONDS_FOR_SORTING = 12
COLUMNS = (
    'milliseconds',
    'passes over the memory',
    'sorting takes times as long',
    'temporary bytes per weight',
)

MaskFn = Callable[[jax.Array], jax.Array]


def row_of(
    name: str,
    ours: MaskFn,
    by_sorting: MaskFn,
    x: jax.Array,
    rounds: int,
    compared_on: jax.Array | None = None,
) -> Row:
    """Times both masks of some scores.

    Args:
      name: the row's.
      ours: from scores to a mask.
      by_sorting: likewise.
      x: the scores.
      rounds: of the timing.
      compared_on: scores for which the masks have to be the same; by default `x`.
    """
    tried = x if compared_on is None else compared_on
    if not jnp.array_equal(jax.jit(ours)(tried), jax.jit(by_sorting)(tried)):
        raise AssertionError(f'the mask by sorting is another: {name}')
    mine = bound(ours, x)
    times = interleaved({'ours': mine, 'pass': bound(jnp.max, x)}, rounds)
    slow = interleaved({'ours': mine, 'sorting': bound(by_sorting, x)}, rounds, SECONDS_FOR_SORTING)
    return Row(
        name,
        (
            times['ours'].milliseconds,
            ratio(times['ours'], times['pass']),
            ratio(slow['sorting'], slow['ours']),
            temporary_bytes(ours, x) / x.size,
        ),
    )
