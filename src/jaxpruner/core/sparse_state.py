"""The state that a pruner keeps inside an optax state, and how it is found there."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxpruner import tree as tree_lib


class SparseState(NamedTuple):
    """What a wrapped optimizer carries from step to step; plain arrays, so that it checkpoints, shards and vmaps.

    Attributes:
      masks: tree like the parameters; uint8 masks in their shapes, or packed to one bit a weight; `None` where dense.
      inner_state: the state of the wrapped optimizer.
      target_sparsities: tree like the parameters of float32 scalars, `None` where dense; or one scalar for all leaves.
      count: int32 scalar; steps so far.
      sizes: if masks are packed, tree like the parameters of uint32 scalars: the weights in each masked leaf.
      thresholds: tree like the parameters: those of the last selection, from which straight-through methods begin the
        next one; else `None`.
      algorithm_state: any pytree of arrays; what `init_algorithm_state` and `track` of the algorithm make.

    >>> SparseState(masks={'kernel': None}).count is None
    True
    """

    masks: Any
    inner_state: Any = None
    target_sparsities: Any = None
    count: Any = None
    sizes: Any = None
    thresholds: Any = None
    algorithm_state: Any = None


# The message where an optimizer state holds no state of a pruner.
NO_STATE = (
    'there is no SparseState in the optimizer state; wrap the optimizer with `updater.wrap_optax`'
)


def outermost_states(opt_state: Any) -> list[SparseState]:
    """Finds every `SparseState` that stands in no other one, as it is; costs little where it stands near the top."""
    states = []
    for node in jax.tree.leaves(opt_state, is_leaf=lambda node: _is_state(node) or _is_split(node)):
        if _is_state(node):
            states.append(node)
        elif _is_split(node):
            # Flax leaves out what is None: dense leaves, and fields.
            fields = {
                name: tree_lib.WithoutMissing(tree) if isinstance(tree, Mapping) else tree
                for name, tree in node.items()
            }
            states.append(SparseState(**{'masks': None, **fields}))
    return states


def _is_split(node: Any) -> bool:
    """Whether a mapping holds the fields of a `SparseState`, as `flax.nnx.split` and checkpoints leave them."""
    if not isinstance(node, Mapping):
        return False
    names = set(node)
    has_some = 'count' in names and not names.isdisjoint(('masks', 'inner_state'))
    return has_some and names <= set(SparseState._fields)


def with_state(opt_state: Any, state: SparseState) -> Any:
    """Replaces the one `SparseState` in an optimizer state.

    Raises:
      ValueError: the state was split by Flax NNX, so that it cannot hold the type of the new one.
    """
    if not any(map(_is_state, jax.tree.leaves(opt_state, is_leaf=_is_state))):
        raise ValueError(
            'flax.nnx.split took the SparseState apart, so that a new one has no place in it; merge the optimizer '
            'first and give its `opt_state`'
        )
    return jax.tree.map(
        lambda node: state if _is_state(node) else node, opt_state, is_leaf=_is_state
    )


def _is_state(node: Any) -> bool:
    return isinstance(node, SparseState)


def sparse_states(opt_state: Any) -> list[SparseState]:
    """Finds every `SparseState` in an optimizer state, however deep in `chain`, `MultiSteps` or `multi_transform`.

    Args:
      opt_state: any optimizer state; also a state that `flax.nnx.split` took out of an `nnx.Optimizer`.

    Returns:
      The states in the order of the tree, outer before inner; an empty list if there is none.

    >>> import jax.numpy as jnp, optax, jaxpruner
    >>> tx = optax.chain(optax.clip(1.0), jaxpruner.NoPruning().wrap_optax(optax.sgd(0.1)))
    >>> len(sparse_states(tx.init({'kernel': jnp.ones((2, 2))})))
    1
    """
    states: list[SparseState] = []
    for state in outermost_states(opt_state):
        states.append(without_boxes(state))
        states.extend(sparse_states(state.inner_state))
    return states


def without_boxes(state: SparseState) -> SparseState:
    """Makes a state of plain arrays: Flax NNX keeps each array of an optimizer state in a variable."""
    state = jax.tree.map(lambda leaf: getattr(leaf, 'value', leaf), state)
    counts = jax.tree.leaves(state.count)
    return state._replace(count=counts[0] if counts else None)


def only_sparse_state(opt_state: Any) -> SparseState:
    """Finds the one `SparseState` in an optimizer state; refuses none, more than one, and one without its masks."""
    states = (
        [without_boxes(opt_state)]
        if isinstance(opt_state, SparseState)
        else sparse_states(opt_state)
    )
    if len(states) != 1:
        remedy = (
            'pass the state that the init of `updater.wrap_optax(…)` made (a checkpoint restored without a target has '
            'lost its types: restore it with the target `jax.eval_shape(tx.init, params)`)'
            if not states
            else 'pass the one that is meant: an entry of `jaxpruner.sparse_states(opt_state)`'
        )
        raise ValueError(
            f'expected one SparseState in the optimizer state, found {len(states)}; {remedy}'
        )
    return states[0]


def leaf_targets(state: SparseState) -> Any:
    """Returns the target of each leaf (`None` where dense), also if the state holds one for all leaves together."""
    target = state.target_sparsities
    if not hasattr(target, 'shape'):
        return target
    return tree_lib.map_with_missing(lambda _: target, state.masks)
