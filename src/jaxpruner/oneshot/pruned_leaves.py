"""Leaves while they are pruned: copies that are changed in place, some matrices after others."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import mask_calculator
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.explicit_meshes import has_explicit_axes, without_explicit_axes
from jaxpruner.oneshot.weight_matrices import WeightMatrices
from jaxpruner.trace.compiled_once import CompiledOnce


class PrunedLeaves:
    """The leaves of a model and their masks; those that are given stay as they are.

    With `donate` nothing is copied: arrays in `params` that are pruned are gone.
    """

    def __init__(self, params: tree_lib.PyTree, donate: bool = False):
        paths, leaves, self._treedef = tree_lib.flatten_with_paths(params)
        self._leaves: dict[tree_lib.Path, Any] = dict(zip(paths, leaves, strict=True))
        self._donated = _single_leaves(self._leaves) if donate else set()
        self._masks: dict[tree_lib.Path, jax.Array] = {}
        self._compiled: dict[Any, tuple[Any, Any]] = {}  # shared by leaves that are read alike

    @property
    def params(self) -> tree_lib.PyTree:
        """The parameters as they are now; what is pruned later changes them in place."""
        leaves = list(self._leaves.values())
        return jax.tree.unflatten(self._treedef, leaves)

    @property
    def masks(self) -> tree_lib.PyTree:
        """uint8 masks in the parameters' shapes, `None` for leaves of which nothing was pruned."""
        masks = list(map(self._mask, self._leaves))
        return tree_lib.unflatten(self._treedef, masks, self._leaves.values())

    def has_layers(self, matrices: WeightMatrices) -> bool:
        """Whether the layers of a stack can be replaced one by one: each device holds its part of each of them."""
        leaf = self._leaves[matrices.path]
        sharding = getattr(leaf, 'sharding', None)
        part_shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        holds_all_layers = part_shape[:1] == leaf.shape[:1]
        return holds_all_layers and matrices.of_slice is not None

    def read(self, matrices: WeightMatrices, other: jax.Array | None = None) -> jax.Array:
        """Reads weight matrices as they are now, or those of another array of the leaf's shape, such as its mask."""
        leaf = self._leaves[matrices.path] if other is None else other
        if matrices.layer is None and not has_explicit_axes(leaf):
            return matrices.read(leaf)  # no copy, where nothing is moved
        reader, _ = self._functions(matrices, leaf)
        return reader(leaf, matrices.layer)

    def replace(self, matrices: WeightMatrices, new: jax.Array | None, kept: jax.Array) -> None:
        """Puts pruned matrices in place of those that `read` gives.

        `new` are the weights, `None` where those that are kept do not change, and `kept` is their mask.

        Raises:
          ValueError: new weights are not finite.
        """
        path = matrices.path
        leaf = jnp.asarray(self._leaves[path])
        mask = self._masks.get(path)
        is_slice = matrices.layer is not None and matrices.of_slice is not None
        # What is the caller's, or another leaf's, must not be given away.
        is_own = mask is not None or path in self._donated
        if is_slice:
            if not is_own:
                leaf = jnp.array(leaf, copy=True)
                is_own = True
            mask = _packed_ones(leaf) if mask is None else mask
        elif mask is not None:
            mask = self._mask(path)
        if new is leaf and is_own:
            new = jnp.array(new, copy=True)
        _, writer = self._functions(matrices, leaf, is_own)
        leaf, mask, is_finite = writer(leaf, mask, new, kept, matrices.layer)
        self._leaves[path] = leaf
        self._masks[path] = mask
        if not is_finite:
            raise ValueError(
                f'{tree_lib.path_string(path)}: its new weights are not finite; look for NaN or inf in it and in its '
                'inputs'
            )

    def _mask(self, path: tree_lib.Path) -> jax.Array | None:
        mask = self._masks.get(path)
        if mask is None:
            return None
        return sparse_state_lib.unpack_like(mask, self._leaves[path].shape)

    def _functions(
        self, matrices: WeightMatrices, leaf: jax.Array, is_own: bool = True
    ) -> tuple[Any, Any]:
        """Compiles functions that read and replace; like layers, whose number is an argument, share them.

        Leaf and mask are replaced in place where they are the object's own.
        """
        # Left to itself, the compiler may make a leaf or its mask whole on each device.
        sharding = getattr(leaf, 'sharding', None)
        is_divided = sharding is not None and len(sharding.device_set) > 1
        divided = sharding if is_divided else None
        key = matrices.reading, divided, is_own
        if key not in self._compiled:
            reader = _reader(matrices)
            writer = _writer(matrices)
            given_away = (0, 1) if is_own else ()
            self._compiled[key] = _compile(reader, writer, divided, given_away)
        return self._compiled[key]


