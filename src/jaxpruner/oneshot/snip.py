"""SNIP: a weight counts by how much the loss changes when it is taken away, before any training."""

import dataclasses

from jaxpruner.algorithms import pruners
from jaxpruner.oneshot.pruning_at_initialization import PruningAtInitialization


@dataclasses.dataclass
class SNIP(PruningAtInitialization):
    r"""Keeps the weights with the largest $|w \cdot \partial L / \partial w|$ in the model, $L$ summed over batches.

    From Lee et al., "SNIP: Single-shot Network Pruning based on Connection Sensitivity", 2019. With more than one of
    `rounds` it is Iter SNIP, from de Jorge et al., "Progressive Skeletonization: Trimming more fat from a network at
    initialization", 2021.

    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.array([[3.0, 1.0]])}
    >>> pruner = SNIP(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> loss_fn = lambda params, x: jnp.sum(x * params['w'])
    >>> pruner.instant_sparsify(params, loss_fn=loss_fn, batches=[jnp.array([1.0, 9.0])])[1]['w'].tolist()
    [[0, 1]]
    """

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Scores weights by the magnitudes of weight times gradient."""
        del sparse_state
        return pruners.saliencies(params, grads)
