"""Straight-through methods: the forward pass is sparse, the weights that are trained stay dense."""

import dataclasses
from typing import ClassVar

import jax

from jaxpruner import seeds
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import pruners
from jaxpruner.base_updater import BaseUpdater


class SteMixin(BaseUpdater):  # no dataclass: it has the fields and the constructor of the pruner
    """Prunes in `pre_forward_update`, at the scheduled sparsity of each step, and lets gradients pass.

    Scores are those of the pruner that it is mixed into.

    The forward pass makes new masks in every step; those in the state are of the last scheduled update, for reports,
    which makes them once more, of the same parameters.

    >>> @dataclasses.dataclass
    ... class Mine(SteMixin, pruners.MagnitudePruning):
    ...     pass
    >>> pruner = Mine(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> import jax.numpy as jnp, optax
    >>> params = {'w': jnp.array([-2.0, 1.0])}
    >>> pruner.pre_forward_update(params, pruner.wrap_optax(optax.sgd(0.1)).init(params))
    {'w': Array([-2.,  0.], dtype=float32)}
    """

    lands_on_zero: ClassVar[bool] = False

    def pre_forward_update(self, params, opt_state=None, *, sparse_state=None):
        """Prunes the parameters; the derivative is the identity, so that it may stand inside the loss."""
        params = tree_lib.as_arrays(params)
        state = sparse_state_lib.only_sparse_state(opt_state, sparse_state)
        masks = self._selected(params, state)
        return tree_lib.map_with_missing(
            lambda p, m: p if m is None else sparse_state_lib.straight_through(p, m), params, masks
        )

    def update_state(self, sparse_state, params, grads, **extra_args):
        """Stores the masks of this step's forward pass."""
        del grads, extra_args
        return sparse_state._replace(masks=self._selected(params, sparse_state))

    def _selected(self, params, state):
        # Scores steer the selection alone; no gradient flows through it.
        detached = jax.lax.stop_gradient(params)
        state = state._replace(masks=sparse_state_lib.unpack_masks(state.masks, params))
        return super().update_state(state, detached, None).masks

    def post_gradient_update(self, params, opt_state=None, *, sparse_state=None):
        """Returns the parameters as they are: dense."""
        del opt_state, sparse_state
        return params


@dataclasses.dataclass
class SteMagnitudePruning(SteMixin, pruners.MagnitudePruning):
    """Straight-through magnitude pruning: the largest weights forward, all of them backward. Bengio et al., 2013.

    >>> SteMagnitudePruning(sparsity_type='2:4').sparsity_type
    NByM(n=2, m=4, axis=-1, allow_partial=False)
    """


@dataclasses.dataclass
class SteRandomPruning(SteMixin, pruners.RandomPruning):
    """Straight-through pruning at random, anew in each step: the baseline for straight-through scores.

    >>> SteRandomPruning(rng_seed=3).rng_seed
    3
    """

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Scores weights by chance, from the seed and the step."""
        del grads
        key = seeds.prng_key(self.rng_seed, None if sparse_state is None else sparse_state.count)
        return pruners.generate_random_scores(params, key)
