"""SparseGPT on weight matrices: they are pruned input by input, and later inputs make up for what earlier ones lost."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import selection, sparsity_types
from jaxpruner.explicit_meshes import without_explicit_axes
from jaxpruner.oneshot import cholesky, matrix_masks
from jaxpruner.oneshot.elimination import Rows, Rule, eliminate, part_lengths, product

BLOCK_SIZE = 128  # inputs whose weights are chosen together, as in the paper


class PrunedMatrices(NamedTuple):
    """What `prune_by_sparsegpt` returns."""

    weights: jax.Array  # [..., inputs, outputs], in the dtype that was given; pruned ones are zero
    mask: jax.Array  # uint8 in the same shape
    damping: jax.Array  # [...], that was used


@functools.partial(jax.jit, static_argnames=('sparsity_type', 'per', 'block_size', 'keep_zeros'))
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
    keep_zeros: bool = False,
) -> PrunedMatrices:
    r"""Prunes weight matrices so that their outputs change little.

    Inputs are pruned in order. With $U$ the upper Cholesky factor of the inverse of the damped Gram matrix, removing
    weight $j$ of input $i$ costs $w_{ij}^2 / U_{ii}^2$, and changes those of each later input $k$ by $-w_{ij} U_{ik} /
    U_{ii}$. Weights are chosen for a block of inputs at a time, in N:M for each group; the weights that a given `mask`
    keeps make up for the others. From Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately
    Pruned in One-Shot", 2023.

    The factors take as much memory as the Gram matrices; besides, one matrix at a time takes memory.

    Args:
      weights: float `[..., inputs, outputs]`.
      gram: sums of products of each two inputs, `[..., inputs, inputs]`.
      sparsity: share to remove, a scalar or one for each matrix; 0 changes nothing. N:M takes any other value alike.
      sparsity_type: `Unstructured()`, or `NByM`, whose groups lie along the inputs whatever its axis.
      per: what is ranked together among the inputs of a block where unstructured. `'output'`: the weights of one
        output. `'layer'`: all weights of one matrix.
      damping: what is added to the Gram matrix's diagonal, as a share of its mean. Where that is not enough to
        decompose it, ten times as much is tried, again and again.
      block_size: how many inputs make a block; the paper has 128.
      mask: 0/1 in the weights' shape (1 = kept), from any source; sparsity and type are ignored then.
      keep_zeros: weights that are zero stay zero, and count as pruned, however many there are.

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
        weights,
        factors,
        sparsity,
        sparsity_type,
        per,
        block_size=block_size,
        mask=mask,
        keep_zeros=keep_zeros,
    )


@functools.partial(jax.jit, static_argnames=('sparsity_type', 'per', 'block_size', 'keep_zeros'))
def prune_by_factors(
    weights: jax.Array,
    factors: cholesky.Factors,
    sparsity: Any,
    sparsity_type: sparsity_types.SparsityType = sparsity_types.Unstructured(),
    per: str = 'layer',
    *,
    block_size: int = BLOCK_SIZE,
    mask: jax.Array | None = None,
    keep_zeros: bool = False,
) -> PrunedMatrices:
    """Prunes as `prune_by_sparsegpt`, by Gram matrices that are decomposed already: some leaves share their inputs."""
    matrix_masks.check_comparison(per)
    if block_size < 1:
        raise ValueError(f'block_size is a number of inputs from 1 up, got {block_size!r}')
    if mask is None:
        matrix_masks.check_matrix_type(sparsity_type, weights.shape, 'weights')
    else:
        sparsity_type = sparsity_types.Unstructured()
    if not weights.size:
        keeps_all = jnp.ones(weights.shape, jnp.uint8)
        return PrunedMatrices(weights, keeps_all, factors.damping)
    *leading, inputs, _ = weights.shape
    lengths = part_lengths(sparsity_type, inputs, block_size)

    def prune(matrix: _Matrix) -> PrunedMatrices:
        rule = Rule(sparsity_type, per, matrix.sparsity, lengths, keep_zeros)
        return _prune(matrix, rule)

    count = math.prod(leading)

    def stack(array: jax.Array) -> jax.Array:
        return array.reshape(count, *array.shape[len(leading) :])

    def prune_all(*matrices: Any) -> tuple[jax.Array, ...]:
        stacked = jax.tree.map(stack, _Matrix(*matrices))
        if count == 1:
            only_matrix = jax.tree.map(lambda array: array[0], stacked)
            pruned = prune(only_matrix)
        else:
            pruned = lax.map(prune, stacked)
        return (
            pruned.weights.reshape(weights.shape),
            pruned.mask.reshape(weights.shape),
            pruned.damping.reshape(leading),
        )

    sparsity = jnp.asarray(sparsity, jnp.float32)
    sparsities = jnp.broadcast_to(sparsity, leading)
    prune_there = without_explicit_axes(prune_all, weights, False, False, False)
    return PrunedMatrices(*prune_there(weights, factors, sparsities, mask))


class _Matrix(NamedTuple):
    """A weight matrix and all that tells which of its weights go."""

    weights: jax.Array
    factors: cholesky.Factors
    sparsity: jax.Array
    mask: jax.Array | None  # if it comes from elsewhere


