"""The largest scores, exactly: counts go in, masks come out, and nothing is sorted.

A mask needs one number, the threshold that exactly as many scores reach as are to be kept. A pass over the scores
counts how many reach a threshold, and so tells on which side of it the right one lies. Each pass tries three. The first
stand where a sample of the scores has it, the next where the count should be right if it fell evenly between those that
are known (`_likely`). The search ends when a count is right, or when no float lies between a threshold that enough
scores reach and one that too few reach. Then what lies between them is equal: ties. The same search, over indices in
flat order, finds where to cut the ties.

    threshold      1   2   3   5   above       the scores 5 1 3 3 2, of which two are to be kept:
    reaching it    5   4   3   1   0           5, and of the ties 3 and 3 the first

The result does not depend on where the search begins. NaN ranks lowest and is kept only where everything is; -0.0
equals 0.0; of equal scores those of lower index are kept. On a CPU, XLA compares denormal numbers (but for float16) as
zero, so that these are ties of zero.

Devices that share an array count what they hold, and send each other counts alone.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching, lax

from jaxpruner import tree as tree_lib
from jaxpruner.explicit_meshes import without_explicit_axes

_EXACT_IN_FLOAT32 = 2**24  # up to here a float32 holds every whole number

# What a CPU reads and threads share; all this changes times alone.
_WORTH_SHARING = 2**17  # scores that several threads read
_SHARES = 64
# Scores of an array that is copied: arrays of similar lengths share a program.
_LONGEST_COPY = 2**22


@jax.tree_util.register_dataclass
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
    of: Callable[[Any], jax.Array] = dataclasses.field(metadata={'static': True})

    shape = property(lambda self: jax.tree.leaves(self.weights)[0].shape)
    dtype = property(lambda self: jax.eval_shape(read, self).dtype)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))


def read(scores: jax.Array | LazyScores) -> jax.Array:
    """Computes lazy scores; an array stands for itself."""
    return scores.of(scores.weights) if isinstance(scores, LazyScores) else scores


def says(**facts: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Lets a method say how it scores or ranks; `said_by` reads it. A method that overrides it says nothing.

    >>> @says(of_each_weight=jnp.abs)
    ... def calculate_scores(self, params): ...
    >>> said_by(calculate_scores, 'of_each_weight') is jnp.abs
    True
    """

    def mark(function):
        function.says = facts
        return function

    return mark


def said_by(method: Callable[..., Any], name: str) -> Any:
    """Finds what a method says; `None` for nothing, as where `functools.wraps` copied the words of another."""
    return None if hasattr(method, '__wrapped__') else getattr(method, 'says', {}).get(name)


def lazily(of: Callable[[jax.Array], jax.Array], weights: Any) -> Any:
    """Scores an array by an elementwise function, lazily; `None` if it holds no numbers.

    >>> lazily(jnp.abs, jnp.array([-2.0])).shape, lazily(jnp.abs, None)
    ((1,), None)
    """
    dtype = getattr(weights, 'dtype', None)
    is_number = dtype is not None and jnp.issubdtype(dtype, jnp.number)
    return LazyScores(weights, of) if is_number else None


def flatten_scores(scores: Any) -> tuple[list[tree_lib.Path], list[Any], Any]:
    """Flattens a tree of scores as `tree.flatten_with_paths` does; its leaves may be lazy, or `None`.

    >>> flatten_scores({'a': None})[:2]
    ([('a',)], [None])
    """
    return tree_lib.flatten_with_paths(
        scores, is_leaf=lambda node: node is None or isinstance(node, LazyScores)
    )


def counter_for(size: int) -> jnp.dtype:
    """Returns the dtype that counts to `size`: uint32, or uint64 where that is too short.

    Raises:
      ValueError: it takes uint64, which JAX has not been asked for.

    >>> counter_for(2**31)
    dtype('uint32')
    """
    if size >= 2**32 and not jax.config.jax_enable_x64:
        raise ValueError(
            f'{size} scores cannot be ranked together in 32 bits; split the leaf, or set jax_enable_x64'
        )
    return jnp.dtype('uint32' if size < 2**32 else 'uint64')


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
    count = jnp.array(size, counter_for(size))
    kept = share_of(count, jnp.asarray(sparsity, jnp.float32), size, of_rest=True)
    return jnp.maximum(kept, min(size, 1))


