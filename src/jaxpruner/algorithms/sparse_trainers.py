"""Training that is sparse from the first step: static masks, SET, RigL."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxpruner import checks, mask_calculator, seeds, selection, sparsity_types
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import pruners
from jaxpruner.base_updater import BaseUpdater
from jaxpruner.sparse_state import restart_inner_state as restart_inner_state


@dataclasses.dataclass
class StaticRandomSparse(BaseUpdater):
    """Random masks at initialisation, kept to the end.

    Call `post_gradient_update` once after `init`, so that the first forward pass is sparse.

    >>> pruner = StaticRandomSparse(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> int(pruner.init_state({'w': jnp.ones(8)}).masks['w'].sum())
    4
    """

    starts_sparse: ClassVar[bool] = True

    is_sparse_gradients: bool = True

    def get_initial_masks(self, params, target_sparsities):
        """Draws random masks at the target sparsities."""
        scores = pruners.generate_random_scores(params, self.rng_seed)
        return self.create_masks(scores, target_sparsities)

    def update_state(self, sparse_state, params, grads):
        """Returns the state as it is."""
        del params, grads
        return sparse_state

    def instant_sparsify(self, params, grads=None):
        """Refuses: there is nothing to train sparse.

        Raises:
          RuntimeError: always.
        """
        raise RuntimeError(
            f'{type(self).__name__} chooses its masks in training: instant_sparsify is not supported in sparse '
            'training methods; use wrap_optax, or RandomPruning for one-shot pruning at random'
        )


@dataclasses.dataclass
class SET(StaticRandomSparse):
    """Sparse evolutionary training: drops the smallest kept weights, grows others at random. Mocanu et al., 2018.

    On update steps the optimizer is skipped. A regrown weight starts at zero with zeroed moments; one that is
    dropped and grown in the same update keeps both. Call `post_gradient_update` once after `init`.

    A subclass overrides `get_drop_scores` or `get_grow_scores`, to rank weights otherwise, or `update_masks`, to choose
    the mask of a leaf otherwise. JaxPruner's names, with an underscore in front, mean the same methods.

    Attributes:
      eps: accepted for code written for JaxPruner, and not used: weights are ranked exactly.
      drop_fraction_fn: step -> share of the kept weights (or blocks, channels) to replace, in [0, 1]; by default 0.3 at
        every step (a configuration has another default: `drop_fraction`, 0.1, which decays).
        `optax.cosine_decay_schedule(0.3, last_step)` lets it decay, as published.
      is_debug: print step, drop fraction and the number of regrown weights at each mask update.

    Raises:
      ValueError: N:M, in whose groups a weight cannot be replaced freely; or a drop fraction outside [0, 1].

    >>> SET(drop_fraction_fn=lambda step: 0.3).skip_gradients
    True
    """

    regrows_from_zero: ClassVar[bool] = True

    skip_gradients: bool = True
    eps: float = 1e-5
    drop_fraction_fn: Callable[[Any], Any] = optax.constant_schedule(0.3)
    is_debug: bool = False

    def __post_init__(self):
        super().__post_init__()
        checks.check_no_topk_fn(self, 'drops and grows by its own ranking')
        # Schedules decay from their first value; a function of the step that needs more fails here, before training.
        checks.check_drop_fraction(self.drop_fraction_fn(0), 'drop_fraction_fn(0)')

    def check_type(self, sparsity_type, where=''):
        """Refuses N:M, and channels that are removed from all leaves."""
        if isinstance(sparsity_type, sparsity_types.NByM):
            raise ValueError(
                f'{where}{type(self).__name__} replaces weights anywhere in a leaf, which N:M groups do not allow, got '
                f'{sparsity_type}; use unstructured, block or channel sparsity, or StaticRandomSparse for N:M'
            )
        checks.check_not_joint(self, sparsity_type, where)

    def check_optimizer(self, inner, params):
        """Refuses optimizers whose moments cannot be zeroed."""
        sparse_state_lib.check_restartable(inner, params)

    def check_plan(self, plan):
        """Also warns where so few weights are kept that none is replaced."""
        super().check_plan(plan)
        checks.check_replaced(plan, self.scheduler, self.drop_fraction_fn)

    @selection.says(of_each_weight=jnp.abs)
    def get_drop_scores(self, sparse_state, params, grads):
        """Scores weights: the smallest kept ones are dropped."""
        del sparse_state, grads
        return pruners.magnitudes(params)

    def get_grow_scores(self, sparse_state, params, grads):
        """Scores weights: the largest that are not kept are grown. Here by chance, from the seed and the step."""
        del grads
        key = seeds.prng_key(self.rng_seed, sparse_state.count)
        return pruners.generate_random_scores(params, key)

    @selection.says(ranks_all_leaves=True)  # as well as one
    def update_masks(self, old_mask, drop_score, grow_score, drop_fraction):
        """Drops and grows weights of one leaf.

        Args:
          old_mask: the mask of the leaf (of one layer, where layers are stacked), unpacked.
          drop_score: of its shape; the smallest of the kept weights are dropped.
          grow_score: of its shape; the largest that are not kept are grown.
          drop_fraction: share of the kept weights to replace.

        Returns:
          The new mask, which keeps the same number of weights.

        Raises:
          TypeError: called by hand where `sparsity_type` names types by leaf, so that the leaf's is not known.
        """
        if not isinstance(self.sparsity_type, sparsity_types.SparsityType):
            raise TypeError(
                f'update_masks works on one leaf, and {self.sparsity_type!r} does not tell its type; set sparsity_type '
                'to a single type'
            )
        leaf = mask_calculator.MaskedLeaf(old_mask, drop_score, grow_score, self.sparsity_type)
        return mask_calculator.drop_and_grow([leaf], drop_fraction)[0]

    # JaxPruner's names, which `update_state` calls: a subclass may override either.

    def _get_drop_scores(self, sparse_state, params, grads, **extra_args):
        return checks.call(self.get_drop_scores, sparse_state, params, grads, **extra_args)

    def _get_grow_scores(self, sparse_state, params, grads, **extra_args):
        return checks.call(self.get_grow_scores, sparse_state, params, grads, **extra_args)

    def _update_masks(self, old_mask, drop_score, grow_score, drop_fraction):
        return self.update_masks(old_mask, drop_score, grow_score, drop_fraction)

    def _said_by(self, hook, fact):
        """Finds what a hook says of itself; nothing where a subclass overrides JaxPruner's name for it."""
        is_other_name = getattr(type(self), f'_{hook}') is getattr(SET, f'_{hook}')
        return selection.said_by(getattr(self, hook), fact) if is_other_name else None

    def update_state(self, sparse_state, params, grads, **extra_args):
        """Drops and grows weights, as many of each; moments of regrown weights become zero.

        Gradients are those that `update` was given, never masked. The methods that score get the extra arguments of
        `update` that they name.
        """
        fraction = self.drop_fraction_fn(sparse_state.count)
        paths, arrays, treedef = tree_lib.flatten_with_paths(params)
        masks = tree_lib.leaves_like(treedef, sparse_state.masks)
        # All leaves in one selection, of lazy scores; a subclass's own rule sees arrays, one leaf after another.
        is_together = self._said_by('update_masks', 'ranks_all_leaves')

        def scores(hook, weights):
            function = self._said_by(hook, 'of_each_weight')
            if function and is_together:
                leaves = tree_lib.leaves_like(treedef, weights)
                return [selection.lazily(function, leaf) for leaf in leaves]
            method = getattr(self, f'_{hook}')
            own = checks.call(method, sparse_state, params, grads, **extra_args)
            checks.check_scored(self, hook, params, own)
            return tree_lib.leaves_like(treedef, own)

        drop, grow = scores('get_drop_scores', params), scores('get_grow_scores', grads)
        masked: dict[int, mask_calculator.MaskedLeaf] = {}
        for i, leaf in enumerate(self.describe_leaves(paths, arrays)):
            if masks[i] is not None:
                for scored in (drop[i], grow[i]):
                    mask_calculator.check_scores(scored, leaf.name)
                masked[i] = mask_calculator.MaskedLeaf(
                    masks[i], drop[i], grow[i], leaf.sparsity_type, leaf.layer_axis
                )
        if is_together:
            replaced = mask_calculator.drop_and_grow(list(masked.values()), fraction)
        else:
            replaced = [self._update_leaf(leaf, fraction) for leaf in masked.values()]
        new = dict(zip(masked, replaced, strict=True))
        new_masks = tree_lib.unflatten(treedef, map(new.get, range(len(masks))), arrays)
        regrown = tree_lib.map_with_missing(
            lambda new, old: (new != 0) & (old == 0), new_masks, sparse_state.masks
        )
        if self.is_debug:
            jax.debug.print(
                '{name}: masks updated at step {step}, drop fraction {fraction}, {number} weights came back',
                name=type(self).__name__,
                step=sparse_state.count,
                fraction=fraction,
                number=sum(map(jnp.sum, jax.tree.leaves(regrown))),
            )
        inner_state = restart_inner_state(sparse_state.inner_state, regrown)
        return sparse_state._replace(masks=new_masks, inner_state=inner_state)

    def _update_leaf(self, leaf, fraction):
        """Asks a subclass's `update_masks`, which sees the leaf's own type, and one layer at a time."""
        pruner = copy.copy(self)
        pruner.sparsity_type = leaf.sparsity_type
        update = functools.partial(pruner._update_masks, drop_fraction=fraction)
        updated = tree_lib.per_layer(update, leaf.layer_axis)
        new = updated(leaf.mask, leaf.drop_scores, leaf.grow_scores)
        shape = getattr(new, 'shape', None)
        if shape != leaf.mask.shape:
            raise ValueError(
                f'{type(self).__name__}.update_masks must return a mask of shape {leaf.mask.shape}, got {shape}'
            )
        return (jnp.asarray(new) != 0).astype(leaf.mask.dtype)


@dataclasses.dataclass
class RigL(SET):
    """Rigging the lottery: as SET, but grows weights where the gradient is largest. Evci et al., 2020.

    It grows by the gradients that `update` is given, of pruned weights, too; only the optimizer sees them masked. So
    take them at the masked parameters, with no mask inside the loss, which would make them zero.

    Its attributes are those of `SET`: `drop_fraction_fn` is 0.3 at every step by default (in a configuration 0.1, which
    decays).

    >>> RigL(drop_fraction_fn=lambda step: 0.3).is_sparse_gradients
    True
    """

    needs_gradients: ClassVar[bool] = True

    @selection.says(of_each_weight=jnp.abs)  # here of each gradient
    def get_grow_scores(self, sparse_state, params, grads):
        """Scores weights by gradient magnitudes."""
        del sparse_state, params
        return pruners.magnitudes(grads)
