"""Wanda: a weight counts as much as its magnitude times what its input brings."""

import jax
import jax.numpy as jnp


def wanda_scores(weights: jax.Array, second_moment: jax.Array) -> jax.Array:
    r"""$|w_{ij}| \cdot \lVert x_i \rVert_2$ of weight $j$ of input $i$.

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
    dtype = jnp.promote_types(weights.dtype, jnp.float32)
    return jnp.abs(weights.astype(dtype)) * jnp.sqrt(second_moment.astype(dtype))[..., None]
