"""Floats as whole numbers in the same order, so that a bracket of thresholds can be halved exactly."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Order(NamedTuple):
    """Maps the floats of one dtype to unsigned positions, and back; -0.0 and 0.0 share a position.

    The position of a float is its rank among all floats of the dtype, and says nothing of where it stands in an array.
    """

    dtype: jnp.dtype  # of the floats
    bits: jnp.dtype  # signed integers as wide as the floats
    signed: jnp.dtype  # at least 32 bits, to compute in
    unsigned: jnp.dtype  # of the positions

    @classmethod
    def of(cls, dtype: jnp.dtype) -> 'Order':
        """Makes the order of a float dtype that has infinities."""
        width = 8 * jnp.dtype(dtype).itemsize
        wide = max(width, 32)
        bits, signed, unsigned = f'int{width}', f'int{wide}', f'uint{wide}'
        return cls(jnp.dtype(dtype), jnp.dtype(bits), jnp.dtype(signed), jnp.dtype(unsigned))

    def position(self, value: jax.Array) -> jax.Array:
        """Finds the position of each value; that of NaN means nothing."""
        bits = lax.bitcast_convert_type(value, self.bits).astype(self.signed)
        signed = jnp.where(bits >= 0, bits, jnp.iinfo(self.bits).min - bits)
        return signed.astype(self.unsigned) + self._zero

    def value(self, position: jax.Array) -> jax.Array:
        """Finds the value at each position."""
        signed = (position - self._zero).astype(self.signed)
        bits = jnp.where(signed >= 0, signed, jnp.iinfo(self.bits).min - signed)
        return lax.bitcast_convert_type(bits.astype(self.bits), self.dtype)

    @property
    def lowest(self) -> jax.Array:
        """Position of -inf. The position below it stands before all numbers."""
        return self._zero - self._infinity

    @property
    def highest(self) -> jax.Array:
        """Position of inf. The position above it stands after all numbers."""
        return self._zero + self._infinity

    @property
    def octave(self) -> int:
        """Number of positions from a float to its double."""
        return 1 << jnp.finfo(self.dtype).nmant

    @property
    def width(self) -> int:
        """Number of bits that tell all positions apart."""
        return 8 * self.dtype.itemsize

    @property
    def _zero(self) -> jax.Array:
        return jnp.array(1 << (8 * self.unsigned.itemsize - 1), self.unsigned)

    @property
    def _infinity(self) -> jax.Array:
        bits = lax.bitcast_convert_type(jnp.array(jnp.inf, self.dtype), self.bits)
        return bits.astype(self.signed).astype(self.unsigned)
