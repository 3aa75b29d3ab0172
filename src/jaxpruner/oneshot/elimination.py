"""Removes the weights of a matrix input by input: later inputs make up for what earlier ones lost."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import sparsity_types
from jaxpruner.mask_calculator import n_by_m

_PART = 16  # inputs that are pruned before the rest of a block is updated


class Rule(NamedTuple):
    """How the weights of a matrix are chosen.

    `lengths` are those of `part_lengths`.
    """

    sparsity_type: sparsity_types.SparsityType
    per: str
    sparsity: jax.Array
    lengths: tuple[int, ...]


class Rows(NamedTuple):
    """Some inputs, whose weights are removed in order.

    `inverse` is their diagonal block of the upper factor of the inverse Gram matrix. `limits` is what removing a weight
    may cost at most, `[inputs, 1]`: 0 where an input never occurs, so that its weights go first.
    """

    weights: jax.Array
    mask: jax.Array
    inverse: jax.Array
    limits: jax.Array

    def costs(self) -> jax.Array:
        """The root of what removing each weight costs."""
        diagonal = jnp.diagonal(self.inverse)
        return jnp.minimum(jnp.abs(self.weights) / diagonal[:, None], self.limits)

    def part(self, start: jax.Array, length: int) -> 'Rows':
        """The rows of some inputs that follow one another."""
        return Rows(
            lax.dynamic_slice_in_dim(self.weights, start, length),
            lax.dynamic_slice_in_dim(self.mask, start, length),
            lax.dynamic_slice(self.inverse, (start, start), (length, length)),
            lax.dynamic_slice_in_dim(self.limits, start, length),
        )


def eliminate(
    rows: Rows, rule: Rule, lengths: Sequence[int]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Removes the weights of some inputs in order: their new weights, their mask, and the errors that this made.

    It calls itself once for each of `lengths`. With `(16, 4, 1)` rows are pruned in parts of 16 inputs, these in parts
    of 4, and these input by input. After each part the later inputs of these rows are updated. With no lengths
    left there is one input, of which the weights outside of the mask become zero.
    """
    if isinstance(rule.sparsity_type, sparsity_types.NByM):
        n, m = rule.sparsity_type.n, rule.sparsity_type.m
        if len(rows.weights) == m:  # a group
            kept = n_by_m.keep_n_of_m(rows.costs(), n, m, 0) != 0
            rows = rows._replace(mask=kept | (rule.sparsity == 0))
    if not lengths:
        new = jnp.where(rows.mask, rows.weights, 0)
        return new, rows.mask, (rows.weights - new) / rows.inverse
    length, *shorter = lengths

    def prune_part(number: jax.Array, carry: Any) -> Any:
        weights, mask, errors = carry
        start = number * length
        part = Rows(weights, mask, rows.inverse, rows.limits).part(start, length)
        new, kept, error = eliminate(part, rule, shorter)
        is_later = jnp.arange(weights.shape[0]) >= start + length
        update = jnp.where(is_later, lax.dynamic_slice_in_dim(rows.inverse, start, length), 0)
        weights = weights - (update.T * error if length == 1 else product(update, error))
        return [
            lax.dynamic_update_slice_in_dim(weights, new, start, 0),
            lax.dynamic_update_slice_in_dim(mask, kept, start, 0),
            lax.dynamic_update_slice_in_dim(errors, error, start, 0),
        ]

    unpruned = [rows.weights, rows.mask, jnp.zeros_like(rows.weights)]
    return tuple(lax.fori_loop(0, len(rows.weights) // length, prune_part, unpruned))


def part_lengths(
    sparsity_type: sparsity_types.SparsityType, inputs: int, block_size: int
) -> tuple[int, ...]:
    """How many inputs the levels hold on which a matrix is pruned: a block, a part of it, a group of N:M, 1 input.

    `eliminate` goes down from level to level. Unstructured weights are chosen for a block together, N:M for a group. A
    part chooses nothing: it only lets one product update the rest of the block. Each length is a multiple of the next
    one; levels of equal length are one.
    """
    if isinstance(sparsity_type, sparsity_types.NByM):
        # Each group is chosen by itself, so that the blocks may have any length.
        group = sparsity_type.m
        part = group * max(_PART // group, 1)
        block = part * max(min(block_size, inputs + part - 1) // part, 1)
        return _without_repeats(block, part, group, 1)
    if block_size > inputs:  # one block, padded
        block = -(-inputs // _PART) * _PART
        return _without_repeats(block, _PART, 1)
    part = min(_PART, block_size)
    while block_size % part:
        part -= 1
    return _without_repeats(block_size, part, 1)


def _without_repeats(*lengths: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(lengths))


def product(transposed: jax.Array, other: jax.Array) -> jax.Array:
    """The product of a transposed matrix and another, at highest precision."""
    return jnp.matmul(transposed.T, other, precision=lax.Precision.HIGHEST)
