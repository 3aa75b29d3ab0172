"""RIA: a weight counts by its share of its input's and of its output's weights, and by what its input brings."""

import dataclasses

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

    def prune_matrices(self, weights, statistics, sparsity, sparsity_type, where):
        """The mask; weights that are kept do not change."""
        del where
        scores = matrix_scores.ria_scores(weights, statistics.second_moment, self.power)
        return None, matrix_masks.keep_in_matrices(scores, sparsity, sparsity_type, self.per)
