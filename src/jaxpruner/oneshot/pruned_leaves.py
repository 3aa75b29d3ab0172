"""Leaves while they are pruned: copies that are changed in place, one part after another."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import mask_calculator
from jaxpruner.core import packing
from jaxpruner.core import tree as tree_lib
from jaxpruner.core.explicit_meshes import has_explicit_axes, without_explicit_axes
from jaxpruner.oneshot.weight_matrices import WeightMatrices
from jaxpruner.uses.compiled_once import CompiledOnce


class PrunedLeaves:
    """The leaves of a model and their masks; those that are given are left as they are.

    Args:
      params: any pytree of arrays.
      donate: no copies are made: arrays in `params` that are pruned are gone.

    >>> leaves = PrunedLeaves({'w': jnp.ones(2), 'b': jnp.ones(1)})
    >>> leaves.masks
    {'b': None, 'w': None}
    """

    def __init__(self, params: tree_lib.PyTree, donate: bool = False):
        paths, leaves, self._treedef = tree_lib.flatten_with_paths(params)
        self._leaves: dict[tree_lib.Path, Any] = dict(zip(paths, leaves, strict=True))
        times = collections.Counter(map(id, leaves))
        self._given = {
            path for path, leaf in self._leaves.items() if donate and times[id(leaf)] == 1
        }
        self._masks: dict[tree_lib.Path, jax.Array] = {}
        self._compiled: dict[Any, tuple[Any, Any]] = {}  # shared by leaves that are read alike

    @property
    def params(self) -> tree_lib.PyTree:
        """The parameters as they are now; what is pruned later changes them in place."""
        return jax.tree.unflatten(self._treedef, list(self._leaves.values()))

    @property
    def masks(self) -> tree_lib.PyTree:
        """uint8 masks in the parameters' shapes, `None` for leaves of which nothing was pruned."""
        return jax.tree.unflatten(self._treedef, [self._mask(path) for path in self._leaves])

    def has_layers(self, path: tree_lib.Path, matrices: WeightMatrices) -> bool:
        """Whether the layers of a stack can be read and replaced one by one: each device has its part of each of them.

        Args:
          path: the leaf's.
          matrices: which of its matrices.
        """
        leaf = self._leaves[path]
        sharding = getattr(leaf, 'sharding', None)
        divided = sharding is not None and sharding.shard_shape(leaf.shape)[:1] != leaf.shape[:1]
        return not divided and matrices.of_one_layer() is not None

    def read(
        self,
        path: tree_lib.Path,
        matrices: WeightMatrices,
        layer: int | None = None,
        other: jax.Array | None = None,
    ) -> jax.Array:
        """Weight matrices of a leaf, as they are now.

        Args:
          path: the leaf's.
          matrices: which of its matrices.
          layer: the number of one layer of a stack, for its matrices alone.
          other: an array of the leaf's shape to read instead, such as its mask.
        """
        leaf = self._leaves[path] if other is None else other
        if layer is None and not has_explicit_axes(leaf):
            return matrices.read(leaf)  # no copy, where nothing is moved
        return self._functions(matrices, leaf)[0](leaf, layer)

    def replace(
        self,
        path: tree_lib.Path,
        matrices: WeightMatrices,
        new: jax.Array | None,
        kept: jax.Array,
        layer: int | None = None,
    ) -> None:
        """Puts pruned matrices in place of those that `read` gives.

        Args:
          path: the leaf's.
          matrices: which of its matrices.
          new: float `[..., inputs, outputs]`; `None` where weights that are kept do not change.
          kept: their mask.
          layer: as in `read`.

        Raises:
          ValueError: new weights are not finite.
        """
        leaf, mask = self._leaves[path], self._masks.get(path)
        by_layer = layer is not None and matrices.of_one_layer() is not None
        if mask is None:
            # What is given away below must not be the caller's, nor another leaf's.
            leaf = jnp.array(leaf, copy=path not in self._given)
            mask = (
                _packed_ones(leaf)
                if by_layer
                else jnp.ones_like(leaf, dtype=mask_calculator.MASK_DTYPE)
            )
        elif not by_layer:
            mask = self._mask(path)
        if new is leaf:  # it is given away below
            new = jnp.array(new, copy=True)
        found = self._functions(matrices, leaf)[1](leaf, mask, new, kept, layer)
        self._leaves[path], self._masks[path], finite = found
        if not finite:
            raise ValueError(
                f'{tree_lib.path_string(path)}: its new weights are not finite; look for NaN or inf in it and in its '
                'inputs'
            )

    def _mask(self, path: tree_lib.Path) -> jax.Array | None:
        leaf, mask = self._leaves[path], self._masks.get(path)
        return None if mask is None else packing.unpack_like(mask, leaf.shape)

    def _functions(self, matrices: WeightMatrices, leaf: jax.Array) -> tuple[Any, Any]:
        # Left to itself, the compiler may make a leaf or its mask whole on each device.
        sharding = getattr(leaf, 'sharding', None)
        divided = sharding if sharding is not None and len(sharding.device_set) > 1 else None
        key = matrices.key, divided
        if key not in self._compiled:
            reader, writer = _reader(matrices), _writer(matrices)

            def read(leaf: jax.Array, layer: Any) -> jax.Array:
                return without_explicit_axes(reader, leaf, False)(leaf, layer)

            def replace(leaf: jax.Array, *rest: Any) -> Any:
                return without_explicit_axes(writer, leaf, True, True, False)(leaf, *rest)

            if divided is None:
                self._compiled[key] = (
                    CompiledOnce(read),
                    CompiledOnce(replace, donate_argnums=(0, 1)),
                )
            else:
                placed = jax.jit(
                    replace, donate_argnums=(0, 1), out_shardings=(divided, divided, None)
                )
                self._compiled[key] = jax.jit(read), placed
        return self._compiled[key]


