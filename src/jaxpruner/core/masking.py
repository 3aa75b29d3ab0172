"""Trees of masks beside trees of parameters: applied, packed, unpacked."""

import logging
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.core import caller_warnings, control, packing

logger = logging.getLogger(__name__)

# How many leaves a warning names.
_NAMED = 8


def apply_mask(
    param: tree_lib.PyTree, mask: tree_lib.PyTree, is_packed: bool = False
) -> tree_lib.PyTree:
    """Sets the pruned weights to zero, whatever they are (inf and NaN, too).

    Args:
      param: an array, or any pytree of arrays.
      mask: its mask, packed or not, or a tree of masks; `None` is dense.
      is_packed: accepted for code written for JaxPruner; the shapes tell.

    Returns:
      What was given, masked.

    Raises:
      ValueError: a mask does not fit its parameter.

    >>> apply_mask({'w': jnp.array([3.0, 4.0])}, {'w': jnp.array([1, 0], jnp.uint8)})
    {'w': Array([3., 0.], dtype=float32)}
    """
    del is_packed

    def masked(leaf: jax.Array | None, leaf_mask: jax.Array | None) -> jax.Array | None:
        if leaf is None or leaf_mask is None:
            return leaf
        return _masked(leaf, leaf_mask)

    return tree_lib.map_with_missing(masked, param, unpack_masks(mask, param))


@control.jit_when_eager
def _masked(leaf: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask != 0, leaf, jnp.zeros_like(leaf))


