"""Finds the thresholds of all rankings together, in passes that read every array.

So it goes on accelerators, which would have to be asked about each row, on several devices, with many short rows, and
where all arrays are one ranking. What is ranked is each row of each array (`LeafByLeaf`), or all arrays together
(`OverModel`).

A pass reads every array once, in its own shape, for several thresholds at a time. On one device an array may be viewed
in shares for threads (`counting`). On several devices each counts its own shard of an array, and the counts are summed
(`counts_over_devices`): scores are never sent, and no axis that devices share is reshaped.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import brackets, masks, search, whole_numbers
from jaxpruner.mask_calculator.selection.brackets import Brackets, Order
from jaxpruner.mask_calculator.selection.counting import (
    Predicates,
    between_before,
    count_array,
    reaching,
)
from jaxpruner.mask_calculator.selection.counts_over_devices import count_by_xla, count_per_device
from jaxpruner.mask_calculator.selection.masks import Selected
from jaxpruner.mask_calculator.selection.scores import (
    LONGEST_BUFFER,
    RankedArray,
    RowCursor,
    Rows,
    ScoresLike,
    rows_of,
    sizes_of_rows,
)
from jaxpruner.mask_calculator.selection.search import Cut, ToKeep

# Arrays are copied one after another where ties are cut, if the largest is at most this share of the model.
_SHARE_TO_COPY = 1 / 16
# Threads share an array if it is at least this share of all; else each takes arrays.
_SHARE_TO_SPLIT = 1 / 16
# How many floats of the quotient's dtype may lie between it and `value * scale`, as a first guess.
_NEAR = 8


class LeafByLeaf:
    """Each row of each array is a ranking of its own.

    Arrays are floats `[rows, …]` of one dtype, or `Scores`, none of them empty.
    """

    member_sizes = None  # each ranking is within one array

    def __init__(self, arrays: list[ScoresLike], per_device: list[bool]):
        self.arrays = []
        for i, rows in enumerate(rows_of(arrays)):
            self.arrays.append(RankedArray(arrays[i], rows, rows, per_device[i]))
        self.order = Order.from_dtype(arrays[0].dtype)
        self.sizes = sizes_of_rows(arrays)
        self.counter = whole_numbers.counter_for(max(self.sizes))

    def thresholds(self, float_ranks: jax.Array) -> jax.Array:
        """Makes what each row has to reach from float ranks `[n, columns]`."""
        return self.order.value(float_ranks)

    def count_reaching(self, thresholds: jax.Array) -> jax.Array:
        """Counts the scores that reach thresholds, `[n, columns]`."""
        return count_reaching(self.arrays, thresholds, self.counter)

    def sampled_probes(self, count: jax.Array) -> None:
        """Takes no sample. Accelerators do not call this; elsewhere, rows are short here or sharded."""
        del count


class OverModel:
    """All arrays are one ranking, by their scores over a scale; ties in the order of the arrays.

    Arrays are floats `[1, …]` or `Scores`, none of them empty; they are the members of the ranking. Quotients are never
    materialised: each pass translates its thresholds to those of each array.
    """

    def __init__(self, arrays: list[ScoresLike], divisors: jax.Array | None, per_device: bool):
        dtypes = [array.dtype for array in arrays]
        if divisors is None:
            dtype = jnp.result_type(*dtypes)
            self.scales = jnp.ones(len(arrays), dtype)
        else:
            dtype = jnp.result_type(*dtypes, divisors)
            self.scales = divisors.astype(dtype)
        has_one_dtype = set(dtypes) == {dtype}
        self._has_one_threshold = divisors is None and has_one_dtype
        self.arrays = []
        for i, rows in enumerate(rows_of(arrays)):
            threshold_rows = Rows(None, 1) if self._has_one_threshold else rows
            self.arrays.append(RankedArray(arrays[i], rows, threshold_rows, per_device))
        self.order = Order.from_dtype(dtype)
        self.member_sizes = sizes_of_rows(arrays)
        self.sizes = [sum(self.member_sizes)]
        self.counter = whole_numbers.counter_for(self.sizes[0])

    def thresholds(self, float_ranks: jax.Array) -> jax.Array:
        """Makes what arrays have to reach from float ranks `[1, columns]`: `[1 or arrays, columns]`."""
        values = self.order.value(float_ranks)
        if self._has_one_threshold:
            return values
        dtypes = [array.scores.dtype for array in self.arrays]
        return _smallest_reaching(dtypes, self.scales, values[0])

    def count_reaching(self, thresholds: jax.Array) -> jax.Array:
        """Counts the scores of each array that reach thresholds, `[arrays, columns]`."""
        return count_reaching(self.arrays, thresholds, self.counter)

    def sampled_probes(self, count: jax.Array) -> jax.Array | None:
        """Makes probes `[1, 3]` around the threshold of a sample of all arrays."""
        scores = [array.scores for array in self.arrays]
        return search.sampled_jointly(scores, self.scales, count, self.order)


def select(ranking: LeafByLeaf | OverModel, to_keep: ToKeep) -> list[Selected]:
    """Selects the largest scores of each ranking.

    Args:
      ranking: `n` of them.
      to_keep: of each; counts are of the dtype `ranking.counter`.

    Returns:
      For each array its mask; `threshold` is that of each row.
    """
    cut = search.find_cut(ranking, to_keep)
    if isinstance(ranking, OverModel) and jax.device_count() == 1:
        ends = _ends_by_members(ranking, cut)
    else:
        ends = _ends_by_counts(ranking, cut)
    keeps_everything = to_keep.count >= np.array(ranking.sizes, ranking.counter)
    keeps_everything = jnp.broadcast_to(keeps_everything, ends.shape)
    return masks.masks_of_arrays(ranking.arrays, cut.thresholds, ends, keeps_everything)


def _ends_by_members(ranking: OverModel, cut: Cut) -> jax.Array:
    """Finds the index in each array after the last tie that is kept, on one device.

    Ties of earlier arrays are kept first, so that at most one array is cut. Only that one is read.
    """
    arrays = [array.scores for array in ranking.arrays]
    sizes = jnp.array(ranking.member_sizes, ranking.counter)
    longest_to_copy = min(LONGEST_BUFFER, _SHARE_TO_COPY * ranking.sizes[0])

    def find(ends: jax.Array, arrays: list, cut: Cut) -> jax.Array:
        ties, ties_to_keep = _by_member(cut)
        columns = cut.thresholds.shape[1]
        thresholds = jnp.broadcast_to(cut.thresholds, (len(arrays), columns))

        def cut_array(row: jax.Array, ends: jax.Array) -> jax.Array:
            cursor = RowCursor.at_row(arrays, row, ranking.counter)
            if cursor.longest <= longest_to_copy:
                lengths = [cursor.longest]
                cursor = cursor.copied(ranking.order.dtype, lengths, jnp.int32(0))
            end = masks.end_in_row(ends, cursor, thresholds[row], ties_to_keep[row])
            return lax.dynamic_update_index_in_dim(ends, end, row, 0)

        def leave_array(row: jax.Array, ends: jax.Array) -> jax.Array:
            del row
            return ends

        def visit_array(row: jax.Array, ends: jax.Array) -> jax.Array:
            is_cut = (ties_to_keep[row] > 0) & (ties_to_keep[row] < ties[row])
            return lax.cond(is_cut, cut_array, leave_array, row, ends)

        # If no tie is kept, the end is 0; if all are, it is that of the array. Under `vmap`, models are cut in
        # different arrays, so that the loop goes over all of them.
        ends = jnp.where(ties_to_keep > 0, ends, 0)
        return lax.fori_loop(0, len(arrays), visit_array, ends)

    return control.run_once(cut.cuts_ties[0], find, sizes, arrays, cut)


def _ends_by_counts(ranking: LeafByLeaf | OverModel, cut: Cut) -> jax.Array:
    """Finds the end in each row of all arrays as `_ends_by_members` does, by counts alone."""
    row_sizes = ranking.member_sizes or ranking.sizes
    sizes = jnp.array(row_sizes, ranking.counter)

    def find(ends: jax.Array, cut: Cut) -> jax.Array:
        del ends
        ties, ties_to_keep = _by_member(cut)
        # These brackets hold indices in flat order, not float ranks. Counts have to fall along a bracket, so that the
        # indices are counted from the end.
        zeros = jnp.zeros_like(sizes)
        backward = Brackets.between(zeros, sizes, ties, zeros, ties_to_keep)

        def as_ends(from_end: jax.Array) -> jax.Array:
            return sizes[:, None] - from_end

        def count(ends: jax.Array) -> jax.Array:
            thresholds = cut.thresholds
            return count_between_before(ranking.arrays, thresholds, ends, ranking.counter)

        # Ties lie scattered: no even division has to come first.
        settled = brackets.settle(
            backward.without_even_probes(),
            as_ends,
            count,
            probe_count=search.probes_per_pass(),
            iterations=search.iterations_for(max(row_sizes).bit_length()),
        )
        # If no tie is kept, the end is 0.
        return jnp.where(ties_to_keep > 0, sizes - settled.low[:, 0], 0)

    return control.run_once(jnp.any(cut.cuts_ties), find, sizes, cut)


def _by_member(cut: Cut) -> tuple[jax.Array, jax.Array]:
    """Finds the ties of each member, and how many of them are kept; of each ranking if there are no members."""
    if cut.member_counts is None:
        return cut.ties, cut.ties_to_keep
    ties = cut.member_counts[:, 0] - cut.member_counts[:, 1]
    sum_up_to, sum_before = masks.sum_by_pairs(ties, np.arange(len(ties)))
    kept_up_to = jnp.minimum(sum_up_to, cut.ties_to_keep)
    kept_before = jnp.minimum(sum_before, cut.ties_to_keep)
    return ties, kept_up_to - kept_before


def count_reaching(
    arrays: Sequence[RankedArray],
    thresholds: jax.Array,
    counter: jnp.dtype,
) -> jax.Array:
    """Counts how many scores of each row reach each threshold; NaN reaches none.

    Args:
      arrays: whose scores are counted.
      thresholds: table `[rows, columns]`.
      counter: unsigned dtype that holds the counts.

    Returns:
      Counts `[all rows, columns]`.
    """
    return _count(reaching, arrays, (thresholds,), counter)


def count_between_before(
    arrays: Sequence[RankedArray],
    thresholds: jax.Array,
    ends: jax.Array,
    counter: jnp.dtype,
) -> jax.Array:
    """Counts how many scores of each row lie between two thresholds and before each end in flat order.

    Column 0 of the thresholds `[rows, 2 or more]` is to be reached, column 1 not; ends are `[all rows, columns]` of the
    counter's dtype. All else is as in `count_reaching`.
    """
    return _count(between_before, arrays, (thresholds, ends), counter)


def _count(
    predicates: Predicates,
    arrays: Sequence[RankedArray],
    tables: tuple[jax.Array, ...],
    counter: jnp.dtype,
) -> jax.Array:
    if jax.device_count() == 1:
        sizes = [array.scores.size for array in arrays]
        may_split = max(sizes) >= _SHARE_TO_SPLIT * sum(sizes)
        counts = []
        for array in arrays:
            counts.append(_count_on_one_device(predicates, counter, may_split, array, tables))
        return jnp.concatenate(counts)
    counts_of: dict[int, jax.Array] = {}
    for count, is_per_device in ((count_per_device, True), (count_by_xla, False)):
        indices = [i for i in range(len(arrays)) if arrays[i].per_device is is_per_device]
        if not indices:
            continue
        scores = tuple(arrays[i].scores for i in indices)
        bounds = tuple(_bounds(arrays[i], tables) for i in indices)
        table = count(predicates, jnp.dtype(counter), scores, bounds)
        ends = np.cumsum([array.shape[0] for array in scores])
        counts_of_arrays = jnp.split(table, ends[:-1])
        counts_of.update(zip(indices, counts_of_arrays, strict=True))
    return jnp.concatenate([counts_of[i] for i in range(len(arrays))])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # traced once for all arrays of one shape
def _count_on_one_device(
    predicates: Predicates,
    counter: jnp.dtype,
    may_split: bool,
    array: RankedArray,
    tables: tuple[jax.Array, ...],
) -> jax.Array:
    bounds = _bounds(array, tables)
    return count_array(predicates, counter, array.scores, bounds, may_split)


def _bounds(array: RankedArray, tables: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Takes the bounds of an array from tables of thresholds, and of ends."""
    thresholds, *ends = tables
    bounds = [array.thresholds(thresholds)]
    for table in ends:
        bounds.append(array.rows.take(table))
    return tuple(bounds)


