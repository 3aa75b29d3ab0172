"""Masks of optimizer states, for the recording and drawing of runs: what JAX is needed for.

The other modules of this package load it where they are given masks, so that `jaxpruner table` need not load JAX.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import explicit_meshes
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib

# The step [1], the targets [m], and what masks kept, dropped and regrew, uint32[3, m].
Record = tuple[jax.Array, jax.Array, jax.Array]


class MaskedLeaf(NamedTuple):
    """The mask of a leaf as a state stores it."""

    name: str
    mask: jax.Array
    size: Any  # weights if the mask is packed, else None
    target: Any


def masked_leaves(opt_state: Any) -> list[MaskedLeaf]:
    """Lists all masked leaves of an optimizer state; refuses a state without a pruner's, and one that is traced."""
    states = sparse_state_lib.sparse_states(opt_state)
    if not states:
        raise ValueError(sparse_state_lib.NO_STATE)
    leaves: list[MaskedLeaf] = []
    for number, state in enumerate(states, 1):
        taken = {leaf.name for leaf in leaves}
        for leaf in _leaves_of(state):
            if leaf.name in taken:  # one pruner wraps another
                leaf = leaf._replace(name=f'{leaf.name} (pruner {number})')
            leaves.append(leaf)
    if not leaves:
        raise ValueError('no leaf of the optimizer state is masked: there is nothing to record')
    if tree_lib.has_traced(leaves):
        raise TypeError(
            'MaskHistory.record was called inside of a compiled program (jit, scan, vmap): call it between steps '
            'with the optimizer state that a step returned'
        )
    return leaves


def count(
    leaves: list[MaskedLeaf], before: list[jax.Array] | None, step: Any
) -> tuple[list[jax.Array], Record]:
    """Copies the masks, at one bit per weight, and counts them against earlier copies; waits for nothing."""
    masks = []
    targets = []
    axes = []
    for leaf in leaves:
        masks.append(leaf.mask)
        targets.append(leaf.target)
        axes.append(_packing_axis(leaf))
    return _count(masks, before, (step, targets), tuple(axes))


def steps_counted(opt_state: Any) -> Any:
    """Finds the counter of the first pruner in an optimizer state, `None` if it has none."""
    return sparse_state_lib.sparse_states(opt_state)[0].count


def number_of_weights(leaf: MaskedLeaf) -> int:
    """Counts the weights of a leaf, in all models of a stacked state together; waits for a packed leaf's size."""
    if leaf.size is None:
        return leaf.mask.size
    return int(np.sum(jax.device_get(leaf.size)))


def fetch(records: list[Record]) -> list[Record]:
    """Fetches the records as arrays of NumPy; waits for them."""
    return jax.device_get(records)


def chosen_names(leaves: Any, names: Any) -> list[int]:
    """Finds the numbers of the leaves, such as 'dense/kernel', that names or globs mean; refuses a name of none."""
    names = list(map(tree_lib.rule_name, tree_lib.as_names(names)))
    paths = [tuple(leaf.split('/')) for leaf in leaves]
    tree_lib.check_names(names, paths, 'leaves')
    numbers = []
    for number, path in enumerate(paths):
        if tree_lib.matches_any(names, path):
            numbers.append(number)
    return numbers


def masks_by_name(masks: Any, params: Any) -> dict[str, Any]:
    """Unpacks the masks of all masked leaves, of an optimizer state or a tree of masks."""
    states = sparse_state_lib.sparse_states(masks)
    by_name: dict[str, Any] = {}
    for state in states or [sparse_state_lib.SparseState(masks)]:
        own_masks = state.masks
        if params is not None:
            own_masks = sparse_state_lib.unpack_masks(own_masks, params)
        elif state.sizes is not None:
            raise ValueError(
                'the masks are packed, and their shapes are those of the parameters: give params='
            )
        paths, arrays, _ = tree_lib.flatten_with_paths(own_masks)
        for path, array in zip(paths, arrays, strict=True):
            by_name[tree_lib.path_string(path)] = array
    return by_name


def _leaves_of(state: sparse_state_lib.SparseState) -> list[MaskedLeaf]:
    paths, masks, treedef = tree_lib.flatten_with_paths(state.masks)
    targets = tree_lib.leaves_like(treedef, sparse_state_lib.leaf_targets(state))
    sizes = tree_lib.leaves_like(treedef, state.sizes)
    leaves = []
    for path, mask, size, target in zip(paths, masks, sizes, targets, strict=True):
        leaves.append(
            MaskedLeaf(
                name=tree_lib.path_string(path),
                mask=jnp.asarray(mask),
                size=size,
                target=np.nan if target is None else target,
            )
        )
    return leaves


def _packing_axis(leaf: MaskedLeaf) -> int | None:
    """Chooses the axis along which the copy of a mask is packed; `None` if it is held as it is."""
    mask = leaf.mask
    if leaf.size is not None or not mask.ndim or explicit_meshes.has_explicit_axes(mask):
        return None
    return sparse_state_lib.packed_axis(mask.shape, mask.sharding.shard_shape(mask.shape))


@partial(jax.jit, static_argnums=3)
def _count(
    masks: list[jax.Array],
    before: list[jax.Array] | None,
    steps_and_targets: tuple[Any, list[Any]],
    axes: tuple[int | None, ...],
) -> tuple[list[jax.Array], Record]:
    """Copies and counts the masks: nothing of either lies in memory that the next step may donate."""
    copies = []
    for mask, axis in zip(masks, axes, strict=True):
        copies.append(_copied(mask) if axis is None else sparse_state_lib.pack(mask, axis))
    counts = []
    for new, old in zip(copies, before or copies, strict=True):
        kept = sparse_state_lib.kept_weights(new)
        dropped = sparse_state_lib.kept_weights(old & ~new)
        regrown = sparse_state_lib.kept_weights(new & ~old)
        counts.append((kept, dropped, regrown))
    step, targets = steps_and_targets
    mean = partial(jnp.mean, dtype=jnp.float32)
    means = list(map(mean, targets))
    last_step = jnp.array([jnp.max(step)])
    return copies, (last_step, jnp.array(means), jnp.array(counts).T)


def _copied(mask: jax.Array) -> jax.Array:
    """Copies the mask to memory of its own: `jit` hands back an argument as it is, which the next step may donate."""
    return mask | jnp.uint8(0)
