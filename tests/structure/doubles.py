"""Models in float64, in which what is equal differs by less than 1e-8."""

import jax
import jax.numpy as jnp
import numpy as np


def doubles(enabled=True):
    """Where float64 is allowed."""
    if hasattr(jax, 'enable_x64'):
        return jax.enable_x64(enabled)
    return jax.experimental.enable_x64(enabled)


def in_doubles(tree):
    """A tree with float64 for other floats; call it inside `doubles`."""

    def wide(leaf):
        return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

    return jax.tree.map(wide, tree)


def close(one, other):
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def keep_of(group, share, rng):
    """Random channels of a group, so many that this share of them is removed, and at least one."""
    count = min(group.size - 1, max(1, round(group.size * (1 - share))))
    return np.sort(rng.choice(group.size, count, replace=False))