def _smallest_reaching(
    dtypes: Sequence[jnp.dtype], scales: jax.Array, values: jax.Array
) -> jax.Array:
    """Finds the smallest floats of each dtype that reach some values when they are divided by the scale beside it.

    Returns `[arrays, values]` in the dtype of the values, which holds each of them exactly.
    """
    thresholds = jnp.broadcast_to(values, (len(dtypes), len(values)))
    for dtype in dict.fromkeys(dtypes):
        indices = np.array([i for i in range(len(dtypes)) if dtypes[i] == dtype])
        of_each_array = scales[indices][:, None]
        scale = jnp.broadcast_to(of_each_array, (len(indices), len(values)))
        smallest = _smallest_quotients_reaching(Order.from_dtype(dtype), scale, values)
        thresholds = thresholds.at[indices].set(smallest.astype(values.dtype))
    return thresholds


def _smallest_quotients_reaching(order: Order, scale: jax.Array, values: jax.Array) -> jax.Array:
    """Finds floats `[arrays, values]`. Division rounds, so that value times scale is only near; a search begins there.

    All divisions stand in the loop. Elsewhere XLA may multiply by a reciprocal instead, which rounds in another way,
    and a threshold that was counted with would not be found again.
    """
    near = order.float_rank((values * scale).astype(order.dtype))
    # `low` does not reach the value; `high` does, or stands after all numbers.
    low = jnp.full_like(near, order.lowest - 1)
    high = jnp.full_like(near, order.highest + 1)

    def halve(state):
        iteration, low, high = state
        middle = low + (high - low) // 2
        below_or_middle = jnp.where(iteration == 1, near - _NEAR, middle)
        guess = jnp.where(iteration == 0, near + _NEAR, below_or_middle)
        is_inside = (guess > low) & (guess < high)
        probe = jnp.where(is_inside, guess, middle)
        is_open = high - low > 1
        quotient = order.value(probe).astype(values.dtype) / scale
        is_enough = quotient >= values
        low = jnp.where(is_open & ~is_enough, probe, low)
        high = jnp.where(is_open & is_enough, probe, high)
        return iteration + 1, low, high

    def is_any_open(state):
        _, low, high = state
        return jnp.any(high - low > 1)

    start = jnp.int32(0), low, high
    _, _, high = lax.while_loop(is_any_open, halve, start)
    return order.value(high)
