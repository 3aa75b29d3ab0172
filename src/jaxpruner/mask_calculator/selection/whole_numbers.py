"""Whole numbers that do not overflow: how many to keep of how many, in as many bits as it takes."""

import fractions
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Up to here a float32 holds every whole number.
_EXACT_IN_FLOAT32 = 2**24


def counter_for(size: int) -> jnp.dtype:
    """Returns the dtype that counts to `size`: uint32, or uint64 where that is too short.

    Args:
      size: the largest count.

    Raises:
      ValueError: it takes uint64, which JAX has not been asked for.

    >>> counter_for(2**31)
    dtype('uint32')
    """
    if size <= jnp.iinfo(jnp.uint32).max:
        return jnp.dtype('uint32')
    if jax.dtypes.canonicalize_dtype(jnp.uint64) != jnp.uint64:
        raise ValueError(
            f'{size} scores cannot be ranked together in 32 bits; at most {jnp.iinfo(jnp.uint32).max} can: split the '
            "leaf, rank per layer, or call jax.config.update('jax_enable_x64', True) first"
        )
    return jnp.dtype('uint64')


def number_to_keep(size: int, sparsity: jax.Array | float) -> jax.Array:
    """Computes how many of `size` scores a sparsity keeps: `max(1, round(size * (1 - sparsity)))`.

    The product is rounded half to even, in float32 up to 2^24 scores (as JaxPruner does) and in whole numbers above,
    where float32 would miss the count.

    Args:
      size: number of scores.
      sparsity: share to remove, a scalar in [0, 1]; taken as float32.

    Returns:
      Scalar of the dtype that counts to `size`.

    Raises:
      ValueError: it takes 64 bits, which are not enabled.

    >>> [int(number_to_keep(10, sparsity)) for sparsity in (0.0, 0.25, 1.0)]
    [10, 8, 1]
    """
    counter = counter_for(size)
    sparsity = jnp.asarray(sparsity, jnp.float32)
    least = jnp.array(min(size, 1), counter)
    if size <= _EXACT_IN_FLOAT32:
        kept = jnp.round(size * (1 - sparsity)).astype(counter)
        return jnp.maximum(kept, least)
    whole = jnp.array(1 << _fraction_bits(counter), counter)
    density = whole - _fixed_point(sparsity, counter)
    kept = _multiply_round(jnp.array(size, counter), density)
    return jnp.maximum(kept, least)


def numbers_to_keep(sizes: Sequence[int], sparsities: Sequence[Any]) -> list[jax.Array]:
    """Computes `number_to_keep` for many arrays, in a few operations on vectors.

    Computed for each array alone, the numbers would be several operations an array, all of which have to be compiled.

    Args:
      sizes: number of scores of each array.
      sparsities: share to remove of each.

    Returns:
      For each array what `number_to_keep` says.

    Raises:
      ValueError: a number takes 64 bits, which are not enabled.

    >>> [int(number) for number in numbers_to_keep([10, 4], [0.25, 0.5])]
    [8, 2]
    """
    numbers: dict[int, jax.Array] = {}
    small: dict[int, int] = {}
    shares = []
    for i, size in enumerate(sizes):
        if size <= _EXACT_IN_FLOAT32 and jnp.ndim(sparsities[i]) == 0:
            small[i] = size
            shares.append(jnp.asarray(sparsities[i], jnp.float32))
        else:
            numbers[i] = number_to_keep(size, sparsities[i])
    if small:
        small_sizes = np.array(list(small.values()))
        density = 1 - jnp.stack(shares)
        kept = jnp.round(small_sizes.astype(np.float32) * density).astype(jnp.uint32)
        least = np.minimum(small_sizes, 1).astype(np.uint32)
        numbers.update(zip(small, jnp.maximum(kept, least), strict=True))
    return [numbers[i] for i in range(len(sizes))]


def number_to_keep_on_host(size: int, sparsity: float) -> int:
    """Computes `number_to_keep` from Python's numbers: nothing is computed on a device.

    Args:
      size: number of scores.
      sparsity: share to remove, in [0, 1]; taken as float32.

    >>> number_to_keep_on_host(10, 0.25)
    8
    """
    share = np.float32(sparsity)
    if size <= _EXACT_IN_FLOAT32:
        density = np.float32(1) - share
        kept = int(np.round(np.float32(size) * density))
    else:
        whole = 1 << (31 if size <= jnp.iinfo(jnp.uint32).max else 63)
        removed = round(float(share) * whole)
        kept = round(fractions.Fraction(size * (whole - removed), whole))
    return max(kept, min(size, 1))


def share_of(
    count: jax.Array,
    share: jax.Array | float,
    most: int | None = None,
) -> jax.Array:
    """Computes `round(count * share)`, half to even: in float32 up to a count of 2^24, in whole numbers above.

    Args:
      count: uint32 (or uint64) scalar.
      share: scalar in [0, 1]; taken as float32.
      most: what the count cannot exceed, if that is known: a small one takes less to compile.

    Returns:
      Scalar of the count's dtype.

    >>> int(share_of(jnp.uint32(192), 0.3))
    58
    """
    share = jnp.asarray(share, jnp.float32)
    in_float32 = jnp.round(count.astype(jnp.float32) * share).astype(count.dtype)
    if most is not None and most <= _EXACT_IN_FLOAT32:
        return in_float32
    in_whole_numbers = _multiply_round(count, _fixed_point(share, count.dtype))
    return jnp.where(count <= _EXACT_IN_FLOAT32, in_float32, in_whole_numbers)


def _fraction_bits(counter: jnp.dtype) -> int:
    return jnp.iinfo(counter).bits - 1


def _fixed_point(share: jax.Array, counter: jnp.dtype) -> jax.Array:
    """Writes a share in [0, 1] as a whole number of 2^-31 (2^-63): exact for every float32 from 2^-7 up."""
    whole = float(1 << _fraction_bits(counter))
    return jnp.round(share * whole).astype(counter)


def _multiply_round(count: jax.Array, share: jax.Array) -> jax.Array:
    """Computes `round(count * share)`, half to even, of a share in fixed point."""
    counter = count.dtype
    fraction_bits = _fraction_bits(counter)
    upper, lower = _double_width_product(count, share)
    product = (upper << 1) | (lower >> fraction_bits)
    fraction = lower & jnp.array((1 << fraction_bits) - 1, counter)
    half = jnp.array(1 << (fraction_bits - 1), counter)
    is_odd = product % 2 == 1
    rounds_up = (fraction > half) | ((fraction == half) & is_odd)
    return product + rounds_up.astype(counter)


def _double_width_product(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Multiplies whole numbers by halves, as on paper; the product is an upper and a lower number of the same dtype."""
    counter = first.dtype
    half_bits = jnp.iinfo(counter).bits // 2
    half_mask = jnp.array((1 << half_bits) - 1, counter)

    def low(number: jax.Array) -> jax.Array:
        return number & half_mask

    def high(number: jax.Array) -> jax.Array:
        return number >> half_bits

    lowest = low(first) * low(second)
    one_cross = high(first) * low(second)
    other_cross = low(first) * high(second)
    highest = high(first) * high(second)
    middle = high(lowest) + low(one_cross) + low(other_cross)
    upper = highest + high(one_cross) + high(other_cross) + high(middle)
    lower = (low(middle) << half_bits) | low(lowest)
    return upper, lower
