"""Changes and reads the moments in the state of any optax optimizer.

Two functions zero the moments of chosen weights, and both zero an array by the same rule. They find the parameter of an
array in two ways. `zero_moments` knows the optimizer and asks optax; the training step calls it. `restart_inner_state`
has JaxPruner's interface, which has no optimizer, and matches paths; `update_state` of an algorithm calls it. `init` of
a wrapped optimizer tries those that the algorithm uses.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import tree_utils

from jaxpruner import tree as tree_lib


def _is_masked_node(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def zero_moments(
    inner: optax.GradientTransformation, state: Any, where: tree_lib.PyTree, params: tree_lib.PyTree
) -> Any:
    """Sets the moments of chosen weights to zero: whatever the optimizer `inner` keeps in a parameter's shape.

    `where` is a tree like the parameters of flags, True where moments become zero, `None` for none of a leaf. What has
    another shape (adafactor's row and column averages, step counts) stays.

    Raises:
      ValueError: optax cannot tell which parts of this optimizer's state belong to which parameter.

    >>> tx, params = optax.sgd(0.1, momentum=0.9), {'w': jnp.ones(2)}
    >>> state = tx.update(params, tx.init(params))[1]
    >>> zero_moments(tx, state, {'w': jnp.array([True, False])}, params)[0].trace
    {'w': Array([0., 1.], dtype=float32)}
    """
    # Dense leaves get a flag that is not set, since trees with None do not map against arrays.
    flags = tree_lib.map_with_missing(
        lambda p, flag: jnp.zeros((1,) * p.ndim, bool) if flag is None else flag, params, where
    )

    try:
        return tree_utils.tree_map_params(inner, _zeroed, state, flags, is_leaf=_is_masked_node)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise ValueError(_CANNOT_RESET) from error


def restart_inner_state(state: Any, masks_activated: tree_lib.PyTree) -> Any:
    """Sets the moments of chosen weights to zero, as `zero_moments`, where the optimizer itself is not at hand.

    An array of the state belongs to a parameter if its path ends with the parameter's path, and it has its shape.

    Args:
      state: the state of an optimizer.
      masks_activated: tree like the parameters of arrays, not 0 where moments are zeroed, `None` for none of a leaf.

    Returns:
      The state with zeros.

    Raises:
      ValueError: the state keeps a history of a parameter, as that of lbfgs does.

    >>> tx, params = optax.sgd(0.1, momentum=0.9), {'w': jnp.ones(2)}
    >>> state = tx.update(params, tx.init(params))[1]
    >>> restart_inner_state(state, {'w': jnp.array([1, 0])})[0].trace
    {'w': Array([0., 1.], dtype=float32)}
    """

    def is_missing(node: Any) -> bool:
        return node is None

    flags, _ = jax.tree_util.tree_flatten_with_path(masks_activated, is_leaf=is_missing)
    flag_by_path = dict(flags)

    def flag_of(path: tuple[Any, ...]) -> Any:
        """Finds the flag of the parameter with the longest path that ends this path."""
        for start in range(len(path) + 1):
            if path[start:] in flag_by_path:
                return flag_by_path[path[start:]]
        return None

    def restarted(path: tuple[Any, ...], moment: Any) -> Any:
        return _zeroed(moment, flag_of(path))

    return jax.tree_util.tree_map_with_path(restarted, state)


def _zeroed(moment: Any, flag: Any) -> Any:
    """Zeroes a part of the state where the flag is set, if it has the shape of the flag's parameter."""
    # Dense leaves have no flag, or one of no dimensions; parts of the state may be no arrays.
    shape = getattr(moment, 'shape', None)
    if shape is None or not getattr(flag, 'ndim', 0):
        return moment
    if shape[1:] == flag.shape:  # a history of the parameter, as lbfgs keeps it
        raise ValueError(_CANNOT_RESET)
    if shape != flag.shape:
        return moment
    return jnp.where(jnp.asarray(flag, bool), jnp.zeros_like(moment), moment)


_CANNOT_RESET = (
    'the moments of regrown weights cannot be zeroed in this optimizer: optax.tree_utils.tree_map_params cannot '
    'tell which parts of its state belong to which parameter (lbfgs keeps a history of all parameters); use a '
    'first-order optimizer such as sgd or adam, or an algorithm that regrows no weights'
)


def check_resettable(inner: optax.GradientTransformation, params: tree_lib.PyTree) -> None:
    """Refuses an optimizer whose moments `zero_moments` could not zero; computes nothing."""

    def attempt(values: tree_lib.PyTree) -> Any:
        return zero_moments(inner, inner.init(values), _everywhere(values), values)

    jax.eval_shape(attempt, params)


def check_restartable(inner: optax.GradientTransformation, params: tree_lib.PyTree) -> None:
    """Refuses an optimizer whose moments `restart_inner_state` could not zero; computes nothing."""

    def attempt(values: tree_lib.PyTree) -> Any:
        return restart_inner_state(inner.init(values), _everywhere(values))

    jax.eval_shape(attempt, params)


def _everywhere(params: tree_lib.PyTree) -> tree_lib.PyTree:
    return jax.tree.map(lambda param: jnp.ones(param.shape, bool), params)


def second_moments(inner_state: Any, params: tree_lib.PyTree) -> list[Any]:
    """Finds Adam's second moments (`nu`) of each leaf, wherever in the state they are; `None` if none has its shape.

    >>> params = {'w': jnp.ones(2)}
    >>> second_moments(optax.adam(0.1).init(params), params)
    [Array([0., 0.], dtype=float32)]
    """
    leaves, treedef = jax.tree.flatten(params)
    second_moments: list[Any] = [None] * len(leaves)
    for _, candidate in tree_utils.tree_get_all_with_path(inner_state, 'nu'):
        try:
            moments = tree_lib.leaves_like(treedef, candidate)
        except ValueError:
            continue  # a `nu` of another structure belongs to no parameter
        for i, (leaf, moment) in enumerate(zip(leaves, moments, strict=True)):
            if second_moments[i] is None and getattr(moment, 'shape', None) == leaf.shape:
                second_moments[i] = moment
    return second_moments
