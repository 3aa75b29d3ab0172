"""Wanda and RIA: a weight counts by its size, alone or beside its neighbours, and by what its input brings."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
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

    def prune_matrices(self, weights, statistics, sparsity, sparsity_type, where):
        """Makes the mask; weights that are kept do not change."""
        del where
        scores = self.score_matrices(weights, statistics.second_moment)
        return None, keep_in_matrices(scores, sparsity, sparsity_type, self.per)


def ria_scores(weights: jax.Array, second_moment: jax.Array, power: Any = 0.5) -> jax.Array:
    r"""Scores by relative importance and activations.

    $$\left(\frac{|w_{ij}|}{\sum_k |w_{kj}|} + \frac{|w_{ij}|}{\sum_k |w_{ik}|}\right) \lVert x_i \rVert_2^a$$

    From Zhang et al., "Plug-and-Play: An Efficient Post-training Pruning Method for Large Language Models", 2024, which
    compares the weights of a layer.

    Args:
      weights: float `[..., inputs, outputs]`.
      second_moment: sum of squares of each input, `[..., inputs]`.
      power: $a$.

    Returns:
      Scores in the weights' shape, float32 (float64 where the weights are).

    >>> ria_scores(jnp.array([[3.0, 1.0], [0.0, 1.0]]), jnp.ones(2)).tolist()
    [[1.75, 0.75], [0.0, 1.5]]
    """
    sizes = jnp.abs(weights.astype(tree_lib.at_least_float32(weights.dtype)))

    def shares(axis: int) -> jax.Array:
        sums = sizes.sum(axis, keepdims=True)
        return sizes / jnp.where(sums == 0, 1, sums)

    activations = second_moment.astype(sizes.dtype) ** (power / 2)
    return (shares(-2) + shares(-1)) * activations[..., None]


@dataclasses.dataclass
class RIA(Wanda):
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
