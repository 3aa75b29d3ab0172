"""Wanda: a weight counts as much as its magnitude times what its input brings."""

import dataclasses

from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning
from jaxpruner.oneshot.matrices import keep_in_matrices, wanda_scores


@dataclasses.dataclass
class Wanda(CalibratedPruning):
    """Removes the weights of least magnitude times norm of their input. Sun et al., 2023.

    >>> import jax.numpy as jnp
    >>> pruner = Wanda(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> params = {'w': jnp.array([[1.0], [2.0]])}
    >>> batches = [jnp.array([[9.0, 1.0], [9.0, 1.0]])]  # the first input is the larger
    >>> pruner.instant_sparsify(params, apply_fn=lambda params, x: x @ params['w'], batches=batches)[1]['w'].tolist()
    [[1], [0]]
    """

    def score_matrices(self, weights, second_moment):
        """Scores weights by the sums of squares of their inputs; a subclass may score otherwise."""
        return wanda_scores(weights, second_moment)

    def prune_matrices(self, weights, prepared, sparsity, sparsity_type, where):
        """Makes the mask; weights that are kept do not change."""
        del where
        scores = self.score_matrices(weights, prepared.second_moment)
        return None, keep_in_matrices(scores, sparsity, sparsity_type, self.per)
