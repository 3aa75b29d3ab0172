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
    """What `flipped_cholesky` returns."""

    upper: jax.Array  # [..., inputs, inputs], garbage below the diagonals
    occurs: jax.Array  # bool [..., inputs], which inputs were not always 0
    damping: jax.Array  # [...], that was used


@jax.jit
def flipped_cholesky(gram: jax.Array, damping: Any) -> Factors:
    r"""The upper triangular $R$ with $H = R R^\top$, of $H = G + d \cdot \operatorname{mean}(\operatorname{diag} G) I$.

    It is the Cholesky factor of $H$ with rows and columns in reverse. Since $H^{-1} = R^{-\top} R^{-1}$, its inverse
    is the factor $U$ of $H^{-1}$ that SparseGPT needs, and each diagonal block of $U$ is the inverse of that of $R$.
    Inputs that never occur are independent of all others, and do not count in the mean.

    `gram` is a float array `[..., inputs, inputs]`, decomposed in at least float32. Where the result is not finite, ten
    times the damping $d$ is tried, again and again; if nothing helps, `gram` is not finite or no Gram matrix. If `gram`
    is donated, the factors take its memory, and not quite two matrices more are held meanwhile.

    >>> factors = flipped_cholesky(jnp.array([[4.0, 2.0], [2.0, 4.0]]), 0.25)
    >>> upper = jnp.triu(factors.upper)
    >>> (upper @ upper.T).round(4).tolist(), float(factors.damping)
    ([[5.0, 2.0], [2.0, 5.0]], 0.25)
    """
    *leading, inputs, _ = gram.shape
    gram = gram.astype(jnp.promote_types(gram.dtype, jnp.float32))
    start = jnp.asarray(damping, gram.dtype)
    if not gram.size:
        none_occurs = jnp.zeros(gram.shape[:-1], bool)
        return Factors(gram, none_occurs, jnp.full(leading, start))
    stack = gram.reshape(-1, inputs, inputs)

    def replace(number: jax.Array, done: Factors) -> Factors:
        factors = _factor(lax.dynamic_index_in_dim(done.upper, number, keepdims=False), start)

        def put(stacked: jax.Array, matrix: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(stacked, matrix, number, 0)

        return jax.tree.map(put, done, factors)

    if stack.shape[0] == 1:
        upper, occurs, damping = _factor(stack[0], start)
    else:
        # `zeros_like` keeps the mesh of the stack, whose axes may be part of types.
        none_occurs = jnp.zeros_like(stack[:, 0], dtype=bool)
        undone = Factors(stack, none_occurs, jnp.full(stack.shape[0], start))
        upper, occurs, damping = lax.fori_loop(0, stack.shape[0], replace, undone)
    return Factors(
        upper.reshape(gram.shape), occurs.reshape(gram.shape[:-1]), damping.reshape(leading)
    )


def _factor(gram: jax.Array, start: jax.Array) -> Factors:
    """The factor of one matrix."""
    diagonal = jnp.diagonal(gram)
    occurs = diagonal != 0
    number = jnp.maximum(jnp.sum(occurs), 1)
    mean = jnp.where(occurs.any(), jnp.sum(diagonal) / number, 1)
    undamped = jnp.where(occurs, diagonal, mean)
    corners = {}
    for end in range(gram.shape[0], 0, -_BLOCK):
        begin = max(end - _BLOCK, 0)
        corners[begin, end] = gram[begin:end, begin:end]

    def retry(attempt: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        matrix, damping, is_first = attempt
        damping = jnp.where(is_first, start, jnp.maximum(10 * damping, 1e-6))
        for (begin, end), corner in corners.items():
            eye = jnp.eye(end - begin, dtype=bool)
            damped = jnp.where(eye, (undamped + damping * mean)[begin:end], corner)
            matrix = _add_columns(matrix, damped, begin)
        return matrix, damping, jnp.zeros_like(is_first)

    def has_failed(attempt: tuple[jax.Array, ...]) -> jax.Array:
        matrix, damping, is_first = attempt
        is_finite = jnp.isfinite(jnp.diagonal(matrix)).all()
        return is_first | ~is_finite & (damping < _MAX_DAMPING)

    # The first attempt is in the loop, too: the program is half as long.
    first_attempt = gram, start, jnp.bool_(True)
    upper, damping, _ = lax.while_loop(has_failed, retry, first_attempt)
    return Factors(upper, occurs, damping)


def _add_columns(matrix: jax.Array, corner: jax.Array, start: int) -> jax.Array:
    """Writes the factor's columns of one diagonal block; those of later blocks are written already.

    The Gram matrix is read from below the diagonal blocks, which stays as it is, so that it can be read again.
    """
    end, size = start + corner.shape[0], matrix.shape[0]

    def subtract(number: jax.Array, carry: list[jax.Array]) -> list[jax.Array]:
        # The matrix is carried, since an array that a loop merely reads cannot be changed in place after it.
        matrix, left = carry
        column = end + number * _BLOCK
        later = lax.dynamic_slice(matrix, (0, column), (end, _BLOCK))
        product = jnp.matmul(later, later[start:].T, precision=lax.Precision.HIGHEST)
        return [matrix, left - product]

    left = jnp.concatenate([matrix[start:end, :start].T, corner])
    if end < size:
        number_of_blocks = (size - end) // _BLOCK
        matrix, left = lax.fori_loop(0, number_of_blocks, subtract, [matrix, left])
    flipped = jnp.flip(left[start:])
    corner = jnp.flip(lax.linalg.cholesky(flipped, symmetrize_input=False))
    beside = lax.linalg.triangular_solve(corner, left[:start], transpose_a=True)
    columns = jnp.concatenate([beside, corner])
    return lax.dynamic_update_slice(matrix, columns, (0, start))
