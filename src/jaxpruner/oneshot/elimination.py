"""Removes the weights of a matrix input by input: later inputs make up for what earlier ones lost."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import n_by_m, sparsity_types

_PART = 16  # inputs that are pruned before the rest of a block is updated


class Rule(NamedTuple):
    """How the weights of a matrix are chosen.

    Attributes:
      sparsity_type: unstructured, or N:M.
      per: what is ranked together, as in `CalibratedPruning`.
      sparsity: the share of weights to remove.
      lengths: what `part_lengths` returned.
      keep_zeros: whether weights that are zero stay zero.
    """

    sparsity_type: sparsity_types.SparsityType
    per: str
    sparsity: jax.Array
    lengths: tuple[int, ...]
    keep_zeros: bool


class Rows(NamedTuple):
    """Some inputs, whose weights are removed in order.

    Attributes:
      weights: `[inputs, outputs]`.
      mask: `[inputs, outputs]`, of the weights that stay.
      inverse: `[inputs, inputs]`, their diagonal block of the upper factor of the inverse Gram matrix.
      limits: the highest cost of each weight, `[inputs, outputs]` or `[inputs, 1]`: -inf for padding, -1 for zeros that
        stay zero, 0 for inputs that never occur, else inf. They are removed in this order, those below 0 always.
    """

    weights: jax.Array
    mask: jax.Array
    inverse: jax.Array
    limits: jax.Array

    def costs(self) -> jax.Array:
        """Computes the square root of what removing each weight costs."""
        diagonal = jnp.diagonal(self.inverse)
        costs = jnp.abs(self.weights) / diagonal[:, None]
        return jnp.minimum(costs, self.limits)

    def part(self, start: jax.Array, length: int) -> 'Rows':
        """Takes the rows of some inputs that follow one another."""
        return Rows(
            weights=lax.dynamic_slice_in_dim(self.weights, start, length),
            mask=lax.dynamic_slice_in_dim(self.mask, start, length),
            inverse=lax.dynamic_slice(self.inverse, (start, start), (length, length)),
            limits=lax.dynamic_slice_in_dim(self.limits, start, length),
        )


class Eliminated(NamedTuple):
    """Some inputs of which weights were removed."""

    weights: jax.Array
    mask: jax.Array
    errors: jax.Array  # that this made

    def with_part(self, part: 'Eliminated', start: jax.Array) -> 'Eliminated':
        """Replaces the values for the inputs from `start` on."""

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(old, new, start, 0)

        return jax.tree.map(put, self, part)


def eliminate(rows: Rows, rule: Rule, lengths: Sequence[int]) -> Eliminated:
    """Removes the weights of some inputs in order.

    It calls itself once for each of `lengths`. With `(16, 4, 1)` rows are pruned in parts of 16 inputs, these in parts
    of 4, and these input by input. After each part the later inputs of these rows are updated. With no lengths
    left there is one input, of which the weights outside of the mask become zero.
    """
    if isinstance(rule.sparsity_type, sparsity_types.NByM):
        n, m = rule.sparsity_type.n, rule.sparsity_type.m
        if len(rows.weights) == m:  # a group
            kept = n_by_m.keep_n_of_m(rows.costs(), n, m, 0) != 0
            keeps_all = rule.sparsity == 0
            rows = rows._replace(mask=(kept | keeps_all) & (rows.limits >= 0))
    if not lengths:
        new = jnp.where(rows.mask, rows.weights, 0)
        errors = (rows.weights - new) / rows.inverse
        return Eliminated(new, rows.mask, errors)
    length, *shorter = lengths

    def prune_part(index: jax.Array, all_rows: Eliminated) -> Eliminated:
        start = index * length
        now = rows._replace(weights=all_rows.weights, mask=all_rows.mask)
        part = eliminate(now.part(start, length), rule, shorter)
        is_later = jnp.arange(len(rows.weights)) >= start + length
        update = lax.dynamic_slice_in_dim(rows.inverse, start, length)
        update = jnp.where(is_later, update, 0)
        if length == 1:
            change = update.T * part.errors
        else:
            change = product(update, part.errors)
        all_rows = all_rows._replace(weights=all_rows.weights - change)
        return all_rows.with_part(part, start)

    unpruned = Eliminated(rows.weights, rows.mask, jnp.zeros_like(rows.weights))
    number_of_parts = len(rows.weights) // length
    return lax.fori_loop(0, number_of_parts, prune_part, unpruned)


def part_lengths(
    sparsity_type: sparsity_types.SparsityType, inputs: int, block_size: int
) -> tuple[int, ...]:
    """Lists how many inputs each level of pruning a matrix holds: a block, a part of it, a group of N:M, 1 input.

    `eliminate` goes down from level to level. Unstructured weights are chosen for a block together, N:M for a group. A
    part chooses nothing: it only lets one product update the rest of the block. Each length is a multiple of the next
    one; levels of equal length are one.
    """
    if isinstance(sparsity_type, sparsity_types.NByM):
        # Each group is chosen by itself, so that the blocks may have any length.
        group = sparsity_type.m
        groups_of_part = max(_PART // group, 1)
        part = group * groups_of_part
        longest_block = min(block_size, inputs + part - 1)
        block = part * max(longest_block // part, 1)
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
    """Multiplies a transposed matrix by another, at highest precision."""
    return jnp.matmul(transposed.T, other, precision=lax.Precision.HIGHEST)
