"""How many to keep: exact, in as many bits as it takes."""

from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.mask_calculator.selection import whole_numbers


@hypothesis.given(st.integers(1, 2**24), st.floats(0, 1, width=32))
def test_numbers_to_keep_are_float32_arithmetic_up_to_2_to_24(size, sparsity):
    expected = max(1, int(np.round(np.float32(size) * (np.float32(1) - np.float32(sparsity)))))
    assert int(whole_numbers.number_to_keep(size, sparsity)) == expected


@pytest.mark.parametrize('largest', [5, 2**24 + 3])
def test_many_numbers_are_those_of_each_alone(largest):
    sizes, sparsities = [0, 1, 1000, largest], [0.5, 1.0, jnp.float32(0.9), np.array([0.25])]
    numbers = jax.jit(whole_numbers.numbers_to_keep, static_argnums=0)(tuple(sizes), sparsities)
    for number, size, sparsity in zip(numbers, sizes, sparsities, strict=True):
        assert int(number.item()) == int(whole_numbers.number_to_keep(size, sparsity).item())


@hypothesis.given(st.integers(2**24 + 1, 2**32 - 1), st.floats(2**-7, 1, width=32))
def test_numbers_to_keep_are_exact_above(size, sparsity):
    # Python's fractions know no rounding; round() goes to even as the library does.
    expected = max(1, round(size * (1 - Fraction(sparsity))))
    assert int(whole_numbers.number_to_keep(size, sparsity)) == expected


@hypothesis.given(st.integers(0, 2**32 - 1), st.floats(2**-7, 1, width=32))
def test_shares_of_a_traced_count(count, share):
    expected = (
        round(count * Fraction(share))
        if count > 2**24
        else int(np.round(np.float32(count) * np.float32(share)))
    )
    assert int(whole_numbers.share_of(jnp.uint32(count), share)) == expected


@hypothesis.given(st.integers(0, 2**24), st.floats(0, 1, width=32))
def test_shares_of_a_count_that_is_known_to_be_small(count, share):
    number = jnp.uint32(count)
    assert whole_numbers.share_of(number, share, most=2**24) == whole_numbers.share_of(
        number, share
    )


def test_what_a_count_cannot_exceed_may_be_much():
    odd = 2**31 - 1  # no float32
    assert int(whole_numbers.share_of(jnp.uint32(odd), 1.0, most=2**31)) == odd


def test_counts_beyond_32_bits_need_64():
    message = "4294967296 scores cannot be ranked together in 32 bits; .* jax.config.update\\('jax_enable_x64', True\\)"
    with pytest.raises(ValueError, match=message):
        whole_numbers.counter_for(2**32)
    assert whole_numbers.counter_for(2**32 - 1) == jnp.uint32


def test_counts_in_64_bits():
    with (jax.enable_x64 if hasattr(jax, 'enable_x64') else jax.experimental.enable_x64)(True):
        assert whole_numbers.counter_for(2**32) == jnp.uint64
        assert int(whole_numbers.number_to_keep(2**33, 0.75)) == 2**31
        assert int(whole_numbers.number_to_keep(7 * 10**9 + 3, 0.5)) == 3_500_000_002  # to even
        assert int(whole_numbers.share_of(jnp.uint64(2**40 + 2), 0.5)) == 2**39 + 1