def _reader(matrices: WeightMatrices) -> Callable[..., jax.Array]:
    """Reads them all, or those of a layer."""
    alone = matrices.of_one_layer()

    def read(leaf: jax.Array, layer: Any) -> jax.Array:
        if layer is None:
            return matrices.read(leaf)
        if alone is None:
            return lax.dynamic_index_in_dim(matrices.read(leaf), layer, keepdims=False)
        return alone.read(lax.dynamic_index_in_dim(leaf, layer, keepdims=False))

    return read


def _writer(matrices: WeightMatrices) -> Callable[..., Any]:
    """Writes them all, or those of a layer: in place, if nothing moves the stack before it is taken apart."""
    alone = matrices.of_one_layer()

    def replace(leaf: jax.Array, mask: jax.Array, new: Any, kept: jax.Array, layer: Any) -> Any:
        def write(part: jax.Array) -> jax.Array:
            if layer is not None:
                rest = jnp.zeros(matrices.layout.matrices_shape, part.dtype)
                part = lax.dynamic_update_index_in_dim(rest, part, layer, 0)
            return matrices.write(part, leaf)

        if layer is None or alone is None:
            return _change(write, leaf, mask, new, kept)
        part, part_mask = (
            lax.dynamic_index_in_dim(array, layer, keepdims=False) for array in (leaf, mask)
        )
        part_mask = packing.unpack_like(part_mask, part.shape)
        part, part_mask, finite = _change(
            functools.partial(alone.write, leaf=part), part, part_mask, new, kept
        )
        changed = part, part_mask if mask.shape == leaf.shape else packing.pack(part_mask)
        pairs = zip((leaf, mask), changed, strict=True)
        return *(lax.dynamic_update_index_in_dim(*pair, layer, 0) for pair in pairs), finite

    return replace


def _change(
    write: Callable[[jax.Array], jax.Array], leaf: Any, mask: Any, new: Any, kept: jax.Array
) -> Any:
    """A leaf and its mask after some of its matrices, and whether these are finite."""
    removed = write(1 - kept.astype(jnp.float32)) > 0
    finite = jnp.bool_(True)
    if new is not None:
        finite = jnp.isfinite(new).all()
        leaf = jnp.where(write(jnp.ones(kept.shape)) > 0, write(new).astype(leaf.dtype), leaf)
    return jnp.where(removed, jnp.zeros_like(leaf), leaf), jnp.where(removed, 0, mask), finite


def _packed_ones(leaf: jax.Array) -> jax.Array:
    """The mask of a stack that is pruned layer by layer, while statistics take memory: packed, if it fits.

    Returns:
      Each layer packed by itself; unpacked where devices share the leaf, since bytes would cross their borders.
    """
    shape = leaf.shape[0], *packing.packed_shape(leaf.shape[1:])
    if len(leaf.sharding.device_set) > 1 or shape == leaf.shape:
        return jnp.ones_like(leaf, dtype=mask_calculator.MASK_DTYPE)
    return jnp.full(shape, 255, jnp.uint8)
