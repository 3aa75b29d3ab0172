"""SparseGPT: weights are removed input by input, and the others are changed to make up for it."""

import dataclasses
import warnings
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxpruner.oneshot.calibrated_pruning import CalibratedPruning
from jaxpruner.oneshot.cholesky import flipped_cholesky
from jaxpruner.oneshot.sparsegpt_matrices import prune_by_factors

decompose_in_place = jax.jit(flipped_cholesky, donate_argnums=0)


@dataclasses.dataclass
class SparseGPT(CalibratedPruning):
    """Removes weights input by input and changes the others to make up for it. Frantar and Alistarh, 2023.

    Attributes:
      damping: what is added to a Gram matrix's diagonal, as a share of its mean; ten times as much where that is not
        enough, with a warning.

    Raises:
      ValueError: a setting is wrong.

    >>> pruner = SparseGPT(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> batches = [jnp.array([[1.0, 1.0], [2.0, 2.0], [1.0, 0.9]])]  # one input can stand for both
    >>> params = {'w': jnp.ones((2, 1))}
    >>> pruned, _ = pruner.instant_sparsify(params, apply_fn=lambda params, x: x @ params['w'], batches=batches)
    >>> pruned['w'].round(1).tolist()
    [[0.0], [2.0]]
    """

    kind: ClassVar[str] = 'gram'

    per: str = 'layer'
    damping: float = 0.01

    def prepare(self, statistics, donate):
        """The factors of the Gram matrices, in their place if they are given away."""
        return (decompose_in_place if donate else flipped_cholesky)(statistics.gram, jnp.float32(self.damping))

    def prune_matrices(self, weights, statistics, sparsity, sparsity_type, where):
        """New weights and the mask; `statistics` are the factors that `prepare` made."""
        pruned = prune_by_factors(weights, statistics, sparsity, sparsity_type, self.per)
        most = float(jnp.max(pruned.damping, initial=0))
        if most > self.damping * 1.001:
            warnings.warn(
                f'{where}: its Gram matrix could not be decomposed with damping {self.damping}, and {most:.2g} was '
                'used; calibrate with more samples, or set damping',
                UserWarning,
                stacklevel=4,
            )
        return pruned.weights, pruned.mask
