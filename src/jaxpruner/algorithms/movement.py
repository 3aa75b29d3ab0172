"""Movement pruning: weights that training moves away from zero are kept."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import ste
from jaxpruner.tree import at_least_float32, holds_weights


@dataclasses.dataclass
class MovementPruning(ste.SteMixin):
    r"""Keeps the weights that fine-tuning moves away from zero. Sanh et al., "Movement Pruning", 2020.

    The score of a weight is a sum over all steps, $S = -\sum_t w_t \cdot \partial L_t / \partial w_t$, which the state
    holds (`algorithm_state`). The forward pass uses the weights with the largest scores (`pre_forward_update`), and
    gradients pass to the pruned weights, too, so that these may be regrown. All scores begin at zero: let the sparsity
    grow from the first step on (`PolynomialSchedule`), or ties decide.

    Of complex weights the product is that of their real parts plus that of their imaginary parts. Give gradients by
    which an optimizer descends, `jnp.conj` of those of `jax.grad`.

    A mask update ranks the scores after the step's gradients. By default pruned weights keep their values and do not
    learn, as published. The masks of the last update say which these are. With `update_freq=1` every step decides anew.

    >>> import optax
    >>> pruner = MovementPruning(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> tx, params = pruner.wrap_optax(optax.sgd(0.1)), {'w': jnp.array([2.0, 1.0])}
    >>> _, state = tx.update({'w': jnp.array([1.0, -1.0])}, tx.init(params), params)
    >>> state.algorithm_state['w'].tolist(), pruner.pre_forward_update(params, state)['w'].tolist()
    ([-2.0, 1.0], [0.0, 1.0])
    """

    needs_gradients: ClassVar[bool] = True

    is_sparse_gradients: bool = True

    def init_algorithm_state(self, params, target_sparsities):
        """Makes scores of zero for each pruned leaf, in 32 bits at least: products of 16-bit numbers would vanish."""
        return tree_lib.map_with_missing(
            lambda param, target: None if target is None else _zero_scores(param),
            params,
            target_sparsities,
        )

    def track(self, sparse_state, params, grads):
        """Adds the movement of this step to the scores, by which masks are then made."""
        scores = _add_movements(params, grads, sparse_state.algorithm_state)
        return sparse_state._replace(algorithm_state=scores)

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Returns the sums so far; in one-shot pruning those of the given gradients."""
        if sparse_state is not None:
            return sparse_state.algorithm_state
        if grads is None:
            raise ValueError(
                'movement scores are sums over training steps, and pruning once has no state that holds them: train '
                'with wrap_optax, whose state has the masks, or give the gradients of one batch, '
                'pruner.instant_sparsify(params, grads)'
            )
        return _add_movements(params, grads, jax.tree.map(_zero_scores, params))


def _zero_scores(param):
    """Makes scores of zero, which are real; `None` for a leaf without weights."""
    if not holds_weights(param):
        return None
    return jnp.zeros_like(param, dtype=jnp.finfo(at_least_float32(param.dtype)).dtype)


def _add_movements(params, grads, scores):
    """Subtracts weight times gradient from the scores, part by part where they are complex."""

    def moved(param, grad, score):
        if score is None or grad is None:
            return score
        dtype = at_least_float32(param.dtype)
        return score - jnp.real(param.astype(dtype) * jnp.conj(grad.astype(dtype)))

    return tree_lib.map_with_missing(moved, params, grads, scores)
