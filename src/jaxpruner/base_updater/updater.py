"""The base of all algorithms: a pruner is a `BaseUpdater` that says how weights are scored.

Most hooks see unpacked masks, and may return them packed or not. `track`, `pre_forward_update` and
`post_gradient_update` see masks as they are stored.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxpruner import (
    mask_calculator,
    sparsity_distributions,
    sparsity_schedules,
    sparsity_types,
)
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import (
    config_keys,
    driver,
    init_checks,
    leaf_plans,
    sparsity_setting,
    targets,
)
from jaxpruner.base_updater.optional_hooks import OptionalHooks
from jaxpruner.core import arguments, control, masking, seeds
from jaxpruner.core.equal_settings import EqualSettings
from jaxpruner.core.masking import apply_mask as apply_mask
from jaxpruner.core.sparse_state import SparseState as SparseState
from jaxpruner.core.sparse_state import only_sparse_state, outermost_states, with_state
from jaxpruner.mask_calculator import calculators, joint_leaves, lazy_scores
from jaxpruner.sparsity_types import (
    Leaf,
    check_groups,
    is_joint,
    normalize_setting,
    resolve_leaves,
    resolve_types,
)

DistributionFn = Callable[..., tree_lib.PyTree]
_SEED = seeds.SeedField()


@dataclasses.dataclass
class BaseUpdater(OptionalHooks, EqualSettings):
    """Base of all algorithms; an algorithm overrides `calculate_scores`, or the methods around it.

    The wrapped optimizer emits updates that land pruned weights on exactly zero. That is exact as long as nothing
    rescales its updates afterwards: put clipping and scaling inside (`wrap_optax(optax.chain(clip, adam))`) or before.

    Pruners of one class and equal settings are equal, and have a hash, so that a pruner may be a static argument of
    `jax.jit`. Settings that are functions are equal if they are the same function, or partials of the same one.

    Attributes:
      scheduler: when masks are updated, and at which sparsity.
      skip_gradients: on steps that update masks the optimizer is left out and kept weights stay as they are.
      is_sparse_gradients: the optimizer sees gradients in which pruned weights have none.
      sparsity_type: a type, its config string, an ordered mapping from leaf names to types (`None` = dense; first match
        wins), or a function `(path, leaf) -> type`.
      sparsity_distribution_fn: `params -> tree of target sparsities`, `None` where dense.
      rng_seed: whole number, uint32 key or typed key; `None` for the default key, 8.
      use_packed_masks: keep masks at one bit per weight.
      topk_fn: `(scores, sparsity) -> mask`, used for every leaf; unless given, that of the sparsity type.
      is_packed: another name of `use_packed_masks`.
      stacked: names or globs of leaves whose first axis counts layers, or a mapping from them to the axis that does
        (`{'*layers*': 1}`); each layer is ranked on its own.
      sparsity: the sparsity of every selected leaf, short for `sparsity_distribution_fn=partial(uniform, sparsity=…)`.

    Raises:
      TypeError, ValueError: a setting is wrong; the message says which and what would be right.

    >>> BaseUpdater(sparsity=0.5).get_target_sparsities({'w': jnp.ones((1, 2)), 'b': jnp.ones(2)})
    {'b': None, 'w': 0.5}
    """

    # Whether regrown weights start at zero, whatever they were before.
    regrows_from_zero: ClassVar[bool] = False
    # Whether a mask update ranks the parameters as they are after the step; it then costs one more optimizer update.
    ranks_next_params: ClassVar[bool] = False
    # Whether `create_masks` and `select_masks` take lazy scores (`selection.Scores`), too. A subclass that overrides
    # one of them gets arrays, unless it says so again.
    ranks_lazy_scores: ClassVar[bool] = True
    # Whether the number of kept weights is the same at every step, so that targets cannot change later.
    keeps_count: ClassVar[bool] = False
    # Whether scores are made of gradients, which integers have none of.
    needs_gradients: ClassVar[bool] = False
    # What one ranking holds: a 'leaf' (or a layer), the 'model', or 'other' sets, whose counts a plan cannot tell.
    ranked_together: ClassVar[str] = 'leaf'

    scheduler: sparsity_schedules.BaseSchedule = sparsity_schedules.NoUpdateSchedule()
    skip_gradients: bool = False
    is_sparse_gradients: bool = False
    sparsity_type: Any = sparsity_types.Unstructured()
    sparsity_distribution_fn: DistributionFn | None = sparsity_distributions.NOT_GIVEN
    rng_seed: Any = _SEED
    use_packed_masks: bool = False
    topk_fn: mask_calculator.TopkFn | None = None
    _: dataclasses.KW_ONLY
    is_packed: bool | None = None
    stacked: tree_lib.Stacked = ()
    sparsity: Any = None

    def __post_init__(self):
        config_keys.check_fields(self)
        if self.is_packed is not None:
            self.use_packed_masks, self.is_packed = self.is_packed, None
        self.sparsity_type = normalize_setting(self.sparsity_type)
        if calculators.own_topk_fn(self.topk_fn) is None:
            self.topk_fn = calculators.TopkOfType(self.sparsity_type)
        self.sparsity_distribution_fn = self.distribution()
        if isinstance(self.sparsity_type, sparsity_types.SparsityType):
            self.check_type(self.sparsity_type, 'sparsity_type: ')

    # What an algorithm overrides; `OptionalHooks` has more, which do nothing by default.

    def calculate_scores(
        self,
        params: tree_lib.PyTree,
        sparse_state: SparseState | None = None,
        grads: tree_lib.PyTree | None = None,
        **kwargs: Any,
    ) -> tree_lib.PyTree:
        """Scores each weight: the larger, the longer it is kept.

        Args:
          params: the parameters.
          sparse_state: the state, masks unpacked; `None` in one-shot pruning.
          grads: gradients of the parameters, `None` in one-shot pruning without them.
          **kwargs: extra arguments of `update`; an override names those that it takes.

        Returns:
          A tree like the parameters.
        """
        raise NotImplementedError(f'{type(self).__name__} must define calculate_scores')

    def update_state(
        self,
        sparse_state: SparseState,
        params: tree_lib.PyTree,
        grads: tree_lib.PyTree,
        **extra_args: Any,
    ) -> SparseState:
        """Makes new masks for the sparsity of this step; called when the scheduler says so.

        Args:
          sparse_state: the state, masks unpacked.
          params: the parameters.
          grads: their gradients, as `update` was given them: `is_sparse_gradients` masks them for the optimizer alone.
          **extra_args: extra arguments of `update`, handed on to `calculate_scores` if it names them.

        Returns:
          The state with new masks, packed or not.
        """
        sparsities = self.scheduler.get_sparsity_at_step(
            sparse_state.target_sparsities, sparse_state.count
        )
        scores = self._scores_to_rank(params, sparse_state, grads, extra_args)
        return sparse_state._replace(masks=self.create_masks(scores, sparsities))

    def create_masks(self, scores: tree_lib.PyTree, sparsities: tree_lib.PyTree) -> tree_lib.PyTree:
        """Makes a mask for each leaf from its scores and its sparsity.

        Args:
          scores: a tree like the parameters; leaves may be `None` where the sparsity is.
          sparsities: a tree like it of scalars, `None` where dense.

        Returns:
          A tree of uint8 masks, `None` where dense.
        """
        return self.select_masks(scores, sparsities)[0]

    def select_masks(
        self,
        scores: tree_lib.PyTree,
        sparsities: tree_lib.PyTree,
        thresholds: tree_lib.PyTree | None = None,
    ) -> tuple[tree_lib.PyTree, tree_lib.PyTree]:
        """Makes masks and their thresholds. Thresholds of an earlier call only speed up the search.

        Args:
          scores: a tree like the parameters of arrays, or of `selection.Scores`.
          sparsities: a tree like it of scalars, `None` where dense.
          thresholds: the thresholds of an earlier selection.

        Returns:
          The masks, and a tree of their thresholds: a float a leaf (one a layer, where layers are stacked), `None`
          where nothing is ranked over the whole leaf.
        """
        paths, score_of, treedef = lazy_scores.flatten(scores)
        sparsity_of = tree_lib.leaves_like(treedef, sparsities)
        start_of = [None] * len(paths)
        if thresholds is not None:
            start_of = tree_lib.leaves_like(treedef, thresholds)
        scored: list[calculators.ScoredLeaf | None] = [None] * len(paths)
        leaves = self._leaves(paths, score_of)
        for i, leaf in enumerate(leaves):
            if leaf.sparsity_type is not None and sparsity_of[i] is not None:
                calculators.check_scores(score_of[i], leaf.name)
                scored[i] = calculators.ScoredLeaf(
                    leaf.layers_first(score_of[i]), sparsity_of[i], leaf.groups, start_of[i]
                )
        if any(is_joint(leaf.sparsity_type) for leaf in leaves):
            leaf_masks = joint_leaves.mask_joint_leaves(leaves, scored, self.topk_fn)
        else:
            leaf_masks = calculators.mask_leaves(scored, self.topk_fn)
        new_masks = []
        for leaf, made in zip(leaves, leaf_masks, strict=True):
            new_masks.append(None if made.mask is None else leaf.layers_back(made.mask))
        masks = tree_lib.unflatten(treedef, new_masks, score_of)
        thresholds = [leaf.threshold for leaf in leaf_masks]
        new_thresholds = tree_lib.unflatten(treedef, thresholds, score_of)
        return masks, new_thresholds

    def get_initial_masks(
        self, params: tree_lib.PyTree, target_sparsities: tree_lib.PyTree
    ) -> tree_lib.PyTree:
        """Makes the masks before the first step: everything is kept.

        Args:
          params: the parameters.
          target_sparsities: a tree like them, `None` where dense.

        Returns:
          A tree of uint8 masks, `None` where dense.
        """

        def ones(param: jax.Array, target: Any) -> jax.Array | None:
            if target is None:
                return None
            return jnp.ones_like(param, dtype=mask_calculator.MASK_DTYPE)

        return tree_lib.map_with_missing(ones, params, target_sparsities)

    def get_target_sparsities(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """Returns the target of each leaf, checked against its shape and sparsity type before anything is computed.

        Args:
          params: the parameters, or their shapes.

        Returns:
          A tree like the parameters, `None` where dense.

        Raises:
          ValueError: a sparsity outside [0, 1], a shape that the sparsity type cannot divide, a name without a leaf.
        """
        params = tree_lib.as_arrays(params)
        paths, arrays, _ = tree_lib.flatten_with_paths(params)
        is_ranked_by_type = calculators.own_topk_fn(self.topk_fn) is None

        def check(pruned: Sequence[Leaf]) -> None:
            for leaf in pruned:
                assert leaf.sparsity_type is not None
                if self.needs_gradients and not tree_lib.holds_weights(leaf):
                    raise ValueError(
                        f'{leaf.name}: {type(self).__name__} scores weights by their gradients, and {leaf.dtype} has '
                        f"none; leave it dense: sparsity_type={{'{leaf.name}': None, '*': …}}"
                    )
                self.check_type(leaf.sparsity_type, f'{leaf.name}: ')
            if is_ranked_by_type:
                checks = {leaf.path: leaf.check_shape for leaf in pruned}
                check_groups(checks, normalize_setting(self.sparsity_type), paths)

        return targets.of_leaves(
            self.distribution(),
            params,
            self._leaves(paths, arrays),
            self.stacked,
            check,
            types_decide=is_ranked_by_type,
        )

    def init_state(self, params: tree_lib.PyTree) -> SparseState:
        """Makes the state before the first step, without the optimizer's.

        Args:
          params: the parameters.

        Returns:
          A state with initial masks, packed if asked, and targets as float32 scalars.

        Raises:
          ValueError: sparsities or shapes do not fit.
        """
        params = tree_lib.as_arrays(params)
        sparsities = self.get_target_sparsities(params)
        targets.log_targets(sparsities)
        initial_masks = self.get_initial_masks(params, sparsities)
        masks = masking.store_masks(initial_masks, params, self.packs_masks())

        def as_float(_: Any, target: Any) -> jax.Array | None:
            return None if target is None else jnp.asarray(target, jnp.float32)

        return SparseState(
            masks=masks,
            target_sparsities=tree_lib.map_with_missing(as_float, params, sparsities),
            count=jnp.zeros([], jnp.int32),
            sizes=masking.mask_sizes(masks, params),
            algorithm_state=self.init_algorithm_state(params, sparsities),
        )

    def post_gradient_update(
        self, params: tree_lib.PyTree, sparse_state: Any = None, *, opt_state: Any = None
    ) -> tree_lib.PyTree:
        """Applies the masks to the parameters.

        Once updates are applied, pruned weights are zero, unless they were infinite or NaN: those this sets to zero.
        Call it once after `init` if the algorithm starts sparse (static, SET, RigL), since `init` cannot change the
        parameters.

        Args:
          params: the parameters.
          sparse_state: a `SparseState`, or any optimizer state that holds one; its masks are as stored.
          opt_state: another name of `sparse_state`.
        """
        return self.apply_masks(
            params, only_sparse_state(arguments.given_state(sparse_state, opt_state)).masks
        )

    def check_plan(self, plan: leaf_plans.PruningPlan) -> None:
        """Warns where the masks cannot become what was asked for; called by `init` with `plan(params)`."""
        init_checks.check_plan(self, plan)

    # What users call.

    def wrap_optax(
        self, inner: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """Wraps an optimizer: its state becomes a `SparseState`, its updates keep pruned weights at zero.

        Nothing outside may rescale the updates afterwards. No reverse-mode derivative can be taken through `update` (as
        meta-learning wants it). Derivatives of the loss are not affected.

        Args:
          inner: any optax transformation.

        Returns:
          A transformation whose `update(updates, state, params, *, update_masks=None, **extra_args)` needs `params`.
          Where `update_masks` is `None`, the schedule decides inside the compiled program; a Python bool, static
          under `jit`, decides for it, and `False` leaves the mask update out of the program. Extra arguments reach the
          score function (those it names) and the inner optimizer (if it takes any).

        >>> import optax, jaxpruner
        >>> tx = jaxpruner.NoPruning().wrap_optax(optax.sgd(0.1))
        >>> tx.init({'w': jnp.ones((2, 2))}).count
        Array(0, dtype=int32)
        """
        return driver.wrap(self, inner)

    def new_masks(
        self,
        state: Any,
        params: tree_lib.PyTree,
        grads: tree_lib.PyTree | None = None,
        **extra_args: Any,
    ) -> Any:
        """Makes the masks of the next step before it, in a compiled program of their own.

        For loops that say themselves when masks are updated: the step is then `update(…, update_masks=False)`, which
        compiles without the making of masks. The masks are those that `update` makes where the schedule says so.
        The optimizer runs in the step that follows, with SET and RigL, too, which leave it out where `update` makes
        masks. What `track` computes in every step is left to that step.

        Args:
          state: a `SparseState`, or any optimizer state that holds one.
          params: the parameters, as `init` was given them.
          grads: their gradients, for algorithms that score by them.
          **extra_args: extra arguments, as `update` gets them.

        Returns:
          The state with new masks, and zeroed moments of regrown weights; its count is unchanged.

        Raises:
          ValueError: the scores need gradients, or parameters after an optimizer step; or the state holds no
            `SparseState`, or several.

        >>> import optax, jaxpruner
        >>> pruner = jaxpruner.MagnitudePruning(jaxpruner.PeriodicSchedule(update_freq=100), sparsity=0.5)
        >>> tx, params = pruner.wrap_optax(optax.sgd(0.1)), {'w': jnp.array([[3.0, 4.0]])}
        >>> pruner.new_masks(tx.init(params), params).masks
        {'w': Array([[0, 1]], dtype=uint8)}
        """
        if self.needs_gradients and grads is None:
            raise ValueError(
                f'{type(self).__name__} scores weights by their gradients; give them: new_masks(state, params, grads)'
            )
        if self.ranks_next_params:
            raise ValueError(
                f'{type(self).__name__} ranks the parameters after an optimizer step; let the step make its masks: '
                'update(…, update_masks=True)'
            )
        held = only_sparse_state(state)
        params, grads = tree_lib.as_arrays(params), tree_lib.as_arrays(grads)
        new = jax.tree.leaves(_new_masks(self, held, params, grads, extra_args))
        (raw,) = outermost_states(state)
        old, treedef = jax.tree.flatten(raw)  # Flax NNX may keep arrays in boxes
        boxed = [b.replace(a) if hasattr(b, 'value') else a for b, a in zip(old, new, strict=True)]
        return with_state(state, jax.tree.unflatten(treedef, boxed))

    def plan(self, params: tree_lib.PyTree, opt_state: Any = None) -> leaf_plans.PruningPlan:
        """Tells what will happen to each leaf: its type, its target, how many weights stay, or why it stays dense.

        Nothing is computed on a device. `print(pruner.plan(params))` shows a table.

        Args:
          params: the parameters, or their shapes.
          opt_state: a state to go on with; a warning says where its targets, which win, are not those of the plan.

        Raises:
          ValueError: sparsities or shapes do not fit.
        """
        if opt_state is not None:
            targets.warn_of_other_targets(self, only_sparse_state(opt_state), params)
        return leaf_plans.plan_leaves(self, params)

    def retarget(self, opt_state: Any, params: tree_lib.PyTree) -> Any:
        """Gives a state the targets of this pruner.

        The targets are in the state, and those win: a pruner with another sparsity goes on to the targets of the one
        that made the state, until the state is retargeted. Masks follow at the next mask update.

        Args:
          opt_state: a `SparseState`, or any optimizer state that holds one.
          params: the parameters, or their shapes.

        Returns:
          The same state with new targets.

        Raises:
          ValueError: other leaves are pruned, or the algorithm never changes how many weights are kept.

        >>> import optax, jaxpruner
        >>> params = {'w': jnp.ones((2, 2))}
        >>> schedule = jaxpruner.PeriodicSchedule(10)
        >>> state = jaxpruner.MagnitudePruning(schedule, sparsity=0.5).wrap_optax(optax.sgd(0.1)).init(params)
        >>> later = jaxpruner.MagnitudePruning(schedule, sparsity=0.75)
        >>> float(later.retarget(state, params).target_sparsities['w'])
        0.75
        """
        return targets.retargeted(self, opt_state, tree_lib.as_arrays(params))

    def instant_sparsify(
        self, params: tree_lib.PyTree, grads: tree_lib.PyTree | None = None, **extra_args: Any
    ) -> tuple[tree_lib.PyTree, tree_lib.PyTree]:
        """Prunes once, to the target sparsities.

        Args:
          params: any pytree of arrays.
          grads: gradients, for algorithms that score by them.
          **extra_args: handed on to `calculate_scores`, which has to name them.

        Returns:
          The pruned parameters, and the (unpacked) masks.

        Raises:
          TypeError: `calculate_scores` does not take an extra argument, or its scores are complex.
          ValueError: sparsities or shapes do not fit, or scores need a state.
        """
        arguments.check_taken(
            self.calculate_scores, extra_args, f'{type(self).__name__}.calculate_scores'
        )
        arrays, grads = tree_lib.as_arrays(params), tree_lib.as_arrays(grads)
        sparsities = self.get_target_sparsities(arrays)
        try:
            scores = self._scores_to_rank(arrays, None, grads, extra_args)
        except AttributeError as error:
            if error.obj is not None or error.name not in SparseState._fields:
                raise
            raise ValueError(
                f'{type(self).__name__} scores by what its state holds ({error.name}), and instant_sparsify has no '
                'state: train with wrap_optax, whose state has the masks, or let calculate_scores do without where '
                'sparse_state is None'
            ) from error
        masks = self.create_masks(scores, sparsities)
        masking.warn_of_emptied(masks, arrays, grads)
        init_checks.check_masks(self, arrays, masks)
        return self.apply_masks(params, masks), masks

    def apply_masks(
        self, params: tree_lib.PyTree, masks: tree_lib.PyTree, is_packed: bool = False
    ) -> tree_lib.PyTree:
        """Sets the pruned weights to zero, as `apply_mask`; for averaged weights (EMA), too."""
        return apply_mask(params, masks, is_packed)

    # What the library reads and calls.

    def distribution(self) -> DistributionFn | None:
        """Returns what `sparsity` and `sparsity_distribution_fn` mean together; `None` for no target at all."""
        return sparsity_setting.distribution_of(self)

    def scores_now(
        self,
        params: tree_lib.PyTree,
        sparse_state: SparseState | None,
        grads: Any,
        extra_args: dict[str, Any],
    ) -> tree_lib.PyTree:
        """Calls `calculate_scores` with those extra arguments that it names."""
        known = arguments.known_arguments(self.calculate_scores, extra_args)
        return self.calculate_scores(params, sparse_state=sparse_state, grads=grads, **known)

    def _scores_to_rank(
        self,
        params: tree_lib.PyTree,
        sparse_state: SparseState | None,
        grads: Any,
        extra_args: dict[str, Any],
    ) -> tree_lib.PyTree:
        """Returns the scores for `create_masks`: lazy where the algorithm has them, else from `scores_now`."""
        scores = self._lazy_scores(params)
        if scores is None:
            scores = self.scores_now(params, sparse_state, grads, extra_args)
        return scores

    def _lazy_scores(self, params: tree_lib.PyTree) -> tree_lib.PyTree | None:
        """Returns lazy scores of the parameters; `None` where scores or rankings are made otherwise."""
        if not self.ranks_lazy_scores:
            return None
        for method in ('create_masks', 'select_masks'):
            if not lazy_scores.hook_describes(self, 'ranks_lazy_scores', method):
                return None
        if not lazy_scores.hook_describes(self, 'elementwise_score', 'calculate_scores'):
            return None
        function = self.elementwise_score()
        return None if function is None else lazy_scores.from_function(params, function)

    def lands_on_zero(self) -> bool:
        """Whether updates land pruned weights on zero.

        An algorithm that defines `post_gradient_update` decides itself what becomes of pruned weights, so its updates
        stay as the optimizer makes them.
        """
        return not self.overrides('post_gradient_update')

    def overrides(self, method: str) -> bool:
        """Whether the algorithm, or this object, defines a method of `BaseUpdater` itself."""
        is_own = getattr(type(self), method) is not getattr(BaseUpdater, method)
        return is_own or method in vars(self)

    def packs_masks(self) -> bool:
        """Whether the state holds masks at one bit per weight."""
        return self.use_packed_masks if self.is_packed is None else self.is_packed

    def _leaves(self, paths: Sequence[tree_lib.Path], arrays: Sequence[Any]) -> list[Leaf]:
        """Resolves the sparsity type of each leaf, and whether layers are stacked in it."""
        # Read here, too: a subclass may define `__post_init__` without calling the base's.
        setting = normalize_setting(self.sparsity_type)
        types = resolve_types(setting, paths, arrays)
        return resolve_leaves(paths, arrays, types, self.stacked)


@functools.partial(jax.jit, static_argnums=0)
def _new_masks(pruner, state, params, grads, extra_args):
    def is_foreign(node: Any) -> bool:  # a parameter that optax.masked gives to another optimizer
        return isinstance(node, optax.MaskedNode)

    if any(map(is_foreign, jax.tree.leaves(state.masks, is_leaf=is_foreign))):
        params, grads = (
            jax.tree.map(
                lambda mask, leaf: mask if is_foreign(mask) else leaf,
                state.masks,
                tree,
                is_leaf=lambda node: node is None or is_foreign(node),
            )
            for tree in (params, grads)
        )
    step = driver.Step(pruner, None, extra_args)
    tracked_state, tracked = step.track(grads, state, params)
    new = step.with_new_masks(tracked_state, params, grads, tracked)
    if new.algorithm_state is tracked_state.algorithm_state:  # the step tracks it
        new = new._replace(algorithm_state=state.algorithm_state)
    new = new._replace(thresholds=state.thresholds)
    return control.cast_like(new, state)
