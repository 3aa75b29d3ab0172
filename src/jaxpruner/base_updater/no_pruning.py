"""The dense baseline: an algorithm that prunes nothing."""

import dataclasses
from typing import ClassVar

import jax

from jaxpruner import tree as tree_lib
from jaxpruner.base_updater.updater import BaseUpdater, DistributionFn


@dataclasses.dataclass
class NoPruning(BaseUpdater):
    """Keeps every weight: the dense baseline under the same interface.

    >>> import jax.numpy as jnp
    >>> NoPruning().instant_sparsify({'w': jnp.ones(2)})[1]
    {'w': None}
    """

    keeps_count: ClassVar[bool] = True

    sparsity_distribution_fn: DistributionFn | None = None

    def get_target_sparsities(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """Gives no leaf a target."""
        return jax.tree.map(lambda _: None, params)

    def check_plan(self, plan):
        """Warns of nothing: dense is what was asked for."""

    def instant_sparsify(self, params, grads=None):
        """Returns the parameters as they are, and no masks."""
        del grads
        return params, tree_lib.map_with_missing(lambda _: None, params)

    def update_state(self, sparse_state, params, grads):
        """Changes nothing."""
        del params, grads
        return sparse_state

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Scores nothing."""
        del sparse_state, grads
        return jax.tree.map(lambda _: None, params)
