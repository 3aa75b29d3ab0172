"""The triangular factor of a damped Gram matrix that optimal brain surgeon goes by, in one decomposition."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Enough to make any finite Gram matrix diagonally dominant.
_MAX_DAMPING = 1e6
# Beyond this LAPACK takes more time than the products into which a decomposition can be broken up.
_LEAF = 128


def flipped_cholesky(gram: jax.Array, damping: Any) -> tuple[jax.Array, jax.Array]:
    r"""The upper triangular $R$ with $H = R R^\top$, of $H = G + d \cdot \operatorname{mean}(\operatorname{diag} G) I$.

    It is the Cholesky factor of $H$ with rows and columns in reverse. Since $H^{-1} = R^{-\top} R^{-1}$, its inverse
    is the factor of $H^{-1}$ that SparseGPT goes by, and the diagonal blocks of one are the inverses of those of the
    other. Inputs that never occur stand alone, and are left out of the mean.

    Args:
      gram: float `[inputs, inputs]`, symmetric and not negative.
      damping: $d$; where the decomposition is not finite, ten times as much is tried, again and again.

    Returns:
      The factor (not finite if nothing helped: then the Gram matrix is not finite, or no Gram matrix), and the damping
      that was used.

    >>> factor, damping = flipped_cholesky(jnp.array([[4.0, 2.0], [2.0, 4.0]]), 0.25)
    >>> (factor @ factor.T).round(4).tolist(), float(damping)
    ([[5.0, 2.0], [2.0, 5.0]], 0.25)
    """
    diagonal = jnp.diagonal(gram)
    occurs = diagonal != 0
    mean = jnp.where(occurs.any(), jnp.sum(diagonal) / jnp.maximum(jnp.sum(occurs), 1), 1)
    alone = jnp.where(occurs, diagonal, mean)

    def more(tried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        damping = jnp.where(tried[1] < 0, start, jnp.maximum(10 * tried[1], 1e-6))
        # The transpose is the same, and as LAPACK wants it.
        return _decompose(gram.T, alone + damping * mean - diagonal), damping

    def failed(tried: tuple[jax.Array, jax.Array]) -> jax.Array:
        return ~jnp.isfinite(jnp.diagonal(tried[0])).all() & (tried[1] < _MAX_DAMPING)

    start = jnp.asarray(damping, gram.dtype)
    # The first try is a turn of the loop, too: the program is half as long, and holds one factor instead of two.
    return lax.while_loop(failed, more, (jnp.full_like(gram, jnp.nan), -jnp.ones_like(start)))


def _decompose(matrix: jax.Array, added: jax.Array) -> jax.Array:
    """The last rows and columns first: what they leave of the others is decomposed next.

    What is added to the diagonal is added where it is used, so that the sum takes no memory.
    """
    size = matrix.shape[0]
    if size <= _LEAF:
        return jnp.flip(lax.linalg.cholesky(jnp.flip(matrix + jnp.diag(added)), symmetrize_input=False))
    first = -(-size // (2 * _LEAF)) * _LEAF
    last = _decompose(matrix[first:, first:], added[first:])
    beside = lax.linalg.triangular_solve(last, matrix[:first, first:], transpose_a=True)
    left = matrix[:first, :first] - jnp.matmul(beside, beside.T, precision=lax.Precision.HIGHEST)
    left = _decompose(left, added[:first])
    whole = jnp.zeros_like(matrix).at[first:, first:].set(last).at[:first, first:].set(beside)
    return whole.at[:first, :first].set(left)
