r"""SparseGPT: weights are removed input by input, and later inputs make up for what earlier ones lost.

Inputs are pruned in order. With $U$ the upper Cholesky factor of the inverse of the damped Gram matrix $H$, removing
weight $j$ of input $i$ costs $w_{ij}^2 / U_{ii}^2$, and changes those of each later input $k$ by $-w_{ij} U_{ik} /
U_{ii}$. Weights are chosen for a block of inputs at a time, in N:M for each group. From Frantar and Alistarh,
"SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", 2023.

Decomposed from its end, $H = R R^\top$ with $R$ upper triangular, so that $U = R^{-1}$. An input's errors are what its
weights lose, over $U_{ii}$. A block of inputs takes its shares of the errors of the blocks before it at once.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import caller_warnings, n_by_m, selection, sparsity_types, utils
from jaxpruner import tree as tree_lib
from jaxpruner.explicit_meshes import without_explicit_axes
from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning
from jaxpruner.oneshot.matrices import check_comparison, check_matrix_type

_BLOCK = 128  # inputs whose weights are chosen together, as in the paper
_PART = 16  # inputs that are pruned before the rest of a block is updated
_MAX_DAMPING = 1e6  # enough to make any finite Gram matrix diagonally dominant


class Factors(NamedTuple):
    """What pruning needs of a Gram matrix, or of several."""

    upper: jax.Array  # [..., inputs, inputs], U
    occurs: jax.Array  # bool [..., inputs], which inputs were not always 0
    damping: jax.Array  # [...], that was used


class PrunedMatrices(NamedTuple):
    """What `prune_by_sparsegpt` returns."""

    weights: jax.Array  # [..., inputs, outputs], in the dtype that was given; pruned ones are zero
    mask: jax.Array  # uint8 in the same shape
    damping: jax.Array  # [...], that was used


def _for_each(function: Callable[..., Any], leading: tuple[int, ...], *trees: Any) -> Any:
    """Calls a function for each matrix, one after another, so that only one takes memory."""
    count = math.prod(leading)
    flat = jax.tree.map(lambda array: array.reshape(count, *array.shape[len(leading) :]), trees)
    if count == 1:
        results = function(*jax.tree.map(lambda array: array[0], flat))
    else:
        results = lax.map(lambda one: function(*one), flat)
    own = slice(int(count != 1), None)
    return jax.tree.map(lambda array: array.reshape(*leading, *array.shape[own]), results)


@jax.jit
def decompose(gram: jax.Array, damping: Any) -> Factors:
    r"""Computes $U$ of $H = G + d \cdot \operatorname{mean}(\operatorname{diag} G) I$, with $H^{-1} = U^\top U$.

    Inputs that never occur are independent of all others, and do not count in the mean. `gram` is a float array `[...,
    inputs, inputs]`, decomposed in at least float32. Where the result is not finite, ten times the damping $d$ is
    tried, again and again; if nothing helps, `gram` is not finite or no Gram matrix.

    >>> factors = decompose(jnp.array([[4.0, 2.0], [2.0, 4.0]]), 0.25)
    >>> jnp.linalg.inv(factors.upper.T @ factors.upper).round(4).tolist(), float(factors.damping)
    ([[5.0, 2.0], [2.0, 5.0]], 0.25)
    """
    gram = gram.astype(tree_lib.at_least_float32(gram.dtype))
    start = jnp.asarray(damping, gram.dtype)

    def decompose_one(gram: jax.Array) -> Factors:
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
            attempt(start),
        )
        identity = jnp.eye(len(gram), dtype=gram.dtype)
        inverse = lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)
        return Factors(jnp.flip(inverse), occurs, damping)

    if not gram.size:
        occurs = jnp.zeros(gram.shape[:-1], bool)
        return Factors(gram, occurs, jnp.full(gram.shape[:-2], start))
    return _for_each(decompose_one, gram.shape[:-2], gram)


@functools.partial(jax.jit, static_argnames=('sparsity_type', 'per', 'block_size', 'keep_zeros'))
def prune_by_sparsegpt(
    weights: jax.Array,
    gram: jax.Array | Factors,
    sparsity: Any,
    sparsity_type: sparsity_types.SparsityType = sparsity_types.Unstructured(),
    per: str = 'layer',
    damping: Any = 0.01,
    *,
    block_size: int = _BLOCK,
    mask: jax.Array | None = None,
    keep_zeros: bool = False,
) -> PrunedMatrices:
    """Prunes weight matrices so that their outputs change little; the head of this file says how.

    Blocks are pruned one after another, within a block parts of some inputs, within a part one input at a time. After
    each part one product updates the rest of the block.

    Args:
      weights: float `[..., inputs, outputs]`.
      gram: sums of products of each two inputs, `[..., inputs, inputs]`, or what `decompose` made of them.
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
    check_comparison(per)
    if block_size < 1:
        raise ValueError(f'block_size is a number of inputs from 1 up, got {block_size!r}')
    if mask is None:
        check_matrix_type(sparsity_type, weights.shape, 'weights')
    factors = gram if isinstance(gram, Factors) else decompose(gram, damping)
    if not weights.size:
        return PrunedMatrices(weights, jnp.ones(weights.shape, jnp.uint8), factors.damping)
    *leading, inputs, outputs = weights.shape
    n = 0
    if mask is None and isinstance(sparsity_type, sparsity_types.NByM):
        # A part is a group, which is chosen by itself, so that blocks may have any length.
        n, part = sparsity_type.n, sparsity_type.m
        block = part * max(min(block_size, inputs) // part, 1)
    else:
        block = block_size if block_size <= inputs else -(-inputs // _PART) * _PART
        part = math.gcd(block, _PART)
    number_of_blocks = -(-inputs // block)
    padding = number_of_blocks * block - inputs
    is_padding = jnp.arange(inputs + padding) >= inputs

    def rows(array: jax.Array, start: Any, length: int = block) -> jax.Array:
        return lax.dynamic_slice_in_dim(array, start, length)

    def put(array: jax.Array, new: jax.Array, start: Any) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(array, new, start, 0)

    def prune_matrix(weights: Any, factors: Factors, sparsity: Any, given: Any) -> tuple[Any, ...]:
        upper = jnp.pad(factors.upper, (0, padding))
        upper = jnp.where(jnp.diag(is_padding), 1, upper)  # independent of all inputs
        old_weights = jnp.pad(weights.astype(upper.dtype), ((0, padding), (0, 0)))
        # The highest cost of each weight. Padding is removed first, then zeros that stay, then inputs that never occur.
        limits = jnp.where(jnp.pad(factors.occurs, (0, padding)), jnp.inf, 0)
        limits = jnp.where(is_padding, -jnp.inf, limits).astype(upper.dtype)[:, None]
        if keep_zeros:
            limits = jnp.where(old_weights == 0, jnp.minimum(limits, -1), limits)
        if given is not None:
            given = jnp.pad(given != 0, ((0, padding), (0, 0)))
        # How many weights each block keeps (of each output), so that the sum is what the library keeps of all.
        ranked = outputs if per == 'layer' else 1
        ends = [min(end, inputs) * ranked for end in range(block, inputs + block, block)]
        kept = jnp.stack([selection.number_to_keep(end, sparsity) for end in ends])
        counts = jnp.diff(kept, prepend=jnp.zeros(1, kept.dtype))

        def prune_block(errors: jax.Array, number_and_count: Any) -> Any:
            number, count = number_and_count
            start = number * block
            own = lax.dynamic_slice(upper, (start, start), (block, block))
            diagonal = jnp.diagonal(own)[:, None]

            def take_share(earlier: jax.Array, left: jax.Array) -> jax.Array:
                shares = lax.dynamic_slice(upper, (earlier * block, start), (block, block))
                return left - _product(shares, rows(errors, earlier * block))

            new = lax.fori_loop(0, number, take_share, rows(old_weights, start))
            limit = rows(limits, start)
            if given is not None:
                mask = rows(given, start)
            elif n:  # the parts choose
                mask = jnp.ones(new.shape, bool)
            else:
                costs = jnp.minimum(jnp.abs(new) / diagonal, limit)
                mask = _keep(costs, count, per) & (limit >= 0)

            def prune_part(number: jax.Array, carry: Any) -> Any:
                new, mask, block_errors = carry
                first = number * part
                own_mask, own_rows = rows(mask, first, part), rows(new, first, part)
                if n:
                    own_limit = rows(limit, first, part)
                    costs = jnp.abs(own_rows) / rows(diagonal, first, part)
                    costs = jnp.minimum(costs, own_limit)
                    own_mask = n_by_m.keep_n_of_m(costs, n, part, 0) != 0
                    own_mask |= sparsity == 0
                    own_mask &= own_limit >= 0
                own_shares = rows(own, first, part)

                def prune_input(i: jax.Array, carry: Any) -> Any:
                    weights, errors = carry
                    row = rows(weights, i, 1)
                    pruned = jnp.where(rows(own_mask, i, 1), row, 0)
                    error = (row - pruned) / rows(diagonal, first + i, 1)
                    later = lax.dynamic_slice(own_shares, (i, first), (1, part)).T
                    later = jnp.where(jnp.arange(part)[:, None] > i, later, 0)
                    return put(weights - later * error, pruned, i), put(errors, error, i)

                carry = own_rows, jnp.zeros_like(own_rows)
                pruned, errors = lax.fori_loop(0, part, prune_input, carry)
                later = jnp.where(jnp.arange(block) >= first + part, own_shares, 0)
                new = put(new - _product(later, errors), pruned, first)
                return new, put(mask, own_mask, first), put(block_errors, errors, first)

            carry = new, mask, jnp.zeros_like(new)
            new, mask, block_errors = lax.fori_loop(0, block // part, prune_part, carry)
            return put(errors, block_errors, start), (new, mask)

        blocks = jnp.arange(number_of_blocks), counts
        _, (new, mask) = lax.scan(prune_block, jnp.zeros_like(old_weights), blocks)
        new, mask = (array.reshape(-1, outputs)[:inputs] for array in (new, mask))
        return new.astype(weights.dtype), mask.astype(jnp.uint8), factors.damping

    sparsities = jnp.broadcast_to(jnp.asarray(sparsity, jnp.float32), leading)
    prune_all = functools.partial(_for_each, prune_matrix, tuple(leading))
    prune_there = without_explicit_axes(prune_all, weights, False, False, False)
    return PrunedMatrices(*prune_there(weights, factors, sparsities, mask))


def _product(transposed: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.matmul(transposed.T, other, precision=lax.Precision.HIGHEST)


def _keep(scores: jax.Array, count: jax.Array, per: str) -> jax.Array:
    if per == 'layer':
        return selection.keep_largest(scores, count) != 0
    return selection.keep_largest(scores.T, jnp.broadcast_to(count, scores.shape[1:])).T != 0


@dataclasses.dataclass
class SparseGPT(CalibratedPruning):
    """Removes weights input by input and changes the others to make up for it. Frantar and Alistarh, 2023.

    Attributes:
      damping: what is added to a Gram matrix's diagonal, as a share of its mean; ten times as much where that is not
        enough, with a warning.
      block_size: inputs among which unstructured weights are ranked together, 128 as published; a smaller one spreads
        what is pruned more evenly, a larger one leaves more choice.
      keep_zeros: weights that are zero stay zero, and count as pruned, however many there are. By default they do, with
        a warning, where more of the weights that are to be pruned are zero already than are asked for. With fewer
        zeros, or with `keep_zeros=False`, a zero may get a value to make up for what goes.

    With `masks` from elsewhere (`instant_sparsify(params, masks=masks, apply_fn=…, batches=…)`) the weights that they
    keep are changed in the same way.

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
    keep_zeros: bool | None = None

    def begin(self, params, targets):
        """Compares the zeros of the model with what is asked for."""
        has_masks = any(target.mask is not None for target in targets.values())
        if self.keep_zeros is not None or has_masks:
            if has_masks and self.keep_zeros is not None:
                raise ValueError('masks say which weights go: leave keep_zeros out')
            return self
        paths, leaves, _ = tree_lib.flatten_with_paths(params)
        pruned = [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if path in targets]
        size = sum(leaf.size for _, leaf in pruned)
        zeros = size - sum(utils.count_nonzero(leaf) for _, leaf in pruned)
        asked = sum(float(targets[path].sparsity) * leaf.size for path, leaf in pruned)
        if zeros <= asked:
            return self
        caller_warnings.warn(
            f'{zeros / size:.4g} of the weights that are to be pruned are zero already, more than the '
            f'{asked / size:.4g} that are asked for; they stay zero. keep_zeros=True avoids this warning, and '
            'keep_zeros=False lets SparseGPT give them values to make up for others'
        )
        pruner = copy.copy(self)
        pruner.keep_zeros = True
        return pruner

    def prepare(self, statistics):
        """Decomposes the Gram matrices."""
        return decompose(statistics.gram, jnp.float32(self.damping))

    def prune_matrices(self, weights, prepared, sparsity, sparsity_type, where):
        """Makes new weights and the mask; `prepared` are the factors that `prepare` made."""
        del where
        settings = {'block_size': self.block_size, 'keep_zeros': bool(self.keep_zeros)}
        pruned = prune_by_sparsegpt(
            weights, prepared, sparsity, sparsity_type, self.per, **settings
        )
        return pruned.weights, pruned.mask

    def reconstruct_matrices(self, weights, prepared, mask):
        """Makes new weights under a mask from elsewhere; `prepared` are the factors, too."""
        pruned = prune_by_sparsegpt(weights, prepared, 0, block_size=self.block_size, mask=mask)
        return pruned.weights, pruned.mask

    def doubt(self, prepared):
        """Tells where a Gram matrix needed more damping."""
        if float(jnp.max(prepared.damping, initial=0)) <= self.damping * 1.001:
            return None
        return (
            f'Gram matrices could not be decomposed with damping {self.damping}: {{names}}; calibrate with more '
            'samples, or set damping'
        )
