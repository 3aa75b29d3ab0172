"""The triangular factors of damped Gram matrices that optimal brain surgeon goes by, in one decomposition each."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Enough to make any finite Gram matrix diagonally dominant.
_MAX_DAMPING = 1e6
# Beyond this LAPACK takes more time than the products into which a decomposition can be broken up.
_BLOCK = 128


class Factors(NamedTuple):
    """What `flipped_cholesky` returns.

    Attributes:
      upper: the factors, `[..., inputs, inputs]`. What stands below their diagonals is of no use.
      occurs: which inputs were not always 0, bool `[..., inputs]`.
      damping: that was used, `[...]`.

    >>> Factors(jnp.eye(2), jnp.ones(2, bool), jnp.float32(0.01)).upper.shape
    (2, 2)
    """

    upper: jax.Array
    occurs: jax.Array
    damping: jax.Array


@jax.jit
def flipped_cholesky(gram: jax.Array, damping: Any) -> Factors:
    r"""The upper triangular $R$ with $H = R R^\top$, of $H = G + d \cdot \operatorname{mean}(\operatorname{diag} G) I$.

    It is the Cholesky factor of $H$ with rows and columns in reverse. Since $H^{-1} = R^{-\top} R^{-1}$, its inverse
    is the factor of $H^{-1}$ that SparseGPT goes by, and the diagonal blocks of one are the inverses of those of the
    other. Inputs that never occur stand alone, and are left out of the mean.

    Where `gram` is donated the factors take its place, and not quite two matrices more are held meanwhile.

    Args:
      gram: float `[..., inputs, inputs]`, symmetric and not negative; decomposed in at least float32.
      damping: $d$; where the decomposition is not finite, ten times as much is tried, again and again.

    Returns:
      The factors (not finite if nothing helped: then the Gram matrix is not finite, or no Gram matrix), and the damping
      that was used.

    >>> factors = flipped_cholesky(jnp.array([[4.0, 2.0], [2.0, 4.0]]), 0.25)
    >>> upper = jnp.triu(factors.upper)
    >>> (upper @ upper.T).round(4).tolist(), float(factors.damping)
    ([[5.0, 2.0], [2.0, 5.0]], 0.25)
    """
    *leading, inputs, _ = gram.shape
    gram = gram.astype(jnp.promote_types(gram.dtype, jnp.float32))
    start = jnp.asarray(damping, gram.dtype)
    if not gram.size:
        return Factors(gram, jnp.zeros(gram.shape[:-1], bool), jnp.full(leading, start))
    stack = gram.reshape(-1, inputs, inputs)

    def replace(place: jax.Array, done: Factors) -> Factors:
        found = _factor(lax.dynamic_index_in_dim(done.upper, place, keepdims=False), start)
        return jax.tree.map(
            lambda each, new: lax.dynamic_update_index_in_dim(each, new, place, 0), done, found
        )

    if stack.shape[0] == 1:
        upper, occurs, damping = _factor(stack[0], start)
    else:
        # Made of the stack for its mesh, whose axes may be part of types.
        occurs, each = jnp.zeros_like(stack[:, 0], dtype=bool), jnp.full(stack.shape[0], start)
        upper, occurs, damping = lax.fori_loop(
            0, stack.shape[0], replace, Factors(stack, occurs, each)
        )
    return Factors(
        upper.reshape(gram.shape), occurs.reshape(gram.shape[:-1]), damping.reshape(leading)
    )


def _factor(gram: jax.Array, start: jax.Array) -> Factors:
    """The factor of one matrix."""
    diagonal = jnp.diagonal(gram)
    occurs = diagonal != 0
    mean = jnp.where(occurs.any(), jnp.sum(diagonal) / jnp.maximum(jnp.sum(occurs), 1), 1)
    alone = jnp.where(occurs, diagonal, mean)
    ranges = [(max(end - _BLOCK, 0), end) for end in range(gram.shape[0], 0, -_BLOCK)]
    corners = [gram[begin:end, begin:end] for begin, end in ranges]

    def more(tried: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        matrix, damping, first = tried
        damping = jnp.where(first, start, jnp.maximum(10 * damping, 1e-6))
        for (begin, end), corner in zip(ranges, corners, strict=True):
            eye = jnp.eye(end - begin, dtype=bool)
            damped = jnp.where(eye, (alone + damping * mean)[begin:end], corner)
            matrix = _add_columns(matrix, damped, begin)
        return matrix, damping, jnp.zeros_like(first)

    def failed(tried: tuple[jax.Array, ...]) -> jax.Array:
        matrix, damping, first = tried
        return first | ~jnp.isfinite(jnp.diagonal(matrix)).all() & (damping < _MAX_DAMPING)

    # The first try is a turn of the loop, too: the program is half as long.
    upper, damping, _ = lax.while_loop(failed, more, (gram, start, jnp.bool_(True)))
    return Factors(upper, occurs, damping)


def _add_columns(matrix: jax.Array, corner: jax.Array, start: int) -> jax.Array:
    """Writes some of the factor's columns above the diagonal, of which the later ones are there already.

    What is factored is read below the diagonal blocks, so that it can be read again.
    """
    end, size = start + corner.shape[0], matrix.shape[0]

    def subtract(number: jax.Array, carry: list[jax.Array]) -> list[jax.Array]:
        matrix, left = (
            carry  # carried, for what a loop merely reads cannot be changed in place after it
        )
        later = lax.dynamic_slice(matrix, (0, end + number * _BLOCK), (end, _BLOCK))
        return [matrix, left - jnp.matmul(later, later[start:].T, precision=lax.Precision.HIGHEST)]

    left = jnp.concatenate([matrix[start:end, :start].T, corner])
    if end < size:
        matrix, left = lax.fori_loop(0, (size - end) // _BLOCK, subtract, [matrix, left])
    corner = jnp.flip(lax.linalg.cholesky(jnp.flip(left[start:]), symmetrize_input=False))
    beside = lax.linalg.triangular_solve(corner, left[:start], transpose_a=True)
    return lax.dynamic_update_slice(matrix, jnp.concatenate([beside, corner]), (0, start))
