"""Scores of weight matrices `[..., inputs, outputs]`, and masks of scores: unstructured, or N:M along the inputs."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import n_by_m, selection, sparsity_types
from jaxpruner import tree as tree_lib


def wanda_scores(weights: jax.Array, second_moment: jax.Array) -> jax.Array:
    r"""Computes $|w_{ij}| \cdot \lVert x_i \rVert_2$ of weight $j$ of input $i$.

    From Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", 2023, which compares the
    weights of each output.

    Args:
      weights: float `[..., inputs, outputs]`.
      second_moment: sum of squares of each input, `[..., inputs]`.

    Returns:
      Scores in the weights' shape, float32 (float64 where the weights are).

    >>> wanda_scores(jnp.array([[2.0], [-3.0]]), jnp.array([9.0, 1.0])).tolist()
    [[6.0], [3.0]]
    """
    dtype = tree_lib.at_least_float32(weights.dtype)
    norms = jnp.sqrt(second_moment.astype(dtype))
    return jnp.abs(weights.astype(dtype)) * norms[..., None]


def ria_scores(weights: jax.Array, second_moment: jax.Array, power: Any = 0.5) -> jax.Array:
    r"""Scores by relative importance and activations.

    $$\left(\frac{|w_{ij}|}{\sum_k |w_{kj}|} + \frac{|w_{ij}|}{\sum_k |w_{ik}|}\right) \lVert x_i \rVert_2^a$$

    From Zhang et al., "Plug-and-Play: An Efficient Post-training Pruning Method for Large Language Models", 2024, which
    compares the weights of a layer.

    Args:
      weights: float `[..., inputs, outputs]`.
      second_moment: sum of squares of each input, `[..., inputs]`.
      power: $a$.

    Returns:
      Scores in the weights' shape, float32 (float64 where the weights are).

    >>> ria_scores(jnp.array([[3.0, 1.0], [0.0, 1.0]]), jnp.ones(2)).tolist()
    [[1.75, 0.75], [0.0, 1.5]]
    """
    sizes = jnp.abs(weights.astype(tree_lib.at_least_float32(weights.dtype)))

    def shares(axis: int) -> jax.Array:
        sums = sizes.sum(axis, keepdims=True)
        return sizes / jnp.where(sums == 0, 1, sums)

    activations = second_moment.astype(sizes.dtype) ** (power / 2)
    return (shares(-2) + shares(-1)) * activations[..., None]


def check_comparison(per: str) -> None:
    """Refuses anything but `'output'` and `'layer'`."""
    if per not in ('output', 'layer'):
        raise ValueError(f"weights are compared per 'output' or per 'layer', got per={per!r}")


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
        raise sparsity_types.PartialGroupError(
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
    if per == 'output':
        scores = jnp.swapaxes(scores, -2, -1)
        counts = selection.number_to_keep(inputs, each)[..., None]
        counts = jnp.broadcast_to(counts, (*leading, outputs))
    else:
        counts = selection.number_to_keep(inputs * outputs, each)
    rows = scores.reshape(counts.size, inputs if per == 'output' else inputs * outputs)
    request = selection.Request(rows, counts.ravel(), is_stacked=True)
    mask = selection.keep_largest_each([request])[0].mask.reshape(scores.shape)
    return jnp.swapaxes(mask, -2, -1) if per == 'output' else mask
