"""Scores of weight matrices become masks: unstructured or N:M along the inputs, for each output or each layer."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import n_by_m, selection, sparsity_types
from jaxpruner.sparsity_types import PartialGroupError

COMPARISONS = ('output', 'layer')


def check_comparison(per: str) -> None:
    """Refuses anything but `'output'` and `'layer'`."""
    if per not in COMPARISONS:
        raise ValueError(
            f'weights are compared per {" or per ".join(map(repr, COMPARISONS))}, got per={per!r}'
        )


def check_matrix_type(
    sparsity_type: sparsity_types.SparsityType, shape: Sequence[int], where: str
) -> None:
    """Refuses all but unstructured and N:M, and N:M that does not divide the inputs of `[..., inputs, outputs]`.

    The axis of N:M is ignored: its groups lie along the inputs.
    """
    if sparsity_types.is_unstructured(sparsity_type):
        return
    if not isinstance(sparsity_type, sparsity_types.NByM):
        raise TypeError(
            f'{where}: calibrated pruning is unstructured or N:M, got {sparsity_type!r}; give Unstructured() or NByM'
        )
    if shape[-2] % sparsity_type.m and not sparsity_type.allow_partial:
        raise PartialGroupError(
            f'{where}: its {shape[-2]} inputs do not divide into groups of m={sparsity_type.m}; choose another m, or '
            f"leave the leaf dense: sparsity_type={{'{where}': None, '*': …}}"
        )


@functools.partial(jax.jit, static_argnames=('sparsity_type', 'per'))
def keep_in_matrices(
    scores: jax.Array,
    sparsity: Any,
    sparsity_type: sparsity_types.SparsityType = sparsity_types.Unstructured(),
    per: str = 'output',
) -> jax.Array:
    """Makes the uint8 mask of weight matrices by their float scores `[..., inputs, outputs]`.

    `sparsity` is the share to remove, a scalar or one for each matrix; 0 keeps everything, and N:M takes all other
    values alike. `per` says what is ranked together where unstructured. `'output'`: the weights of one output.
    `'layer'`: all weights of one matrix. Of equal scores the lower input (per layer: the lower flat index) is kept, in
    N:M the higher one. NaN ranks lowest.

    >>> keep_in_matrices(jnp.array([[4.0, 1.0], [3.0, 2.0]]), 0.5).tolist()
    [[1, 0], [0, 1]]
    >>> keep_in_matrices(jnp.array([[4.0, 1.0], [3.0, 2.0]]), 0.5, per='layer').tolist()
    [[1, 0], [1, 0]]
    """
    check_comparison(per)
    check_matrix_type(sparsity_type, scores.shape, 'scores')
    *leading, inputs, outputs = scores.shape
    each = jnp.broadcast_to(jnp.asarray(sparsity, jnp.float32), leading)
    if isinstance(sparsity_type, sparsity_types.NByM):
        mask = n_by_m.keep_n_of_m(scores, sparsity_type.n, sparsity_type.m, -2)
        return mask | (each == 0)[..., None, None].astype(jnp.uint8)
    if per == 'layer':
        counts = selection.number_to_keep(inputs * outputs, each)
        return _keep_in_rows(scores, counts)
    by_output = jnp.swapaxes(scores, -2, -1)
    counts = selection.number_to_keep(inputs, each)[..., None]
    mask = _keep_in_rows(by_output, jnp.broadcast_to(counts, (*leading, outputs)))
    return jnp.swapaxes(mask, -2, -1)


def _keep_in_rows(scores: jax.Array, counts: jax.Array) -> jax.Array:
    """Keeps the largest scores of each row: `counts` has the number to keep, `scores` further axes for the row."""
    row_length = math.prod(scores.shape[counts.ndim :])
    rows = scores.reshape(counts.size, row_length)
    request = selection.Request(rows, counts.ravel(), is_stacked=True)
    (kept,) = selection.keep_largest_each([request])
    return kept.mask.reshape(scores.shape)
