"""Floats as whole numbers of the same order, in which thresholds can be sought."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Order(NamedTuple):
    """The order-preserving map between floats of one dtype and unsigned integers; -0.0 and 0.0 share an image.

    >>> order = Order.of(jnp.float32)
    >>> [float(order.value(order.image(jnp.float32(x)) + 1)) > x for x in (-1.0, 0.0, 1.0)]
    [True, True, True]
    """

    dtype: jnp.dtype  # the floats'
    bits: jnp.dtype  # signed integers as wide as they are
    signed: jnp.dtype  # at least 32 bits, to compute in
    unsigned: jnp.dtype  # the images'

    @classmethod
    def of(cls, dtype: jnp.dtype) -> 'Order':
        """The order of a dtype of floats that has infinities."""
        width = jnp.dtype(dtype).itemsize
        wide = max(width, 4)
        integers = (
            jnp.dtype(f'{kind}{8 * n}')
            for kind, n in (('int', width), ('int', wide), ('uint', wide))
        )
        return cls(jnp.dtype(dtype), *integers)

    def image(self, value: jax.Array) -> jax.Array:
        """The place of each value; what NaN becomes means nothing."""
        bits = lax.bitcast_convert_type(value, self.bits).astype(self.signed)
        signed = jnp.where(bits >= 0, bits, jnp.iinfo(self.bits).min - bits)
        return signed.astype(self.unsigned) + self._zero

    def value(self, image: jax.Array) -> jax.Array:
        """The value at each place."""
        signed = (image - self._zero).astype(self.signed)
        bits = jnp.where(signed >= 0, signed, jnp.iinfo(self.bits).min - signed)
        return lax.bitcast_convert_type(bits.astype(self.bits), self.dtype)

    @property
    def lowest(self) -> jax.Array:
        """The image of -inf; the one below stands before all numbers."""
        return self._zero - self._infinity

    @property
    def highest(self) -> jax.Array:
        """The image of inf; the one above stands after all numbers."""
        return self._zero + self._infinity

    @property
    def octave(self) -> int:
        """How many images lie from a number to its double."""
        return 1 << jnp.finfo(self.dtype).nmant

    @property
    def width(self) -> int:
        """How many images there are, at most, in bits."""
        return 8 * self.dtype.itemsize

    @property
    def _zero(self) -> jax.Array:
        return jnp.array(1 << (8 * self.unsigned.itemsize - 1), self.unsigned)

    @property
    def _infinity(self) -> jax.Array:
        bits = lax.bitcast_convert_type(jnp.array(jnp.inf, self.dtype), self.bits)
        return bits.astype(self.signed).astype(self.unsigned)
