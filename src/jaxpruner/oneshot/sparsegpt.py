r"""SparseGPT: weights are removed input by input, and later inputs make up for what earlier ones lost.

Inputs are pruned in order. With $U$ the upper Cholesky factor of the inverse of the damped Gram matrix $H$, removing
weight $j$ of input $i$ costs $w_{ij}^2 / U_{ii}^2$, and changes those of each later input $k$ by $-w_{ij} U_{ik} /
U_{ii}$. Weights are chosen for a block of inputs at a time, in N:M for each group. From Frantar and Alistarh,
"SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", 2023.

Decomposed from its end, $H = R R^\top$ with $R$ upper triangular, so that $U = R^{-1}$. An input's errors are what its
weights lose, over $U_{ii}$. A block of inputs takes its shares of the errors of the blocks before it at once.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import caller_warnings, n_by_m, selection, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.explicit_meshes import without_explicit_axes
from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning
from jaxpruner.oneshot.matrices import check_ranking, keep_best

_BLOCK = 128  # inputs whose weights are chosen together, as in the paper
_PART = 16  # inputs that are pruned before the rest of a block is updated
_MAX_DAMPING = 1e6  # enough to make any finite Gram matrix diagonally dominant


class PrunedMatrices(NamedTuple):
    """What `prune_by_sparsegpt` returns."""

    weights: jax.Array  # [..., inputs, outputs], in the dtype that was given; pruned ones are zero
    mask: jax.Array  # uint8 in the same shape
    damping: jax.Array  # [...], that was used


def decompose(gram: jax.Array, damping: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""Computes $U$ of $H = G + d \cdot \operatorname{mean}(\operatorname{diag} G) I$, with $H^{-1} = U^\top U$.

    Also returns which inputs occur, and the damping $d$ that was used. Inputs that never occur are independent of all
    others, and do not count in the mean. Where the result is not finite, ten times the damping is tried, again and
    again; if nothing helps, `gram` is not finite or no Gram matrix.

    >>> upper, _, damping = decompose(jnp.array([[4.0, 2.0], [2.0, 4.0]]), 0.25)
    >>> jnp.linalg.inv(upper.T @ upper).round(4).tolist(), float(damping)
    ([[5.0, 2.0], [2.0, 5.0]], 0.25)
    """
    diagonal = jnp.diagonal(gram)
    occurs = diagonal != 0
    mean = jnp.sum(diagonal) / jnp.maximum(jnp.sum(occurs), 1)
    mean = jnp.where(occurs.any(), mean, 1)
    undamped = jnp.where(occurs, diagonal, mean)
    # In reverse the lower factor is the upper one; the diagonal is written last, so that `gram` is read once.
    flipped = jnp.flip(gram)
    is_diagonal = jnp.eye(len(gram), dtype=bool)

    def attempt(damping: jax.Array) -> tuple[jax.Array, jax.Array]:
        damped = jnp.where(is_diagonal, jnp.flip(undamped + damping * mean), flipped)
        return lax.linalg.cholesky(damped, symmetrize_input=False), damping

    lower, damping = lax.while_loop(
        lambda tried: ~jnp.isfinite(jnp.diagonal(tried[0])).all() & (tried[1] < _MAX_DAMPING),
        lambda tried: attempt(jnp.maximum(10 * tried[1], 1e-6)),
        attempt(jnp.asarray(damping, gram.dtype)),
    )
    identity = jnp.eye(len(gram), dtype=gram.dtype)
    inverse = lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)
    return jnp.flip(inverse), occurs, damping


