"""Wanda: a weight counts as much as its magnitude times what its input brings."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax

from jaxpruner.mask_calculator import lazy_scores
from jaxpruner.oneshot import matrix_masks, matrix_scores
from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning
from jaxpruner.oneshot.output_portions import in_portions


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

    # Scores and mask are one program. A subclass that overrides `score_matrices` is asked for its scores instead.
    scores_with_mask: ClassVar[bool] = True

    def score_matrices(self, weights, second_moment):
        """Scores weights by the sums of squares of their inputs; a subclass may score otherwise."""
        return matrix_scores.wanda_scores(weights, second_moment)

    def prune_matrices(self, weights, prepared, sparsity, sparsity_type, where):
        """Makes the mask; weights that are kept do not change."""
        del where
        second_moment = prepared.second_moment
        settings = {'sparsity': sparsity, 'sparsity_type': sparsity_type, 'per': self.per}
        if lazy_scores.hook_describes(self, 'scores_with_mask', 'score_matrices'):
            # These scores are computed with the mask, of some outputs at a time.
            ranked = weights
            mask_of = functools.partial(_mask, second_moment=second_moment, **settings)
        else:
            # The scores of a subclass may depend on all outputs.
            ranked = self.score_matrices(weights, second_moment)
            mask_of = functools.partial(matrix_masks.keep_in_matrices, **settings)
        if self.per == 'output':
            return None, in_portions(mask_of, ranked)
        return None, mask_of(ranked)


@functools.partial(jax.jit, static_argnames=('sparsity_type', 'per'))
def _mask(
    weights: jax.Array, second_moment: jax.Array, sparsity: Any, sparsity_type: Any, per: str
) -> jax.Array:
    """Makes the mask by one program for each shape, not one for each operation."""
    scores = matrix_scores.wanda_scores(weights, second_moment)
    return matrix_masks.keep_in_matrices(scores, sparsity, sparsity_type, per)