@jax.custom_jvp
def straight_through(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Masks forward, not backward: the derivative with respect to the values is the identity.

    Args:
      values: any array of floats.
      mask: 0/1 array of its shape.

    Returns:
      The values where the mask is not 0, else 0.

    >>> jax.grad(lambda x: jnp.sum(straight_through(x, jnp.array([1, 0]))))(jnp.array([3.0, 4.0]))
    Array([1., 1.], dtype=float32)
    """
    return jnp.where(mask != 0, values, jnp.zeros_like(values))


@straight_through.defjvp
def _straight_through_jvp(primals, tangents):
    return straight_through(*primals), tangents[0]


def unpack_masks(masks: tree_lib.PyTree, params: tree_lib.PyTree) -> tree_lib.PyTree:
    """Unpacks the masks of all parameters to 0 and 1, however they are stored.

    The masks of an optimizer state are `sparse_states(opt_state)[0].masks`. `jnp.unpackbits` of a flattened packed mask
    gives the right count and wrong positions: masks are packed along one axis.

    Args:
      masks: a tree of masks, packed or not, `None` where dense.
      params: the parameters, or their shapes.

    Returns:
      A tree of uint8 masks in the parameters' shapes, `None` where dense.

    Raises:
      ValueError: a mask does not fit its parameter.

    >>> unpack_masks({'w': jnp.array([128], jnp.uint8)}, {'w': jnp.ones(2)})
    {'w': Array([1, 0], dtype=uint8)}
    """
    paths, leaves, treedef = tree_lib.flatten_with_paths(tree_lib.as_arrays(params))
    unpacked = []
    for path, param, mask in zip(paths, leaves, tree_lib.leaves_like(treedef, masks), strict=True):
        try:
            unpacked.append(None if mask is None else packing.unpack_like(mask, param.shape))
        except ValueError as error:
            raise ValueError(f'{tree_lib.path_string(path)}: {error}') from error
    return tree_lib.unflatten(treedef, unpacked, leaves)


def mask_sizes(masks: tree_lib.PyTree, params: tree_lib.PyTree) -> tree_lib.PyTree:
    """Counts the weights of each masked leaf, if masks are packed, whose bits alone do not tell.

    Args:
      masks: a tree of masks as a state holds them, `None` where dense.
      params: the parameters, or their shapes.

    Returns:
      A tree of uint32 scalars, `None` where dense; `None` where no mask is packed, since each array of a state costs a
      step some microseconds.

    >>> mask_sizes({'w': jnp.array([128], jnp.uint8), 'b': None}, {'w': jnp.ones(2), 'b': jnp.ones(2)})
    {'b': None, 'w': Array(2, dtype=uint32)}
    >>> mask_sizes({'w': jnp.ones(2, jnp.uint8)}, {'w': jnp.ones(2)}) is None
    True
    """
    unpacked = tree_lib.map_with_missing(
        lambda p, m: m is None or m.shape == p.shape, params, masks
    )
    if all(jax.tree.leaves(unpacked)):
        return None
    return tree_lib.map_with_missing(
        lambda p, m: None if m is None else jnp.uint32(p.size), params, masks
    )


def store_masks(
    masks: tree_lib.PyTree, params: tree_lib.PyTree, packed: bool, like: tree_lib.PyTree = None
) -> tree_lib.PyTree:
    """Makes masks as a state holds them.

    Packed masks are sharded as their parameters are if some axis is not sharded, or its length on each device is a
    multiple of 8; a warning names the others. Where shardings are not known (inside `jit`), shapes alone decide.

    Args:
      masks: a tree of masks, packed or not, `None` where dense.
      params: the parameters, or their shapes.
      packed: at one bit per weight.
      like: a tree of stored masks that these replace; what is packed there is packed along the same axis.

    Returns:
      A tree of uint8 arrays, `None` where dense.

    Raises:
      ValueError: a mask does not fit its parameter.

    >>> store_masks({'w': jnp.array([1, 0], jnp.uint8)}, {'w': jnp.ones(2)}, packed=True)
    {'w': Array([128], dtype=uint8)}
    """
    unpacked = unpack_masks(masks, params)
    if not packed and like is None:
        return unpacked
    _, leaves, treedef = tree_lib.flatten_with_paths(params)
    new, old = tree_lib.leaves_like(treedef, unpacked), tree_lib.leaves_like(treedef, like)
    if packed:
        for i, mask in enumerate(new):
            new[i] = None if mask is None else packing.pack(mask, _axis(leaves[i], old[i]))
    if like is not None and [mask is None for mask in new] == [mask is None for mask in old]:
        return jax.tree.structure(like).unflatten(mask for mask in new if mask is not None)
    # Names of axes that a packed mask cannot be divided along are dropped with the parameter's wrapper.
    named = [leaf if _keeps_names(leaf, new[i]) else None for i, leaf in enumerate(leaves)]
    stored = tree_lib.unflatten(treedef, new, named)
    if packed and like is None:
        _warn_of_shared_bytes(stored, masks, params)
    return stored


def _keeps_names(param: Any, stored: Any) -> bool:
    """Whether a mask can be divided over devices as its parameter is: each of them holds whole bytes."""
    if stored is None or stored.shape == param.shape:
        return True
    if _sharding(param) is not None:
        return not _splits_a_byte(param, stored)
    # Inside of jit: whatever axes of a mesh the parameter lies on, they have a part of all devices.
    axis = packing.axis_of_bits(stored.shape, param.shape)
    return axis is not None and stored.shape[axis] % jax.device_count() == 0


def _axis(param: Any, stored: Any) -> int | None:
    """Finds the axis along which to pack a parameter's mask: that of its stored mask, if that one is packed."""
    # Where nothing is longer than 1, the shapes are equal, and there is one way to pack.
    if stored is not None and stored.shape != param.shape:
        axis = packing.axis_of_bits(stored.shape, param.shape)
        if axis is not None:
            return axis
    return packing.packed_axis(param.shape, _local_shape(param)) if param.shape else None


def _sharding(param: Any) -> Any:
    """Finds how a parameter lies on devices, `None` where that is unknown."""
    if tree_lib.is_traced(param):
        # Known where shardings are part of types.
        param = jax.typeof(param) if hasattr(jax, 'typeof') else None
    return getattr(param, 'sharding', None)


def _local_shape(param: Any) -> tuple[int, ...]:
    """Finds the shape of what one device holds of a parameter; the whole where that is unknown."""
    sharding = _sharding(param)
    return param.shape if sharding is None else sharding.shard_shape(param.shape)


def _warn_of_shared_bytes(
    stored: tree_lib.PyTree, given: tree_lib.PyTree, params: tree_lib.PyTree
) -> None:
    """Names the masks in which single bytes hold weights of several devices, unless they were given so."""
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    masks, before = tree_lib.leaves_like(treedef, stored), tree_lib.leaves_like(treedef, given)
    named = []
    for path, param, mask, mask_before in zip(paths, leaves, masks, before, strict=True):
        if mask is None or mask.shape == mask_before.shape:
            continue
        if _splits_a_byte(param, mask):
            sharding = _sharding(param)
            text = getattr(sharding, 'spec', sharding)
            named.append(f'{tree_lib.path_string(path)} of shape {param.shape}, sharded as {text}')
    if named:
        more = f'; and {len(named) - _NAMED} more' if len(named) > _NAMED else ''
        logger.warning(
            'these parameters are sharded along every axis, and no axis has a multiple of %d weights on each device. '
            'So a byte of a packed mask may hold weights of two devices, which exchange it at each mask update. Set '
            'use_packed_masks=False to avoid this: %s%s',
            packing.BITS,
            '; '.join(named[:_NAMED]),
            more,
        )


def _splits_a_byte(param: Any, packed_mask: Any) -> bool:
    """Whether a byte of a packed mask holds weights of several devices."""
    lengths = zip(param.shape, packed_mask.shape, _local_shape(param), strict=True)
    for length, packed_length, local_length in lengths:
        is_packed = packed_length != length
        is_divided = local_length != length
        if is_packed and is_divided and local_length % packing.BITS:
            return True
    return False


def warn_of_emptied(
    masks: tree_lib.PyTree, params: tree_lib.PyTree, grads: tree_lib.PyTree | None
) -> None:
    """Names the leaves that lose every weight because they, or their gradients, are NaN throughout.

    NaN ranks lowest and is never kept, so that such a leaf becomes zero. Nothing is looked at where values are traced.

    Args:
      masks: unpacked masks that were made from the parameters, `None` where dense.
      params: the parameters.
      grads: their gradients, or `None`.

    >>> warn_of_emptied({'w': jnp.array([1, 0], jnp.uint8)}, {'w': jnp.array([2.0, jnp.nan])}, None)
    """
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    rows = zip(paths, leaves, tree_lib.leaves_like(treedef, masks), strict=True)
    masked = [(path, leaf, mask) for path, leaf, mask in rows if mask is not None and mask.size]
    if tree_lib.has_traced([mask for _, _, mask in masked]):
        return
    # All are computed before the first is waited for.
    are_kept = [keeps_any(mask) for _, _, mask in masked]
    emptied = {
        path: leaf for (path, leaf, _), kept in zip(masked, are_kept, strict=True) if not kept
    }
    if not emptied:
        return
    arrays = {f'{tree_lib.path_string(path)} holds': leaf for path, leaf in emptied.items()}
    if grads is not None:
        gradients = dict(zip(paths, tree_lib.leaves_like(treedef, grads), strict=True))
        arrays |= {
            f'the gradients of {tree_lib.path_string(path)} hold': gradients[path]
            for path in emptied
        }
    nan_alone = [
        words
        for words, array in arrays.items()
        if array is not None and bool(jnp.all(jnp.isnan(array)))
    ]
    if nan_alone:
        more = f' (so do {len(nan_alone) - 1} more leaves)' if len(nan_alone) > 1 else ''
        caller_warnings.warn(
            f'{nan_alone[0]} NaN alone{more}: nothing of it is kept, so that it becomes zero; look where NaN come from'
        )


@jax.jit
def keeps_any(mask: jax.Array) -> jax.Array:
    """Whether a mask keeps anything, in one program."""
    return jnp.any(mask != 0)


@jax.jit
def keeps_all(mask: jax.Array) -> jax.Array:
    """Whether a mask keeps everything, in one program."""
    return jnp.all(mask != 0)
