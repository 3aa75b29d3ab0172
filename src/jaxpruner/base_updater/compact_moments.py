"""Moments of kept weights alone: `compact_moments=True` of pruners with a fixed number of kept weights.

An optimizer keeps one or two moments a weight, of pruned weights, too. Here it sees each masked leaf as a vector of its
kept weights, and so does its state:

    mask       0 1 1        positions  1 2 5       gradients  grads.reshape(-1)[positions]
               0 0 1                               moments    three numbers
                                                   updates    three numbers, put back at the positions

A matrix stays a matrix, of one row, since optimizers tell biases from kernels by the number of axes.

Positions are whole numbers, 4 bytes a kept weight. They are kept in the state, since reading them off a mask in each
step would take longer than the optimizer. A mask update finds the new positions, and for each of them its place among
the old ones: a weight that was kept takes its moments along, and those of a regrown one begin at zero.

An optimizer that treats each weight by itself trains the same as with moments of all weights.
"""

import math
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import elementwise_optimizers
from jaxpruner.base_updater.pruner import Pruner
from jaxpruner.core import (
    caller_warnings,
    explicit_meshes,
    kept_positions,
    optimizer_state,
    packing,
)
from jaxpruner.core.sparse_state import SparseState
from jaxpruner.mask_calculator import lazy_scores

_REMEDY = 'take StaticRandomSparse, SET, RigL or FixedMask, or compact_moments=False'
# What makes or changes masks: a class that overrides one of them says anew whether the count stays.
_MAKERS = (
    'init_state',
    'get_initial_masks',
    'update_state',
    'update_masks',
    'create_masks',
    'select_masks',
)


class CompactMoments(NamedTuple):
    """The state of an optimizer that has moments of kept weights alone; plain arrays.

    Attributes:
      positions: tree like the parameters of int32 [kept], where the kept weights of a flattened leaf stand, ascending;
        `None` where dense.
      inner_state: the state of the optimizer, for parameters of which masked leaves are [1, …, kept].
    """

    positions: Any
    inner_state: Any


def check_pruner(pruner: Any) -> None:
    """Refuses a pruner whose number of kept weights may change, or whose pruned weights may move.

    Raises:
      ValueError: the number may change, or pruned weights may move.
    """
    name = type(pruner).__name__
    needs = 'compact_moments=True needs as many kept weights at every step'
    if not pruner.keeps_count:
        raise ValueError(f'{needs}, which {name} does not promise; {_REMEDY}')
    for method in _MAKERS:
        is_own = hasattr(pruner, method)
        if is_own and not lazy_scores.hook_describes(pruner, 'keeps_count', method):
            raise ValueError(
                f'{needs}, and {name} has a {method} of its own; write `keeps_count = True` beside it if as many stay '
                'kept, or set compact_moments=False'
            )
    if not pruner.lands_on_zero():
        raise ValueError(
            f'compact_moments=True needs pruned weights to stay at zero, and {name} decides itself what becomes of '
            f'them (post_gradient_update); {_REMEDY}'
        )


def refuse_state(pruner: Pruner) -> NoReturn:
    """Refuses a state that was made with the other setting of `compact_moments`.

    Raises:
      ValueError: always.
    """
    setting = pruner.compact_moments
    raise ValueError(
        f'the pruner has compact_moments={setting}, and the state was made with {not setting}; give the setting with '
        'which it was made, or make a new state with init'
    )


