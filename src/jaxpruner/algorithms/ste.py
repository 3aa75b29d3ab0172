"""Straight-through methods: the forward pass is sparse, the weights that are trained stay dense."""

import dataclasses

import jax

from jaxpruner import base_updater, masking, utils
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import pruners
from jaxpruner.sparse_state import only_sparse_state


@dataclasses.dataclass
class SteUpdater(base_updater.BaseUpdater):
    """Prunes in `pre_forward_update`, at the scheduled sparsity of each step, and lets gradients pass.

    The masks in the state are those of the last scheduled update, for reports; the forward pass selects anew each step.

    >>> updater = SteMagnitudePruning(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> import jax.numpy as jnp, optax
    >>> params = {'w': jnp.array([-2.0, 1.0])}
    >>> updater.pre_forward_update(params, updater.wrap_optax(optax.sgd(0.1)).init(params))
    {'w': Array([-2.,  0.], dtype=float32)}
    """

    def pre_forward_update(self, params, sparse_state):
        """The pruned parameters; the derivative is the identity, so that it may stand inside the loss."""
        state = only_sparse_state(sparse_state)
        sparsities = self.scheduler.get_sparsity_at_step(state.target_sparsities, state.count)
        # Scores steer the selection alone; no gradient flows through it.
        detached = jax.lax.stop_gradient(params)
        state = state._replace(masks=masking.unpack_masks(state.masks, params))
        masks = self.create_masks(self.calculate_scores(detached, sparse_state=state), sparsities)
        return tree_lib.map_with_missing(lambda p, m: p if m is None else masking.straight_through(p, m), params, masks)

    def post_gradient_update(self, params, sparse_state):
        """The parameters as they are: dense."""
        del sparse_state
        return params


@dataclasses.dataclass
class SteMagnitudePruning(SteUpdater):
    """Straight-through magnitude pruning: the largest weights forward, all of them backward. Bengio et al., 2013.

    >>> SteMagnitudePruning(sparsity_type='2:4').sparsity_type
    NByM(n=2, m=4, axis=-1, allow_partial=False)
    """

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """The magnitudes."""
        del sparse_state, grads
        return pruners.magnitudes(params)


@dataclasses.dataclass
class SteRandomPruning(SteUpdater):
    """Straight-through pruning at random, anew in each step: the baseline for straight-through scores.

    >>> SteRandomPruning().rng_seed
    8
    """

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Chance, from the seed and the step."""
        del grads
        key = utils.prng_key(self.rng_seed, None if sparse_state is None else sparse_state.count)
        return pruners.generate_random_scores(params, key)
