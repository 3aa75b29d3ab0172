"""Scores of weight matrices from the weights and the size of their inputs: the larger, the longer a weight is kept."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

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
    sizes = jnp.abs(weights.astype(dtype))
    norms = jnp.sqrt(second_moment.astype(dtype))
    return sizes * norms[..., None]


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
    of_outputs = shares(weights, -2)
    of_inputs = shares(weights, -1)
    return scores_of_shares(of_outputs, of_inputs, second_moment, power)


def scores_of_shares(
    of_outputs: jax.Array, of_inputs: jax.Array, second_moment: jax.Array, power: Any
) -> jax.Array:
    """Computes `ria_scores` of each weight's share of its output's sum, and of its input's."""
    importance = of_outputs + of_inputs
    second_moment = second_moment.astype(importance.dtype)
    activations = second_moment ** (power / 2)
    return importance * activations[..., None]


@functools.partial(jax.jit, static_argnums=1)
def shares(weights: jax.Array, axis: int) -> jax.Array:
    """Computes the shares of magnitudes in their sum along the axis; of nothing the share is 0.

    A program of its own: in one program with the sum of two shares both are rounded otherwise.
    """
    dtype = tree_lib.at_least_float32(weights.dtype)
    sizes = jnp.abs(weights.astype(dtype))
    sums = sizes.sum(axis, keepdims=True)
    return sizes / jnp.where(sums == 0, 1, sums)
