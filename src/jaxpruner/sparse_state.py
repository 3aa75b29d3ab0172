"""The state that a pruner keeps inside any optax state, its masks at one bit a weight, and what masks do to trees.

A mask is a uint8 array of zeros and ones (1 = kept) in its parameter's shape. Packed, it is a plain uint8 array of the
parameter's rank, `jnp.packbits(mask, axis=a)`: the axis `a` depends on the parameter's shape alone, and is read off the
two shapes.
"""

import collections
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.tree import PyTree

BITS = 8
MASK_DTYPE = jnp.uint8


class SparseState(NamedTuple):
    """What a wrapped optimizer carries from step to step; plain arrays, so that it checkpoints, shards and vmaps.

    Attributes:
      masks: tree like the parameters; uint8 masks in their shapes, or packed to one bit a weight; `None` where dense.
      inner_state: the state of the wrapped optimizer.
      target_sparsities: tree like the parameters of float32 scalars, `None` where dense; or one scalar for all leaves.
      count: int32 scalar; steps so far.
      sizes: if masks are packed, tree like the parameters of uint32 scalars: the weights in each masked leaf.
      algorithm_state: any pytree of arrays; what `init_algorithm_state` and `track` of the algorithm make.

    >>> SparseState(masks={'kernel': None}).count is None
    True
    """

    masks: Any
    inner_state: Any = None
    target_sparsities: Any = None
    count: Any = None
    sizes: Any = None
    algorithm_state: Any = None


NO_STATE = 'there is no SparseState in the optimizer state; wrap the optimizer with wrap_optax'


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
        states += [without_boxes(state), *sparse_states(state.inner_state)]
    return states