def init(
    pruner: Pruner,
    optimizer: optax.GradientTransformationExtraArgs,
    params: tree_lib.PyTree,
    masks: tree_lib.PyTree,
) -> CompactMoments:
    """Makes the first state of an optimizer.

    Args:
      pruner: whose `compact_moments` is set.
      optimizer: any that treats each weight by itself.
      params: the parameters.
      masks: as the state stores them.

    Raises:
      ValueError: the optimizer looks at more than single weights, or the number of kept weights of a leaf is not known.
    """
    counts = _kept_counts(pruner, params, masks)

    _warn_of_whole_moments(params, counts)

    def compact_shape(param: Any, count: int | None) -> jax.ShapeDtypeStruct:
        shape = param.shape if count is None else _compact(param.shape, count)
        return jax.ShapeDtypeStruct(shape, param.dtype)

    compact_shapes = tree_lib.map_with_missing(compact_shape, params, counts)
    elementwise_optimizers.check_elementwise(
        optimizer, params, compact_shapes, pruner.is_sparse_gradients
    )

    def positions_of(param: Any, mask: Any, count: Any) -> Any:
        return None if mask is None else _positions(param, mask, count)

    positions = tree_lib.map_with_missing(positions_of, params, masks, counts)
    return CompactMoments(positions, optimizer.init(_gathered(params, positions)))


def update(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: tree_lib.PyTree,
    state: CompactMoments,
    params: tree_lib.PyTree,
    extra_args: dict[str, Any],
) -> tuple[tree_lib.PyTree, CompactMoments]:
    """Runs the optimizer; returns its updates, of which pruned entries mean nothing, and its state."""
    compact_grads = _gathered(grads, state.positions)
    compact_params = _gathered(params, state.positions)
    updates, inner_state = optimizer.update(
        compact_grads, state.inner_state, compact_params, **extra_args
    )
    return _scattered(updates, state.positions, grads), state._replace(inner_state=inner_state)


def after_mask_update(
    optimizer: optax.GradientTransformationExtraArgs,
    new_state: SparseState,
    params: tree_lib.PyTree,
    reset: tree_lib.PyTree | None,
) -> CompactMoments:
    """Makes the state for new masks: moments move along with their weights; those of regrown weights are zero.

    Args:
      optimizer: whose state it is.
      new_state: with the new masks, unpacked, and the optimizer's state for the masks before.
      params: the parameters.
      reset: tree like the parameters of flags: further weights whose moments become zero.
    """
    state = new_state.inner_state

    def new_positions(param: Any, mask: Any, old: Any) -> Any:
        return None if mask is None else _positions(param, mask, old.shape[0])

    positions = tree_lib.map_with_missing(new_positions, params, new_state.masks, state.positions)
    # Dense leaves have the first place, since trees with None do not map against arrays.
    places = tree_lib.map_with_missing(_places_before, params, state.positions, positions)
    inner_state = kept_positions.move_moments(optimizer, state.inner_state, places)
    if reset is not None:
        inner_state = optimizer_state.zero_moments(
            optimizer, inner_state, _gathered(reset, positions), _gathered(params, positions)
        )
    return CompactMoments(positions, inner_state)


def _kept_counts(
    pruner: Pruner, params: tree_lib.PyTree, masks: tree_lib.PyTree
) -> tree_lib.PyTree:
    """Counts the kept weights of each masked leaf; `None` where dense."""
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    leaf_masks = tree_lib.leaves_like(treedef, masks)
    counts = pruner.kept_counts(params)
    for i, mask in enumerate(leaf_masks):
        if mask is None:
            counts[i] = None
            continue
        name = tree_lib.path_string(paths[i])
        _check_size(name, math.prod(leaves[i].shape))
        count = counts[i]
        if count is None:
            sparsity_type = pruner.plan(params)[paths[i]].sparsity_type
            raise ValueError(
                f'compact_moments=True needs to know from shapes how many weights are kept, and that of {name} is not '
                f'known ({sparsity_type}); print(pruner.plan(params)) shows it. Take another sparsity type for this '
                'leaf, or compact_moments=False'
            )
        if not tree_lib.is_traced(mask):
            _check_count(name, int(packing.kept_weights(mask)), count)
    return tree_lib.unflatten(treedef, counts, leaves)


def _check_size(name: str, size: int) -> None:
    if size > np.iinfo(np.int32).max:
        raise ValueError(
            f'compact_moments=True holds positions of 32 bits, and {name} has {size} weights; divide the leaf, or set '
            'compact_moments=False'
        )


