"""SparseGPT on weight matrices: they are pruned input by input, and later inputs make up for what earlier ones lost."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import sparsity_types
from jaxpruner.mask_calculator import n_by_m, selection
from jaxpruner.oneshot import cholesky, matrix_masks

BLOCK_SIZE = 128  # inputs whose weights are chosen together, as in the paper
_PART = 16  # inputs that are gone through before the rest of a block is told


class PrunedMatrices(NamedTuple):
    """What `prune_by_sparsegpt` returns.

    Attributes:
      weights: `[..., inputs, outputs]`, in the dtype that was given; pruned ones are zero, the others changed.
      mask: uint8 in the same shape.
      damping: that was used, `[...]`.

    >>> PrunedMatrices(jnp.ones((2, 1)), jnp.ones((2, 1), jnp.uint8), jnp.float32(0.01)).mask.shape
    (2, 1)
    """

    weights: jax.Array
    mask: jax.Array
    damping: jax.Array


@functools.partial(jax.jit, static_argnames=('sparsity_type', 'per', 'block_size'))
def prune_by_sparsegpt(
    weights: jax.Array,
    gram: jax.Array,
    sparsity: Any,
    sparsity_type: sparsity_types.SparsityType = sparsity_types.Unstructured(),
    per: str = 'layer',
    damping: Any = 0.01,
    *,
    block_size: int = BLOCK_SIZE,
    mask: jax.Array | None = None,
) -> PrunedMatrices:
    r"""Prunes weight matrices so that their outputs change little.

    With $U$ the upper Cholesky factor of the inverse of the damped Gram matrix, the inputs are gone through in order:
    removing weight $j$ of input $i$ costs $w_{ij}^2 / U_{ii}^2$, and changes those of each later input $k$ by $-w_{ij}
    U_{ik} / U_{ii}$. Which weights go is decided for a block of inputs at a time, in N:M for each group; or `mask` says
    it, and the weights that it keeps make up for the others. From Frantar and Alistarh, "SparseGPT: Massive Language
    Models Can Be Accurately Pruned in One-Shot", 2023.

    The factors take as much memory as the Gram matrices; besides, one matrix at a time takes memory.

    Args:
      weights: float `[..., inputs, outputs]`.
      gram: sums of products of each two inputs, `[..., inputs, inputs]`.
      sparsity: share to remove, a scalar or one for each matrix; 0 changes nothing. N:M takes any other value alike.
      sparsity_type: `Unstructured()`, or `NByM`, whose groups lie along the inputs whatever its axis.
      per: what is ranked together among the inputs of a block where unstructured: all weights (`'layer'`), or those of
        each `'output'`.
      damping: what is added to the Gram matrix's diagonal, as a share of its mean. Where that is not enough to
        decompose it, ten times as much is tried, again and again.
      block_size: how many inputs make a block; the paper has 128.
      mask: 0/1 in the weights' shape (1 = kept), of whichever origin; sparsity and type are not looked at then.

    Returns:
      New weights, the mask, and the damping that was used. Weights are not finite where the Gram matrix is not.

    Raises:
      TypeError: another sparsity type.
      ValueError: m does not divide the inputs, or something else to compare.

    >>> inputs = jnp.array([[1.0, 1.0], [2.0, 2.0], [1.0, 0.9]])  # nearly the same: one can stand for both
    >>> pruned = prune_by_sparsegpt(jnp.array([[1.0], [1.0]]), inputs.T @ inputs, 0.5)
    >>> pruned.weights.round(1).tolist(), pruned.mask.tolist()
    ([[0.0], [2.0]], [[0], [1]])
    """
    factors = cholesky.flipped_cholesky(gram, damping)
    return prune_by_factors(
        weights, factors, sparsity, sparsity_type, per, block_size=block_size, mask=mask
    )


@functools.partial(jax.jit, static_argnames=('sparsity_type', 'per', 'block_size'))
def prune_by_factors(
    weights: jax.Array,
    factors: cholesky.Factors,
    sparsity: Any,
    sparsity_type: sparsity_types.SparsityType = sparsity_types.Unstructured(),
    per: str = 'layer',
    *,
    block_size: int = BLOCK_SIZE,
    mask: jax.Array | None = None,
) -> PrunedMatrices:
    """`prune_by_sparsegpt` where the Gram matrices are decomposed already, as those of leaves that share their inputs.

    Args:
      weights: as there.
      factors: of the damped Gram matrices.
      sparsity: as there.
      sparsity_type: as there.
      per: as there.
      block_size: as there.
      mask: as there.

    Raises:
      TypeError, ValueError: as there.

    >>> inputs = jnp.array([[1.0, 1.0], [2.0, 2.0], [1.0, 0.9]])
    >>> factors = cholesky.flipped_cholesky(inputs.T @ inputs, 0.01)
    >>> prune_by_factors(jnp.array([[1.0], [1.0]]), factors, 0.5).weights.round(1).tolist()
    [[0.0], [2.0]]
    """
    matrix_masks.check_comparison(per)
    if block_size < 1:
        raise ValueError(f'block_size is a number of inputs from 1 up, got {block_size!r}')
    if mask is None:
        matrix_masks.check_matrix_type(sparsity_type, weights.shape, 'weights')
    else:
        sparsity_type = sparsity_types.Unstructured()
    if not weights.size:
        return PrunedMatrices(weights, jnp.ones(weights.shape, jnp.uint8), factors.damping)
    leading = weights.shape[:-2]
    number = math.prod(leading)
    each = jnp.broadcast_to(jnp.asarray(sparsity, jnp.float32), leading)

    def prune(
        matrix: tuple[jax.Array, cholesky.Factors, jax.Array, jax.Array | None],
    ) -> PrunedMatrices:
        weights, factors, sparsity, mask = matrix
        return _prune(weights, factors, _Choice(sparsity, sparsity_type, per, block_size, mask))

    matrices = jax.tree.map(
        lambda array: array.reshape(number, *array.shape[len(leading) :]),
        (weights, factors, each, mask),
    )
    if number == 1:
        pruned = jax.tree.map(
            lambda array: array[None], prune(jax.tree.map(lambda array: array[0], matrices))
        )
    else:
        pruned = lax.map(prune, matrices)
    return jax.tree.map(lambda array: array.reshape(*leading, *array.shape[1:]), pruned)


class _Choice(NamedTuple):
    """Which weights of a matrix go."""

    sparsity: jax.Array
    sparsity_type: Any
    per: str
    block_size: int
    mask: jax.Array | None  # where it is known already


def _prune(weights: jax.Array, factors: cholesky.Factors, choice: _Choice) -> PrunedMatrices:
    """One matrix, block by block; a block asks for what earlier ones have changed when its turn comes."""
    inputs, outputs = weights.shape
    sparsity, kind, per = choice[:3]
    length, *parts = _lengths(kind, inputs, choice.block_size)
    blocks = -(-inputs // length)
    padding = blocks * length - inputs
    factor = factors.upper
    if padding:
        padded = jnp.diag((jnp.arange(inputs + padding) >= inputs).astype(factor.dtype))
        factor = padded.at[:inputs, :inputs].set(factor)
    start_weights = jnp.pad(weights.astype(factor.dtype), ((0, padding), (0, 0)))
    # Weights of inputs that never occur cost nothing; those that pad the last block are never preferred.
    limits = jnp.where(factors.occurs, jnp.inf, 0).astype(factor.dtype)
    limits = jnp.pad(limits, (0, padding), constant_values=-jnp.inf)[:, None]
    given = (
        None
        if choice.mask is None
        else jnp.pad(choice.mask != 0, ((0, padding), (0, 0)), constant_values=True)
    )

    def prune_block(
        changes: jax.Array, block: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, Any]:
        number, count = block
        start = number * length
        corner = lax.dynamic_slice(factor, (start, start), (length, length))
        eye = jnp.eye(length, dtype=corner.dtype)
        # Transposed it is as LAPACK wants it, and the factor need not be copied.
        inverse = lax.linalg.triangular_solve(
            corner.T, eye, left_side=True, lower=True, transpose_a=True
        )
        old = lax.dynamic_slice_in_dim(start_weights, start, length)
        rows = old + _product(inverse, _told(factor, changes, number, length))
        limit = lax.dynamic_slice_in_dim(limits, start, length)
        mask = jnp.ones(rows.shape, bool)
        if given is not None:
            mask = lax.dynamic_slice_in_dim(given, start, length)
        elif isinstance(kind, sparsity_types.Unstructured):
            mask = _keep(_costs(rows, inverse, limit), count, per)
        rows, mask, _ = _eliminate(rows, mask, inverse, limit, sparsity, kind, parts)
        return lax.dynamic_update_slice_in_dim(changes, old - rows, start, 0), (rows, mask)

    counts = _counts(inputs, outputs, length, sparsity, per)
    _, (rows, mask) = lax.scan(
        prune_block, jnp.zeros_like(start_weights), (jnp.arange(blocks), counts)
    )
    rows, mask = (array.reshape(-1, outputs)[:inputs] for array in (rows, mask))
    return PrunedMatrices(rows.astype(weights.dtype), mask.astype(jnp.uint8), factors.damping)


def _lengths(kind: Any, inputs: int, block_size: int) -> list[int]:
    """How many inputs a block has, a part of it, and so on down to one; groups of N:M are not torn apart."""
    if isinstance(kind, sparsity_types.NByM):  # each group is chosen by itself, whatever the blocks
        part = kind.m * max(_PART // kind.m, 1)
        block = part * max(min(block_size, inputs + part - 1) // part, 1)
        return list(dict.fromkeys([block, part, kind.m, 1]))
    if block_size > inputs:  # one block, padded
        return list(dict.fromkeys([-(-inputs // _PART) * _PART, _PART, 1]))
    part = next(part for part in range(min(_PART, block_size), 0, -1) if block_size % part == 0)
    return list(dict.fromkeys([block_size, part, 1]))


def _counts(inputs: int, outputs: int, length: int, sparsity: jax.Array, per: str) -> jax.Array:
    """How many weights each block keeps (of each output), so that the sum is what the library keeps of all."""
    ends = [min(end, inputs) for end in range(length, inputs + length, length)]
    kept = [
        selection.number_to_keep(end * (outputs if per == 'layer' else 1), sparsity) for end in ends
    ]
    return jnp.diff(jnp.stack(kept), prepend=jnp.zeros((1,), kept[0].dtype))


def _told(factor: jax.Array, changes: jax.Array, number: jax.Array, length: int) -> jax.Array:
    """What earlier blocks have to tell a block.

    With D the changes of all weights and E their errors, D = U^T E, so that R^T D = E: of U no more is needed than its
    diagonal blocks, which are the inverses of those of R.
    """

    def add(earlier: jax.Array, total: jax.Array) -> jax.Array:
        part = lax.dynamic_slice(factor, (earlier * length, number * length), (length, length))
        return total + _product(part, lax.dynamic_slice_in_dim(changes, earlier * length, length))

    return lax.fori_loop(0, number, add, jnp.zeros((length, changes.shape[1]), changes.dtype))


def _eliminate(
    rows: jax.Array,
    mask: jax.Array,
    inverse: jax.Array,
    limits: jax.Array,
    sparsity: jax.Array,
    kind: Any,
    lengths: list[int],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Removes weights of some inputs in order: their new weights, their mask, and the errors that this made.

    The first of `lengths` says how many inputs are gone through before the others are told.
    """
    group = isinstance(kind, sparsity_types.NByM) and rows.shape[0] == kind.m
    if group:
        mask = (n_by_m.keep_n_of_m(_costs(rows, inverse, limits), kind.n, kind.m, 0) != 0) | (
            sparsity == 0
        )
    if not lengths:
        new = jnp.where(mask, rows, 0)
        return new, mask, (rows - new) / inverse
    length, *rest = lengths

    def step(number: jax.Array, carry: Any) -> Any:
        rows, mask, errors = carry
        start = number * length
        corner = lax.dynamic_slice(inverse, (start, start), (length, length))
        part, chosen, limit = (
            lax.dynamic_slice_in_dim(array, start, length) for array in (rows, mask, limits)
        )
        new, kept, error = _eliminate(part, chosen, corner, limit, sparsity, kind, rest)
        later = jnp.arange(rows.shape[0]) >= start + length
        weights = jnp.where(later, lax.dynamic_slice_in_dim(inverse, start, length), 0)
        rows = rows - (weights.T * error if length == 1 else _product(weights, error))
        return [
            lax.dynamic_update_slice_in_dim(array, update, start, 0)
            for array, update in zip((rows, mask, errors), (new, kept, error), strict=True)
        ]

    return tuple(
        lax.fori_loop(0, rows.shape[0] // length, step, [rows, mask, jnp.zeros_like(rows)])
    )


def _costs(rows: jax.Array, inverse: jax.Array, limits: jax.Array) -> jax.Array:
    """The root of what removing each weight costs."""
    return jnp.minimum(jnp.abs(rows) / jnp.diagonal(inverse)[:, None], limits)


def _keep(scores: jax.Array, count: jax.Array, per: str) -> jax.Array:
    if per == 'layer':
        return selection.keep_largest(scores, count) != 0
    request = selection.Request(scores.T, count, is_stacked=True)
    (kept,) = selection.keep_largest_each([request])
    return kept.mask.T != 0


def _product(transposed: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.matmul(transposed.T, other, precision=lax.Precision.HIGHEST)