def outermost_states(opt_state: Any) -> list[SparseState]:
    """Finds every `SparseState` that stands in no other one, as it is."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: _as_state(node) is not None)
    return [state for state in map(_as_state, nodes) if state is not None]


def _as_state(node):
    """Returns a `SparseState`, also of a mapping of its fields, as `flax.nnx.split` and checkpoints leave it."""
    if isinstance(node, SparseState):
        return node
    names = set(node) if isinstance(node, Mapping) else set()
    has_fields = 'count' in names and bool(names & {'masks', 'inner_state'})
    if not has_fields or names - {*SparseState._fields}:
        return None
    # Flax leaves out what is None: dense leaves, and fields.
    fields = {'masks': None, **node}
    for name, field in fields.items():
        if isinstance(field, Mapping):
            fields[name] = collections.defaultdict(type(None), field)
    return SparseState(**fields)


def without_boxes(state: SparseState) -> SparseState:
    """Makes a state of plain arrays: Flax NNX keeps each array of an optimizer state in a variable."""
    state = jax.tree.map(lambda leaf: getattr(leaf, 'value', leaf), state)
    return state._replace(count=next(iter(jax.tree.leaves(state.count)), None))


def only_sparse_state(opt_state: Any, other: Any = None) -> SparseState:
    """Finds the one `SparseState` in an optimizer state, given under one of two names; refuses none, and several."""
    if (opt_state is None) == (other is None):
        raise TypeError('give the optimizer state once, as opt_state or as sparse_state')
    opt_state = other if opt_state is None else opt_state
    if isinstance(opt_state, SparseState):
        return without_boxes(opt_state)
    states = sparse_states(opt_state)
    if len(states) != 1:
        raise ValueError(
            f'expected one SparseState in the optimizer state, found {len(states)}; pass the state that the init of '
            '`updater.wrap_optax(…)` made, or the entry of `jaxpruner.sparse_states(opt_state)` that is meant. A '
            'checkpoint is restored with the target `jax.eval_shape(tx.init, params)`, or it loses its types'
        )
    return states[0]


def replace_state(opt_state: Any, state: SparseState) -> Any:
    """Puts a state of the same structure in the place of the `SparseState` in an optimizer state."""

    def is_state(node):
        return isinstance(node, SparseState)

    def replaced(node):
        if not is_state(node):
            return node
        old, treedef = jax.tree.flatten(node)  # Flax NNX may keep arrays in boxes that are leaves
        pairs = zip(old, jax.tree.leaves(state), strict=True)
        return treedef.unflatten([b.replace(x) if hasattr(b, 'value') else x for b, x in pairs])

    if not any(map(is_state, jax.tree.leaves(opt_state, is_leaf=is_state))):
        raise ValueError('flax.nnx.split took the SparseState apart; merge the optimizer first')
    return jax.tree.map(replaced, opt_state, is_leaf=is_state)


def leaf_targets(state: SparseState) -> Any:
    """Returns the target of each leaf (`None` where dense), also if the state holds one for all leaves together."""
    target = state.target_sparsities
    if not hasattr(target, 'shape'):
        return target
    return tree_lib.map_with_missing(lambda _: target, state.masks)


# Masks as bits.


def packed_axis(shape: Sequence[int]) -> int:
    """Chooses the axis along which a mask of this shape is packed, as a negative number.

    Of the axes whose length is a multiple of 8 it is the one that is divisible by the largest power of two, so that
    devices that share the axis have whole bytes of it; else it is the longest axis. Of several such axes it is the
    last.

    Args:
      shape: the parameter's shape, of at least one dimension.

    >>> packed_axis((3, 3, 16, 10)), packed_axis((300, 10)), packed_axis((64, 48))
    (-2, -2, -2)
    """
    # The lowest bit that is set is the largest power of two that divides a length.
    ranks = [
        (1, length & -length, axis) if length % BITS == 0 else (0, length, axis)
        for axis, length in enumerate(shape)
    ]
    return max(ranks)[-1] - len(shape)


def packed_shape(shape: Sequence[int], axis: int | None = None) -> tuple[int, ...]:
    """Computes the shape of the packed mask of a parameter of this shape.

    Args:
      shape: the parameter's shape.
      axis: the axis along which it is packed; by default `packed_axis(shape)`.

    >>> packed_shape((784, 300)), packed_shape((784, 300), -1), packed_shape(())
    ((98, 300), (784, 38), ())
    """
    if not shape:
        return ()
    lengths = list(shape)
    axis = packed_axis(shape) if axis is None else axis
    lengths[axis] = -(-lengths[axis] // BITS)
    return tuple(lengths)


def axis_of_bits(bits_shape: Sequence[int], shape: Sequence[int]) -> int | None:
    """Finds the axis along which a mask is packed, as a negative number: the one that is shorter than the parameter's.

    Args:
      bits_shape: the packed mask's shape.
      shape: the parameter's shape.

    Returns:
      The axis (any of length 1, where all are), or `None` if bits of that shape are not of such a parameter.

    >>> axis_of_bits((98, 300), (784, 300)), axis_of_bits((784, 38), (784, 300)), axis_of_bits((1, 1), (784, 300))
    (-2, -1, None)
    """
    axes = range(-len(shape), 0)
    return next((a for a in axes if packed_shape(shape, a) == tuple(bits_shape)), None)


@functools.partial(jax.jit, inline=True)
def pack(mask: jax.Array) -> jax.Array:
    """Packs a mask into bits along `packed_axis(mask.shape)`.

    Args:
      mask: uint8 0/1 array of any shape; a scalar is returned as it is.

    Returns:
      uint8 array of shape `packed_shape(mask.shape)`.

    >>> pack(jnp.array([[1, 0, 1], [0, 0, 1]], jnp.uint8))
    Array([[160],
           [ 32]], dtype=uint8)
    """
    if not mask.ndim:
        return mask
    # `jnp.packbits` moves the axis to the end and back: then a step copies masks, into another layout and back.
    axis = packed_axis(mask.shape) + mask.ndim
    padding = [(0, -length % BITS * (i == axis)) for i, length in enumerate(mask.shape)]
    padded = jnp.pad(mask, padding)
    bits = padded.reshape(*mask.shape[:axis], -1, BITS, *mask.shape[axis + 1 :])
    return jnp.sum(bits << _shifts(mask.shape, axis)[::-1], axis=axis + 1, dtype=MASK_DTYPE)


def _shifts(shape, axis):
    """How far the bits of a byte are shifted to its highest one, beside the axes behind the packed one."""
    return jnp.arange(BITS, dtype=MASK_DTYPE).reshape(BITS, *(1,) * (len(shape) - axis - 1))


def unpack_like(mask: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Unpacks the mask of a parameter to 0 and 1, however it is stored.

    Args:
      mask: an unpacked mask (of booleans, too), a packed one, or the flat array that `jnp.packbits(mask)` makes.
      shape: the parameter's shape.

    Returns:
      uint8 0/1 array of the given shape.

    Raises:
      ValueError: the mask's shape is none of these.

    >>> unpack_like(jnp.packbits(jnp.eye(3, dtype=jnp.uint8)), (3, 3))
    Array([[1, 0, 0],
           [0, 1, 0],
           [0, 0, 1]], dtype=uint8)
    """
    shape = tuple(shape)
    size = math.prod(shape)
    # Where nothing is longer than 1, packed (128) and unpacked (1) masks look alike.
    if mask.dtype != MASK_DTYPE or (mask.shape == shape and size <= 1):
        mask = (mask != 0).astype(MASK_DTYPE)
    if mask.shape == shape:
        return mask
    axis = axis_of_bits(mask.shape, shape)
    if axis is not None:
        return _unpack(mask, axis=axis + len(shape), length=shape[axis])
    if mask.shape == packed_shape((size,)):
        return _unpack(mask, axis=0, length=size).reshape(shape)
    raise ValueError(f'a mask of shape {mask.shape} does not fit a parameter of shape {shape}')


