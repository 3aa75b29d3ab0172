"""A mask update as a program of its own, apart from the training step that it stands before.

Within a step, masks are made between the gradients and the optimizer. They can as well be made before the step, by a
program of their own, if nobody can tell the difference. That is so if

- the update reads no gradient, no optimizer, and no extra argument of the step;
- what it changes is read neither by the forward pass nor by what the algorithm computes in every step;
- it reads nothing that it changes, so that it may be repeated where a step is (by `MultiSteps`, or after a failure).

`mask_program` traces the update to see what it reads. It returns the program, or says why the update stays in the step.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.extend.core
import optax
from jax.sharding import NamedSharding

from jaxpruner import tree as tree_lib
from jaxpruner.base_updater.driver import Step
from jaxpruner.base_updater.updater import BaseUpdater
from jaxpruner.core import control, masking
from jaxpruner.core.sparse_state import SparseState

# Method -> its arguments that exist outside of a step; any other is an extra argument of the step's `update`.
_ARGUMENTS_OUTSIDE_A_STEP = {
    'track': {'sparse_state', 'params', 'grads'},
    'update_state': {'sparse_state', 'params', 'grads', 'tracked'},
    'calculate_scores': {'params', 'sparse_state', 'grads'},
}
_GRADIENTS = 'it reads the gradients of the step'
_ITSELF = 'it reads what it changes'
_TRACKED = 'what it changes is also changed, or read, by what the algorithm computes in every step'
_FORWARD = 'the forward pass reads what it changes'
_OPTIMIZER = 'it needs the optimizer, to take a step or to change moments'
_SKIPS = 'the step that updates masks runs no optimizer (skip_gradients)'


class StaysInStepError(Exception):
    """The mask update has to stay in the training step; the message says why."""


class MaskProgram(NamedTuple):
    """A compiled mask update."""

    replaced: list[int]  # which leaves of the state it replaces
    compute: Callable[..., list[jax.Array]]  # (those leaves, the state's other leaves, params)

    def run(self, state: list[jax.Array], params: tree_lib.PyTree) -> list[jax.Array]:
        """Returns the leaves of a state after the mask update."""
        old: list[jax.Array] = []
        others: list[jax.Array | None] = list(state)
        for i in self.replaced:
            old.append(state[i])
            others[i] = None
        new = self.compute(old, others, params)
        after = list(state)
        for i, leaf in zip(self.replaced, new, strict=True):
            after[i] = leaf
        return after


def mask_program(
    pruner: BaseUpdater, state: SparseState, params: tree_lib.PyTree, donate: bool
) -> MaskProgram:
    """Makes the mask update of a state a program.

    Args:
      pruner: whose update.
      state: the state of a wrapped optimizer, of plain arrays; stacked where trainings are, for each `vmap` once.
      params: the parameters as the wrapped optimizer sees them.
      donate: whether the arrays that the program replaces are donated to it.

    Raises:
      StaysInStepError: the update has to stay in the step.
    """
    _check_arguments(pruner)
    leaves, treedef = jax.tree.flatten(state)

    def fits(leaves: list, params: tree_lib.PyTree) -> Any:
        return masking.unpack_masks(jax.tree.unflatten(treedef, leaves).masks, params)

    def update(leaves: list, params: tree_lib.PyTree, grads: tree_lib.PyTree) -> Any:
        return _update(pruner, jax.tree.unflatten(treedef, leaves), params, grads)

    def forward(leaves: list, params: tree_lib.PyTree) -> Any:
        state = jax.tree.unflatten(treedef, leaves)
        return jax.tree.leaves(pruner.pre_forward_update(params, state))

    for _ in range(state.count.ndim):
        fits, update, forward = jax.vmap(fits), jax.vmap(update), jax.vmap(forward)
    try:
        jax.eval_shape(fits, leaves, params)
    except ValueError as error:  # something between them flattens or splits parameters
        raise StaysInStepError(f'the optimizer sees other parameters: {error}') from None
    # Gradients have the shapes of parameters: here it only matters whether they are read.
    program = jax.make_jaxpr(update)(leaves, params, params)
    replaced = _replaced_leaves(program.jaxpr, len(leaves))
    if pruner.overrides('pre_forward_update'):
        passed = jax.make_jaxpr(forward)(leaves, params).jaxpr
        _refuse_path(passed, [passed.invars[i] for i in replaced], passed.outvars, _FORWARD)
    return MaskProgram(replaced, _compiled(program, replaced, leaves, donate))


def _check_arguments(pruner: BaseUpdater) -> None:
    """Refuses an algorithm that needs a step, or one of whose methods takes extra arguments of the step."""
    if pruner.skip_gradients:
        raise StaysInStepError(_SKIPS)
    for method, known in _ARGUMENTS_OUTSIDE_A_STEP.items():
        if not pruner.overrides(method):
            continue
        function = getattr(pruner, method)
        # The library's own methods only hand such arguments on.
        hands_on = function.__module__.partition('.')[0] == __name__.partition('.')[0]
        for parameter in inspect.signature(function).parameters.values():
            is_open = parameter.kind is parameter.VAR_KEYWORD
            if parameter.name not in known and not (is_open and hands_on):
                raise StaysInStepError(f'{method} takes {parameter}, an argument of the step')


def _refuse_optimizer(*_: Any, **__: Any) -> Any:
    raise StaysInStepError(_OPTIMIZER)


def _update(
    pruner: BaseUpdater, state: SparseState, params: tree_lib.PyTree, grads: tree_lib.PyTree
) -> tuple[list, list]:
    """Lists the leaves of the state as `track` leaves it, and of the state after the mask update."""
    optimizer = optax.GradientTransformationExtraArgs(_refuse_optimizer, _refuse_optimizer)
    step = Step(pruner, optimizer, extra_args={})
    tracked_state, tracked = step.track(grads, state, params)
    new_state = step.with_new_masks(tracked_state, params, grads, tracked)
    # Leaves, since Flax NNX keeps a state's arrays in variables of another type than the parameters'.
    old, new = jax.tree.leaves(tracked_state), jax.tree.leaves(new_state)
    return old, control.cast_like(new, old)


def _replaced_leaves(program: jax.extend.core.Jaxpr, number: int) -> list[int]:
    """Finds which of the state's leaves `_update` replaces; refuses an update that could not stand before its step."""
    old, new = program.invars[:number], program.outvars[number:]
    tracked = program.outvars[:number]
    replaced = [i for i in range(number) if new[i] is not tracked[i]]
    is_tracked = [i for i in range(number) if tracked[i] is not old[i]]
    if set(replaced) & set(is_tracked):
        raise StaysInStepError(_TRACKED)
    changed = [old[i] for i in replaced]
    _refuse_path(program, changed, [tracked[i] for i in is_tracked], _TRACKED)
    results = [new[i] for i in replaced]
    # `_update` takes the state, the parameters, and as many gradients as parameters.
    number_of_params = (len(program.invars) - number) // 2
    gradients = program.invars[number + number_of_params :]
    _refuse_path(program, gradients, results, _GRADIENTS)
    _refuse_path(program, changed, results, _ITSELF)
    return replaced


