"""RIA: a weight counts by its share of its input's and of its output's weights, and by what its input brings."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax

from jaxpruner.mask_calculator import lazy_scores
from jaxpruner.oneshot import matrix_masks, matrix_scores
from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning


@dataclasses.dataclass
class RIA(CalibratedPruning):
    """Removes the weights of least relative importance and activation. Zhang et al., 2024.

    Attributes:
      power: of the norm of the inputs.

    >>> RIA().per
    'layer'
    """

    per: str = 'layer'
    power: float = 0.5

    # Scores and mask are one program. A subclass that overrides `score_matrices` is asked for its scores instead.
    scores_with_mask: ClassVar[bool] = True

    def score_matrices(self, weights, second_moment):
        """Scores weights by the sums of squares of their inputs; a subclass may score otherwise."""
        return matrix_scores.ria_scores(weights, second_moment, self.power)

    def prune_matrices(self, weights, prepared, sparsity, sparsity_type, where):
        """Makes the mask; weights that are kept do not change."""
        del where
        second_moment = prepared.second_moment
        if not lazy_scores.hook_describes(self, 'scores_with_mask', 'score_matrices'):
            scores = self.score_matrices(weights, second_moment)
            mask = matrix_masks.keep_in_matrices(scores, sparsity, sparsity_type, self.per)
            return None, mask
        # These scores are computed with the mask.
        shares = matrix_scores.shares(weights, -2), matrix_scores.shares(weights, -1)
        mask = _mask(shares, second_moment, sparsity, self.power, sparsity_type, self.per)
        return None, mask


@functools.partial(jax.jit, static_argnames=('sparsity_type', 'per'))
def _mask(
    shares: tuple[jax.Array, jax.Array],
    second_moment: jax.Array,
    sparsity: Any,
    power: Any,
    sparsity_type: Any,
    per: str,
) -> jax.Array:
    """Makes the mask by one program for each shape, not one for each operation."""
    scores = matrix_scores.scores_of_shares(*shares, second_moment, power)
    return matrix_masks.keep_in_matrices(scores, sparsity, sparsity_type, per)