@functools.partial(jax.jit, inline=True, static_argnames=('axis', 'length'))
def _unpack(bits, axis, length):
    before, after = bits.shape[:axis], bits.shape[axis + 1 :]
    # packbits puts the first weight into the highest bit, which is the sign of a signed byte: tests of signs are read
    # fast along every axis, tests of single bits are not.
    shifted = jnp.expand_dims(bits, axis + 1) << _shifts(bits.shape, axis)
    is_kept = jax.lax.bitcast_convert_type(shifted, jnp.int8) < 0
    padded = is_kept.reshape(*before, bits.shape[axis] * BITS, *after)
    return jax.lax.slice_in_dim(padded, 0, length, axis=axis).astype(MASK_DTYPE)


@functools.partial(jax.jit, inline=True)
def kept_weights(mask: jax.Array) -> jax.Array:
    """Counts the weights that a mask keeps, packed or not: the bits that are set.

    Args:
      mask: uint8 array.

    Returns:
      uint32 scalar.

    >>> int(kept_weights(jnp.array([160, 1], jnp.uint8)))
    3
    """
    return jnp.sum(jax.lax.population_count(mask), dtype=jnp.uint32)


# Trees of masks.


def unpack_masks(masks: PyTree, params: PyTree) -> PyTree:
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
            unpacked.append(None if mask is None else unpack_like(mask, param.shape))
        except ValueError as error:
            raise ValueError(f'{tree_lib.path_string(path)}: {error}') from error
    return tree_lib.unflatten(treedef, unpacked, leaves)


def store_masks(masks: PyTree, params: PyTree, packed: bool, like: PyTree = None) -> PyTree:
    """Makes masks as a state holds them.

    Args:
      masks: a tree of masks, packed or not, `None` where dense.
      params: the parameters, or their shapes.
      packed: at one bit per weight.
      like: a tree of stored masks that these replace, whose containers they get.

    Returns:
      A tree of uint8 arrays, `None` where dense.

    Raises:
      ValueError: a mask does not fit its parameter.

    >>> store_masks({'w': jnp.array([1, 0], jnp.uint8)}, {'w': jnp.ones(2)}, packed=True)
    {'w': Array([128], dtype=uint8)}
    """
    leaves, treedef = jax.tree.flatten(params)
    new = tree_lib.leaves_like(treedef, unpack_masks(masks, params))
    is_masked = [mask is not None for mask in new]
    named = list(leaves)
    for i, (leaf, mask) in enumerate(zip(leaves, new, strict=True)):
        if packed and mask is not None and leaf.shape:
            new[i] = pack(mask)
            # Names of axes that bytes cannot be divided along are dropped with the parameter's wrapper.
            if new[i].shape[packed_axis(leaf.shape)] % jax.device_count():
                named[i] = None
    if like is not None and is_masked == [
        mask is not None for mask in tree_lib.leaves_like(treedef, like)
    ]:
        return jax.tree.structure(like).unflatten(mask for mask in new if mask is not None)
    return tree_lib.unflatten(treedef, new, named)


