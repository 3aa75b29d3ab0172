"""Pruning by the Fisher information that Adam keeps anyway."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from optax import tree_utils

from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import BaseUpdater
from jaxpruner.tree import at_least_float32


@dataclasses.dataclass
class AdamFisherPruning(BaseUpdater):
    r"""Removes the weights of least $w^2 \hat v$, where $\hat v$ is Adam's second moment of the gradient.

    The second moment estimates the diagonal of the Fisher information, so that the score is (twice) the second-order
    change of the loss: Theis et al., "Faster gaze prediction with dense networks and Fisher pruning", 2018.

    Attributes:
      reset_adam: after a mask update the moments of all weights are zero, those of dense leaves, too.

    Raises:
      ValueError: in `init`, the optimizer keeps no second moment (`nu`) of a selected leaf's shape.

    >>> import jax.numpy as jnp, optax
    >>> from jaxpruner import sparsity_schedules
    >>> once = sparsity_schedules.OneShotSchedule(target_step=1000)
    >>> pruner = AdamFisherPruning(once, sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> pruner.wrap_optax(optax.adam(0.1)).init({'w': jnp.ones(2)}).masks
    {'w': Array([1, 1], dtype=uint8)}
    """

    reset_adam: bool = False

    def update_state(self, sparse_state, params, grads, **extra_args):
        """Makes masks as the base does; then zeroes the moments, if they are to be."""
        new_state = super().update_state(sparse_state, params, grads, **extra_args)
        if not self.reset_adam:
            return new_state
        everything = jax.tree.map(lambda leaf: jnp.ones_like(leaf, dtype=bool), params)
        inner_state = sparse_state_lib.restart_inner_state(new_state.inner_state, everything)
        return new_state._replace(inner_state=inner_state)

    def check_optimizer(self, inner, params):
        """Refuses optimizers without second moments, and those whose moments cannot be zeroed, if they are to be."""
        if self.reset_adam:
            sparse_state_lib.check_restartable(inner, params)
        moments = _second_moments(
            *jax.eval_shape(lambda values: (inner.init(values), values), params)
        )
        rows = tree_lib.zip_with_paths(params, self.get_target_sparsities(params))
        for (path, leaf, target), moment in zip(rows, moments, strict=True):
            if target is not None and moment is None:
                raise ValueError(
                    f'adam_fisher scores weights by the second moment of their gradients, and this optimizer keeps '
                    f'none (`nu`) of shape {tuple(leaf.shape)} for {tree_lib.path_string(path)}; use adam, adamw '
                    'or rmsprop'
                )

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Computes the roots of squared weights times second moments; `None` where none is kept.

        Raises:
          ValueError: there is no optimizer state, as in one-shot pruning.
        """
        del grads
        if sparse_state is None or sparse_state.inner_state is None:
            raise ValueError(
                "adam_fisher scores by Adam's state, and pruning once has none: train with wrap_optax, or use "
                'SaliencyPruning, pruner.instant_sparsify(params, grads)'
            )
        leaves, treedef = jax.tree.flatten(params)
        scores = []
        moments = _second_moments(sparse_state.inner_state, params)
        for leaf, moment in zip(leaves, moments, strict=True):
            if moment is not None:
                # Optax keeps the moment of a complex gradient as a complex number that is real.
                moment = jnp.real(moment.astype(at_least_float32(moment.dtype)))
                # The root ranks alike, and does not vanish where products would.
                moment = jnp.abs(leaf).astype(moment.dtype) * jnp.sqrt(moment)
            scores.append(moment)
        return tree_lib.unflatten(treedef, scores, leaves)


def _second_moments(inner_state, params):
    """Finds Adam's second moments (`nu`) of each leaf, wherever in the state they are; `None` if none has its shape.

    >>> import optax
    >>> params = {'w': jnp.ones(2)}
    >>> _second_moments(optax.adam(0.1).init(params), params)
    [Array([0., 0.], dtype=float32)]
    """
    leaves, treedef = jax.tree.flatten(params)
    second_moments: list[Any] = [None] * len(leaves)
    for _, candidate in tree_utils.tree_get_all_with_path(inner_state, 'nu'):
        try:
            moments = tree_lib.leaves_like(treedef, candidate)
        except ValueError:
            continue  # a `nu` of another structure belongs to no parameter
        for i, (leaf, moment) in enumerate(zip(leaves, moments, strict=True)):
            if second_moments[i] is None and getattr(moment, 'shape', None) == leaf.shape:
                second_moments[i] = moment
    return second_moments