def _prune(matrix: _Matrix, rule: Rule) -> PrunedMatrices:
    """Prunes one matrix block by block; a block adds up the updates from earlier blocks when its turn comes."""
    inputs, outputs = matrix.weights.shape
    length, *parts = rule.lengths
    number_of_blocks = -(-inputs // length)
    padding = number_of_blocks * length - inputs
    factor = _pad_factor(matrix.factors.upper, padding)
    below = (0, padding), (0, 0)
    old_weights = jnp.pad(matrix.weights.astype(factor.dtype), below)
    # Weights of inputs that never occur have cost 0. Padding has cost -inf. So padding is removed first, then inputs
    # that never occur.
    limits = jnp.where(matrix.factors.occurs, jnp.inf, 0)
    limits = limits.astype(factor.dtype)
    limits = jnp.pad(limits, (0, padding), constant_values=-jnp.inf)[:, None]
    if rule.keep_zeros:
        limits = jnp.where(old_weights == 0, jnp.minimum(limits, -1), limits)
    given = matrix.mask
    if given is not None:
        given = jnp.pad(given != 0, below, constant_values=True)

    def prune_block(
        changes: jax.Array, block: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        index, count = block
        start = index * length
        corner = lax.dynamic_slice(factor, (start, start), (length, length))
        old = lax.dynamic_slice_in_dim(old_weights, start, length)
        inverse = _invert(corner)
        errors = _errors_of_earlier_blocks(factor, changes, index, length)
        weights = old + product(inverse, errors)
        keeps_all = jnp.ones(weights.shape, bool)
        limit = lax.dynamic_slice_in_dim(limits, start, length)
        rows = Rows(weights, keeps_all, inverse, limit)
        if given is not None:
            own_mask = lax.dynamic_slice_in_dim(given, start, length)
            rows = rows._replace(mask=own_mask)
        elif sparsity_types.is_unstructured(rule.sparsity_type):
            own_mask = _keep(rows.costs(), count, rule.per)
            rows = rows._replace(mask=own_mask & (limit >= 0))
        new, mask, _ = eliminate(rows, rule, parts)
        changes = lax.dynamic_update_slice_in_dim(changes, old - new, start, 0)
        return changes, (new, mask)

    blocks = jnp.arange(number_of_blocks), _counts(inputs, outputs, rule)
    _, (new, mask) = lax.scan(prune_block, jnp.zeros_like(old_weights), blocks)
    new = new.reshape(-1, outputs)[:inputs]
    mask = mask.reshape(-1, outputs)[:inputs]
    return PrunedMatrices(
        weights=new.astype(matrix.weights.dtype),
        mask=mask.astype(jnp.uint8),
        damping=matrix.factors.damping,
    )


def _counts(inputs: int, outputs: int, rule: Rule) -> jax.Array:
    """Counts how many weights each block keeps (of each output), so that the sum is what the library keeps of all."""
    length = rule.lengths[0]
    compared_outputs = outputs if rule.per == 'layer' else 1
    kept = []
    for end in range(length, inputs + length, length):
        weights = min(end, inputs) * compared_outputs
        kept.append(selection.number_to_keep(weights, rule.sparsity))
    zero = jnp.zeros((1,), kept[0].dtype)
    return jnp.diff(jnp.stack(kept), prepend=zero)


def _pad_factor(factor: jax.Array, padding: int) -> jax.Array:
    """Pads a factor with inputs behind the last that are independent of all others."""
    inputs = factor.shape[0]
    if not padding:
        return factor
    is_padding = jnp.arange(inputs + padding) >= inputs
    independent = jnp.diag(is_padding.astype(factor.dtype))
    return independent.at[:inputs, :inputs].set(factor)


def _invert(upper: jax.Array) -> jax.Array:
    """Inverts an upper triangle; transposed it is as LAPACK wants it, and need not be copied."""
    eye = jnp.eye(upper.shape[0], dtype=upper.dtype)
    return lax.linalg.triangular_solve(upper.T, eye, left_side=True, lower=True, transpose_a=True)


def _errors_of_earlier_blocks(
    factor: jax.Array, changes: jax.Array, index: jax.Array, length: int
) -> jax.Array:
    """Sums the errors that a block has to make up for over the blocks before it.

    With $D$ the changes of all weights and $E$ the errors that they correct, $D = U^T E$, so that $R^T D = E$. Of $U$
    only the diagonal blocks are needed, which are the inverses of those of the factor $R$.
    """

    def add(earlier: jax.Array, total: jax.Array) -> jax.Array:
        start = earlier * length
        part = lax.dynamic_slice(factor, (start, index * length), (length, length))
        own_changes = lax.dynamic_slice_in_dim(changes, start, length)
        return total + product(part, own_changes)

    zeros = jnp.zeros((length, changes.shape[1]), changes.dtype)
    return lax.fori_loop(0, index, add, zeros)


def _keep(scores: jax.Array, count: jax.Array, per: str) -> jax.Array:
    if per == 'layer':
        return selection.keep_largest(scores, count) != 0
    request = selection.Request(scores.T, count, is_stacked=True)
    (kept,) = selection.keep_largest_each([request])
    return kept.mask.T != 0
