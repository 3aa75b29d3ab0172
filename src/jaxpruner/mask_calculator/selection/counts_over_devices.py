"""Counts on several devices: each counts its own shard of an array, and the counts are summed once.

Only arrays that lie on devices as parameters do are counted so. What was pooled or reshaped may be divided in ways that
no axis of the mesh names, which JAX cannot tell a partitioned function. Those arrays are left to XLA.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jaxpruner.mask_calculator.selection.counting import (
    Predicates,
    Shard,
    count_array,
    count_shard,
)


class _Layout(NamedTuple):
    """How an array lies on the devices of a mesh."""

    mesh: Any
    spec: PartitionSpec
    shape: tuple[int, ...]  # of the whole array

    @property
    def mesh_axes(self) -> set[str]:
        """The axes of the mesh over which the array is divided."""
        names: set[str] = set()
        for entry in self.spec:
            names.update(_names(entry))
        return names


def count_by_xla(
    predicates: Predicates,
    counter: jnp.dtype,
    arrays: tuple,
    bounds: tuple,
) -> jax.Array:
    """Counts arrays that may be sharded in unknown ways, each by its own bounds; `[all rows, columns]`."""
    counts = []
    for array, own_bounds in zip(arrays, bounds, strict=True):
        counts.append(count_array(predicates, counter, array, own_bounds, may_split=False))
    return jnp.concatenate(counts)


def count_per_device(
    predicates: Predicates,
    counter: jnp.dtype,
    arrays: tuple,
    bounds: tuple,
) -> jax.Array:
    """Counts as `count_by_xla` does; each device counts what it holds."""
    leaves, treedef = jax.tree.flatten((arrays, bounds))
    ranks = tuple(leaf.ndim for leaf in leaves)
    # Lazy scores may depend on several arrays.
    leaves_per_array = tuple(len(jax.tree.leaves(array)) for array in arrays)
    partitioned = _partitioned(predicates, counter, treedef, ranks, leaves_per_array)

    def by_xla(*leaves: jax.Array) -> jax.Array:
        return count_by_xla(predicates, counter, *jax.tree.unflatten(treedef, leaves))

    @jax.custom_batching.custom_vmap
    def count(*leaves):
        return partitioned(*leaves)

    @count.def_vmap
    def count_batched(axis_size, in_batched, *leaves):
        # A partitioned function cannot be batched.
        del axis_size
        in_axes = tuple(0 if is_batched else None for is_batched in in_batched)
        return jax.vmap(by_xla, in_axes)(*leaves), True

    return count(*leaves)


@functools.cache
def _partitioned(
    predicates: Predicates,
    counter: jnp.dtype,
    treedef: Any,
    ranks: tuple[int, ...],
    leaves_per_array: tuple[int, ...],
) -> Any:
    """Makes the function that XLA asks how to count when it knows how the arrays are sharded.

    The leaves of the arrays stand first. All leaves of one array lie on devices as the first of them does.
    """

    @custom_partitioning
    def function(*leaves):
        return count_by_xla(predicates, counter, *jax.tree.unflatten(treedef, leaves))

    def partition(mesh, arguments, result):
        del result
        whole = NamedSharding(mesh, PartitionSpec())
        layouts, shardings = [], []
        for leaf_count in leaves_per_array:
            first = arguments[len(shardings)]
            spec = _even_spec(mesh, first)
            layouts.append(_Layout(mesh, spec, first.shape))
            shardings += [NamedSharding(mesh, spec)] * leaf_count
        shardings += [whole] * (len(arguments) - len(shardings))

        def count_own_shards(*leaves):
            arrays, bounds = jax.tree.unflatten(treedef, leaves)
            return _count_on_device(predicates, counter, arrays, bounds, layouts)

        return mesh, count_own_shards, whole, tuple(shardings)

    def infer_sharding(mesh, arguments, result):
        del arguments, result
        return NamedSharding(mesh, PartitionSpec())

    # Each dimension has its own name: nothing is sharded because something else is.
    names = []
    for i, rank in enumerate(ranks):
        names.append(' '.join(f'd{i}x{axis}' for axis in range(rank)))
    function.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer_sharding,
        sharding_rule=f'{", ".join(names)} -> rows columns',
    )
    return function


def _even_spec(mesh: Any, argument: Any) -> PartitionSpec:
    """Finds how an array is sharded along axes that devices share evenly; other axes would be padded."""
    # XLA may say of what was made on all devices alike only that it is not divided.
    spec = getattr(argument.sharding, 'spec', PartitionSpec())
    entries = []
    for axis, length in enumerate(argument.shape):
        entry = spec[axis] if axis < len(spec) else None
        shard_count = math.prod(mesh.shape[name] for name in _names(entry))
        entries.append(entry if length % shard_count == 0 else None)
    return PartitionSpec(*entries)


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _count_on_device(
    predicates: Predicates,
    counter: jnp.dtype,
    arrays: tuple,
    bounds: tuple,
    layouts: Sequence[_Layout],
) -> jax.Array:
    """Counts all rows of the shards that this device holds; one sum over the mesh for all arrays."""
    used: set[str] = set()
    for layout in layouts:
        used |= layout.mesh_axes
    totals = []
    for array, bounds_of_rows, layout in zip(arrays, bounds, layouts, strict=True):
        origin = []
        for entry, length in zip(layout.spec, array.shape, strict=True):
            origin.append(_shard_index(layout.mesh, entry, counter) * length)
        rows, all_rows = array.shape[0], layout.shape[0]
        own_bounds = []
        for bound in bounds_of_rows:
            own_bounds.append(lax.dynamic_slice_in_dim(bound, origin[0], rows))
        shard = Shard(array, own_bounds, origin, layout.shape)
        counts = count_shard(predicates, counter, shard, may_split=True)
        # Of devices that hold the same shard one counts.
        for name in sorted(used - layout.mesh_axes):
            counts = jnp.where(lax.axis_index(name) == 0, counts, 0)
        if rows != all_rows:
            zeros = jnp.zeros((all_rows, counts.shape[1]), counter)
            counts = lax.dynamic_update_slice_in_dim(zeros, counts, origin[0], 0)
        totals.append(counts)
    total = jnp.concatenate(totals)
    return lax.psum(total, tuple(sorted(used))) if used else total


def _shard_index(
    mesh: Any,
    entry: Any,
    counter: jnp.dtype,
) -> jax.Array:
    """Finds the index of this device's shard along an axis."""
    index = jnp.zeros((), counter)
    for name in _names(entry):
        index = index * mesh.shape[name] + lax.axis_index(name).astype(counter)
    return index
