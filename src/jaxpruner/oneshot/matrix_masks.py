"""Scores of weight matrices become masks: unstructured or N:M along the inputs, for each output or each layer."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import sparsity_types
from jaxpruner.mask_calculator import n_by_m, selection

COMPARISONS = ('output', 'layer')


def check_comparison(per: str) -> None:
    """Refuses what weights cannot be compared within.

    Raises:
      ValueError: it is neither `'output'` nor `'layer'`.

    >>> check_comparison('output')
    """
    if per not in COMPARISONS:
        raise ValueError(
            f'weights are compared per {" or per ".join(map(repr, COMPARISONS))}, got per={per!r}'
        )


def check_matrix_type(
    sparsity_type: sparsity_types.SparsityType, shape: Sequence[int], where: str
) -> None:
    """Refuses a sparsity type that calibrated pruning does not know, or that does not divide the inputs.

    Args:
      sparsity_type: the type; the axis of N:M is not looked at, its groups lie along the inputs.
      shape: of the matrices, `[..., inputs, outputs]`.
      where: the leaf's path, for the messages.

    Raises:
      TypeError: it is neither unstructured nor N:M.
      ValueError: m does not divide the inputs.

    >>> check_matrix_type(sparsity_types.NByM(2, 4), (8, 3), 'dense/kernel')
    """
    if isinstance(sparsity_type, sparsity_types.Unstructured):
        return
    if not isinstance(sparsity_type, sparsity_types.NByM):
        raise TypeError(
            f'{where}: calibrated pruning is unstructured or N:M, got {sparsity_type!r}; give Unstructured() or NByM'
        )
    if shape[-2] % sparsity_type.m and not sparsity_type.allow_partial:
        raise ValueError(
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
    """Masks of weight matrices.

    Args:
      scores: float `[..., inputs, outputs]`.
      sparsity: share to remove, a scalar or one for each matrix; 0 keeps everything. N:M takes any other value alike.
      sparsity_type: `Unstructured()`, or `NByM`, whose groups lie along the inputs whatever its axis.
      per: what is ranked together where unstructured: the inputs of one `'output'`, or a `'layer'`, which is a matrix.

    Returns:
      uint8 array of the scores' shape. Of equal scores the lower input (per layer: the lower flat index) is kept, in
      N:M the higher one; NaN ranks lowest.

    Raises:
      TypeError: another sparsity type.
      ValueError: m does not divide the inputs, or something else to compare.

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
        return _keep_in_rows(scores.reshape(counts.size, inputs * outputs), counts.ravel()).reshape(
            scores.shape
        )
    by_output = jnp.swapaxes(scores, -2, -1)
    counts = jnp.broadcast_to(
        selection.number_to_keep(inputs, each)[..., None], (*leading, outputs)
    )
    mask = _keep_in_rows(by_output.reshape(counts.size, inputs), counts.ravel())
    return jnp.swapaxes(mask.reshape(by_output.shape), -2, -1)


def _keep_in_rows(scores: jax.Array, counts: jax.Array) -> jax.Array:
    request = selection.Request(scores, counts, is_stacked=True)
    return selection.keep_largest_each([request])[0].mask
