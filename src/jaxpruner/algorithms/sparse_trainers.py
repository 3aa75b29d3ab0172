"""Training that is sparse from the first step: static masks, SET, RigL."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxpruner import base_updater, optimizer_state, replacement, scoring, sparsity_types, targets, utils
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import pruners


@dataclasses.dataclass
class StaticRandomSparse(base_updater.BaseUpdater):
    """Random masks at initialisation, kept to the end.

    Call `post_gradient_update` once after `init`, so that the first forward pass is sparse.

    >>> updater = StaticRandomSparse(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> int(updater.init_state({'w': jnp.ones(8)}).masks['w'].sum())
    4
    """

    approaches_target: ClassVar[bool] = False

    is_sparse_gradients: bool = True

    def get_initial_masks(self, params, target_sparsities):
        """Random masks at the target sparsities."""
        return self.create_masks(pruners.generate_random_scores(params, self.rng_seed), target_sparsities)

    def update_state(self, sparse_state, params, grads):
        """The state as it is."""
        del params, grads
        return sparse_state

    def instant_sparsify(self, params, grads=None):
        """Refused: there is nothing to train sparse.

        Raises:
          RuntimeError: always.
        """
        raise RuntimeError(
            f'{type(self).__name__} trains sparse from the start: instant_sparsify is not supported in sparse training '
            'methods; use wrap_optax, or RandomPruning for one-shot pruning at random'
        )


@dataclasses.dataclass
class SET(StaticRandomSparse):
    """Sparse evolutionary training: drops the smallest kept weights, regrows as many at random. Mocanu et al., 2018.

    On update steps the optimizer is skipped. A weight that comes back starts at zero with zeroed moments; one that is
    dropped and regrown in the same update keeps both. Call `post_gradient_update` once after `init`.

    Attributes:
      drop_fraction_fn: step -> share of the kept weights (or blocks, channels) to replace, in [0, 1].

    Raises:
      ValueError: N:M, in whose groups a weight cannot be replaced freely; or a drop fraction outside [0, 1].

    >>> SET(drop_fraction_fn=lambda step: 0.3).skip_gradients
    True
    """

    regrows_from_zero: ClassVar[bool] = True

    skip_gradients: bool = True
    drop_fraction_fn: Callable[[Any], Any] = optax.constant_schedule(0.1)

    def __post_init__(self):
        super().__post_init__()
        if self.topk_fn is not None:
            raise ValueError(
                f'{type(self).__name__} drops and regrows by its own ranking: topk_fn has no meaning for it'
            )
        if not callable(self.drop_fraction_fn):
            raise TypeError(
                f'drop_fraction_fn must be a function of the step, got {self.drop_fraction_fn!r}; '
                'for a constant pass optax.constant_schedule(…)'
            )
        # Schedules decay from their first value; a function of the step that needs more fails here, before training.
        check_drop_fraction(self.drop_fraction_fn(0), 'drop_fraction_fn(0)')

    def check_type(self, sparsity_type, where=''):
        """Refuses N:M."""
        if isinstance(sparsity_type, sparsity_types.NByM):
            raise ValueError(
                f'{where}{type(self).__name__} replaces weights anywhere in a leaf, which N:M groups do not allow, got '
                f'{sparsity_type}; use unstructured, block or channel sparsity, or StaticRandomSparse for N:M'
            )

    def check_optimizer(self, inner, params):
        """Refuses optimizers whose moments cannot be zeroed."""
        optimizer_state.check_resettable(inner, params)

    @scoring.of_each_weight(jnp.abs)
    def get_drop_scores(self, sparse_state, params, grads):
        """Scores of the weights: the smallest kept ones are dropped."""
        del sparse_state, grads
        return pruners.magnitudes(params)

    def get_grow_scores(self, sparse_state, params, grads):
        """Scores of the weights: the largest that are not kept come back. Here chance, from the seed and the step."""
        del grads
        return pruners.generate_random_scores(params, utils.prng_key(self.rng_seed, sparse_state.count))

    def update_state(self, sparse_state, params, grads):
        """Drops and regrows; the number of kept weights stays."""
        fraction = self.drop_fraction_fn(sparse_state.count)
        drop_scores, grow_scores = (
            _scores_of(method, sparse_state, params, grads) for method in (self.get_drop_scores, self.get_grow_scores)
        )
        paths, leaves, treedef = tree_lib.flatten_with_paths(params)
        types, stacked = self._leaf_types(paths, leaves), targets.are_stacked(self.stacked, paths)
        old, drop, grow = (tree_lib.leaves_like(treedef, t) for t in (sparse_state.masks, drop_scores, grow_scores))
        masked = [i for i, mask in enumerate(old) if mask is not None]
        replaced = replacement.drop_and_grow(
            [old[i] for i in masked],
            [drop[i] for i in masked],
            [grow[i] for i in masked],
            [types[i] for i in masked],
            [stacked[i] for i in masked],
            fraction=fraction,
        )
        masks = dict(zip(masked, replaced, strict=True))
        return sparse_state._replace(masks=jax.tree.unflatten(treedef, [masks.get(i) for i in range(len(leaves))]))

    def moments_to_reset(self, old_state, new_state):
        """The weights that were pruned before and are kept now."""
        leaves, treedef = jax.tree.flatten(new_state.masks)
        old = tree_lib.leaves_like(treedef, old_state.masks)
        return jax.tree.unflatten(treedef, [(new != 0) & (was == 0) for new, was in zip(leaves, old, strict=True)])


@dataclasses.dataclass
class RigL(SET):
    """Rigging the lottery: as SET, but regrows where the gradient is largest. Evci et al., 2020.

    >>> RigL(drop_fraction_fn=lambda step: 0.3).is_sparse_gradients
    True
    """

    @scoring.of_each_gradient(jnp.abs)
    def get_grow_scores(self, sparse_state, params, grads):
        """The gradients' magnitudes."""
        del sparse_state, params
        return pruners.magnitudes(grads)


def check_drop_fraction(fraction: Any, name: str) -> None:
    """Refuses a drop fraction outside [0, 1]; traced values pass.

    Args:
      fraction: a number or scalar array.
      name: what it is called, for the message.

    Raises:
      ValueError: it lies outside.
      TypeError: it is no number.

    >>> check_drop_fraction(0.3, 'drop_fraction')
    """
    if tree_lib.is_traced(fraction):
        return
    if isinstance(fraction, str) or not hasattr(fraction, '__float__'):
        raise TypeError(f'{name} must be a number between 0 and 1, got {fraction!r}')
    if not 0 <= float(fraction) <= 1:
        raise ValueError(f'{name} must lie in [0, 1] (the share of kept weights that is replaced), got {fraction}')


def _scores_of(method: Callable[..., Any], sparse_state: Any, params: Any, grads: Any) -> Any:
    """What a method returns, not written down where that can be."""
    scores = scoring.said_of(method, params, grads)
    return method(sparse_state, params, grads) if scores is None else scores
