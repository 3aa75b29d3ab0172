"""Training that is sparse from the first step: static masks, SET, RigL."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxpruner import base_updater, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import overridden_names, pruners, regrown_channels
from jaxpruner.base_updater import init_checks, schedule_reach
from jaxpruner.core import arguments, optimizer_state, seeds
from jaxpruner.core.optimizer_state import restart_inner_state as restart_inner_state
from jaxpruner.mask_calculator import calculators, lazy_scores, replacement
from jaxpruner.mask_calculator.replacement import MaskedLeaf
from jaxpruner.sparsity_types import Groups


@dataclasses.dataclass
class StaticRandomSparse(base_updater.BaseUpdater):
    """Random masks at initialisation, kept to the end.

    Call `post_gradient_update` once after `init`, so that the first forward pass is sparse.

    >>> pruner = StaticRandomSparse(sparsity_distribution_fn=lambda params: {'w': 0.5})
    >>> int(pruner.init_state({'w': jnp.ones(8)}).masks['w'].sum())
    4
    """

    keeps_count: ClassVar[bool] = True

    is_sparse_gradients: bool = True

    def get_initial_masks(self, params, target_sparsities):
        """Draws random masks at the target sparsities."""
        return self.create_masks(
            pruners.generate_random_scores(params, self.rng_seed), target_sparsities
        )

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
            f'{type(self).__name__} trains sparse from the start: instant_sparsify is not supported in sparse training '
            'methods; use wrap_optax, or RandomPruning for one-shot pruning at random'
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
      TypeError: where a subclass is defined that overrides what is never called.

    >>> SET(drop_fraction_fn=lambda step: 0.3).skip_gradients
    True
    """

    regrows_from_zero: ClassVar[bool] = True
    keeps_count: ClassVar[bool] = True

    skip_gradients: bool = True
    eps: float = 1e-5
    drop_fraction_fn: Callable[[Any], Any] = optax.constant_schedule(0.3)
    is_debug: bool = False

    def __init_subclass__(cls, **settings: Any):
        super().__init_subclass__(**settings)
        overridden_names.unify_names(cls, SET)

    def __post_init__(self):
        super().__post_init__()
        if calculators.own_topk_fn(self.topk_fn) is not None:
            raise ValueError(
                f'{type(self).__name__} drops and grows by its own ranking: topk_fn has no meaning for it'
            )
        # Schedules decay from their first value; a function of the step that needs more fails here, before training.
        check_drop_fraction(self.drop_fraction_fn(0), 'drop_fraction_fn(0)')

    def check_type(self, sparsity_type, where=''):
        """Refuses N:M, and channels that are removed from all leaves."""
        if isinstance(sparsity_type, sparsity_types.NByM):
            raise ValueError(
                f'{where}{type(self).__name__} replaces weights anywhere in a leaf, which N:M groups do not allow, got '
                f'{sparsity_type}; use unstructured, block or channel sparsity, or StaticRandomSparse for N:M'
            )
        regrown_channels.check_not_joint(self, sparsity_type, where)

    def check_optimizer(self, inner, params):
        """Refuses optimizers whose moments cannot be zeroed."""
        # By `update_state` here, and by the training step where a subclass has an `update_state` of its own.
        optimizer_state.check_restartable(inner, params)
        optimizer_state.check_resettable(inner, params)

    def check_plan(self, plan):
        """Also warns where no weight is ever replaced."""
        super().check_plan(plan)
        init_checks.check_replacement(self, plan, self.drop_fraction_fn)

    def plan(self, params, opt_state=None):
        """Also tells the drop fraction at the first and the last mask update."""
        steps = schedule_reach.update_steps(self.scheduler) or (0,)
        with jax.ensure_compile_time_eval():
            first, last = self.drop_fraction_fn(steps[0]), self.drop_fraction_fn(steps[-1])
        plan = super().plan(params, opt_state)
        if not plan.pruned or tree_lib.has_traced((first, last)):
            return plan
        words = f'{float(first):.4g} of the kept weights'
        if float(first) != float(last):
            words += f' at step {steps[0]}, {float(last):.4g} at step {steps[-1]}'
        return dataclasses.replace(
            plan, updates=f'drop_fraction_fn: a mask update replaces {words}'
        )

    def get_drop_scores(self, sparse_state, params, grads):
        """Scores weights: the smallest kept ones are dropped.

        It is not called while `elementwise_drop_score` gives the same scores. An override in a subclass is called.
        """
        del sparse_state, grads
        return pruners.magnitudes(params)

    def get_grow_scores(self, sparse_state, params, grads):
        """Scores weights: the largest that are not kept are grown. Here by chance, from the seed and the step."""
        del grads
        return pruners.generate_random_scores(
            params, seeds.prng_key(self.rng_seed, sparse_state.count)
        )

    def elementwise_drop_score(self):
        """Returns the function of a weight behind `get_drop_scores`, or `None`, as `elementwise_score` does."""
        return jnp.abs

    def elementwise_grow_score(self):
        """Returns the function of a gradient behind `get_grow_scores`, or `None`, as `elementwise_score` does."""
        return None

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
        if not isinstance(self.sparsity_type, sparsity_types.GroupedType):
            raise TypeError(
                f'update_masks works on one leaf, and {self.sparsity_type!r} does not tell its type; set sparsity_type '
                'to a single type'
            )
        leaf = MaskedLeaf(old_mask, drop_score, grow_score, Groups(self.sparsity_type))
        return replacement.drop_and_grow([leaf], drop_fraction)[0]

    # JaxPruner's names. Whatever name a subclass overrides, `unify_names` gives both to its method.
    _get_drop_scores = get_drop_scores
    _get_grow_scores = get_grow_scores
    _update_masks = update_masks

    def update_state(self, sparse_state, params, grads, **extra_args):
        """Drops and grows weights, as many of each; moments of regrown weights become zero.

        Gradients are those that `update` was given, never masked. The methods that score get the extra arguments of
        `update` that they name.
        """
        fraction = self.drop_fraction_fn(sparse_state.count)
        paths, arrays, treedef = tree_lib.flatten_with_paths(params)
        masks = tree_lib.leaves_like(treedef, sparse_state.masks)
        drop, grow = self._drop_and_grow_scores(treedef, sparse_state, params, grads, extra_args)
        masked: dict[int, MaskedLeaf] = {}
        leaves = self._leaves(paths, arrays)
        for i, leaf in enumerate(leaves):
            if masks[i] is not None:
                calculators.check_scores(drop[i], leaf.name)
                calculators.check_scores(grow[i], leaf.name)
                mask, dropped, grown = map(leaf.layers_first, (masks[i], drop[i], grow[i]))
                masked[i] = MaskedLeaf(mask, dropped, grown, leaf.groups)
        new_masks = self._replace_weights(list(masked.values()), fraction)
        for i, mask in zip(masked, new_masks, strict=True):
            masks[i] = leaves[i].layers_back(mask)
        new_state = sparse_state._replace(masks=tree_lib.unflatten(treedef, masks, arrays))
        regrown = self.weights_that_came_back(sparse_state, new_state)
        if self.is_debug:
            _print_update(type(self).__name__, sparse_state.count, fraction, regrown)
        return new_state._replace(
            inner_state=restart_inner_state(sparse_state.inner_state, regrown)
        )

    def weights_that_came_back(self, old_state, new_state):
        """Finds the regrown weights, pruned in one state and kept in the other: a tree of flags, `None` where dense."""

        def is_regrown(new: jax.Array, old: jax.Array) -> jax.Array:
            return (new != 0) & (old == 0)

        return tree_lib.map_with_missing(is_regrown, new_state.masks, old_state.masks)

    def moments_to_reset(self, old_state, new_state):
        """Chooses the regrown weights, if `update_state` has not zeroed their moments already.

        The `update_state` of SET and RigL has: subclasses written for JaxPruner expect it of `super().update_state`. A
        subclass that makes masks without it leaves `inner_state` as it was.
        """
        is_already_done = new_state.inner_state is not old_state.inner_state
        if is_already_done:
            return None
        return self.weights_that_came_back(old_state, new_state)

    def _drop_and_grow_scores(self, treedef, sparse_state, params, grads, extra_args):
        scores = []
        # Under JaxPruner's names: code that replaces a method of a class or of one pruner knows these.
        for name, hook, weights in (
            ('_get_drop_scores', 'elementwise_drop_score', params),
            ('_get_grow_scores', 'elementwise_grow_score', grads),
        ):
            tree = self._lazy_scores_by(hook, name, treedef, weights)
            if tree is None:
                method = getattr(self, name)
                named = arguments.known_arguments(method, extra_args)
                tree = method(sparse_state, params, grads, **named)
            scores.append(tree_lib.leaves_like(treedef, tree))
        return scores

    def _lazy_scores_by(self, hook, method, treedef, arrays):
        """Returns lazy scores as a hook has them; `None` where a method makes arrays."""
        if self._updates_masks_itself() or not lazy_scores.hook_describes(self, hook, method):
            return None
        function = getattr(self, hook)()
        if function is None:
            return None
        # Gradients may come in containers of another type than the parameters.
        arrays = jax.tree.unflatten(treedef, tree_lib.leaves_like(treedef, arrays))
        return lazy_scores.from_function(arrays, function, hook)

    def _updates_masks_itself(self) -> bool:
        return getattr(self._update_masks, '__func__', None) is not SET.update_masks

    def _replace_weights(self, leaves: list[MaskedLeaf], fraction: Any) -> list[jax.Array]:
        if self._updates_masks_itself():
            return [self._replace_by_override(leaf, fraction) for leaf in leaves]
        return replacement.drop_and_grow(leaves, fraction)

    def _replace_by_override(self, leaf: MaskedLeaf, fraction: Any) -> jax.Array:
        """Asks a subclass's `update_masks`, which sees the leaf's own type, and one layer at a time."""
        pruner = copy.copy(self)
        pruner.sparsity_type = leaf.groups.sparsity_type

        def update(mask: jax.Array, drop: jax.Array, grow: jax.Array) -> jax.Array:
            return pruner._update_masks(mask, drop, grow, drop_fraction=fraction)

        update_leaf = leaf.groups.per_layer(update)
        new = update_leaf(leaf.mask, leaf.drop_scores, leaf.grow_scores)
        return (jnp.asarray(new) != 0).astype(leaf.mask.dtype)


def _print_update(name: str, step: Any, fraction: Any, regrown: tree_lib.PyTree) -> None:
    number = sum(jnp.sum(flags) for flags in jax.tree.leaves(regrown))
    jax.debug.print(
        '{name}: masks updated at step {step}, drop fraction {fraction}, {number} weights came back',
        name=name,
        step=step,
        fraction=fraction,
        number=number,
    )


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

    def get_grow_scores(self, sparse_state, params, grads):
        """Scores weights by gradient magnitudes; not called while `elementwise_grow_score` gives the same scores."""
        del sparse_state, params
        return pruners.magnitudes(grads)

    def elementwise_grow_score(self):
        """Scores a weight by the magnitude of its gradient."""
        return jnp.abs


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
        raise ValueError(
            f'{name} must lie in [0, 1] (the share of kept weights that is replaced), got {fraction}'
        )