def number_to_keep_on_host(size: int, sparsity: float) -> int:
    """Computes `number_to_keep` from Python's numbers: nothing is computed on a device.

    >>> number_to_keep_on_host(10, 0.25)
    8
    """
    count = np.array(size, np.uint32 if size < 2**32 else np.uint64)
    return max(int(share_of(count, np.float32(sparsity), size, of_rest=True)), min(size, 1))


def share_of(count: Any, share: Any, most: int, of_rest: bool = False) -> Any:
    """Computes `round(count * share)`, half to even, as exactly as `number_to_keep`.

    Args:
      count: unsigned array of JAX or NumPy.
      share: in [0, 1], a float32 array of the same library.
      most: what the count cannot exceed.
      of_rest: computes `round(count * (1 - share))` instead.

    >>> int(share_of(jnp.uint32(192), jnp.float32(0.3), most=640))
    58
    """
    if most <= _EXACT_IN_FLOAT32 or count.dtype == 'uint64':
        wide = 'float64' if count.dtype == 'uint64' else 'float32'
        share = share.astype(wide)
        return (count.astype(wide) * (1 - share if of_rest else share)).round().astype(count.dtype)
    # In fixed point, which is exact for every share from 2^-7 up; multiplied by halves, as on paper.
    fixed = (share * np.float32(2**31)).round().astype('uint32')
    fixed = np.uint32(2**31) - fixed if of_rest else fixed
    high, low, fixed_high, fixed_low = count >> 16, count & 0xFFFF, fixed >> 16, fixed & 0xFFFF
    crosses, lowest = (high * fixed_low, low * fixed_high), low * fixed_low
    middle = (crosses[0] & 0x7FFF) + (crosses[1] & 0x7FFF) + (lowest >> 16)
    whole = 2 * high * fixed_high + (crosses[0] >> 15) + (crosses[1] >> 15) + (middle >> 15)
    rest = (middle & 0x7FFF) << 16 | lowest & 0xFFFF  # of 2^31
    return whole + ((rest > 2**30) | ((rest == 2**30) & (whole % 2 == 1))).astype('uint32')


