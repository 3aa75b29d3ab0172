"""The triangular factors of damped Gram matrices that optimal brain surgeon goes by, in one decomposition each."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Enough to make any finite Gram matrix diagonally dominant.
_MAX_DAMPING = 1e6
# Beyond this LAPACK takes more time than the products into which a decomposition can be broken up.
_BLOCK = 128
# A column is made in so many portions of rows at most, of so many rows at least: then few rows are made in vain.
_PORTIONS, _ROWS = 8, 256


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
    # What blocks of one length leave over is a shorter one, which comes last.
    remainder = gram.shape[0] % _BLOCK
    starts = jnp.arange(remainder, gram.shape[0], _BLOCK)
    corners = _diagonal_blocks(gram, starts)
    first_corner = gram[:remainder, :remainder]

    def damped(corner: jax.Array, block_start: Any, damping: jax.Array) -> jax.Array:
        own = lax.dynamic_slice_in_dim(undamped, block_start, len(corner))
        return jnp.where(jnp.eye(len(corner), dtype=bool), own + damping * mean, corner)

    def retry(attempt: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        matrix, damping, is_first = attempt
        damping = jnp.where(is_first, start, jnp.maximum(10 * damping, 1e-6))

        def add_block(done: jax.Array, matrix: jax.Array) -> jax.Array:
            number = len(starts) - 1 - done
            corner = damped(corners[number], starts[number], damping)
            matrix, corner = _add_corner(matrix, corner, starts[number])
            return _add_columns(matrix, corner, starts[number])

        if len(starts):
            matrix = lax.fori_loop(0, len(starts), add_block, matrix)
        if remainder:
            matrix, _ = _add_corner(matrix, damped(first_corner, 0, damping), 0)
        return matrix, damping, jnp.zeros_like(is_first)

    def has_failed(attempt: tuple[jax.Array, ...]) -> jax.Array:
        matrix, damping, is_first = attempt
        is_finite = jnp.isfinite(jnp.diagonal(matrix)).all()
        return is_first | ~is_finite & (damping < _MAX_DAMPING)

    # The first attempt is in the loop, too: the program is half as long.
    first_attempt = gram, start, jnp.bool_(True)
    upper, damping, _ = lax.while_loop(has_failed, retry, first_attempt)
    return Factors(upper, occurs, damping)


def _diagonal_blocks(matrix: jax.Array, starts: jax.Array) -> jax.Array:
    """The blocks on the diagonal, taken at once: what a loop merely reads could not be changed in place after it."""
    if not len(starts):
        return jnp.zeros((0, _BLOCK, _BLOCK), matrix.dtype)

    def block(start: jax.Array) -> jax.Array:
        return lax.dynamic_slice(matrix, (start, start), (_BLOCK, _BLOCK))

    return jax.vmap(block)(starts)


def _add_corner(matrix: jax.Array, corner: jax.Array, start: Any) -> tuple[jax.Array, jax.Array]:
    """Writes the factor's part in one diagonal block, and returns that, too."""
    matrix, left = _without_later_blocks(matrix, corner, start, start, len(corner))
    corner = jnp.flip(lax.linalg.cholesky(jnp.flip(left), symmetrize_input=False))
    return lax.dynamic_update_slice(matrix, corner, (start, start)), corner


def _add_columns(matrix: jax.Array, corner: jax.Array, start: jax.Array) -> jax.Array:
    """Writes the factor's columns above one diagonal block; those of later blocks are written already.

    The Gram matrix is read from below the diagonal blocks, which stays as it is, so that it can be read again. Rows go
    in portions of one length: one short program does for all blocks.
    """
    size = len(matrix)
    length = min(max(_ROWS, -(-size // _PORTIONS)), size)

    def add_rows(number: jax.Array, matrix: jax.Array) -> jax.Array:
        first = jnp.minimum(number * length, size - length)
        left = lax.dynamic_slice(matrix, (start, first), (_BLOCK, length)).T
        matrix, left = _without_later_blocks(matrix, left, first, start, _BLOCK)
        rows = lax.linalg.triangular_solve(corner, left, transpose_a=True)
        old = lax.dynamic_slice(matrix, (first, start), rows.shape)
        is_above = first + jnp.arange(length) < start
        rows = jnp.where(is_above[:, None], rows, old)
        return lax.dynamic_update_slice(matrix, rows, (first, start))

    return lax.fori_loop(0, (start + length - 1) // length, add_rows, matrix)


def _without_later_blocks(
    matrix: jax.Array, left: jax.Array, first: Any, start: Any, length: int
) -> tuple[jax.Array, jax.Array]:
    """Subtracts, from rows of a block's columns, what the columns of later blocks make of them.

    Args:
      matrix: holds the factor's columns of later blocks.
      left: the rows.
      first: the number of the first row.
      start: the number of the block's first column.
      length: of the block.
    """
    end = start + length

    def subtract(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # The matrix is carried, since an array that a loop merely reads cannot be changed in place after it.
        matrix, left = carry
        column = end + number * _BLOCK
        later = lax.dynamic_slice(matrix, (first, column), (len(left), _BLOCK))
        of_block = lax.dynamic_slice(matrix, (start, column), (length, _BLOCK))
        product = jnp.matmul(later, of_block.T, precision=lax.Precision.HIGHEST)
        return matrix, left - product

    if len(matrix) < length + _BLOCK:  # it is the only block
        return matrix, left
    return lax.fori_loop(0, (len(matrix) - end) // _BLOCK, subtract, (matrix, left))