def _refuse_path(
    program: jax.extend.core.Jaxpr, sources: Iterable[Any], results: Iterable[Any], reason: str
) -> None:
    """Refuses a program in which some result depends on some source."""
    reached = set(sources)
    for equation in program.eqns:
        if any(control.is_variable(x) and x in reached for x in equation.invars):
            reached.update(equation.outvars)
    if any(control.is_variable(x) and x in reached for x in results):
        raise StaysInStepError(reason)


def _compiled(
    program: Any, replaced: list[int], leaves: list, donate: bool
) -> Callable[..., list[jax.Array]]:
    """Compiles the part of `_update` that makes the replaced leaves, each divided over devices as before."""
    compute = jax.extend.core.jaxpr_as_fun(program)

    def update_masks(old: list, others: list, params: tree_lib.PyTree) -> list:
        given = iter(old)
        state = [next(given) if leaf is None else leaf for leaf in others]
        values = jax.tree.leaves(params)

        def new_leaves(state: list, values: list) -> list:
            results = compute(*state, *values, *values)[len(state) :]
            return [results[i] for i in replaced]

        # In a branch it rounds as it does in a step.
        return control.compute_apart(new_leaves, state, values)

    return jax.jit(
        update_masks,
        out_shardings=[_sharding_over_devices(leaves[i]) for i in replaced],
        donate_argnums=0 if donate else (),
        keep_unused=donate,  # what is replaced is not read
    )


def _sharding_over_devices(array: jax.Array) -> NamedSharding | None:
    """Tells how an array is divided; `None` on one device, where a sharding would pin the result to it."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
        return sharding
    return None
