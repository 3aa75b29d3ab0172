"""The functions of an epoch loop: `pruning` makes masks when they are due, `pruning_apply` applies them."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import caller_warnings
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.jax_pruning.plan import EntryPlan, resolve_entries
from jaxpruner.jax_pruning.strategy import PruningStrategy
from jaxpruner.mask_calculator import MASK_DTYPE


def pruning(
    state: Any,
    epoch: int | None = None,
    mask_key: tree_lib.PyTree | None = None,
    prune_strategy: Any = None,
    *,
    prune_axis: int | None = None,
    stacked: tree_lib.Stacked = (),
    use_packed_masks: bool = False,
) -> tuple[bool, tree_lib.PyTree | None]:
    """Makes new masks if the strategy has an entry for this epoch.

    Weights are ranked by magnitude. Those that `mask_key` prunes count as zero. Leaves that the entry does not mean
    keep their masks. Call it outside `jit`, or inside with a static `epoch`.

    Args:
      state: a flax `TrainState` (anything with `params` that can be replaced), an `nnx` state, or parameters.
      epoch: the epoch that has ended, a whole number; with `None` nothing is due, and the strategy is only checked.
      mask_key: the masks so far, `None` before the first.
      prune_strategy: a `PruningStrategy` or what `PruningStrategy.parse` reads; with `None` nothing is due.
      prune_axis: the axis along which N:M groups lie for entries that give none; the last by default.
      stacked: names or globs of leaves whose first axis counts layers (of a scan), or a mapping from them to that axis;
        each layer is ranked on its own.
      use_packed_masks: make masks at one bit per weight.

    Returns:
      Whether masks are new, and the masks: a tree like the parameters of uint8 arrays, `None` where dense. When nothing
      is due, `mask_key` as it was given.

    Raises:
      ValueError, TypeError: the strategy does not fit the parameters; any of its entries, not only one that is due.

    >>> import jax.numpy as jnp
    >>> params = {'Dense_0': {'bias': jnp.zeros(2), 'kernel': jnp.array([[1.0, -4.0], [3.0, -2.0]])}}
    >>> pruning(params, 1, None, {1: {'method': 'unstr_global', 'prune_rate_pattern': 0.5}})[1]['Dense_0']['kernel']
    Array([[0, 1],
           [1, 0]], dtype=uint8)
    """
    epoch = None if epoch is None else _read_epoch(epoch)
    if prune_strategy is None:
        return False, mask_key
    params = _parameters_of(state)
    strategy = PruningStrategy.parse(prune_strategy)
    entries = resolve_entries(strategy, params, prune_axis, stacked)
    if epoch not in entries:
        return False, mask_key
    entry = entries[epoch]
    for message in entry.warnings:
        caller_warnings.warn(message)
    masks = _new_masks(params, mask_key, entry.sparsities, plan=entry.plan)
    return True, sparse_state_lib.store_masks(masks, params, use_packed_masks, like=mask_key)


def pruning_apply(
    state: Any, mask_key: tree_lib.PyTree | None
) -> tuple[Any, tree_lib.PyTree | None]:
    """Sets the pruned weights to zero.

    Args:
      state: what `pruning` takes.
      mask_key: the masks, packed or not; `None` before the first.

    Returns:
      The masked state (the state itself if there are no masks), and `mask_key`.

    Raises:
      ValueError: a mask does not fit its parameter.

    >>> import jax.numpy as jnp
    >>> pruning_apply({'kernel': jnp.array([3.0, 4.0])}, {'kernel': jnp.array([1, 0], jnp.uint8)})[0]
    {'kernel': Array([3., 0.], dtype=float32)}
    """
    if mask_key is None:
        return state, None
    masked = sparse_state_lib.apply_mask(_parameters_of(state), mask_key)
    if _holds_parameters(state):
        masked = _replace_parameters(state, masked)
    return masked, mask_key


def initial_masks(
    state: Any,
    prune_strategy: Any,
    *,
    stacked: tree_lib.Stacked = (),
    use_packed_masks: bool = False,
) -> tree_lib.PyTree:
    """Masks that prune nothing: a first `mask_key` whose structure never changes.

    With `mask_key=None` at first, a leaf gets its mask from the first entry that means it, so that the structure of the
    masks changes from epoch to epoch, and with it the target that a checkpoint is restored into. `StrategyPruning`
    begins with these masks, too.

    Args:
      state: what `pruning` takes.
      prune_strategy: a `PruningStrategy` or what `PruningStrategy.parse` reads.
      stacked: as for `pruning`.
      use_packed_masks: make masks at one bit per weight.

    Returns:
      A tree like the parameters: masks of ones for leaves that some entry means, `None` for all others.

    Raises:
      ValueError, TypeError: the strategy does not fit the parameters.

    >>> import jax.numpy as jnp
    >>> params = {'bias': jnp.ones(2), 'kernel': jnp.ones((1, 2))}
    >>> initial_masks(params, {3: {'method': 'unstr_global', 'prune_rate_pattern': 0.5}})
    {'bias': None, 'kernel': Array([[1, 1]], dtype=uint8)}
    """
    params = _parameters_of(state)
    strategy = PruningStrategy.parse(prune_strategy)
    meant: set[tree_lib.Path] = set()
    for entry in resolve_entries(strategy, params, None, stacked).values():
        meant |= entry.sparsities.keys()
    masks = []
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    for path, leaf in zip(paths, leaves, strict=True):
        masks.append(jnp.ones(leaf.shape, MASK_DTYPE) if path in meant else None)
    return sparse_state_lib.store_masks(
        tree_lib.unflatten(treedef, masks, leaves), params, use_packed_masks
    )


@functools.partial(jax.jit, static_argnames='plan')
def _new_masks(
    params: tree_lib.PyTree, old_masks: tree_lib.PyTree, sparsities: Any, *, plan: EntryPlan
) -> tree_lib.PyTree:
    return plan.new_masks(params, old_masks, sparsities)


def _read_epoch(epoch: Any) -> int:
    if tree_lib.is_traced(epoch):
        raise TypeError(
            'the epoch decides which masks are made, so it must be known when the function is traced; got a traced '
            "value: jax.jit(…, static_argnames='epoch')"
        )
    if isinstance(epoch, bool) or not hasattr(epoch, '__index__'):
        raise TypeError(f'epoch must be a whole number, got {epoch!r}')
    return operator.index(epoch)


def _parameters_of(state: Any) -> tree_lib.PyTree:
    return state.params if _holds_parameters(state) else state


def _holds_parameters(state: Any) -> bool:
    """Whether the parameters are a field of the state; a model may have a field or an entry of that name, too."""
    if not hasattr(state, 'params') or isinstance(state, Mapping):
        return False
    if _replace_method(state) is not None or jax.tree_util.all_leaves([state]):
        return True
    # Its parameters alone are meant, not the moments of an optimizer beside them.
    if hasattr(state, 'opt_state'):
        raise _irreplaceable(state)
    return False


def _replace_parameters(state: Any, params: tree_lib.PyTree) -> Any:
    replace = _replace_method(state)
    if replace is not None:
        return replace(params=params)
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        return dataclasses.replace(state, params=params)
    raise _irreplaceable(state)


def _replace_method(state: Any) -> Callable[..., Any] | None:
    """The method of flax's dataclasses, or of a NamedTuple, that replaces a field."""
    for name in ('replace', '_replace'):
        method = getattr(state, name, None)
        if callable(method):
            return method
    return None


def _irreplaceable(state: Any) -> TypeError:
    name = type(state).__name__
    return TypeError(f'{name} has params but no method `replace`; pass state.params instead')
