"""The base of all algorithms, and the training step that it makes of an optimizer.

A step lets the pruner track what it keeps of every step, makes new masks if they are due, runs the optimizer, and lands
pruned weights on zero. Mask updates are rare, so they stand in loops that run zero or one times: the other steps do not
pay for them.

The methods that an algorithm overrides see unpacked masks, and may return them packed or not; `track`,
`pre_forward_update` and `post_gradient_update` see masks as they are stored.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import (
    checks,
    control,
    mask_calculator,
    seeds,
    selection,
    sparsity_distributions,
    sparsity_schedules,
    sparsity_types,
)
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.plan import PruningPlan, plan_leaves
from jaxpruner.sparse_state import SparseState as SparseState
from jaxpruner.sparse_state import apply_mask as apply_mask
from jaxpruner.tree import PyTree

__all__ = ['BaseUpdater', 'NoPruning', 'SparseState', 'apply_mask']

DistributionFn = Callable[..., PyTree]
_SEED = seeds.SeedField()


@dataclasses.dataclass(eq=False)
class BaseUpdater:
    """Base of all algorithms; an algorithm overrides `calculate_scores`, or the methods around it.

    The wrapped optimizer emits updates that land pruned weights on exactly zero. That is exact as long as nothing
    rescales its updates afterwards: put clipping and scaling inside (`wrap_optax(optax.chain(clip, adam))`) or before.

    Pruners of equal settings are equal, functions and arrays being equal to themselves alone. They have a hash, so that
    a pruner may be a static argument of `jax.jit`.

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

    # Facts about an algorithm; a subclass says otherwise.
    # Updates land pruned weights on zero; else the algorithm decides what becomes of them.
    lands_on_zero: ClassVar[bool] = True
    # Regrown weights start at zero, whatever they were before.
    regrows_from_zero: ClassVar[bool] = False
    # A mask update ranks the parameters as they are after the step; it then costs one more optimizer update.
    ranks_next_params: ClassVar[bool] = False
    # The first masks are sparse.
    starts_sparse: ClassVar[bool] = False
    # Scores are made of gradients, which integers have none of.
    needs_gradients: ClassVar[bool] = False
    # Weights may be removed; else nobody is warned that none are.
    prunes: ClassVar[bool] = True
    # The fields that say together how sparse leaves are to be, as arguments of `uniform`.
    fields_of_distribution: ClassVar[tuple[str, ...]] = ('sparsity',)
    # What one ranking holds: a 'leaf' (or a layer), the 'model', or 'other' sets, whose counts a plan cannot tell.
    ranked_together: ClassVar[str] = 'leaf'
    # Groups of N:M lie along the inputs, whatever axis is named, so that a shape without a model says nothing.
    finds_input_axes: ClassVar[bool] = False

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

    def __init_subclass__(cls, **settings: Any):
        super().__init_subclass__(**settings)
        # The dataclass decorator would compare arrays, and take the hash away.
        cls.__eq__, cls.__hash__ = BaseUpdater.__eq__, BaseUpdater.__hash__

    def __eq__(self, other: object) -> Any:
        if type(self) is not type(other):
            return NotImplemented
        (mine, own_form), (others, form) = (jax.tree.flatten(vars(p)) for p in (self, other))

        def is_equal(a, b):
            return a is b or (not hasattr(a, 'shape') and not hasattr(b, 'shape') and a == b)

        return own_form == form and all(map(is_equal, mine, others))

    def __hash__(self) -> int:
        return hash(type(self))

    def __post_init__(self):
        checks.check_fields(self)
        if self.is_packed is not None:
            self.use_packed_masks, self.is_packed = self.is_packed, None
        self.sparsity_type = sparsity_types.normalize_setting(self.sparsity_type)
        if mask_calculator.own_topk_fn(self.topk_fn) is None:
            self.topk_fn = mask_calculator.TopkOfType(self.sparsity_type)
        self.sparsity_distribution_fn = self.distribution()
        if isinstance(self.sparsity_type, sparsity_types.SparsityType):
            self.check_type(self.sparsity_type, 'sparsity_type: ')

    # What an algorithm overrides.

    def calculate_scores(
        self,
        params: PyTree,
        sparse_state: SparseState | None = None,
        grads: PyTree | None = None,
        **kwargs: Any,
    ) -> PyTree:
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
        self, sparse_state: SparseState, params: PyTree, grads: PyTree, **extra_args: Any
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
        scores = self.scores_to_rank(params, sparse_state, grads, extra_args)
        return sparse_state._replace(masks=self.create_masks(scores, sparsities))

    @selection.says(reads_lazy_scores=True)
    def create_masks(self, scores: PyTree, sparsities: PyTree) -> PyTree:
        """Makes a mask for each leaf from its scores and its sparsity.

        Args:
          scores: a tree like the parameters; leaves may be `None` where the sparsity is.
          sparsities: a tree like it of scalars, `None` where dense.

        Returns:
          A tree of uint8 masks, `None` where dense.
        """
        paths, arrays, treedef = selection.flatten_scores(scores)
        targets = tree_lib.leaves_like(treedef, sparsities)
        leaves = self.describe_leaves(paths, arrays)
        masks = mask_calculator.mask_leaves(leaves, arrays, targets, self.topk_fn)
        return tree_lib.unflatten(treedef, masks, arrays)

    def get_initial_masks(self, params: PyTree, target_sparsities: PyTree) -> PyTree:
        """Makes the masks before the first step: everything is kept.

        Args:
          params: the parameters.
          target_sparsities: a tree like them, `None` where dense.

        Returns:
          A tree of uint8 masks, `None` where dense.
        """

        def ones(param, target):
            if target is None:
                return None
            return jnp.ones_like(param, dtype=sparse_state_lib.MASK_DTYPE)

        return tree_lib.map_with_missing(ones, params, target_sparsities)

    def get_target_sparsities(self, params: PyTree) -> PyTree:
        """Returns the target of each leaf, checked against its shape and sparsity type before anything is computed.

        Args:
          params: the parameters, or their shapes.

        Returns:
          A tree like the parameters, `None` where dense.

        Raises:
          ValueError: a sparsity outside [0, 1], a shape that the sparsity type cannot divide, a name without a leaf.
        """
        params = tree_lib.as_arrays(params)
        paths, arrays, treedef = tree_lib.flatten_with_paths(params)
        checks.check_arrays(paths, arrays)
        leaves = self.describe_leaves(paths, arrays)
        distribution = self.distribution()
        targets: list[Any] = [None] * len(leaves)
        if distribution is not None:
            named = {'stacked': self.stacked} if self.stacked else {}
            if checks.known_arguments(distribution, named) != named:
                raise ValueError(
                    'stacked layers change what a distribution selects, and this sparsity_distribution_fn takes no '
                    'argument `stacked`; pass functools.partial(uniform, sparsity=…), or a function of params and '
                    'stacked'
                )
            given = tree_lib.leaves_like(treedef, distribution(params, **named))
            targets = checks.check_targets(self, distribution, leaves, given)
        return tree_lib.unflatten(treedef, targets, arrays)

    def init_state(self, params: PyTree) -> SparseState:
        """Makes the state before the first step, without the optimizer's.

        Args:
          params: the parameters.

        Returns:
          A state with initial masks, packed if asked, and targets as float32 scalars.

        Raises:
          ValueError: sparsities or shapes do not fit.
        """
        params = tree_lib.as_arrays(params)
        targets = self.get_target_sparsities(params)
        masks = self.get_initial_masks(params, targets)
        return SparseState(
            masks=sparse_state_lib.store_masks(masks, params, self.packs_masks()),
            target_sparsities=jax.tree.map(lambda t: jnp.asarray(t, jnp.float32), targets),
            count=jnp.zeros([], jnp.int32),
            algorithm_state=self.init_algorithm_state(params, targets),
        )

    def init_algorithm_state(self, params: PyTree, target_sparsities: PyTree) -> PyTree:
        """Makes the first values of what the algorithm itself keeps from step to step; by default nothing.

        They stand in `sparse_state.algorithm_state`. `track` replaces them each step, `calculate_scores` reads them.
        Structure, shapes and dtypes must stay from step to step; `update` refuses others. Sums of small numbers vanish
        in 16 bits: use `jnp.zeros_like(param, dtype=jnp.float32)` if parameters may be bfloat16.

        Args:
          params: the parameters.
          target_sparsities: a tree like them, `None` where dense.

        Returns:
          Any pytree of arrays; `None` for nothing.
        """
        del params, target_sparsities
        return None

    def track(self, sparse_state: SparseState, params: PyTree) -> SparseState:
        """Computes what `update` needs in every step, before masks that are due; by default nothing.

        An override may name further arguments, as in `track(self, sparse_state, params, grads)`: `grads` receives the
        gradients as `update` got them, any other name the extra argument of `update`.

        Args:
          sparse_state: the state, masks as they are stored: at one bit a weight if they are packed.
          params: the parameters.

        Returns:
          The state, with a new `algorithm_state`.

        Raises:
          TypeError: (by `update`) it returned something else, or changed shapes or dtypes of `algorithm_state`.
        """
        del params
        return sparse_state

    def pre_forward_update(
        self, params: PyTree, opt_state: Any = None, *, sparse_state: Any = None
    ) -> PyTree:
        """Returns the parameters that the forward pass uses; straight-through methods prune here. Default: as they are.

        Args:
          params: the parameters.
          opt_state: a `SparseState`, or any optimizer state that holds one; its masks are as stored.
          sparse_state: another name of `opt_state`.
        """
        del opt_state, sparse_state
        return params

    def post_gradient_update(
        self, params: PyTree, sparse_state: Any = None, *, opt_state: Any = None
    ) -> PyTree:
        """Applies the masks to the parameters.

        Once updates are applied, pruned weights are zero, unless they were infinite or NaN: those this sets to zero.
        Call it once after `init` if the algorithm starts sparse (static, SET, RigL), since `init` cannot change the
        parameters.

        Args:
          params: the parameters.
          sparse_state: a `SparseState`, or any optimizer state that holds one; its masks are as stored.
          opt_state: another name of `sparse_state`.
        """
        state = sparse_state_lib.only_sparse_state(sparse_state, opt_state)
        return self.apply_masks(params, state.masks)

    def check_type(self, sparsity_type: sparsity_types.SparsityType, where: str = '') -> None:
        """Refuses a sparsity type with which the algorithm cannot work.

        Args:
          sparsity_type: the type of all leaves, or of one that is to be pruned.
          where: how the message begins: the leaf's path and a colon.
        """
        del sparsity_type, where

    def check_optimizer(self, inner: optax.GradientTransformation, params: PyTree) -> None:
        """Refuses an optimizer with which the algorithm cannot work; called by `init` before anything is computed."""
        del inner, params

    def check_plan(self, plan: PruningPlan) -> None:
        """Warns where the masks cannot become what was asked for; called by `init` with `plan(params)`."""
        checks.check_plan(self, plan)

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
        if not (hasattr(inner, 'init') and hasattr(inner, 'update')):
            raise TypeError(
                f'wrap_optax takes an optax transformation such as optax.adam(1e-3), got {inner!r}'
            )
        optimizer = optax.with_extra_args_support(inner)

        def init(params):
            params = tree_lib.as_arrays(params)
            self.check_optimizer(optimizer, params)
            state = self.init_state(params)
            self.check_plan(self.plan(params))
            # A user's own `init_state` may store masks in another way, and know nothing of the other fields.
            masks = sparse_state_lib.store_masks(state.masks, params, self.packs_masks())
            if state.algorithm_state is None:
                targets = sparse_state_lib.leaf_targets(state)
                state = state._replace(algorithm_state=self.init_algorithm_state(params, targets))
            sizes = sparse_state_lib.mask_sizes(masks, params)
            return state._replace(masks=masks, inner_state=optimizer.init(params), sizes=sizes)

        def update(updates, state, params=None, *, update_masks=None, **extra_args):
            if params is None:  # in the words of optax
                raise ValueError(
                    'You are using a transformation that requires the current value of parameters, but you are not '
                    'passing `params` when calling `update`.'
                )
            if not isinstance(state, SparseState):
                raise TypeError(
                    f'the state of a wrapped optimizer is a SparseState, got {type(state).__name__}; make it with the '
                    'init of the wrapped optimizer, and restore checkpoints with the target '
                    '`jax.eval_shape(tx.init, params)`'
                )
            is_due: Any = update_masks
            if is_due is None:
                is_due = self.scheduler.is_mask_update_iter(state.count)
            elif not isinstance(is_due, bool | np.bool_):
                raise TypeError(
                    f'update_masks must be a Python bool, got {update_masks!r}; under jit it has to be static '
                    "(static_argnames='update_masks'), and bool(pruner.scheduler.is_mask_update_iter(step)) gives it "
                    'for a step that the host counts'
                )
            is_due = is_due if tree_lib.is_traced(is_due) else bool(is_due)
            params, grads, old = tree_lib.as_arrays(params), tree_lib.as_arrays(updates), state
            state = _track(self, state, params, grads, extra_args)

            def optimize(grads, inner_state, params, masks):
                if self.is_sparse_gradients:
                    grads = apply_mask(grads, masks)
                return optimizer.update(grads, inner_state, params, **extra_args)

            def make_masks(state, params, grads):
                if self.ranks_next_params:
                    # The optimizer runs once more. Taken from outside of the loop, its updates would be written in
                    # every step.
                    updates, _ = optimize(grads, state.inner_state, params, state.masks)
                    landed = sparse_state_lib.land(updates, params, state.masks)
                    params = optax.apply_updates(params, landed)
                return _new_masks(self, state, params, grads, extra_args)

            if is_due is not False and self.skip_gradients:
                updates, state = _masks_or_updates(
                    self, is_due, make_masks, optimize, grads, state, params
                )
            else:
                state = control.run_once(is_due, make_masks, state, params, grads)
                updates, inner_state = optimize(grads, state.inner_state, params, state.masks)
                state = state._replace(inner_state=inner_state)
            if self.lands_on_zero:
                # Where masks are not due, old and new ones are the same.
                regrows = self.regrows_from_zero and not self.skip_gradients
                masks = (old.masks, state.masks) if regrows else (state.masks,)
                updates = sparse_state_lib.land(updates, params, *masks)
            # The count stays at its maximum rather than becoming negative.
            return updates, state._replace(count=optax.safe_increment(state.count))

        return optax.GradientTransformationExtraArgs(init, update)

    def new_masks(
        self, state: Any, params: PyTree, grads: PyTree | None = None, **extra_args: Any
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
        name = type(self).__name__
        if self.needs_gradients and grads is None:
            raise ValueError(
                f'{name} scores weights by their gradients; give them: new_masks(state, params, grads)'
            )
        if self.ranks_next_params:
            raise ValueError(
                f'{name} ranks the parameters after an optimizer step; let the step make its masks: '
                'update(…, update_masks=True)'
            )
        held = sparse_state_lib.only_sparse_state(state)
        params, grads = tree_lib.as_arrays(params), tree_lib.as_arrays(grads)
        new = _jitted_new_masks(self, held, params, grads, extra_args)
        return sparse_state_lib.replace_state(state, new)

    def plan(self, params: PyTree) -> PruningPlan:
        """Tells what will happen to each leaf: its type, its target, how many weights stay, or why it stays dense.

        Nothing is computed on a device. `print(pruner.plan(params))` shows a table.

        Args:
          params: the parameters, or their shapes.

        Raises:
          ValueError: sparsities or shapes do not fit.
        """
        return plan_leaves(self, params)

    def instant_sparsify(
        self, params: PyTree, grads: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
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
        if extra_args:
            name = f'{type(self).__name__}.calculate_scores'
            checks.check_taken(self.calculate_scores, extra_args, name)
        arrays, grads = tree_lib.as_arrays(params), tree_lib.as_arrays(grads)
        targets = self.get_target_sparsities(arrays)
        scores = self.scores_to_rank(arrays, None, grads, extra_args)
        masks = self.create_masks(scores, targets)
        checks.check_masks(self, arrays, masks, scores)
        return self.apply_masks(params, masks), masks

    def apply_masks(self, params: PyTree, masks: PyTree, is_packed: bool = False) -> PyTree:
        """Sets the pruned weights to zero, as `apply_mask`; for averaged weights (EMA), too."""
        return apply_mask(params, masks, is_packed)

    # What the library calls.

    def distribution(self) -> DistributionFn | None:
        """Returns what `sparsity` and `sparsity_distribution_fn` mean together; `None` for no target at all."""
        given = self.sparsity_distribution_fn
        if isinstance(given, FromSettings):  # `dataclasses.replace` may have changed the settings
            given = type(self).sparsity_distribution_fn
        names = [name for name in self.fields_of_distribution if getattr(self, name) is not None]
        own = {name: getattr(self, name) for name in names}
        if own and sparsity_distributions.is_default(given):
            return FromSettings(sparsity_distributions.uniform, **{'sparsity': 0.0, **own})
        defaults = {name: getattr(type(self), name) for name in own}
        changed = [n for n in own if tree_lib.is_traced(own[n]) or own[n] != defaults[n]]
        # The field `sparsity` may be one of a user's class, which then means something else.
        if not changed or not checks.is_of_library(type(self), 'sparsity'):
            return given
        raise ValueError(
            f'{type(self).__name__} got {", ".join(changed)} and sparsity_distribution_fn={given!r}, which both say '
            'how sparse leaves are to be; give one of them. functools.partial(f, sparsity=0.7, '
            'custom_sparsity_map=…) gives a distribution f a sparsity'
        )

    def scores_to_rank(
        self, params: PyTree, sparse_state: Any, grads: Any, extra_args: Any
    ) -> PyTree:
        """Returns the scores for `create_masks`, given those extra arguments that `calculate_scores` names.

        They are lazy, so that they take no memory, where nobody can tell: the function says that it scores each weight
        by itself, and the ranking that it reads lazy scores. A subclass has functions of its own, which say nothing.
        """
        function = selection.said_by(self.calculate_scores, 'of_each_weight')
        if function and selection.said_by(self.create_masks, 'reads_lazy_scores'):
            leaves, treedef = jax.tree.flatten(params)
            scores = [selection.lazily(function, leaf) for leaf in leaves]
            return tree_lib.unflatten(treedef, scores, leaves)
        given = {**extra_args, 'sparse_state': sparse_state, 'grads': grads}
        scores = checks.call(self.calculate_scores, params, **given)
        checks.check_scored(self, 'calculate_scores', params, scores)
        return scores

    def packs_masks(self) -> bool:
        """Whether the state holds masks at one bit per weight; a subclass may lack the base's `__post_init__`."""
        return self.use_packed_masks if self.is_packed is None else self.is_packed

    def describe_leaves(
        self, paths: Sequence[tree_lib.Path], arrays: Sequence[Any]
    ) -> list[sparsity_types.Leaf]:
        """Tells the sparsity type of each leaf, given its array or shape, and whether layers are stacked in it."""
        setting = sparsity_types.normalize_setting(self.sparsity_type)
        types = sparsity_types.resolve_types(setting, paths, arrays)
        shapes = [tuple(getattr(array, 'shape', ())) for array in arrays]
        dtypes = [getattr(array, 'dtype', None) for array in arrays]
        axes = tree_lib.layer_axes(self.stacked, paths, shapes)
        return list(map(sparsity_types.Leaf, paths, shapes, dtypes, types, axes))


class FromSettings(functools.partial):
    """A distribution that a pruner made of its own settings, which another `sparsity` replaces.

    >>> type(BaseUpdater(sparsity=0.5).sparsity_distribution_fn).__name__
    'FromSettings'
    """


# The step.


def _masks_or_updates(pruner, is_due, make_masks, optimize, grads, state, params):
    """Makes new masks, or takes a step of the optimizer; returns the updates and the next state.

    These are two loops, of which one runs. To save memory they write updates over the gradients, which the carry holds
    until then, in the wider dtype of both. Nothing reads the old masks after the first.
    """
    shapes, _ = jax.eval_shape(optimize, grads, state.inner_state, params, state.masks)
    carried = jax.tree.map(lambda u, g: g.astype(jnp.result_type(u, g)), shapes, grads)

    def gradients(carried):
        return jax.tree.map(lambda c, g: c.astype(g.dtype), carried, grads)

    def only_masks(carry, params):
        updates, state = jax.tree.map(jnp.zeros_like, carry[0]), carry[1]
        new = make_masks(state, params, gradients(carry[0]))
        if pruner.regrows_from_zero and pruner.lands_on_zero:
            updates = sparse_state_lib.land(updates, params, state.masks, new.masks)
        return updates, new

    def only_update(carry, params, masks):
        return optimize(gradients(carry[0]), carry[1], params, masks)

    updates, state = control.run_once(is_due, only_masks, (carried, state), params)
    if is_due is not True:
        updates, inner_state = control.run_once(
            ~is_due, only_update, (updates, state.inner_state), params, state.masks
        )
        state = state._replace(inner_state=inner_state)
    return updates, state


def _track(pruner, state, params, grads, extra_args):
    """Lets the algorithm track each step; it gets the gradients and extra arguments that it names."""
    named = {**extra_args, 'grads': grads}
    named.pop('sparse_state', None)
    tracked = checks.call(pruner.track, state, params, **named)
    checks.check_algorithm_state(pruner, 'track', state, tracked)
    return tracked


def _new_masks(pruner, state, params, grads, extra_args):
    """Updates the masks, which are stored as they were, and zeroes the moments of chosen weights."""
    old = state._replace(masks=sparse_state_lib.unpack_masks(state.masks, params))
    taken = ('params', 'grads', 'sparse_state')  # `update_state` has arguments of these names
    named = {name: value for name, value in extra_args.items() if name not in taken}
    new = checks.call(pruner.update_state, old, params, grads, **named)
    checks.check_algorithm_state(pruner, 'update_state', old, new)
    # Algorithms whose masks never change return the same tree; it is stored as it was.
    stored = state.masks
    if new.masks is not old.masks:
        new = new._replace(masks=sparse_state_lib.unpack_masks(new.masks, params))
        stored = sparse_state_lib.store_masks(new.masks, params, pruner.packs_masks(), stored)
    return new._replace(masks=stored)


@functools.partial(jax.jit, static_argnums=0)
def _jitted_new_masks(pruner, state, params, grads, extra_args):
    """Makes the masks of the next step, which then tracks what is tracked here, too."""

    def is_foreign(node):  # a parameter that optax.masked gives to another optimizer
        return isinstance(node, optax.MaskedNode)

    def without_foreign(tree):
        return jax.tree.map(
            lambda mask, leaf: mask if is_foreign(mask) else leaf,
            state.masks,
            tree,
            is_leaf=lambda node: node is None or is_foreign(node),
        )

    if any(map(is_foreign, jax.tree.leaves(state.masks, is_leaf=is_foreign))):
        params, grads = without_foreign(params), without_foreign(grads)

    def make_masks(state):
        tracked = _track(pruner, state, params, grads, extra_args)
        new = _new_masks(pruner, tracked, params, grads, extra_args)
        if new.algorithm_state is tracked.algorithm_state:
            new = new._replace(algorithm_state=state.algorithm_state)
        return new

    return control.run_once(True, make_masks, state)


@dataclasses.dataclass
class NoPruning(BaseUpdater):
    """Keeps every weight: the dense baseline under the same interface.

    >>> import jax.numpy as jnp
    >>> NoPruning().instant_sparsify({'w': jnp.ones(2)})[1]
    {'w': None}
    """

    prunes: ClassVar[bool] = False

    sparsity_distribution_fn: DistributionFn | None = None

    def get_target_sparsities(self, params):
        """Gives no leaf a target."""
        return tree_lib.map_with_missing(lambda _: None, params)

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Scores nothing."""
        del sparse_state, grads
        return tree_lib.map_with_missing(lambda _: None, params)
