"""The training step: a pruner and an optimizer become one optax transformation.

A step lets the pruner track what it keeps of every step, makes new masks if they are due, runs the optimizer, and lands
pruned weights on zero. Mask updates are rare, so they stand in loops that run zero or one times: the other steps do not
pay for them. Where the caller says whether masks are due (`update_masks`), there is no loop: the mask update is in the
program, or not.

With `skip_gradients` (SET, RigL) a step that makes new masks runs no optimizer: updates are 0, or -p where a weight is
pruned or regrown.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import optional_hooks, targets
from jaxpruner.base_updater.pruner import Pruner
from jaxpruner.core import arguments, caller_warnings, control, masking, optimizer_state, packing
from jaxpruner.core.sparse_state import SparseState, leaf_targets

# The words of optax for the same mistake.
_NO_PARAMS = (
    'You are using a transformation that requires the current value of parameters, but you are not passing `params` '
    'when calling `update`.'
)


def wrap(
    pruner: Pruner, inner: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Makes the transformation whose state is a `SparseState`; see `BaseUpdater.wrap_optax`."""
    if not (callable(getattr(inner, 'init', None)) and callable(getattr(inner, 'update', None))):
        raise TypeError(
            f'wrap_optax takes an optax transformation such as optax.adam(1e-3), got {inner!r}'
        )
    optimizer = optax.with_extra_args_support(inner)
    warned_of: set[str] = set()
    seen: list[Any] = []  # the targets of the last state outside of jit

    def init_fn(params: tree_lib.PyTree) -> SparseState:
        params = tree_lib.as_arrays(params)
        with caller_warnings.each_once(warned_of):
            pruner.check_optimizer(optimizer, params)
            state = pruner.init_state(params)
            pruner.check_plan(pruner.plan(params))
        if not tree_lib.has_traced(state.target_sparsities):
            seen[:] = jax.tree.leaves(state.target_sparsities)
        return _complete_state(pruner, optimizer, state, params)

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
        held = jax.tree.leaves(state.target_sparsities)
        if not tree_lib.has_traced((held, params)):
            if list(map(id, held)) != list(map(id, seen)):
                with caller_warnings.each_once(warned_of):
                    targets.warn_of_other_targets(pruner, state, params)
            seen[:] = held
        step = Step(pruner, optimizer, extra_args)
        is_due = _is_due(pruner, state, update_masks)
        return step.run(is_due, tree_lib.as_arrays(updates), state, tree_lib.as_arrays(params))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _complete_state(
    pruner: Pruner,
    optimizer: optax.GradientTransformationExtraArgs,
    state: SparseState,
    params: tree_lib.PyTree,
) -> SparseState:
    """Completes the first state, with the optimizer's.

    A user's own `init_state` may pack masks in another way, or not at all, and may know nothing of the other fields.
    """
    masks = masking.store_masks(state.masks, params, pruner.packs_masks())
    algorithm_state = state.algorithm_state
    if algorithm_state is None:
        algorithm_state = pruner.init_algorithm_state(params, leaf_targets(state))
    return state._replace(
        masks=masks,
        inner_state=optimizer.init(params),
        sizes=masking.mask_sizes(masks, params),
        algorithm_state=algorithm_state,
    )


