"""The triangular factors of damped Gram matrices that optimal brain surgeon goes by, in one decomposition each."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner import tree as tree_lib

# Enough to make any finite Gram matrix diagonally dominant.
_MAX_DAMPING = 1e6
# Beyond this LAPACK takes more time than the products into which a decomposition can be broken up.
_BLOCK = 128
# Blocks of a band are decomposed by one loop, each with the number of rows that the last one has. With fewer bands a
# program is shorter, and more rows are computed in vain.
_LEAST_BLOCKS_OF_BAND = 3
_MOST_BANDS = 8


class Factors(NamedTuple):
    """What `flipped_cholesky` returns."""

    upper: jax.Array  # [..., inputs, inputs], garbage below the diagonals
    occurs: jax.Array  # bool [..., inputs], which inputs were not always 0
    damping: jax.Array  # [...], that was used


@jax.jit
def flipped_cholesky(gram: jax.Array, damping: Any) -> Factors:
    r"""Factors $H = G + d \cdot \operatorname{mean}(\operatorname{diag} G) I$ as $H = R R^\top$, $R$ upper triangular.

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
    gram = gram.astype(tree_lib.at_least_float32(gram.dtype))
    start = jnp.asarray(damping, gram.dtype)
    if not gram.size:
        none_occurs = jnp.zeros(gram.shape[:-1], bool)
        return Factors(gram, none_occurs, jnp.full(leading, start))
    stack = gram.reshape(-1, inputs, inputs)

    def replace(index: jax.Array, done: Factors) -> Factors:
        own_gram = lax.dynamic_index_in_dim(done.upper, index, keepdims=False)
        factors = _factor(own_gram, start)

        def put(stacked: jax.Array, matrix: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(stacked, matrix, index, 0)

        return jax.tree.map(put, done, factors)

    count = stack.shape[0]
    if count == 1:
        upper, occurs, damping = _factor(stack[0], start)
    else:
        # `where` keeps the mesh of the stack, whose axes may be part of types; on JAX 0.12 `zeros_like` does not.
        none_occurs = jnp.where(False, stack[:, 0], 0) != 0
        undone = Factors(stack, none_occurs, jnp.full(count, start))
        upper, occurs, damping = lax.fori_loop(0, count, replace, undone)
    return Factors(
        upper=upper.reshape(gram.shape),
        occurs=occurs.reshape(gram.shape[:-1]),
        damping=damping.reshape(leading),
    )


def _factor(gram: jax.Array, start: jax.Array) -> Factors:
    """Factors one matrix."""
    diagonal = jnp.diagonal(gram)
    occurs = diagonal != 0
    count = jnp.maximum(jnp.sum(occurs), 1)
    mean = jnp.sum(diagonal) / count
    mean = jnp.where(occurs.any(), mean, 1)
    undamped = jnp.where(occurs, diagonal, mean)
    bands = _bands(gram.shape[0])
    blocks = [_diagonal_blocks(gram, band) for band in bands]

    def retry(attempt: _Attempt) -> _Attempt:
        matrix, damping, is_first = attempt
        more = jnp.maximum(10 * damping, 1e-6)
        damping = jnp.where(is_first, start, more)
        damped = undamped + damping * mean
        for band, own_blocks in zip(bands, blocks, strict=True):
            diagonals = damped[band.start : band.end]
            diagonals = diagonals.reshape(band.count, band.width, 1)
            is_diagonal = jnp.eye(band.width, dtype=bool)
            corners = jnp.where(is_diagonal, diagonals, own_blocks)
            matrix = _add_band(matrix, corners, band)
        return _Attempt(matrix, damping, jnp.zeros_like(is_first))

    def has_failed(attempt: _Attempt) -> jax.Array:
        diagonal = jnp.diagonal(attempt.matrix)
        is_finite = jnp.isfinite(diagonal).all()
        may_be_damped = attempt.damping < _MAX_DAMPING
        return attempt.is_first | ~is_finite & may_be_damped

    # The first attempt is in the loop, too: the program is half as long.
    undone = _Attempt(gram, start, jnp.bool_(True))
    upper, damping, _ = lax.while_loop(has_failed, retry, undone)
    return Factors(upper, occurs, damping)


class _Attempt(NamedTuple):
    """A decomposition with some damping."""

    matrix: jax.Array  # the factor, or at first the Gram matrix
    damping: jax.Array
    is_first: jax.Array  # whether nothing was tried yet


class _Band(NamedTuple):
    """Blocks of equal width along the diagonal that follow one another."""

    start: int
    width: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.width


def _bands(size: int) -> list[_Band]:
    """Divides a matrix, from its end; what the blocks leave over is a shorter one at the beginning."""
    count, remainder = divmod(size, _BLOCK)
    length = max(_LEAST_BLOCKS_OF_BAND, -(-count // _MOST_BANDS))
    bands = []
    for stop in range(count, 0, -length):
        first = max(stop - length, 0)
        start = remainder + first * _BLOCK
        bands.append(_Band(start, _BLOCK, stop - first))
    if remainder:
        bands.append(_Band(0, remainder, 1))
    return bands


def _diagonal_blocks(matrix: jax.Array, band: _Band) -> jax.Array:
    """Copies `[count, width, width]` of blocks on the diagonal, which the factor takes the place of."""

    def block(start: jax.Array) -> jax.Array:
        return lax.dynamic_slice(matrix, (start, start), (band.width, band.width))

    starts = jnp.arange(band.start, band.end, band.width)
    return jax.vmap(block)(starts)


class _Block(NamedTuple):
    """A block on the diagonal."""

    corner: jax.Array  # its elements, damped
    start: jax.Array  # its first row, unsigned: such indices need no code for negative ones
    later_blocks: jax.Array  # how many stand behind it


def _add_band(matrix: jax.Array, corners: jax.Array, band: _Band) -> jax.Array:
    """Writes the factor's columns of the blocks of a band, the last block first."""

    def add_block(matrix: jax.Array, block: _Block) -> tuple[jax.Array, None]:
        return _add_columns(matrix, block, band.end), None

    starts = np.arange(band.start, band.end, band.width, dtype=np.uint32)
    later_blocks = (len(matrix) - band.width - starts) // _BLOCK
    blocks = _Block(corners, jnp.asarray(starts), jnp.asarray(later_blocks))
    matrix, _ = lax.scan(add_block, matrix, blocks, reverse=True)
    return matrix


def _add_columns(matrix: jax.Array, block: _Block, height: int) -> jax.Array:
    """Writes the factor's columns of one diagonal block; those of later blocks are written already.

    Of the `height` rows that are computed those above the block count. The Gram matrix is read from below the diagonal
    blocks, which stays as it is, so that it can be read again.
    """
    corner, start, later_blocks = block
    width = len(corner)
    first_row = jnp.zeros_like(start)

    def subtract(index: jax.Array, carry: list[jax.Array]) -> list[jax.Array]:
        # The matrix is carried, since an array that a loop merely reads cannot be changed in place after it.
        matrix, left = carry
        column = start + width + index * _BLOCK
        later = lax.dynamic_slice(matrix, (first_row, column), (height, _BLOCK))
        of_block = lax.dynamic_slice(matrix, (start, column), (width, _BLOCK))
        product = jnp.matmul(later, of_block.T, precision=lax.Precision.HIGHEST)
        return [matrix, left - product]

    below_diagonal = lax.dynamic_slice(matrix, (start, first_row), (width, height))
    left = below_diagonal.T
    left = lax.dynamic_update_slice_in_dim(left, corner, start, 0)
    if len(matrix) >= width + _BLOCK:
        matrix, left = lax.fori_loop(first_row, later_blocks, subtract, [matrix, left])
    flipped = jnp.flip(lax.dynamic_slice_in_dim(left, start, width))
    lower = lax.linalg.cholesky(flipped, symmetrize_input=False)
    corner = jnp.flip(lower)
    above = lax.linalg.triangular_solve(corner, left, transpose_a=True)
    old = lax.dynamic_slice(matrix, (first_row, start), (height, width))
    is_above = jnp.arange(height)[:, None] < start
    columns = jnp.where(is_above, above, old)
    columns = lax.dynamic_update_slice_in_dim(columns, corner, start, 0)
    return lax.dynamic_update_slice(matrix, columns, (first_row, start))
