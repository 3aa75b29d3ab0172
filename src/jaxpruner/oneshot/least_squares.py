"""Inputs removed from weight matrices: the weights of the others are fitted to what the whole matrix gave."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import tree as tree_lib
from jaxpruner.oneshot.cholesky import flipped_cholesky


class FittedMatrices(NamedTuple):
    """What `fit_kept_inputs` returns.

    Attributes:
      weights: `[..., inputs, outputs]`, in the dtype that was given; those of removed inputs are zero.
      damping: `[...]`, that was used.
    """

    weights: jax.Array
    damping: jax.Array


@jax.jit
def fit_kept_inputs(
    weights: jax.Array, gram: jax.Array, is_kept: jax.Array, damping: Any
) -> FittedMatrices:
    r"""Fits the weights $W'$ of kept inputs so that $X_k W'$ is nearest to $X W$, with $H = X^\top X$.

    $W' = W_k + (H_{kk} + d \cdot \operatorname{mean}(\operatorname{diag} H_{kk}) I)^{-1} H_{kr} W_r$, where $k$ are the
    inputs that are kept and $r$ the others. With no damping $d$ this is least squares; more of it holds the weights
    nearer to what they were.

    Args:
      weights: float `[..., inputs, outputs]`.
      gram: sums of products of each two inputs, `[..., inputs, inputs]`.
      is_kept: bool `[..., inputs]`.
      damping: as in `flipped_cholesky`, which takes ten times as much where it is not enough.

    >>> inputs = jnp.array([[1.0, 2.0], [2.0, 4.0]])  # the second is twice the first
    >>> fitted = fit_kept_inputs(jnp.ones((2, 1)), inputs.T @ inputs, jnp.array([True, False]), 0.0)
    >>> fitted.weights.tolist()
    [[3.0], [0.0]]
    """
    kept_rows = is_kept[..., :, None]
    gram = gram.astype(tree_lib.at_least_float32(gram.dtype))
    old = weights.astype(gram.dtype)
    # The matrix keeps its size: inputs that are all zero are independent of the others, and get no change.
    kept_columns = is_kept[..., None, :]
    kept_gram = jnp.where(kept_rows & kept_columns, gram, 0)
    removed = jnp.where(kept_rows, 0, old)
    lost = jnp.matmul(gram, removed, precision=lax.Precision.HIGHEST)
    lost = jnp.where(kept_rows, lost, 0)
    factors = flipped_cholesky(kept_gram, damping)
    solve = functools.partial(
        lax.linalg.triangular_solve, factors.upper, left_side=True, lower=False
    )
    change = solve(solve(lost), transpose_a=True)
    fitted = jnp.where(kept_rows, old + change, 0)
    return FittedMatrices(fitted.astype(weights.dtype), factors.damping)
