"""Training in which the host decides when masks are updated, so that the program of most steps makes no masks."""

import logging
from typing import Any

import jax
import numpy as np
import optax

from jaxpruner import tree as tree_lib
from jaxpruner.base_updater.mask_programs import MaskProgram, StaysInStepError, mask_program
from jaxpruner.base_updater.updater import BaseUpdater
from jaxpruner.core import sparse_state
from jaxpruner.core.sparse_state import DueState, HostDrivenState, SparseState

logger = logging.getLogger(__name__)


class HostDriven:
    """Updates masks from a Python loop, so that the training step compiles as fast as a dense one.

    Call `update` before each step. Until masks are due, it returns a state whose step leaves the masks as they are, and
    is compiled without the making of masks. The first time they are due, it compiles a program that makes masks from
    parameters and state. All masks and parameters are those of a step that decides for itself.

    Some algorithms need what only the step has: SET and RigL, which run no optimizer where they update masks, and those
    that score by gradients. For these, `update` marks the state as due, and `jit` compiles the step once more, with the
    making of masks in it. The log (`logging.INFO`) says which way is taken, and why.

    Attributes:
      pruner: the pruner whose `wrap_optax` made the optimizer.
      donate: whether `update` may replace masks in place, which deletes those of the state that it is given.

    Raises:
      TypeError: `pruner` is not a pruner.

    >>> import jax.numpy as jnp, optax, jaxpruner
    >>> pruner = jaxpruner.MagnitudePruning(jaxpruner.OneShotSchedule(target_step=2), sparsity=0.5)
    >>> tx, params = pruner.wrap_optax(optax.sgd(0.1)), {'w': jnp.array([[3.0, 4.0]])}
    >>> masks, opt_state = HostDriven(pruner), tx.init(params)
    >>> for step in range(3):
    ...     opt_state = masks.update(params, opt_state, step)
    ...     updates, opt_state = jax.jit(tx.update)(params, opt_state, params)
    >>> opt_state.masks
    {'w': Array([[0, 1]], dtype=uint8)}
    """

    def __init__(self, pruner: BaseUpdater, *, donate: bool = False):
        if not isinstance(pruner, BaseUpdater):
            raise TypeError(
                f'HostDriven takes a pruner, such as jaxpruner.MagnitudePruning(…), got {pruner!r}'
            )
        self.pruner = pruner
        self.donate = donate
        self._programs: dict[Any, MaskProgram | None] = {}  # None: masks are made in the step
        self._last_step: int | None = None

    def update(
        self, params: Any, opt_state: Any, step: int | None = None, *, due: bool | None = None
    ) -> Any:
        """Makes the optimizer's state for the next step, with new masks if they are due.

        Args:
          params: the parameters, as `tx.init` was given them.
          opt_state: the optimizer's state, however deep in it that of the pruner stands.
          step: how many steps the pruner has counted, if the loop knows; outside of `optax.MultiSteps(…, k)` that is
            `step // k`. Unless it is given, it is read from the state, for which the host waits for the step before.
          due: whether masks are updated; unless it is given, the schedule says so.

        Returns:
          An optimizer state of the same arrays but for new masks. Its type says what the next step does.

        Raises:
          ValueError: masks were due at a step before which `update` was not called; `step` is not what the state
            counts; or the state holds no pruner, or several.
          TypeError: it is called under `jit`, or `due` is no bool.
        """
        state = self._state_in(opt_state)
        is_new = not isinstance(state, HostDrivenState) or self._last_step is None
        if is_new or step is None:
            step = _checked_step(step, state)
        if due is None:
            self._check_nothing_missed(None if is_new else self._last_step, step)
        is_due = self._is_due(step, due)
        if is_due:
            _checked_step(step, state)
        self._last_step = step
        if is_due:
            state = self._with_new_masks(params, state)
        elif type(state) is not HostDrivenState:
            state = HostDrivenState(*state)
        else:
            return opt_state
        return sparse_state.with_state(opt_state, state)

    def release(self, opt_state: Any) -> Any:
        """Makes the state for steps that decide for themselves again, inside of their program.

        Args:
          opt_state: an optimizer state that `update` has returned, or that of a step after it.

        Returns:
          An optimizer state of the same arrays.
        """
        self._last_step = None
        return sparse_state.with_state(opt_state, SparseState(*self._state_in(opt_state)))

    def _state_in(self, opt_state: Any) -> SparseState:
        """Finds the one state of a pruner, as it is."""
        states = sparse_state.outermost_states(opt_state)
        if len(states) == 1 and isinstance(states[0], HostDrivenState):
            return states[0]
        number = len(sparse_state.sparse_states(opt_state))
        if number != 1:
            raise ValueError(
                f'HostDriven updates the masks of one pruner, and the optimizer state holds those of {number}; '
                'wrap one optimizer with pruner.wrap_optax, or decide in the loop with update_masks=…'
            )
        return states[0]

    def _is_due(self, step: int, due: bool | None) -> bool:
        if due is None:
            return bool(self.pruner.scheduler.is_mask_update_iter(step))
        if not isinstance(due, bool | np.bool_):
            raise TypeError(f'due must be a bool, or None where the schedule decides, got {due!r}')
        return bool(due)

    def _check_nothing_missed(self, last: int | None, step: int) -> None:
        """Refuses to go on from a step between which and the last one masks were due."""
        if last is None:
            return
        for missed in range(last + 1, step):
            if self.pruner.scheduler.is_mask_update_iter(missed):
                raise ValueError(
                    f'masks were due at step {missed}, and HostDriven.update was called at step {last} and then at '
                    f'{step}; call it before each step, once for each training. A program of several steps decides '
                    'for itself: leave HostDriven out'
                )

    def _with_new_masks(self, params: Any, state: SparseState) -> SparseState:
        """Makes new masks, or, where they are made in the step, marks the state as due."""
        arrays = sparse_state.without_boxes(state)
        seen = _as_optimizer_sees(tree_lib.as_arrays(params), arrays.masks)
        program = self._program(arrays, seen)
        if program is None:
            return DueState(*state)
        boxes, treedef = jax.tree.flatten(state)
        old = jax.tree.leaves(arrays)
        new = dict(zip(map(id, old), program.run(old, seen), strict=True))

        def replaced(box: Any) -> Any:
            value = getattr(box, 'value', box)
            if value is None or new[id(value)] is value:
                return box
            return new[id(value)] if value is box else box.replace(new[id(value)])

        return HostDrivenState(*jax.tree.unflatten(treedef, map(replaced, boxes)))

    def _program(self, state: SparseState, params: Any) -> MaskProgram | None:
        leaves, treedef = jax.tree.flatten((state, params))
        key = treedef, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        if key not in self._programs:
            name = type(self.pruner).__name__
            try:
                self._programs[key] = mask_program(self.pruner, state, params, self.donate)
                logger.info('%s: masks are updated by a program of their own', name)
            except StaysInStepError as reason:
                self._programs[key] = None
                logger.info('%s: masks are updated in the training step, since %s', name, reason)
        return self._programs[key]