def _is_due(pruner: Pruner, state: SparseState, update_masks: Any) -> Any:
    """Tells whether this step updates the masks: a bool where that is known now, else a traced scalar."""
    if update_masks is None:
        is_due = pruner.scheduler.is_mask_update_iter(state.count)
        return is_due if tree_lib.is_traced(is_due) else bool(is_due)
    if not isinstance(update_masks, bool | np.bool_):
        raise TypeError(
            f'update_masks must be a Python bool, got {update_masks!r}; under jit it has to be static '
            "(static_argnames='update_masks'), and bool(pruner.scheduler.is_mask_update_iter(step)) gives it for a "
            'step that the host counts'
        )
    return bool(update_masks)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One training step, and the ways it can go."""

    pruner: Pruner
    optimizer: Any  # an optax transformation; None where masks alone are made
    extra_args: dict[str, Any]  # those of `update`, by name

    def run(
        self, is_due: Any, grads: tree_lib.PyTree, old_state: SparseState, params: tree_lib.PyTree
    ) -> tuple[tree_lib.PyTree, SparseState]:
        """Returns the updates and the next state; `is_due` is a bool, or a traced scalar."""
        state, tracked = self.track(grads, old_state, params)
        lands_regrown: Any = False  # whether regrown weights still have to land on zero
        if not self.pruner.skip_gradients:
            updates, state = self._masks_then_update(is_due, grads, state, params, tracked)
            if self.pruner.regrows_from_zero:
                lands_regrown = is_due
        elif is_due is False:
            updates, inner_state = self._update(grads, state.inner_state, params, state.masks)
            state = state._replace(inner_state=inner_state)
        else:
            updates, state = self._masks_or_update(is_due, grads, state, params, tracked)
        if self.pruner.lands_on_zero():
            updates = _land(updates, params, old_state.masks, state.masks, lands_regrown)
        # The count stays at its maximum rather than becoming negative.
        count = jnp.where(state.count < jnp.iinfo(jnp.int32).max, state.count + 1, state.count)
        return updates, state._replace(count=count)

    # The ways a step can go.

    def _masks_then_update(
        self,
        is_due: Any,
        grads: tree_lib.PyTree,
        state: SparseState,
        params: tree_lib.PyTree,
        tracked: Any,
    ) -> tuple[tree_lib.PyTree, SparseState]:
        """Makes new masks if they are due, then runs the optimizer."""
        masks_before = state.masks
        state = control.run_once(
            is_due,
            self.with_new_masks,
            state,
            params,
            grads,
            tracked,
            # A narrow loop waits for no gradient that it does not read, so that the optimizer may begin earlier. On a
            # CPU, only straight-through steps gain from it; others wait for the masks anyway (benchmarks/step.py).
            narrow=not self.pruner.lands_on_zero(),
        )
        # If `ranks_next_params` is set, the parameters after this optimizer step were ranked, under the old masks.
        masks = masks_before if self.pruner.ranks_next_params else state.masks
        updates, inner_state = self._update(grads, state.inner_state, params, masks)
        return updates, state._replace(inner_state=inner_state)

    def _masks_or_update(
        self,
        is_due: Any,
        grads: tree_lib.PyTree,
        state: SparseState,
        params: tree_lib.PyTree,
        tracked: Any,
    ) -> tuple[tree_lib.PyTree, SparseState]:
        """Makes new masks if they are due, else runs the optimizer.

        With new masks, regrown weights land on zero, and nothing else changes. They land here, beside the old masks;
        pruned ones land in `run`. Nothing reads the old masks after the first loop, which therefore replaces them in
        place.

        If `is_due` is traced there are two loops, one for each of its values. If it is True the masks are updated
        without a loop (`run` handles False). To save memory, loops write updates over the gradients. So the carry holds
        gradients until one of the loops has run. If updates have other dtypes, the carry begins as zeros instead, and
        gradients stay an input.
        """
        shapes, _ = jax.eval_shape(self._update, grads, state.inner_state, params, state.masks)
        takes_memory = _dtypes(shapes) == _dtypes(grads)
        carried = grads if takes_memory else _zeros(shapes)
        separate_grads = None if takes_memory else grads

        def gradients(carried: tree_lib.PyTree, separate_grads: tree_lib.PyTree) -> tree_lib.PyTree:
            return carried if separate_grads is None else separate_grads

        def only_masks(
            carry: Any, separate_grads: tree_lib.PyTree, params: tree_lib.PyTree, tracked: Any
        ) -> Any:
            carried, state = carry
            grads = gradients(carried, separate_grads)
            new_state = self.with_new_masks(state, params, grads, tracked)
            updates = _zeros(shapes)
            if self.pruner.regrows_from_zero and self.pruner.lands_on_zero():
                updates = _land(updates, params, state.masks, new_state.masks, lands_regrown=True)
            return updates, new_state

        def only_update(
            carry: Any, separate_grads: tree_lib.PyTree, *inputs: tree_lib.PyTree
        ) -> Any:
            carried, inner_state = carry
            return self._update(gradients(carried, separate_grads), inner_state, *inputs)

        grads_or_updates, state = control.run_once(
            is_due, only_masks, (carried, state), separate_grads, params, tracked
        )
        if is_due is True:
            return grads_or_updates, state
        updates, inner_state = control.run_once(
            jnp.logical_not(is_due),
            only_update,
            (grads_or_updates, state.inner_state),
            separate_grads,
            params,
            state.masks,
        )
        return updates, state._replace(inner_state=inner_state)

    # What these are made of.

    def track(
        self, grads: tree_lib.PyTree, state: SparseState, params: tree_lib.PyTree
    ) -> tuple[SparseState, Any]:
        """Lets the algorithm track each step; it gets the gradients and extra arguments that it names."""
        if not self.pruner.overrides('track'):
            return state, None
        available = {key: x for key, x in self.extra_args.items() if key != 'sparse_state'}
        available['grads'] = grads
        named = arguments.known_arguments(self.pruner.track, available)
        optional_hooks.check_track_arguments(self.pruner, named)
        returned = self.pruner.track(state, params, **named)
        return optional_hooks.check_tracked(self.pruner, state, returned)

    def _update(
        self,
        grads: tree_lib.PyTree,
        inner_state: Any,
        params: tree_lib.PyTree,
        masks: tree_lib.PyTree,
    ) -> tuple[tree_lib.PyTree, Any]:
        """Runs the optimizer, which sees masked gradients if that is asked for; returns its updates and state."""
        if self.pruner.is_sparse_gradients:
            grads = masking.apply_mask(grads, masks)
        return self.optimizer.update(grads, inner_state, params, **self.extra_args)

    def with_new_masks(
        self,
        state: SparseState,
        params: tree_lib.PyTree,
        grads: tree_lib.PyTree,
        tracked: Any = None,
    ) -> SparseState:
        """Updates the masks, and zeroes the moments of chosen weights."""
        old_state = state._replace(masks=masking.unpack_masks(state.masks, params))
        if self.pruner.ranks_next_params:
            params = self._next_params(old_state, params, grads)
        new_state = self._call_update_state(old_state, params, grads, tracked)
        optional_hooks.check_algorithm_state(self.pruner, 'update_state', old_state, new_state)
        # Algorithms whose masks never change return the same tree; it is stored as it was.
        masks_unchanged = new_state.masks is old_state.masks
        new_state = new_state._replace(masks=masking.unpack_masks(new_state.masks, params))
        reset = None
        if self.pruner.overrides('moments_to_reset'):
            reset = self.pruner.moments_to_reset(old_state, new_state)
        if reset is not None:
            if self.optimizer is None:
                inner_state = optimizer_state.restart_inner_state(new_state.inner_state, reset)
            else:
                inner_state = optimizer_state.zero_moments(
                    self.optimizer, new_state.inner_state, reset, params
                )
            new_state = new_state._replace(inner_state=inner_state)
        if masks_unchanged:
            return new_state._replace(masks=state.masks)
        packs_masks = self.pruner.packs_masks()
        stored = masking.store_masks(new_state.masks, params, packs_masks, like=state.masks)
        return new_state._replace(masks=stored)

    def _call_update_state(
        self, state: SparseState, params: tree_lib.PyTree, grads: tree_lib.PyTree, tracked: Any
    ) -> SparseState:
        taken = ('params', 'grads', 'sparse_state')  # `update_state` has arguments of these names
        extra_args = {key: x for key, x in self.extra_args.items() if key not in taken}
        if tracked is not None:
            extra_args['tracked'] = tracked
        named = arguments.known_arguments(self.pruner.update_state, extra_args)
        return self.pruner.update_state(state, params, grads, **named)

    def _next_params(
        self, state: SparseState, params: tree_lib.PyTree, grads: tree_lib.PyTree
    ) -> tree_lib.PyTree:
        """Computes the parameters after this step if the masks stayed as they are; `state` has them unpacked.

        The optimizer runs once more for this. Its updates could come from outside of the loop of a mask update, but
        would then be written to memory in every step.
        """
        updates, _ = self._update(grads, state.inner_state, params, state.masks)
        landed = _land(updates, params, state.masks, state.masks, lands_regrown=False)
        return optax.apply_updates(params, landed)


def _land(
    updates: tree_lib.PyTree,
    params: tree_lib.PyTree,
    old_masks: tree_lib.PyTree,
    masks: tree_lib.PyTree,
    lands_regrown: Any,
) -> tree_lib.PyTree:
    """Makes updates after which pruned weights are exactly zero: -p where the mask is 0.

    If `lands_regrown` (a bool or a scalar) is true, regrown weights land on zero, too. Each leaf has the result type of
    update and parameter.
    """

    def landed(param: jax.Array, update: Any, old_mask: Any, mask: Any) -> Any:
        if update is None or mask is None:
            return update
        kept = packing.unpack_like(mask, param.shape) != 0
        if lands_regrown is not False:
            keeps_regrown = jnp.logical_not(lands_regrown)
            was_kept = packing.unpack_like(old_mask, param.shape) != 0
            kept &= keeps_regrown | was_kept
        dtype = jnp.result_type(update, param)
        return jnp.where(kept, update.astype(dtype), -param.astype(dtype))

    return tree_lib.map_with_missing(landed, params, updates, old_masks, masks)


def _dtypes(tree: tree_lib.PyTree) -> list[Any]:
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def _zeros(shapes: tree_lib.PyTree) -> tree_lib.PyTree:
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