def _warn_of_whole_moments(params: tree_lib.PyTree, counts: tree_lib.PyTree) -> None:
    """Warns of masked leaves that are divided over devices: positions in the whole leaf cannot be divided alike."""
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    leaf_counts = tree_lib.leaves_like(treedef, counts)
    divided = []
    for path, leaf, count in zip(paths, leaves, leaf_counts, strict=True):
        if count is not None and _is_divided(leaf):
            divided.append(tree_lib.path_string(path))
    if divided:
        more = f' and {len(divided) - 1} more' if len(divided) > 1 else ''
        caller_warnings.warn(
            f'compact_moments=True may keep the moments of {divided[0]}{more} whole on each device, while the weights '
            'are divided over devices; this pays where fewer weights are kept than a device holds, else set '
            'compact_moments=False'
        )


def _is_divided(leaf: Any) -> bool:
    if tree_lib.is_traced(leaf):
        return False
    sharding = getattr(leaf, 'sharding', None)
    return sharding is not None and not sharding.is_fully_replicated


def _check_count(name: str, kept: int, expected: int) -> None:
    if kept != expected:
        raise ValueError(
            f'compact_moments=True needs the number of kept weights that shapes tell, {expected} for {name}, and its '
            f'mask keeps {kept}; let get_initial_masks keep as many, or set compact_moments=False'
        )


def _compact(shape: tuple[int, ...], kept: int) -> tuple[int, ...]:
    """Computes the shape that a leaf has when it holds its kept weights alone."""
    return (1,) * (len(shape) - 1) + (kept,)


def _positions(param: Any, mask: jax.Array, count: int) -> jax.Array:
    """Finds where the mask of a leaf keeps weights, ascending."""

    def find(kept: jax.Array) -> jax.Array:
        return kept_positions.positions_of(kept.reshape(-1), count)

    kept = packing.unpack_like(mask, param.shape) != 0
    return explicit_meshes.without_explicit_axes(find, kept, False)(kept)


def _gathered(tree: tree_lib.PyTree, positions: tree_lib.PyTree) -> tree_lib.PyTree:
    """Gathers the kept weights of masked leaves; dense leaves stay as they are."""

    def gathered(leaf: Any, where: Any) -> Any:
        if where is None:
            return leaf

        def take(values: jax.Array, where: jax.Array) -> jax.Array:
            kept = (
                values.reshape(-1)
                .at[where]
                .get(mode='clip', unique_indices=True, indices_are_sorted=True)
            )
            return kept.reshape(_compact(values.shape, where.size))

        return explicit_meshes.without_explicit_axes(take, leaf, False)(leaf, where)

    return tree_lib.map_with_missing(gathered, tree, positions)


def _scattered(
    updates: tree_lib.PyTree, positions: tree_lib.PyTree, grads: tree_lib.PyTree
) -> tree_lib.PyTree:
    """Scatters updates of kept weights into the shapes of the parameters.

    They replace gradients, in their memory. Pruned entries still hold gradients; the driver overwrites them when it
    lands pruned weights on zero.
    """

    def scattered(grad: Any, update: Any, where: Any) -> Any:
        if where is None or update is None:
            return update

        def put(grad: jax.Array, update: jax.Array, where: jax.Array) -> jax.Array:
            whole = grad.astype(update.dtype).reshape(-1)
            whole = whole.at[where].set(
                update.reshape(-1), mode='drop', unique_indices=True, indices_are_sorted=True
            )
            return whole.reshape(grad.shape)

        return explicit_meshes.without_explicit_axes(put, grad, True)(grad, update, where)

    return tree_lib.map_with_missing(scattered, grads, updates, positions)


def _places_before(param: Any, old: Any, new: Any) -> jax.Array:
    """Finds for each kept weight its place among those kept before; a dense leaf gets one place, the first."""
    if old is None:
        return jnp.zeros((1,) * len(param.shape), jnp.int32)
    places = kept_positions.places_before(old, new)
    return places.reshape(_compact(param.shape, new.size))