def with_automatic_axes(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Compiles a function; how arrays on explicit axes of a mesh are shared inside is left to the compiler.

    Args:
      function: of a list of pytrees; the mask of each lies as the first array of its tree does.
    """

    @jax.jit
    @functools.wraps(function)
    def compiled(trees, *others):
        firsts = [jax.tree.leaves(tree)[0] for tree in trees]
        return without_explicit_axes(function, trees, firsts)(trees, *others)

    return compiled


def leaf_by_leaf(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Compiles a function of a list of leaves, and calls it for each leaf alone, unless it is traced.

    Eagerly, a program of all would be compiled anew for each model; leaves of one shape share one.
    """
    compiled = with_automatic_axes(function)

    @functools.wraps(function)
    def call(leaves, *others):
        if tree_lib.has_traced((leaves, others)):
            return compiled(list(leaves), *others)
        return [compiled([leaf], *others)[0] for leaf in leaves]

    return call


def keep_largest(scores: jax.Array | LazyScores, count: jax.Array | int) -> jax.Array:
    """Makes the uint8 mask of the `count` largest scores, 1 = kept.

    Args:
      scores: array of any shape. What is no float, or has eight bits, is ranked as float32.
      count: 0 keeps nothing; the size or more keeps everything, NaN included. An array of one axis has a number for
        each entry of the first axis of the scores, which is a ranking of its own.

    >>> keep_largest(jnp.array([[3.0, 1.0], [2.0, 2.0]]), 2)
    Array([[1, 0],
           [1, 0]], dtype=uint8)
    """
    keep = _keep_largest_of_rows if jnp.ndim(count) else keep_largest_each
    return keep([(scores, count)])[0]


@with_automatic_axes
def _keep_largest_of_rows(requests):
    return [jax.vmap(keep_largest)(scores, counts) for scores, counts in requests]


@leaf_by_leaf
def keep_largest_each(
    requests: Sequence[tuple[jax.Array | LazyScores, jax.Array | int]],
) -> list[jax.Array]:
    """Makes the masks of the largest scores of each of many arrays, given pairs of scores and one count.

    Raises:
      ValueError: an array is too large to count in 32 bits, and 64 are not enabled.

    >>> first, second = keep_largest_each([(jnp.array([1.0, 4.0]), 1), (jnp.array([[3.0, 2.0]]), 2)])
    >>> first.tolist(), second.tolist()
    ([0, 1], [[1, 1]])
    """
    arrays = [_as_floats(scores) for scores, _ in requests]
    masks: list[Any] = [None] * len(arrays)
    for members in _groups(arrays):
        own = [arrays[i] for i in members]
        counter = counter_for(max(array.size for array in own))
        counts = [jnp.asarray(requests[i][1]).astype(counter) for i in members]
        is_long = own[0].size >= _WORTH_SHARING and jax.device_count() == 1
        table = _in_turn(_cut_in_turn if is_long else _cut_of, own, counts)
        rows = _hidden(range(len(own)), beside=table) if len(own) > 1 else [0]
        for i, row in zip(members, rows, strict=True):
            masks[i] = _mask(arrays[i], table[row], 0).reshape(requests[i][0].shape)
    return masks


@with_automatic_axes
def keep_largest_jointly(
    scores: Sequence[jax.Array | LazyScores],
    count: jax.Array | int,
    divisors: Sequence[jax.Array] | None = None,
) -> list[jax.Array]:
    """Makes the masks of the `count` largest among the scores of many arrays, which are never concatenated.

    Args:
      scores: arrays of any shapes, or `LazyScores`; ranked in their common dtype, ties in the order of the arrays.
      count: as in `keep_largest`.
      divisors: a positive, finite number for each array, which is ranked by `scores / divisor`.

    Returns:
      A uint8 array for each array of scores.

    Raises:
      ValueError: the arrays are too large together to count in 32 bits, and 64 are not enabled.

    >>> keep_largest_jointly([jnp.array([1.0, 4.0]), jnp.array([3.0])], 2)
    [Array([0, 1], dtype=uint8), Array([1], dtype=uint8)]
    """
    arrays = list(map(_as_floats, scores))
    own: list[Any] = [1] * len(arrays) if divisors is None else list(divisors)
    dtype = jnp.result_type(*[array.dtype for array in arrays], *own)
    own = lax.stop_gradient([jnp.asarray(each, dtype) for each in own])
    own = lax.optimization_barrier(own)
    arrays = [LazyScores(pair, _divide) for pair in zip(arrays, own, strict=True)]
    *begins, size = itertools.accumulate([0, *(array.size for array in arrays)])
    count = jnp.asarray(count).astype(counter_for(size))
    begins = _hidden(np.array(begins, count.dtype), beside=count)
    cut = _find_cut(arrays, begins, count)
    return [
        _mask(array, cut, begin).reshape(each.shape)
        for array, begin, each in zip(arrays, begins, scores, strict=True)
    ]


def _divide(scores_and_divisor):
    scores, divisor = scores_and_divisor
    return read(scores).astype(divisor.dtype) / divisor


def _as_floats(scores):
    """Makes scores floats, of at least one axis."""
    scores = lax.stop_gradient(scores)  # masks have no derivative
    if not jnp.issubdtype(scores.dtype, jnp.floating) or scores.dtype.itemsize == 1:
        scores = read(scores).astype(jnp.float32)  # not all have infinities
    return scores if scores.shape else jax.tree.map(jnp.atleast_1d, scores)


def _groups(arrays):
    """Groups arrays of one dtype and similar lengths, to be read in turn; those that devices share stay alone."""
    groups: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        is_alone = array.size > _LONGEST_COPY or jax.device_count() > 1
        key = i if is_alone else (array.dtype, (array.size - 1).bit_length())
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _hidden(numbers, beside):
    """Makes scalars that XLA does not see: it compiles programs that differ by a constant apart."""
    scalars = [jnp.asarray(number) for number in numbers]
    true, _ = lax.optimization_barrier((jnp.bool_(True), beside))
    return lax.cond(true, lambda: scalars, lambda: [jnp.zeros_like(each) for each in scalars])


def _in_turn(function, arrays, *others):
    """Calls a function of one array (and its others) after another, each of which is copied to the same buffer."""
    if len(arrays) == 1:
        return function(arrays[0], *[other[0] for other in others])[None]
    longest = max(array.size for array in arrays)
    copies = [functools.partial(_copied, array, length=longest) for array in arrays]

    def call(inputs):
        which, *own = inputs
        return function(lax.switch(which, copies), *own)

    return lax.map(call, (jnp.arange(len(arrays)), *map(jnp.stack, others)))


@functools.partial(jax.jit, static_argnames='length')  # traced once for all arrays of one shape
def _copied(array, length):
    copied = read(array).ravel()
    return jnp.pad(copied, (0, length - copied.size), constant_values=jnp.nan)


def _cut_of(array, count):
    return _find_cut([array], [0], count)


# Under vmap, long arrays are searched in turn: each search ends when its own count is right, and stays in the cache.
_cut_in_turn = custom_batching.sequential_vmap(_cut_of)


def _find_cut(arrays, begins, count):
    """Finds where a ranking is cut: low, high, an end, and whether everything is kept.

    What reaches high is kept, and what reaches low, if it stands before the end in flat order; both are numbers of
    floats.

    Args:
      arrays: the scores, of one dtype.
      begins: where in the ranking each array begins.
      count: how many to keep.
    """
    dtype = arrays[0].dtype
    number = jnp.promote_types(_integers(dtype)[1], count.dtype)
    begins = [jnp.asarray(begin).astype(number) for begin in begins]

    def count_kept(*bounds):
        # What does not change with the bounds would be computed outside of the loop, into memory.
        barred, bounds = lax.optimization_barrier((arrays, bounds))
        total = jnp.zeros(3, number)
        for members in _groups(arrays):
            own, own_begins = ([values[i] for i in members] for values in (barred, begins))
            counts = _in_turn(functools.partial(_count, bounds=bounds), own, own_begins)
            total += counts.sum(0, dtype=number)
        return total

    size = jnp.array(sum(array.size for array in arrays), number)
    count = count.astype(number)
    target = jnp.minimum(count, size)
    lowest, highest = _number_of(jnp.array([-jnp.inf, jnp.inf], dtype)).astype(number)
    zero = jnp.zeros_like(size)
    bracket = lowest - 1, highest + 1, size, zero
    probes = _first_probes(arrays, target, bracket)
    low, high, count_low, count_high = _settle(
        lambda numbers: count_kept(_value_of(numbers, dtype)),
        target,
        bracket,
        jnp.clip(probes, lowest, highest),
    )
    low = jnp.maximum(low, lowest)  # below -inf lies NaN, which nothing reaches
    # The same search finds where to cut ties. Indices are counted from the end, since counts have to fall.
    values = [jnp.full(3, _value_of(each, dtype)) for each in (low, high)]
    bracket = zero, size, count_low, count_high
    from_end, *_ = _settle(
        lambda from_end: count_kept(*values, size - from_end),
        target,
        bracket,
        _likely(target, *bracket),
    )
    end = jnp.where(target > count_high, size - from_end, 0)
    return jnp.stack([low, high, end, (count >= size).astype(number)])


def _settle(count, target, bracket, probes):
    """Narrows a bracket until the count at `low` is the target, or no number lies between.

    Args:
      count: counts at three numbers.
      target: of the counts.
      bracket: two numbers between which the count falls below the target, and the counts there.
      probes: the three numbers to try first.
    """

    def narrow(table):  # one table takes fewer programs than a tuple
        low, high, count_low, count_high, *probes = table
        for probe, counted in zip(probes, count(table[4:]), strict=True):
            is_enough = counted >= target
            low = jnp.where(is_enough, jnp.maximum(low, probe), low)
            high = jnp.where(is_enough, high, jnp.minimum(high, probe))
            count_low = jnp.where(is_enough, jnp.minimum(count_low, counted), count_low)
            count_high = jnp.where(is_enough, count_high, jnp.maximum(count_high, counted))
        bracket = low, high, count_low, count_high
        return jnp.stack([*bracket, *_likely(target, *bracket)])

    def is_open(table):
        return (table[2] != target) & (table[1] - table[0] > 1)

    return lax.while_loop(is_open, narrow, jnp.stack([*bracket, *probes]))[:4]


def _likely(target, low, high, count_low, count_high):
    """Chooses three numbers: the middle, and both sides of where an even fall passes the target."""
    width = high - low
    inside = (count_low - count_high).astype(jnp.float32)
    share = ((count_low - target).astype(jnp.float32) + 0.5) / (inside + 1)
    scatter = share * (1 - share)
    away = jnp.sqrt(scatter / (inside + 2)) + 0.05 * scatter
    places = jnp.stack([share - away, jnp.full_like(share, 0.5), share + away])
    steps = jnp.clip(places, 0, 1 - 2**-20) * width.astype(jnp.float32)
    return low + jnp.clip(steps.astype(width.dtype), 1, jnp.maximum(width, 2) - 1)


def _first_probes(arrays, target, bracket):
    """Chooses three numbers where a sample passes the target.

    The sort does one thing more: XLA for CPUs does not compile a loop with a sort into a single function, which would
    take longer to compile, and run on one thread.
    """
    size = sum(array.size for array in arrays)
    if jax.device_count() > 1 or not size:  # of several devices a sample would be gathered
        return _likely(target, *bracket)
    stride = size // max(math.isqrt(size) // 2, 1) | 1  # odd: columns of a matrix take turns

    def thin(leaf):
        return leaf.ravel()[::stride] if leaf.ndim else leaf

    sample = jnp.concatenate([read(jax.tree.map(thin, array)) for array in arrays])
    share = target.astype(jnp.float32) / size
    expected = share * sample.size
    away = 2 * jnp.sqrt(expected * (1 - share)) + 1
    places = jnp.stack([expected + away, expected, expected - away])
    index = jnp.clip(places.astype(jnp.int32), 0, sample.size - 1)
    quantiles = -jnp.sort(-sample.astype(jnp.promote_types(sample.dtype, jnp.float32)))[
        index
    ].astype(sample.dtype)
    return _number_of(quantiles).astype(target.dtype)


def _number_of(value):
    """Numbers floats in their order; -0.0 and 0.0 share the middle number."""
    bits, unsigned, middle = _integers(value.dtype)
    pattern = lax.bitcast_convert_type(value, bits)
    steps = (pattern & jnp.iinfo(bits).max).astype(unsigned)
    return jnp.where(pattern < 0, middle - steps, middle + steps)


def _value_of(number, dtype):
    """Finds the float of a number, in the order of floats; zero has the middle one, and NaN lie beyond infinities."""
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


@jax.jit
def _mask(array, cut, begin):
    """Makes the mask of an array that begins at an index of its ranking."""
    low, high, end, keeps_all = cut
    low, high = _value_of(low, array.dtype), _value_of(high, array.dtype)
    is_kept = _is_kept(_in_shares(array), begin, low, high, end)
    return jnp.where(is_kept, jnp.uint8(1), keeps_all.astype(jnp.uint8))


@jax.jit  # traced once for all arrays of one shape
def _count(array, begin, bounds):
    """Counts what is kept between each of three bounds."""
    x = _in_shares(array)
    # Together: the flags of a lone sum would be written to memory.
    flags = [_is_kept(x, begin, *each) for each in zip(*bounds, strict=True)]
    sums = tuple(each.astype(begin.dtype) for each in flags)
    zeros = (jnp.zeros((), begin.dtype),) * len(sums)
    axes = tuple(range(x.ndim))
    apart = 0 if jax.device_count() > 1 else 1  # threads share what the first sum leaves
    for summed in (axes[apart:], axes[:apart]):
        sums = lax.reduce(sums, zeros, lambda a, b: tuple(map(lax.add, a, b)), summed)
    return jnp.stack(sums)


def count_true(flags: jax.Array) -> jax.Array:
    """Counts flags by the pass that counts scores; a plain sum would write them to memory as integers.

    >>> int(count_true(jnp.array([True, False, True])))
    2
    """
    scores = LazyScores(jnp.atleast_1d(flags), _as_scores)
    bounds = (jnp.ones(3, jnp.float32),)
    return _count(scores, jnp.zeros((), counter_for(flags.size)), bounds)[0]


def _as_scores(flags):
    return flags.astype(jnp.float32)


def _is_kept(x, begin, low, high=None, end=None):
    """Tells which scores reach high, or low before the end; or only low. They begin at an index of their ranking."""
    if high is None or end is None:
        return x >= low.astype(x.dtype)
    *shape, length = x.shape
    lines = jnp.arange(math.prod(shape), dtype=end.dtype).reshape(*shape, 1) * length
    begin = jnp.asarray(begin).astype(end.dtype) + lines
    left = jnp.maximum(end, begin) - begin
    is_before = lax.broadcasted_iota(end.dtype, x.shape, x.ndim - 1) < left
    return x >= jnp.where(is_before, low, high).astype(x.dtype)


def _in_shares(array):
    """Reads scores as `[shares, length]`: threads take shares. What devices share stays as it is."""

    def view(leaf):
        if jax.device_count() > 1 or leaf.ndim == 0:
            return leaf
        return leaf.reshape(math.gcd(leaf.size, _SHARES) if leaf.size >= _WORTH_SHARING else 1, -1)

    scores = read(jax.tree.map(view, array))
    # A CPU compares numbers of 16 bits one by one.
    return scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