def _checked_step(step: int | None, state: SparseState) -> int:
    """Reads how many steps a state has counted; refuses a loop that counts otherwise."""
    count = sparse_state.without_boxes(state).count
    if tree_lib.is_traced(count):
        raise TypeError(
            'HostDriven.update reads how many steps the state has counted, and is called where that is traced; call '
            'it in the Python loop, outside of jit'
        )
    counts = np.unique(np.asarray(count))
    if counts.size != 1:
        raise ValueError(
            f'stacked trainings that HostDriven updates are at one step, and these are at {counts}'
        )
    counted = int(counts[0])
    if step is not None and step != counted:
        raise ValueError(
            f'step={step} was given, and the state has counted {counted} steps; give int(state.count) plus the steps '
            'since (step // k outside of MultiSteps(…, k)), or leave step out'
        )
    return counted


def _as_optimizer_sees(params: Any, masks: Any) -> Any:
    """Leaves out the parameters that `optax.masked` or `multi_transform` gives to another optimizer."""

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    if not any(map(is_masked, jax.tree.leaves(masks, is_leaf=is_masked))):
        return params
    return jax.tree.map(
        lambda mask, param: mask if is_masked(mask) else param,
        masks,
        params,
        is_leaf=lambda node: node is None or is_masked(node),
    )