def _compile(
    reader: Callable[..., Any],
    writer: Callable[..., Any],
    divided: Any,
    given_away: tuple[int, ...],
) -> Any:
    """Compiles the two functions; the second writes in the memory of what is given away."""
    if divided is None:
        return CompiledOnce(reader), CompiledOnce(writer, donate_argnums=given_away)
    shardings = divided, divided, None
    write = jax.jit(writer, donate_argnums=given_away, out_shardings=shardings)
    return jax.jit(reader), write


def _single_leaves(leaves: dict[tree_lib.Path, Any]) -> set[tree_lib.Path]:
    """Finds the leaves whose arrays no other leaf shares."""
    times = collections.Counter(map(id, leaves.values()))
    single = set()
    for path, leaf in leaves.items():
        if times[id(leaf)] == 1:
            single.add(path)
    return single


def _reader(matrices: WeightMatrices) -> Callable[..., jax.Array]:
    def read(leaf: jax.Array, layer: Any) -> jax.Array:
        of_layer = matrices.at_layer(layer)
        reader = without_explicit_axes(of_layer.read, leaf, False)
        return reader(leaf)

    return read


def _writer(matrices: WeightMatrices) -> Callable[..., Any]:
    """Replaces all matrices, or those of a layer: in place, if nothing moves the stack before it is taken apart.

    A mask that is `None` is one that keeps everything.
    """

    def replace(leaf: jax.Array, mask: Any, new: Any, kept: jax.Array, layer: Any) -> Any:
        if mask is None:
            mask = _ones(leaf)
        if layer is None or matrices.of_slice is None:
            of_layer = matrices.at_layer(layer)
            return _change(of_layer, leaf, mask, new, kept)
        old = lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
        old_mask = lax.dynamic_index_in_dim(mask, layer, keepdims=False)
        old_mask = sparse_state_lib.unpack_like(old_mask, old.shape)
        changed, changed_mask, is_finite = _change(matrices.of_slice, old, old_mask, new, kept)
        if mask.shape != leaf.shape:
            changed_mask = sparse_state_lib.pack(changed_mask)
        leaf = lax.dynamic_update_index_in_dim(leaf, changed, layer, 0)
        mask = lax.dynamic_update_index_in_dim(mask, changed_mask, layer, 0)
        return leaf, mask, is_finite

    def on_any_mesh(leaf: jax.Array, *arguments: Any) -> Any:
        replace_there = without_explicit_axes(replace, leaf, True, True, False)
        return replace_there(leaf, *arguments)

    return on_any_mesh


def _change(
    matrices: WeightMatrices, leaf: jax.Array, mask: Any, new: Any, kept: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Changes a leaf and its mask in some of its matrices; also tells whether these are finite."""
    removed = 1 - kept.astype(jnp.float32)
    is_removed = matrices.write(removed, leaf) > 0
    is_finite = jnp.bool_(True)
    if new is not None:
        is_finite = jnp.isfinite(new).all()
        ones = jnp.ones(kept.shape)
        is_replaced = matrices.write(ones, leaf) > 0
        written = matrices.write(new, leaf)
        leaf = jnp.where(is_replaced, written.astype(leaf.dtype), leaf)
    leaf = jnp.where(is_removed, jnp.zeros_like(leaf), leaf)
    mask = jnp.where(is_removed, 0, mask)
    return leaf, mask, is_finite


def _ones(leaf: jax.Array) -> jax.Array:
    return jnp.ones_like(leaf, dtype=mask_calculator.MASK_DTYPE)


def _packed_ones(leaf: jax.Array) -> jax.Array:
    """Makes the mask of a stack that is pruned layer by layer. Each layer is packed apart: statistics need the memory.

    It is unpacked where devices share the leaf, since bytes would cross their borders.
    """
    shape = leaf.shape[0], *sparse_state_lib.packed_shape(leaf.shape[1:])
    if len(leaf.sharding.device_set) > 1 or shape == leaf.shape:
        return _ones(leaf)
    return jnp.full(shape, 255, jnp.uint8)