@functools.partial(jax.jit, static_argnames=('sparsity_type', 'per', 'block_size', 'keep_zeros'))
def prune_by_sparsegpt(
    weights: jax.Array,
    gram: jax.Array,
    sparsity: Any,
    sparsity_type: sparsity_types.SparsityType = sparsity_types.Unstructured(),
    per: str = 'layer',
    damping: Any = 0.01,
    *,
    block_size: int = _BLOCK,
    keep_zeros: bool = False,
) -> PrunedMatrices:
    """Prunes weight matrices so that their outputs change little; the head of this file says how.

    Blocks are pruned one after another, within a block parts of some inputs, within a part one input at a time. After
    each part one product updates the rest of the block.

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
    check_ranking(sparsity_type, per, weights.shape[-2], 'weights')
    if block_size < 1:
        raise ValueError(f'block_size is a number of inputs from 1 up, got {block_size!r}')
    leading = weights.shape[:-2]
    each = [jnp.broadcast_to(jnp.asarray(x, jnp.float32), leading) for x in (sparsity, damping)]
    if not weights.size:
        return PrunedMatrices(weights, jnp.ones(weights.shape, jnp.uint8), each[1])

    def prune_matrix(matrix: tuple[jax.Array, ...]) -> PrunedMatrices:
        return _prune_matrix(matrix, sparsity_type, per, block_size, keep_zeros)

    def prune_all(*matrices: jax.Array) -> tuple[jax.Array, ...]:
        # One after another, so that only one takes memory.
        flat = tuple(x.reshape(-1, *x.shape[len(leading) :]) for x in matrices)
        return tuple(x.reshape(*leading, *x.shape[1:]) for x in lax.map(prune_matrix, flat))

    prune_there = without_explicit_axes(prune_all, weights)
    return PrunedMatrices(*prune_there(weights, gram, *each))


def _prune_matrix(
    matrix: tuple[jax.Array, ...], sparsity_type: Any, per: str, block_size: int, keep_zeros: bool
) -> PrunedMatrices:
    """Prunes one matrix, given its weights, Gram matrix, sparsity and damping, block by block."""
    weights, gram, sparsity, damping = matrix
    inputs, outputs = weights.shape
    is_n_by_m, part = isinstance(sparsity_type, sparsity_types.NByM), _PART
    block = block_size if block_size <= inputs else -(-inputs // part) * part
    if is_n_by_m:
        # A part is a group, which is chosen by itself, so that blocks may have any length.
        part = sparsity_type.m
        block = part * max(min(block_size, inputs) // part, 1)
    part = math.gcd(block, part)
    padding = -inputs % block
    upper, occurs, used = decompose(gram.astype(tree_lib.at_least_float32(gram.dtype)), damping)
    is_padding = jnp.arange(inputs + padding) >= inputs
    upper = jnp.pad(upper, (0, padding))
    upper = jnp.where(jnp.diag(is_padding), 1, upper)  # independent of all inputs
    old_weights = jnp.pad(weights.astype(upper.dtype), ((0, padding), (0, 0)))
    # The highest cost of each weight. Padding is removed first, then zeros that stay, then inputs that never occur.
    limits = jnp.where(jnp.pad(occurs, (0, padding)), jnp.inf, 0)
    limits = jnp.where(is_padding, -jnp.inf, limits).astype(upper.dtype)[:, None]
    if keep_zeros:
        limits = jnp.where(old_weights == 0, jnp.minimum(limits, -1), limits)
    # How many weights each block keeps (of each output), so that the sum is what the library keeps of all.
    ranked = outputs if per == 'layer' else 1
    ends = [min(end, inputs) * ranked for end in range(block, inputs + block, block)]
    kept = jnp.stack([selection.number_to_keep(end, sparsity) for end in ends])
    counts = jnp.diff(kept, prepend=jnp.zeros(1, kept.dtype))

    def prune_block(errors: jax.Array, number_and_count: Any) -> Any:
        number, count = number_and_count
        start = number * block

        def take_share(earlier: jax.Array, left: jax.Array) -> jax.Array:
            shares = lax.dynamic_slice(upper, (earlier * block, start), (block, block))
            return left - _product(shares, _rows(errors, earlier * block, block))

        def choose(costs: jax.Array) -> jax.Array:
            if not is_n_by_m:
                return keep_best(costs, count, per) != 0
            return (n_by_m.keep_n_of_m(costs, sparsity_type.n, part, 0) != 0) | (sparsity == 0)

        own = lax.fori_loop(0, number, take_share, _rows(old_weights, start, block))
        own_upper = lax.dynamic_slice(upper, (start, start), (block, block))
        own_limits = _rows(limits, start, block)
        new, mask, own_errors = _prune_block(own, own_upper, own_limits, part, choose, is_n_by_m)
        return _put(errors, own_errors, start), (new, mask)

    blocks = jnp.arange(len(ends)), counts
    _, pruned = lax.scan(prune_block, jnp.zeros_like(old_weights), blocks)
    new, mask = (array.reshape(-1, outputs)[:inputs] for array in pruned)
    return PrunedMatrices(new.astype(weights.dtype), mask.astype(jnp.uint8), used)


def _prune_block(
    weights: jax.Array, upper: jax.Array, limits: jax.Array, part: int, choose: Any, in_parts: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Prunes the inputs of a block, part by part; returns the new weights, the mask, and the errors.

    `choose` makes a mask of the costs of the block's weights, or of those of each part when its turn comes.
    """
    diagonal = jnp.diagonal(upper)[:, None]

    def choose_rows(weights: jax.Array, start: Any, length: int) -> jax.Array:
        own_limits = _rows(limits, start, length)
        costs = jnp.abs(weights) / _rows(diagonal, start, length)
        return choose(jnp.minimum(costs, own_limits)) & (own_limits >= 0)

    def prune_part(number: jax.Array, carry: Any) -> Any:
        weights, mask, errors = carry
        first = number * part
        own, shares = _rows(weights, first, part), _rows(upper, first, part)
        own_mask = _rows(mask, first, part)
        if in_parts:
            own_mask = choose_rows(own, first, part)

        def prune_input(i: jax.Array, carry: Any) -> Any:
            weights, errors = carry
            row = _rows(weights, i, 1)
            pruned = jnp.where(_rows(own_mask, i, 1), row, 0)
            error = (row - pruned) / _rows(diagonal, first + i, 1)
            later = lax.dynamic_slice(shares, (i, first), (1, part)).T
            later = jnp.where(jnp.arange(part)[:, None] > i, later, 0)
            return _put(weights - later * error, pruned, i), _put(errors, error, i)

        own, own_errors = lax.fori_loop(0, part, prune_input, (own, jnp.zeros_like(own)))
        later = jnp.where(jnp.arange(len(upper)) >= first + part, shares, 0)
        weights = _put(weights - _product(later, own_errors), own, first)
        return weights, _put(mask, own_mask, first), _put(errors, own_errors, first)

    mask = jnp.ones(weights.shape, bool)
    if not in_parts:
        mask = choose_rows(weights, 0, len(weights))
    carry = weights, mask, jnp.zeros_like(weights)
    return lax.fori_loop(0, len(weights) // part, prune_part, carry)


def _rows(array: jax.Array, start: Any, length: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(array, start, length)


def _put(array: jax.Array, new: jax.Array, start: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(array, new, start, 0)


def _product(transposed: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.matmul(transposed.T, other, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass
class SparseGPT(CalibratedPruning):
    """Removes weights input by input and changes the others to make up for it. Frantar and Alistarh, 2023.

    Attributes:
      damping: what is added to a Gram matrix's diagonal, as a share of its mean; ten times as much where that is not
        enough, with a warning.
      block_size: inputs among which unstructured weights are ranked together, 128 as published; a smaller one spreads
        what is pruned more evenly, a larger one leaves more choice.
      keep_zeros: weights that are zero stay zero, and count as pruned, however many there are; by default one may get a
        value to make up for what goes.

    Raises:
      ValueError: a setting is wrong.

    >>> pruner = SparseGPT(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> batches = [jnp.array([[1.0, 1.0], [2.0, 2.0], [1.0, 0.9]])]  # one input can stand for both
    >>> params = {'w': jnp.ones((2, 1))}
    >>> pruned, _ = pruner.instant_sparsify(params, apply_fn=lambda params, x: x @ params['w'], batches=batches)
    >>> pruned['w'].round(1).tolist()
    [[0.0], [2.0]]
    """

    kind: ClassVar[str] = 'gram'

    per: str = 'layer'
    damping: float = 0.01
    block_size: int = _BLOCK
    keep_zeros: bool = False

    def prune_matrices(self, weights, statistics, sparsity, sparsity_type, where):
        """Makes new weights and the mask; warns where a Gram matrix needed more damping."""
        if statistics.gram is None:
            raise ValueError(
                f"{where}: its statistics hold no Gram matrix; calibrate with kind='gram'"
            )
        settings = {'block_size': self.block_size, 'keep_zeros': self.keep_zeros}
        pruned = prune_by_sparsegpt(
            weights, statistics.gram, sparsity, sparsity_type, self.per, self.damping, **settings
        )
        if float(jnp.max(pruned.damping, initial=0)) > self.damping * 1.001:
            caller_warnings.warn(
                f'Gram matrices could not be decomposed with damping {self.damping}: {where}; calibrate with more '
                'samples, or set damping'
            )
        return pruned.weights, pruned.mask