def mask_sizes(masks: PyTree, params: PyTree) -> PyTree:
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

    def size(param, mask):
        return None if mask is None or mask.shape == param.shape else jnp.uint32(param.size)

    sizes = tree_lib.map_with_missing(size, params, masks)
    return sizes if jax.tree.leaves(sizes) else None


def apply_mask(param: PyTree, mask: PyTree, is_packed: bool = False) -> PyTree:
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

    def masked(leaf, leaf_mask):
        return leaf if leaf_mask is None else jnp.where(leaf_mask != 0, leaf, jnp.zeros_like(leaf))

    return tree_lib.map_with_missing(masked, param, unpack_masks(mask, param))


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


def land(updates: PyTree, params: PyTree, *masks: PyTree) -> PyTree:
    """Makes updates after which weights that one of the masks prunes are exactly zero: -p where a mask is 0.

    Each leaf has the result type of update and parameter.

    >>> land({'w': jnp.zeros(2)}, {'w': jnp.array([3.0, 4.0])}, {'w': jnp.array([1, 0], jnp.uint8)})
    {'w': Array([ 0., -4.], dtype=float32)}
    """

    def landed(param, update, *leaf_masks):
        if update is None or leaf_masks[0] is None:
            return update
        kept = [unpack_like(mask, param.shape) != 0 for mask in leaf_masks]
        is_kept = functools.reduce(jnp.logical_and, kept)
        dtype = jnp.result_type(update, param)
        return jnp.where(is_kept, update.astype(dtype), -param.astype(dtype))

    return tree_lib.map_with_missing(landed, params, updates, *masks)


# Moments.


def restart_inner_state(state: Any, masks_activated: PyTree) -> Any:
    """Sets the moments of chosen weights to zero, whatever the optimizer.

    An array of the state belongs to a parameter if its path ends with the parameter's path, and it has its shape. What
    has another shape (adafactor's row and column averages, step counts) stays.

    Args:
      state: the state of an optimizer.
      masks_activated: tree like the parameters of arrays, not 0 where moments are zeroed, `None` for none of a leaf.

    Returns:
      The state with zeros.

    Raises:
      ValueError: the state keeps a history of a parameter, as that of lbfgs does.

    >>> import optax
    >>> tx, params = optax.sgd(0.1, momentum=0.9), {'w': jnp.ones(2)}
    >>> state = tx.update(params, tx.init(params))[1]
    >>> restart_inner_state(state, {'w': jnp.array([1, 0])})[0].trace
    {'w': Array([0., 1.], dtype=float32)}
    """
    # Dense leaves count, or a parameter of the same name elsewhere would be taken for theirs.
    entries, _ = jax.tree_util.tree_flatten_with_path(masks_activated, is_leaf=lambda x: x is None)
    flags = dict(entries)

    def restarted(path, moment):
        ends = (path[start:] for start in range(len(path) + 1))
        flag = next((flags[end] for end in ends if end in flags), None)
        shape = getattr(moment, 'shape', None)
        if flag is None or shape is None or not flag.ndim:
            return moment
        if shape[1:] == flag.shape:
            raise ValueError(
                'the moments of regrown weights cannot be zeroed in an optimizer that keeps a history of all '
                'parameters, such as lbfgs; use a first-order one, or an algorithm that regrows no weights'
            )
        is_like = shape == flag.shape
        return jnp.where(flag != 0, jnp.zeros_like(moment), moment) if is_like else moment

    return jax.tree_util.tree_map_with_path(restarted, state)


def check_restartable(inner: Any, params: PyTree) -> None:
    """Refuses an optimizer whose moments cannot be zeroed; computes nothing."""

    def attempt(values):
        everywhere = jax.tree.map(lambda value: jnp.ones_like(value, dtype=bool), values)
        return restart_inner_state(inner.init(values), everywhere)

    jax.eval_shape(attempt, params)
