"""The largest scores, exactly: counts go in, masks come out, and nothing is sorted.

A mask needs one number, the threshold that exactly as many scores reach as are to be kept. A pass over the scores
counts how many reach a threshold, and so tells on which side of it the right one lies. Each pass tries three. The first
stand near the threshold of an earlier selection, or where a sample of the scores has it, the next where the count
should be right if it fell evenly between those that are known (`_likely`). The search ends when a count is right, or
when no float lies between a threshold that enough scores reach and one that too few reach. Then what lies between them
is equal: ties. The same search, over indices in flat order, finds where to cut the ties.

    threshold      1   2   3   5   above       the scores 5 1 3 3 2, of which two are to be kept:
    reaching it    5   4   3   1   0           5, and of the ties 3 and 3 the first

The result does not depend on where the search begins. NaN ranks lowest and is kept only where everything is; -0.0
equals 0.0; of equal scores those of lower index are kept. On a CPU, XLA compares denormal numbers (but for float16) as
zero, so that these are ties of zero.

Devices that share an array count what they hold, and send each other counts alone.
"""

import dataclasses
import fractions
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpruner import explicit_meshes
from jaxpruner import tree as tree_lib

_EXACT_IN_FLOAT32 = 2**24  # up to here a float32 holds every whole number

# What a CPU reads and threads share; all this changes times alone.
_WORTH_SHARING = 2**17  # scores that several threads read
_SHARES = 64
_LONGEST_COPY = (
    2**22
)  # scores of an array that is copied, so that arrays of similar lengths share a program
_SHORT_ROW = 2**12  # scores of rows that are searched together
_BITS_KEPT = 7  # to which an earlier threshold is trusted


