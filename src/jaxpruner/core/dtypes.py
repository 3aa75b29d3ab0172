"""Which arrays hold weights, and how wide the numbers are in which weights are scored."""

from typing import Any

import jax.numpy as jnp


def holds_weights(leaf: Any) -> bool:
    """Whether a leaf holds floats or complex numbers; indices, flags and random keys are no weights.

    >>> import numpy as np
    >>> holds_weights(np.ones(2)), holds_weights(np.arange(2))
    (True, False)
    """
    dtype = getattr(leaf, 'dtype', None)
    return dtype is None or jnp.issubdtype(dtype, jnp.inexact)


def at_least_float32(dtype: Any) -> jnp.dtype:
    """Returns the dtype, or float32 where that is wider: sums and products of few bits overflow or vanish.

    >>> at_least_float32('bfloat16'), at_least_float32('float8_e5m2'), at_least_float32('complex64')
    (dtype('float32'), dtype('float32'), dtype('complex64'))
    """
    dtype = jnp.dtype(dtype)
    # JAX promotes no float of 8 bits, and no number of less.
    return jnp.dtype('float32') if dtype.itemsize == 1 else jnp.promote_types(dtype, jnp.float32)
