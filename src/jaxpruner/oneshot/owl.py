"""OWL: layers with many outliers among their scores stay denser."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparsity_distributions import check_sparsity


def outlier_shares(scores: jax.Array, multiple: float = 5.0) -> jax.Array:
    """Computes which share of a layer's scores exceeds a multiple of their mean.

    Args:
      scores: Wanda's, `[..., inputs, outputs]`.
      multiple: the paper's M.

    Returns:
      A share for each matrix, `[...]`.

    >>> outlier_shares(jnp.array([[9.0, 0.0, 0.0, 0.0, 0.0, 0.0]]))
    Array(0.16666667, dtype=float32)
    """
    mean = jnp.mean(scores, (-2, -1), keepdims=True)
    return jnp.mean(scores > multiple * mean, (-2, -1), dtype=scores.dtype)


def owl_sparsities(
    shares: Sequence[float], sizes: Sequence[int], sparsity: float, max_deviation: float = 0.08
) -> list[float]:
    r"""Computes outlier weighed layer-wise sparsity, from Yin et al., 2023.

    With $D_l$ the share of outliers of layer $l$, its density is $2 \lambda (D_l - \min D) / (\max D - \min D)$,
    shifted so that all layers together reach the target. Where a layer would leave [0, 1], all come as much closer to
    the target as it takes.

    Args:
      shares: of outliers, one for each layer; see `outlier_shares`.
      sizes: number of weights of each layer, with which its sparsity counts in the mean.
      sparsity: what the mean is to be, in [0, 1].
      max_deviation: the paper's lambda.

    Returns:
      The sparsity of each layer.

    Raises:
      ValueError: a sparsity outside [0, 1], a negative deviation, shares that are not finite, or other numbers of
        shares and sizes.

    >>> np.round(owl_sparsities([0.01, 0.03, 0.02], [100, 100, 100], 0.7), 3).tolist()
    [0.78, 0.62, 0.7]
    """
    check_sparsity(sparsity, 'sparsity')
    if not max_deviation >= 0:
        raise ValueError(f'max_deviation must not be negative, got {max_deviation!r}')
    if len(shares) != len(sizes):
        raise ValueError(
            f'each layer needs a share and a size, got {len(shares)} shares and {len(sizes)} sizes'
        )
    outliers = np.asarray(shares, np.float64)
    weights = np.asarray(sizes, np.float64)
    if not np.isfinite(outliers).all():
        raise ValueError(
            f'shares of outliers must be finite, got {list(shares)}; look for NaN in the scores'
        )
    spread = np.ptp(outliers) if len(outliers) else 0.0
    if spread == 0:
        return [float(sparsity)] * len(sizes)
    above = 2 * max_deviation * (outliers - outliers.min()) / spread
    mean_above = np.sum(above * weights) / np.sum(weights)
    above -= mean_above
    room_below = sparsity / max(above.max(), 1e-30)
    room_above = (1 - sparsity) / max(-above.min(), 1e-30)
    room = min(room_below, room_above, 1.0)
    sparsities = sparsity - room * above
    return np.clip(sparsities, 0, 1).tolist()
