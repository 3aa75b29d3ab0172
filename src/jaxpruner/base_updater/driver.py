"""The one driver: a pruner and an optimizer become one optax transformation.

A step: update the masks if they are due, mask the gradients if asked, run the optimizer unless it is skipped, and land
pruned weights on zero. What happens on few steps stands in loops of at most one turn, so that the others do not pay;
where the host decides, it stands there without a loop, or not at all.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner.base_updater import optional_hooks
from jaxpruner.base_updater.pruner import Pruner
from jaxpruner.core import arguments, caller_warnings, control, masking, optimizer_state, packing
from jaxpruner.core import tree as tree_lib
from jaxpruner.core.sparse_state import SparseState, check_has_masks, leaf_targets

# The words of optax for the same mistake.
_NO_PARAMS = (
    'You are using a transformation that requires the current value of parameters, but you are not passing `params` '
    'when calling `update`.'
)


def wrap(
    updater: Pruner, inner: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer; see `BaseUpdater.wrap_optax`.

    Args:
      updater: the pruner.
      inner: any optax transformation.

    Returns:
      The transformation whose state is a `SparseState`.

    Raises:
      TypeError: `inner` is no transformation.

    >>> import jaxpruner
    >>> wrap(jaxpruner.NoPruning(), optax.sgd(0.1)).init({'w': jnp.ones((2, 2))}).count
    Array(0, dtype=int32)
    """
    if not (callable(getattr(inner, 'init', None)) and callable(getattr(inner, 'update', None))):
        raise TypeError(
            f'wrap_optax takes an optax transformation such as optax.adam(1e-3), got {inner!r}'
        )
    inner_with_extra = optax.with_extra_args_support(inner)

    said: set[str] = set()

    def init_fn(params: tree_lib.PyTree) -> SparseState:
        params = tree_lib.as_arrays(params)
        with caller_warnings.each_once(said):
            updater.check_optimizer(inner_with_extra, params)
            state = updater.init_state(params)
            updater.check_plan(updater.plan(params))
        # A user's own `init_state` may pack masks in another way, or not at all, and know nothing of other fields.
        masks = masking.store_masks(state.masks, params, updater.packs_masks())
        algorithm_state = state.algorithm_state
        if algorithm_state is None:
            algorithm_state = updater.init_algorithm_state(params, leaf_targets(state))
        return state._replace(
            masks=masks,
            inner_state=inner_with_extra.init(params),
            sizes=masking.mask_sizes(masks, params),
            algorithm_state=algorithm_state,
        )

    def update_fn(
        updates: tree_lib.PyTree,
        state: Any,
        params: tree_lib.PyTree | None = None,
        *,
        update_masks: bool | None = None,
        **extra_args: Any,
    ) -> tuple[tree_lib.PyTree, SparseState]:
        if params is None:
            raise ValueError(_NO_PARAMS)
        if not isinstance(state, SparseState):
            raise TypeError(
                f'the state of a wrapped optimizer is a SparseState, got {type(state).__name__}; make it with the init '
                'of the wrapped optimizer, and restore checkpoints with the target `jax.eval_shape(tx.init, params)`'
            )
        check_has_masks(state)
        updates, params = tree_lib.as_arrays(updates), tree_lib.as_arrays(params)
        due = _is_due(updater, state, update_masks)
        return _step(updater, inner_with_extra, due, updates, state, params, extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_due(updater: Pruner, state: SparseState, update_masks: Any) -> Any:
    """Whether this step updates the masks: a bool where that is known now, else a traced scalar."""
    if update_masks is None:
        due = updater.scheduler.is_mask_update_iter(state.count)
        return due if tree_lib.is_traced(due) else bool(due)
    if not isinstance(update_masks, bool | np.bool_):
        raise TypeError(
            f'update_masks must be a bool of Python, got {update_masks!r}; under jit it has to be static '
            "(static_argnames='update_masks'), and bool(updater.scheduler.is_mask_update_iter(step)) gives it for a "
            'step that the host counts'
        )
    return bool(update_masks)


def _step(
    updater: Pruner,
    inner: optax.GradientTransformationExtraArgs,
    due: Any,
    grads: tree_lib.PyTree,
    old_state: SparseState,
    params: tree_lib.PyTree,
    extra_args: dict[str, Any],
) -> tuple[tree_lib.PyTree, SparseState]:
    new_masks = functools.partial(_updated_masks, updater, inner, extra_args)
    tracking_state, tracked = _track(updater, old_state, params, grads, extra_args)
    update = functools.partial(_masked_update, updater, inner, extra_args)
    if updater.skip_gradients and due is not False:
        updates, state = _masks_or_update(
            updater, due, new_masks, update, grads, tracking_state, params
        )
        regrow = False
    else:
        # Into a loop it would be handed through memory, in every step; whoever needs it there finds it again.
        tracked = tracked if due is True else None
        # A loop that reads no gradients lets the optimizer run while some are still computed. Straight-through steps
        # are faster so on a CPU; those whose parameters land on zero, and so wait for masks anyway, are slower.
        narrow = not updater.lands_on_zero()
        state = control.run_once(
            due, new_masks, tracking_state, params, grads, tracked, narrow=narrow
        )
        # Who ranks the parameters after the step has to take the step that was ranked.
        masks_of_grads = (old_state if updater.ranks_next_params else state).masks
        updates, inner_state = update(grads, state.inner_state, params, masks_of_grads)
        if updater.skip_gradients:
            landing = (
                state.masks if updater.lands_on_zero() else jax.tree.map(lambda _: None, params)
            )
            updates = _kept_from_fusing(updates, params, landing)
            inner_state = _with_dtypes_of(state.inner_state, inner_state)
        state = state._replace(inner_state=inner_state)
        regrow = updater.regrows_from_zero and due
    if updater.lands_on_zero():
        updates = _land(updates, params, old_state.masks, state.masks, regrow)
    # The count stays at its maximum rather than becoming negative.
    count = jnp.where(state.count < jnp.iinfo(jnp.int32).max, state.count + 1, state.count)
    return updates, state._replace(count=count)


def _track(
    updater: Pruner,
    state: SparseState,
    params: tree_lib.PyTree,
    grads: tree_lib.PyTree,
    extra_args: dict[str, Any],
) -> tuple[SparseState, Any]:
    """What the algorithm keeps of every step; it gets gradients and extra arguments by naming them."""
    available = {name: value for name, value in extra_args.items() if name != 'sparse_state'}
    available['grads'] = grads
    known = arguments.known_arguments(updater.track, available)
    optional_hooks.check_track_arguments(updater, known)
    return updater.track(state, params, **known)


def _updated_masks(
    updater: Pruner,
    inner: optax.GradientTransformationExtraArgs,
    extra_args: dict[str, Any],
    state: SparseState,
    params: tree_lib.PyTree,
    grads: tree_lib.PyTree,
    tracked: Any,
) -> SparseState:
    old_state = state._replace(masks=masking.unpack_masks(state.masks, params))
    if updater.ranks_next_params:
        params = _next_params(updater, inner, extra_args, old_state, params, grads)
    # `update_state` has arguments of these names already.
    extra_args = {
        key: value
        for key, value in extra_args.items()
        if key not in ('params', 'grads', 'sparse_state')
    }
    if tracked is not None:
        extra_args['tracked'] = tracked
    new_state = updater.update_state(
        old_state, params, grads, **arguments.known_arguments(updater.update_state, extra_args)
    )
    new_state = new_state._replace(masks=masking.unpack_masks(new_state.masks, params))
    reset = updater.moments_to_reset(old_state, new_state)
    if reset is not None:
        inner_state = optimizer_state.zero_moments(inner, new_state.inner_state, reset, params)
        new_state = new_state._replace(inner_state=inner_state)
    stored = masking.store_masks(new_state.masks, params, updater.packs_masks(), like=state.masks)
    return new_state._replace(masks=stored)


def _next_params(
    updater: Pruner,
    inner: optax.GradientTransformationExtraArgs,
    extra_args: dict[str, Any],
    state: SparseState,
    params: tree_lib.PyTree,
    grads: tree_lib.PyTree,
) -> tree_lib.PyTree:
    """The parameters after this step, if the masks stayed as they are; `state` has them unpacked.

    The optimizer runs once more for it: handing its updates to the mask update would write them to memory in each step.
    """
    updates, _ = _masked_update(
        updater, inner, extra_args, grads, state.inner_state, params, state.masks
    )
    return optax.apply_updates(
        params, _land(updates, params, state.masks, state.masks, regrow=False)
    )


def _land(
    updates: tree_lib.PyTree,
    params: tree_lib.PyTree,
    old_masks: tree_lib.PyTree,
    masks: tree_lib.PyTree,
    regrow: Any,
) -> tree_lib.PyTree:
    """Updates after which pruned weights are exactly zero: -p where the mask is 0.

    Where weights come back (`regrow`, a bool or a scalar), those land on zero, too. Each leaf has the result type of
    update and parameter.
    """

    def landed(param: jax.Array, update: Any, old_mask: Any, mask: Any) -> Any:
        if update is None or mask is None:
            return update
        kept = packing.unpack_like(mask, param.shape) != 0
        if regrow is not False:
            kept &= jnp.logical_not(regrow) | (packing.unpack_like(old_mask, param.shape) != 0)
        dtype = jnp.result_type(update, param)
        return jnp.where(kept, update.astype(dtype), -param.astype(dtype))

    return tree_lib.map_with_missing(landed, params, updates, old_masks, masks)


def _masked_update(
    updater: Pruner,
    inner: optax.GradientTransformationExtraArgs,
    extra_args: dict[str, Any],
    grads: tree_lib.PyTree,
    inner_state: Any,
    params: tree_lib.PyTree,
    masks: tree_lib.PyTree,
) -> tuple[tree_lib.PyTree, Any]:
    """The optimizer's update; its gradients are masked if asked."""
    sparse_grads = masking.apply_mask(grads, masks) if updater.is_sparse_gradients else grads
    return inner.update(sparse_grads, inner_state, params, **extra_args)


def _masks_or_update(
    updater: Pruner,
    due: Any,
    new_masks: Callable[..., SparseState],
    update: Callable[..., tuple[tree_lib.PyTree, Any]],
    grads: tree_lib.PyTree,
    old_state: SparseState,
    params: tree_lib.PyTree,
) -> tuple[tree_lib.PyTree, SparseState]:
    """New masks where they are due, and then no more than weights that come back at zero; else the optimizer's update.

    Nothing reads the old masks after the first loop, which therefore updates them in place.
    """
    shapes, _ = jax.eval_shape(update, grads, old_state.inner_state, params, old_state.masks)
    same = [leaf.dtype for leaf in jax.tree.leaves(shapes)] == [
        leaf.dtype for leaf in jax.tree.leaves(grads)
    ]
    # Where they can, gradients travel in the carry, where the updates take their memory.
    start, gradients = (grads, None) if same else (_zeros(shapes), grads)

    def only_masks(carry: Any, gradients: tree_lib.PyTree, params: tree_lib.PyTree) -> Any:
        grads, state = carry
        new_state = new_masks(state, params, grads if gradients is None else gradients, None)
        updates = _zeros(shapes)
        if updater.regrows_from_zero and updater.lands_on_zero():
            updates = _land(updates, params, state.masks, new_state.masks, regrow=True)
        return updates, new_state

    def only_update(carry: Any, gradients: tree_lib.PyTree, *inputs: tree_lib.PyTree) -> Any:
        grads, inner_state = carry
        return update(grads if gradients is None else gradients, inner_state, *inputs)

    carry, state = control.run_once(due, only_masks, (start, old_state), gradients, params)
    if due is True:
        return carry, state
    updates, inner_state = control.run_once(
        ~due, only_update, (carry, state.inner_state), gradients, params, state.masks
    )
    return updates, state._replace(inner_state=inner_state)


def _zeros(shapes: tree_lib.PyTree) -> tree_lib.PyTree:
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)


def _with_dtypes_of(old_state: Any, new_state: Any) -> Any:
    """The optimizer's new state as it is after a loop, whose carry keeps its dtypes."""
    return jax.tree.map(
        lambda new, old: jnp.asarray(new, jnp.result_type(old)), new_state, old_state
    )


def _kept_from_fusing(
    updates: tree_lib.PyTree, params: tree_lib.PyTree, landing: tree_lib.PyTree
) -> tree_lib.PyTree:
    """Updates that are rounded before they are added to the parameters, as those that leave a loop are.

    LLVM makes one multiply-add of an update's last product and that addition, which rounds once and not twice. A select
    between the two prevents it, in registers. Leaves that land on zero have one, by the masks in `landing`; others
    select on the parameter: NaN plus anything is NaN, so that sums are the same.
    """

    def rounded(param: jax.Array, update: Any, mask: Any) -> Any:
        if update is None or mask is not None or not jnp.issubdtype(update.dtype, jnp.inexact):
            return update
        return jnp.where(jnp.isnan(param), jnp.asarray(jnp.nan, update.dtype), update)

    return tree_lib.map_with_missing(rounded, params, updates, landing)
