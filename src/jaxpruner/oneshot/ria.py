"""RIA: a weight counts by its share of its input's and of its output's weights, and by what its input brings."""

import dataclasses

from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning
from jaxpruner.oneshot.matrix_masks import keep_in_matrices, ria_scores


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

    def score_matrices(self, weights, second_moment):
        """Scores weights by the sums of squares of their inputs; a subclass may score otherwise."""
        return ria_scores(weights, second_moment, self.power)

    def prune_matrices(self, weights, prepared, sparsity, sparsity_type, where):
        """Makes the mask; weights that are kept do not change."""
        del where
        scores = self.score_matrices(weights, prepared.second_moment)
        return None, keep_in_matrices(scores, sparsity, sparsity_type, self.per)