@functools.partial(jax.tree_util.register_dataclass, data_fields=['weights'], meta_fields=['of'])
@dataclasses.dataclass(frozen=True)
class LazyScores:
    """The scores `of(weights)`, computed wherever they are read, so that they take no memory.

    Attributes:
      weights: a pytree that begins with an array of the shape of the scores; others have it, too, or no axes.
      of: an elementwise function; hashable.

    >>> read(LazyScores(jnp.array([-2.0, 1.0]), jnp.abs))
    Array([2., 1.], dtype=float32)
    """

    weights: Any
    of: Callable[[Any], jax.Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scores."""
        return jax.tree.leaves(self.weights)[0].shape

    @property
    def dtype(self) -> Any:
        """The dtype of the scores."""
        return jax.eval_shape(read, self).dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of scores."""
        return math.prod(self.shape)


def read(scores: jax.Array | LazyScores) -> jax.Array:
    """Computes lazy scores; an array stands for itself."""
    return scores.of(scores.weights) if isinstance(scores, LazyScores) else scores


def says(**facts: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a method attributes that say how it scores or ranks; a method that overrides it has none.

    >>> @says(of_each_weight=jnp.abs)
    ... def calculate_scores(self, params): ...
    >>> calculate_scores.of_each_weight is jnp.abs
    True
    """

    def mark(function):
        for name, fact in facts.items():
            setattr(function, name, fact)
        return function

    return mark


def lazily(of: Callable[[jax.Array], jax.Array], weights: Any) -> Any:
    """Scores an array by an elementwise function: lazily if it holds floats, `None` if it holds no numbers.

    >>> lazily(jnp.abs, jnp.array([-2.0])).shape, lazily(jnp.abs, None)
    ((1,), None)
    """
    dtype = getattr(weights, 'dtype', None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.number):
        return None
    return LazyScores(weights, of) if jnp.issubdtype(dtype, jnp.floating) else of(weights)


def is_score_leaf(node: Any) -> bool:
    """Whether a node of a tree of scores is a leaf that JAX takes for none.

    >>> is_score_leaf(None)
    True
    """
    return node is None or isinstance(node, LazyScores)


def counter_for(size: int) -> jnp.dtype:
    """Returns the dtype that counts to `size`: uint32, or uint64 where that is too short.

    Raises:
      ValueError: it takes uint64, which JAX has not been asked for.

    >>> counter_for(2**31)
    dtype('uint32')
    """
    if size < 2**32:
        return jnp.dtype('uint32')
    if not jax.config.jax_enable_x64:
        raise ValueError(
            f'{size} scores cannot be ranked together in 32 bits; at most {2**32 - 1} can: split the leaf, rank per '
            "layer, or call jax.config.update('jax_enable_x64', True) first"
        )
    return jnp.dtype('uint64')


def number_to_keep(size: int, sparsity: jax.Array | float) -> jax.Array:
    """Computes how many of `size` scores a sparsity keeps: `max(1, round(size * (1 - sparsity)))`.

    The product is rounded half to even, in float32 up to 2^24 scores (as JaxPruner does) and in whole numbers above,
    where float32 would miss the count.

    Args:
      size: number of scores.
      sparsity: share to remove, in [0, 1]; taken as float32. An array gives one number for each.

    Returns:
      Numbers of the dtype that counts to `size`.

    Raises:
      ValueError: it takes 64 bits, which are not enabled.

    >>> number_to_keep(10, jnp.array([0.0, 0.25, 1.0])).tolist()
    [10, 8, 1]
    """
    counter = counter_for(size)
    sparsity = jnp.asarray(sparsity, jnp.float32)
    if size <= _EXACT_IN_FLOAT32:
        kept = jnp.round(size * (1 - sparsity)).astype(counter)
    else:
        whole = jnp.array(1 << jnp.iinfo(counter).bits - 1, counter)
        kept = _multiply_round(jnp.array(size, counter), whole - _fixed_point(sparsity, counter))
    return jnp.maximum(kept, jnp.array(min(size, 1), counter))


def number_to_keep_on_host(size: int, sparsity: float) -> int:
    """Computes `number_to_keep` from Python's numbers: nothing is computed on a device.

    >>> number_to_keep_on_host(10, 0.25)
    8
    """
    if size <= _EXACT_IN_FLOAT32:
        kept = int(np.round(np.float32(size) * (np.float32(1) - np.float32(sparsity))))
    else:
        whole = 1 << (31 if size < 2**32 else 63)
        removed = round(float(np.float32(sparsity)) * whole)
        kept = round(fractions.Fraction(size * (whole - removed), whole))
    return max(kept, min(size, 1))


def count_true(flags: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Counts the flags that are set over some axes.

    >>> count_true(jnp.array([[True, False], [True, True]]), (1,)).tolist()
    [1, 2]
    """
    return jnp.sum(flags, axes, dtype=counter_for(flags.size))


def share_of(count: jax.Array, share: jax.Array | float, most: int) -> jax.Array:
    """Computes `round(count * share)`, half to even, as exactly as `number_to_keep`.

    Args:
      count: unsigned.
      share: in [0, 1]; taken as float32.
      most: what the count cannot exceed.

    >>> int(share_of(jnp.uint32(192), 0.3, most=640))
    58
    """
    share = jnp.asarray(share, jnp.float32)
    in_float32 = jnp.round(count.astype(jnp.float32) * share).astype(count.dtype)
    if most <= _EXACT_IN_FLOAT32:
        return in_float32
    in_whole_numbers = _multiply_round(count, _fixed_point(share, count.dtype))
    return jnp.where(count <= _EXACT_IN_FLOAT32, in_float32, in_whole_numbers)


def _fixed_point(share, counter):
    """Writes a share in [0, 1] as a whole number of 2^-31 (2^-63): exact for every float32 from 2^-7 up."""
    return jnp.round(share * float(1 << jnp.iinfo(counter).bits - 1)).astype(counter)


def _multiply_round(count, share):
    """Computes `round(count * share)`, half to even, of a share in fixed point: by halves, as on paper."""
    bits = jnp.iinfo(count.dtype).bits
    low, high = lambda x: x & (1 << bits // 2) - 1, lambda x: x >> bits // 2
    lowest = low(count) * low(share)
    crosses = high(count) * low(share), low(count) * high(share)
    middle = high(lowest) + low(crosses[0]) + low(crosses[1])
    upper = high(count) * high(share) + high(crosses[0]) + high(crosses[1]) + high(middle)
    lower = low(middle) << bits // 2 | low(lowest)
    product, rest = upper << 1 | lower >> bits - 1, lower << 1
    half = jnp.array(1 << bits - 1, count.dtype)
    return product + ((rest > half) | ((rest == half) & (product % 2 == 1))).astype(count.dtype)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['scores', 'count', 'start'],
    meta_fields=['is_stacked'],
)
@dataclasses.dataclass(frozen=True)
class Request:
    """Asks for the `count` largest scores of one array.

    Attributes:
      scores: array of any shape, or `LazyScores`. What is no float, or has eight bits, is ranked as float32.
      count: 0 keeps nothing; the size or more keeps everything, NaN included. For a stack one number, or one a layer.
      start: where to look first, the threshold of an earlier selection (of each layer); NaN or `None` for none.
      is_stacked: whether the first axis counts layers, each of which is a ranking of its own.

    >>> Request(jnp.array([1.0, 4.0]), 1).is_stacked
    False
    """

    scores: jax.Array | LazyScores
    count: jax.Array | int
    start: jax.Array | None = None
    is_stacked: bool = False


class Selected(NamedTuple):
    """The result of a selection.

    >>> Selected(mask=jnp.array([1, 0]), threshold=jnp.float32(3)).threshold.shape
    ()
    """

    mask: jax.Array  # uint8, 1 = kept
    threshold: jax.Array  # a float, one a layer; at most the smallest score that is kept


def keep_largest(scores: jax.Array | LazyScores, count: jax.Array | int) -> jax.Array:
    """Makes the uint8 mask of the `count` largest scores, 1 = kept.

    >>> keep_largest(jnp.array([[3.0, 1.0], [2.0, 2.0]]), 2)
    Array([[1, 0],
           [1, 0]], dtype=uint8)
    """
    return keep_largest_each([Request(scores, count)])[0].mask


def keep_largest_each(requests: Sequence[Request]) -> list[Selected]:
    """Selects the largest scores of each of many arrays.

    Raises:
      ValueError: an array is too large to count in 32 bits, and 64 are not enabled.

    >>> requests = [Request(jnp.array([1.0, 4.0]), 1), Request(jnp.array([[3.0, 2.0]]), 2)]
    >>> first, second = keep_largest_each(requests)
    >>> first.mask.tolist(), second.mask.tolist(), float(first.threshold) <= 4.0
    ([0, 1], [[1, 1]], True)
    """
    requests = list(requests)
    if tree_lib.has_traced(requests):
        return _keep_largest_each(requests)
    # A program of all would be compiled anew for each model; leaves of one shape share one.
    return [_keep_largest_each([request])[0] for request in requests]


def keep_largest_jointly(
    scores: Sequence[jax.Array | LazyScores],
    count: jax.Array | int,
    divisors: jax.Array | Sequence[jax.Array] | None = None,
) -> list[jax.Array]:
    """Makes the masks of the `count` largest among the scores of many arrays, which are never concatenated.

    Args:
      scores: arrays of any shapes, or `LazyScores`; ranked in their common dtype, ties in the order of the arrays.
      count: as in `Request`.
      divisors: a positive, finite number for each array, which is ranked by `scores / divisor`.

    Returns:
      A uint8 array for each array of scores.

    Raises:
      ValueError: the arrays are too large together to count in 32 bits, and 64 are not enabled.

    >>> keep_largest_jointly([jnp.array([1.0, 4.0]), jnp.array([3.0])], 2)
    [Array([0, 1], dtype=uint8), Array([1], dtype=uint8)]
    """
    divisors = None if divisors is None else list(divisors)
    return _keep_largest_jointly(list(scores), count, divisors)


def with_automatic_axes(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Compiles a function; how arrays on explicit axes of a mesh are shared inside is left to the compiler.

    Args:
      function: of a list of pytrees; a mask in its results lies as the first array of its tree does.
    """

    @jax.jit
    def call(trees, *others):
        explicit = [
            leaf for leaf in jax.tree.leaves(trees) if explicit_meshes.has_explicit_axes(leaf)
        ]
        if not explicit:
            return function(trees, *others)
        whole = NamedSharding(jax.typeof(explicit[0]).sharding.mesh, PartitionSpec())
        places = []
        for tree in trees:
            first = jax.tree.leaves(tree)[0]
            has_axes = explicit_meshes.has_explicit_axes(first)
            place = jax.typeof(first).sharding if has_axes else whole
            both: Any = Selected(place, whole)  # pyright: ignore[reportArgumentType]
            places.append(both if isinstance(tree, Request) else place)
        return jax.sharding.auto_axes(function, out_sharding=places)(trees, *others)

    return call


@with_automatic_axes
def _keep_largest_each(requests):
    arrays = [_as_rows(request.scores, request.is_stacked) for request in requests]
    shapes = [jax.eval_shape(read, array) for array in arrays]
    results: list[Any] = [None] * len(arrays)
    for i, shape in enumerate(shapes):
        if not shape.size:
            threshold = jnp.zeros(shape.shape[:1] if requests[i].is_stacked else (), shape.dtype)
            results[i] = Selected(jnp.zeros(requests[i].scores.shape, jnp.uint8), threshold)
    for members in _groups(shapes):
        own = [arrays[i] for i in members]
        rows = [shapes[i].shape[0] for i in members]
        lengths = [_length(shapes[i]) for i in members]
        counter = counter_for(max(lengths))

        def column(values, dtype, rows=rows):
            values = [jnp.asarray(value).astype(dtype) for value in values]
            return jnp.concatenate(list(map(jnp.broadcast_to, values, rows)))[:, None]

        starts = [requests[i].start for i in members]
        starts = [jnp.nan if start is None else start for start in starts]
        starts = column(starts, shapes[members[0]].dtype)
        counts = column([requests[i].count for i in members], counter)
        firsts = np.cumsum([0, *rows[:-1]])
        if _is_one_cpu() and (len(own) > 1 or (lengths[0] > _SHORT_ROW and rows[0] > 1)):
            cut = _cut_in_turn(own, rows, counts, starts)
        else:
            cut = _find_cut(own, counts, starts, firsts)
        if len(own) > 1:
            firsts = _hidden(firsts, beside=cut)
        keeps_all = counts >= np.repeat(lengths, rows).astype(counter)[:, None]
        for i, first in zip(members, firsts, strict=True):
            mask = _mask(arrays[i], cut, keeps_all, first, 0)
            low = _value_of(_own_rows(cut, first, len(mask))[:, 0], shapes[i].dtype)
            threshold = low if requests[i].is_stacked else low[0]
            results[i] = Selected(mask.reshape(requests[i].scores.shape), threshold)
    return results


@with_automatic_axes
def _keep_largest_jointly(scores, count, divisors):
    rows = [_as_rows(each, is_stacked=False) for each in scores]
    shapes = [jax.eval_shape(read, row) for row in rows]
    dtypes = [shape.dtype for shape in shapes]
    if divisors is not None or len(set(dtypes)) > 1:
        dtype = jnp.result_type(*dtypes, *(divisors or []))
        divisors = [jnp.asarray(each, dtype) for each in divisors or [1] * len(rows)]
        divisors = lax.optimization_barrier(lax.stop_gradient(divisors))
        rows = [LazyScores(pair, _divide) for pair in zip(rows, divisors, strict=True)]
    *begins, size = itertools.accumulate([0, *(shape.size for shape in shapes)])
    counter = counter_for(size)
    count = jnp.reshape(jnp.asarray(count).astype(counter), (1, 1))
    begins = _hidden(np.array(begins, counter), count)
    start = jnp.full((1, 1), jnp.nan, jax.eval_shape(read, rows[0]).dtype)
    cut = _find_cut(rows, count, start, begins=begins)
    masks = [
        _mask(row, cut, count >= size, 0, begin) for row, begin in zip(rows, begins, strict=True)
    ]
    return [mask.reshape(each.shape) for mask, each in zip(masks, scores, strict=True)]


def _divide(scores_and_divisor):
    scores, divisor = scores_and_divisor
    return read(scores).astype(divisor.dtype) / divisor


def _as_rows(scores, is_stacked):
    """Views scores as floats `[rows, …]`, each of whose rows is a ranking, of at least two axes."""
    scores = lax.stop_gradient(scores)  # masks have no derivative
    dtype = jax.eval_shape(read, scores).dtype
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 1:  # not all have infinities
        scores = read(scores).astype(jnp.float32)

    def view(leaf):
        if leaf.ndim != scores.ndim:
            return leaf  # one number for all
        leaf = leaf if is_stacked else leaf[None]
        return leaf if leaf.ndim > 1 else leaf[:, None]

    return jax.tree.map(view, scores)


def _length(shape):
    """Counts the scores of a row."""
    return math.prod(shape.shape[1:])


def _is_one_cpu():
    """Whether a ranking ends when its own count is right, and stays in the cache until then."""
    return jax.device_count() == 1 and jax.default_backend() == 'cpu'


def _groups(shapes):
    """Groups arrays that are not empty: of one dtype, and on one CPU of similar lengths, so that a buffer fits all."""
    groups: dict[Any, list[int]] = {}
    for i, shape in enumerate(shapes):
        length, key = _length(shape), shape.dtype
        if _is_one_cpu():
            has_short_rows = shape.shape[0] > 1 and length <= _SHORT_ROW
            is_alone = length > _LONGEST_COPY or has_short_rows
            key = i if is_alone else (shape.dtype, (length - 1).bit_length())
        if shape.size:
            groups.setdefault(key, []).append(i)
    return list(groups.values())


def _hidden(numbers, beside):
    """Makes scalars that XLA does not see: it compiles programs that differ by a constant apart."""
    scalars = [jnp.asarray(number) for number in numbers]
    true, _ = lax.optimization_barrier((jnp.bool_(True), beside))
    return lax.cond(true, lambda: scalars, lambda: [jnp.zeros_like(each) for each in scalars])


def _in_turn(function, arrays, rows, *columns):
    """Calls a function of one row `[1, …]` after another; those of several arrays are copied to one buffer."""
    length = max(
        jax.eval_shape(read, array).size // n for array, n in zip(arrays, rows, strict=True)
    )

    def call(inputs):
        which, row, *own = inputs
        if len(arrays) > 1:
            copies = [functools.partial(_padded_row, array, length=length) for array in arrays]
            return function(lax.switch(which, copies, row), *own)
        return function(_take_row(arrays[0], row), *own)

    which = np.repeat(np.arange(len(arrays), dtype=np.int32), rows)
    row = np.concatenate([np.arange(n, dtype=np.int32) for n in rows])
    return lax.map(call, (which, row, *columns))


@functools.partial(jax.jit, static_argnames='length')  # traced once for all arrays of one shape
def _padded_row(array, row, length):
    copied = read(_take_row(array, row)).reshape(1, -1)
    return jnp.pad(copied, ((0, 0), (0, length - copied.size)), constant_values=jnp.nan)


def _take_row(array, row):
    return jax.tree.map(
        lambda leaf: lax.dynamic_slice_in_dim(leaf, row, 1) if leaf.ndim else leaf, array
    )


def _cut_in_turn(arrays, rows, counts, starts):
    def cut(row, count, start):
        return _find_cut([row], count[None], start[None])[0]

    return _in_turn(cut, arrays, rows, counts, starts)


def _find_cut(arrays, counts, starts, firsts=None, begins=None):
    """Finds where rankings are cut: `[n, 3]`, low, high and an end; floats are given by their numbers.

    What reaches high is kept, and what reaches low, if it stands before the end in flat order.

    Args:
      arrays: scores `[rows, …]` of one dtype, each row of which is a ranking.
      counts: `[n, 1]`, how many to keep.
      starts: `[n, 1]`, where to look first, NaN for nowhere.
      firsts: which of the `n` rankings the first row of each array is.
      begins: all arrays, of one row each, are one ranking, and here each begins.
    """
    shapes = [jax.eval_shape(read, array) for array in arrays]
    dtype, counter, is_joint = shapes[0].dtype, counts.dtype, begins is not None
    begins = begins or [0] * len(arrays)
    firsts = [0] * len(arrays) if firsts is None else firsts
    number = jnp.promote_types(_integers(dtype)[1], counter)
    sizes = np.concatenate([np.full(shape.shape[0], _length(shape), counter) for shape in shapes])
    sizes = np.sum(sizes, keepdims=True) if is_joint else sizes
    sizes = jnp.asarray(sizes).astype(number)[:, None]

    def count(flags, *tables):
        # What does not change with the tables would be computed outside of the loop, into memory.
        barred, tables = lax.optimization_barrier((arrays, tables))
        counted = functools.partial(_count, flags, counter)
        if not is_joint:
            rows = zip(barred, firsts, strict=True)
            parts = [counted(array, tables, first, 0) for array, first in rows]
            return jnp.concatenate(parts).astype(number)
        total = jnp.zeros((1, 1), counter)
        for members in _groups(shapes) if _is_one_cpu() else [[i] for i in range(len(arrays))]:
            own = [barred[i] for i in members]
            own_begins = [begins[i] for i in members]
            if len(own) == 1:
                total += counted(own[0], tables, 0, own_begins[0])
            else:
                each = _in_turn(
                    lambda row, begin: counted(row, tables, 0, begin),
                    own,
                    [1] * len(own),
                    jnp.stack(own_begins),
                )
                total += jnp.sum(each, 0, dtype=counter)
        return total.astype(number)

    def count_reaching(numbers):
        return count(_reaching, _value_of(numbers, dtype))

    def count_ties_before(from_end):
        return count(_ties_before, low, (sizes - from_end).astype(counter))

    target = jnp.minimum(counts.astype(number), sizes)
    infinities = jnp.array([-jnp.inf, jnp.inf], dtype)
    lowest, highest = _number_of(infinities).astype(number)
    zero = jnp.zeros_like(sizes)
    bracket = zero + lowest - 1, zero + highest + 1, sizes, zero
    probes = _first(arrays, target, starts, _likely(target, *bracket), is_joint)
    probes = jnp.clip(probes, lowest, highest)
    low, high, count_low, count_high = _settle(count_reaching, target, bracket, probes)
    low = jnp.maximum(low, lowest)  # below -inf lies NaN, which nothing reaches
    cut = low, high
    # Indices are counted from the end, since counts have to fall.
    ties = count_low - count_high
    target = jnp.minimum(target - count_high, ties)
    bracket = zero, sizes, ties, zero
    low = _value_of(low, dtype)
    from_end, *_ = _settle(count_ties_before, target, bracket, _likely(target, *bracket))
    return jnp.concatenate([*cut, jnp.where(target > 0, sizes - from_end, 0)], 1)


def _settle(count, target, bracket, probes):
    """Narrows brackets until the count at `low` is the target, or no number lies between.

    Args:
      count: counts at numbers `[n, 3]`.
      target: `[n, 1]`.
      bracket: two numbers between which the count falls below the target, and the counts there; `[n, 1]` each.
      probes: the numbers `[n, 3]` to try first.
    """

    def narrow(table):  # one table takes fewer programs than a tuple
        low, high, count_low, count_high, *probes = _columns(table)
        counts = _columns(count(jnp.concatenate(probes, 1)))
        for probe, counted in zip(probes, counts, strict=True):
            is_enough = counted >= target
            low = jnp.where(is_enough, jnp.maximum(low, probe), low)
            high = jnp.where(is_enough, high, jnp.minimum(high, probe))
            count_low = jnp.where(is_enough, jnp.minimum(count_low, counted), count_low)
            count_high = jnp.where(is_enough, count_high, jnp.maximum(count_high, counted))
        bracket = low, high, count_low, count_high
        return jnp.concatenate([*bracket, _likely(target, *bracket)], 1)

    def is_open(table):
        low, high, count_low, *_ = _columns(table)
        return jnp.any((count_low != target) & (high - low > 1))

    table = lax.while_loop(is_open, narrow, jnp.concatenate([*bracket, probes], 1))
    return _columns(table)[:4]


def _columns(table):
    return jnp.split(table, table.shape[1], 1)


def _likely(target, low, high, count_low, count_high):
    """Chooses three numbers: the middle, and both sides of where an even fall passes the target."""
    width = high - low
    inside = (count_low - count_high).astype(jnp.float32)
    share = ((count_low - target).astype(jnp.float32) + 0.5) / (inside + 1)
    scatter = share * (1 - share)
    away = jnp.sqrt(scatter / (inside + 2)) + 0.05 * scatter
    places = jnp.concatenate([share - away, jnp.full_like(share, 0.5), share + away], 1)
    steps = jnp.clip(places, 0, 1 - 2**-20) * width.astype(jnp.float32)
    return low + jnp.clip(steps.astype(width.dtype), 1, jnp.maximum(width, 2) - 1)


def _first(arrays, target, starts, otherwise, is_joint):
    """Chooses three numbers near earlier thresholds, or else where a sample passes the target."""
    if jax.device_count() == 1 and (
        len(arrays) == 1 or is_joint
    ):  # of several devices it would be gathered
        size = sum(_length(jax.eval_shape(read, array)) for array in arrays)
        stride = size // max(math.isqrt(size) // 2, 1) | 1  # odd: columns of a matrix take turns

        def thin(leaf):
            return leaf.reshape(len(leaf), -1)[:, ::stride] if leaf.ndim else leaf

        sample = jnp.concatenate([read(jax.tree.map(thin, array)) for array in arrays], 1)
        share = target.astype(jnp.float32) / size
        expected = share * sample.shape[1]
        away = 2 * jnp.sqrt(expected * (1 - share)) + 1
        places = jnp.concatenate([expected + away, expected, expected - away], 1)
        index = jnp.clip(places.astype(jnp.int32), 0, sample.shape[1] - 1)
        wide = sample.astype(jnp.promote_types(sample.dtype, jnp.float32))  # as in `_in_shares`
        falling = -jnp.sort(-wide, 1)
        quantiles = jnp.take_along_axis(falling, index, 1).astype(sample.dtype)
        otherwise = _number_of(quantiles).astype(target.dtype)
    step = 1 << max(0, jnp.finfo(starts.dtype).nmant - _BITS_KEPT)
    near = _number_of(starts).astype(target.dtype) + jnp.arange(-step, step + 1, step).astype(
        target.dtype
    )
    return jnp.where(jnp.isnan(starts), otherwise, near)


def _number_of(value):
    """Numbers floats in their order; -0.0 and 0.0 share the middle number."""
    bits, unsigned, middle = _integers(value.dtype)
    pattern = lax.bitcast_convert_type(value, bits)
    steps = (pattern & jnp.iinfo(bits).max).astype(unsigned)
    return jnp.where(pattern < 0, middle - steps, middle + steps)


def _value_of(number, dtype):
    """Finds the float of a number: NaN above that of inf, and below that of -inf."""
    bits, unsigned, middle = _integers(dtype)
    number = number.astype(unsigned)
    steps = jnp.where(number < middle, middle - number, number - middle)
    magnitude = lax.bitcast_convert_type(steps.astype(bits), dtype)
    return jnp.where(number < middle, -magnitude, magnitude)


def _integers(dtype):
    """Integers as wide as floats, unsigned ones of 32 bits or more, and the number of zero."""
    width = 8 * jnp.dtype(dtype).itemsize
    unsigned = jnp.dtype(f'uint{max(width, 32)}')
    middle = np.array(1 << (8 * unsigned.itemsize - 1), unsigned)
    return jnp.dtype(f'int{width}'), unsigned, middle


def _reaching(x, begin, thresholds):
    return [x >= _beside(x, threshold) for threshold in _columns(thresholds)]


def _ties_before(x, begin, low, ends):
    is_tie = x == _beside(x, low)
    return [is_tie & _is_before(_beside(x, end), begin, x) for end in _columns(ends)]


@jax.jit
def _mask(array, cut, keeps_all, first, begin):
    """Makes the mask of an array, as `_count` counts it."""
    x = _in_shares(array)
    low, high, end = _columns(_own_rows(cut, first, len(x)))
    dtype = jax.eval_shape(read, array).dtype
    low, high = (_value_of(each, dtype).astype(x.dtype) for each in (low, high))
    is_before = _is_before(_beside(x, end), begin, x)
    is_kept = x >= jnp.where(is_before, _beside(x, low), _beside(x, high))
    keeps_row = _beside(x, _own_rows(keeps_all, first, len(x)))
    return jnp.where(is_kept, jnp.uint8(1), keeps_row.astype(jnp.uint8))


def _is_before(end, begin, x):
    """Tells which scores of rows that begin at an index of their ranking stand before the end."""
    *shape, length = x.shape[1:]
    lines = jnp.arange(math.prod(shape), dtype=end.dtype).reshape(*shape, 1) * length
    begin = jnp.asarray(begin).astype(end.dtype) + lines
    left = jnp.maximum(end, begin) - begin
    return lax.broadcasted_iota(end.dtype, x.shape, x.ndim - 1) < left


def _own_rows(table, first, rows):
    return table if len(table) == rows else lax.dynamic_slice_in_dim(table, first, rows)


def _in_shares(array):
    """Reads scores as `[rows, shares, length]`: threads take shares. What devices share stays as it is."""

    def view(leaf):
        if jax.device_count() > 1 or leaf.ndim == 0:
            return leaf
        size = leaf[0].size
        shares = math.gcd(size, _SHARES) if size >= _WORTH_SHARING else 1
        return leaf.reshape(len(leaf), shares, size // shares)

    scores = read(jax.tree.map(view, array))
    # A CPU compares numbers of 16 bits one by one.
    return scores.astype(jnp.promote_types(scores.dtype, jnp.float32))


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced once for all arrays of one shape
def _count(flags, counter, array, tables, first, begin):
    """Counts what `flags(scores, begin, *tables)` flag in each row: `[rows, flags]`."""
    x = _in_shares(array)
    own = [_own_rows(table, first, len(x)) for table in tables]
    own = [
        table.astype(x.dtype) if jnp.issubdtype(table.dtype, jnp.floating) else table
        for table in own
    ]

    def add(first, second):
        return tuple(map(lax.add, first, second))

    apart = 1 if jax.device_count() > 1 else 2  # threads share what the first sum leaves
    axes = tuple(range(1, x.ndim))
    # Together: the flags of a lone sum would be written to memory.
    sums = tuple(each.astype(counter) for each in flags(x, begin, *own))
    for summed in (axes[apart - 1 :], axes[: apart - 1]):
        sums = lax.reduce(sums, (jnp.zeros((), counter),) * len(sums), add, summed)
    return jnp.stack(sums, 1)


def _beside(x, column):
    """Views one value a row as it compares with scores `[rows, …]`."""
    return column.reshape(-1, *(1,) * (x.ndim - 1))
