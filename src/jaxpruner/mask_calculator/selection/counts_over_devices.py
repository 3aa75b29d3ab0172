"""How devices that share arrays count: each its own parts, and one sum is made of the counts.

Only arrays that lie on devices as parameters do are counted in parts: what was pooled or reshaped may be divided in
ways that no axis of the mesh names, which JAX cannot tell a partitioned function, and where each device has whole rows,
there is nothing to sum. Those XLA is left to divide.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jaxpruner.mask_calculator.selection.counts_of_parts import Predicates, count_all, count_part


def count_apart(
    predicates: Predicates, counter: jnp.dtype, arrays: tuple, bounds: tuple
) -> jax.Array:
    """As `counts_of_parts.count_all`; each device counts what it holds, and the counts are summed.

    >>> def positive(array, place, bounds):
    ...     return [array > 0]
    >>> count_apart(positive, jnp.dtype('uint32'), (jnp.array([[1.0, -1.0, 2.0]]),), ((),))
    Array([[2]], dtype=uint32)
    """
    flat, treedef = jax.tree.flatten((arrays, bounds))
    parts = tuple(
        len(jax.tree.leaves(array)) for array in arrays
    )  # scores may depend on several arrays
    count = _partitioned(predicates, counter, treedef, tuple(array.ndim for array in flat), parts)

    def by_xla(*leaves):
        return count_by_xla(predicates, counter, *jax.tree.unflatten(treedef, leaves))

    @jax.custom_batching.custom_vmap
    def counted(*leaves):
        return count(*leaves)

    @counted.def_vmap
    def batched(axis_size, in_batched, *leaves):
        # A partitioned function knows no batches.
        del axis_size
        in_axes = tuple(0 if is_batched else None for is_batched in in_batched)
        return jax.vmap(by_xla, in_axes)(*leaves), True

    return counted(*flat)


def count_by_xla(
    predicates: Predicates, counter: jnp.dtype, arrays: tuple, bounds: tuple
) -> jax.Array:
    """As `counts_of_parts.count_all`, of arrays that may be sharded in ways that are not known.

    >>> def positive(array, place, bounds):
    ...     return [array > 0]
    >>> count_by_xla(positive, jnp.dtype('uint32'), (jnp.array([[1.0, -1.0, 2.0]]),), ((),))
    Array([[2]], dtype=uint32)
    """
    return count_all(predicates, counter, arrays, bounds, may_split=False)


@functools.cache
def _partitioned(
    predicates: Predicates,
    counter: jnp.dtype,
    treedef: Any,
    ranks: tuple[int, ...],
    parts: tuple[int, ...],
) -> Any:
    """The function that XLA asks how to count when it knows how the arrays are sharded.

    They stand first; those of which `parts` counts several lie on devices as the first of these does.
    """
    firsts = [sum(parts[:i]) for i in range(len(parts))]

    @custom_partitioning
    def function(*leaves):
        return count_by_xla(predicates, counter, *jax.tree.unflatten(treedef, leaves))

    def partition(mesh, arguments, result):
        del result
        whole = NamedSharding(mesh, PartitionSpec())
        specs = [_even_spec(mesh, arguments[first]) for first in firsts]
        shapes = [arguments[first].shape for first in firsts]
        shardings = [
            NamedSharding(mesh, specs[i]) for i, number in enumerate(parts) for _ in range(number)
        ]
        shardings += [whole] * (len(arguments) - len(shardings))

        def count_part_of_all(*leaves):
            return _count_on_device(
                predicates, counter, mesh, specs, shapes, *jax.tree.unflatten(treedef, leaves)
            )

        return mesh, count_part_of_all, whole, tuple(shardings)

    # Each dimension is its own: nothing is sharded because something else is.
    names = [' '.join(f'd{i}x{axis}' for axis in range(rank)) for i, rank in enumerate(ranks)]
    function.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, arguments, result: NamedSharding(
            mesh, PartitionSpec()
        ),
        sharding_rule=f'{", ".join(names)} -> rows columns',
    )
    return function


def _even_spec(mesh: Any, argument: Any) -> PartitionSpec:
    """How an array is sharded, along axes that the devices share evenly; elsewhere parts would be padded."""
    spec = tuple(argument.sharding.spec) + (None,) * (
        len(argument.shape) - len(argument.sharding.spec)
    )
    return PartitionSpec(
        *[
            entry if length % math.prod(mesh.shape[name] for name in _names(entry)) == 0 else None
            for entry, length in zip(spec, argument.shape, strict=True)
        ]
    )


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _count_on_device(predicates, counter, mesh, specs, shapes, parts, bounds):
    """The counts of all rows, from the parts that this device holds; one sum over the mesh for all arrays."""
    used = {name for spec in specs for entry in spec for name in _names(entry)}
    totals = []
    for spec, shape, part, bound in zip(specs, shapes, parts, bounds, strict=True):
        origin = [
            _place(mesh, entry, counter) * length
            for entry, length in zip(spec, part.shape, strict=True)
        ]
        mine = [lax.dynamic_slice_in_dim(rows, origin[0], part.shape[0]) for rows in bound]
        counts = jnp.stack(
            count_part(predicates, counter, part, mine, origin, shape, may_split=True), 1
        )
        # Of devices that hold the same part one counts.
        for name in sorted(used - {name for entry in spec for name in _names(entry)}):
            counts = jnp.where(lax.axis_index(name) == 0, counts, 0)
        if part.shape[0] != shape[0]:
            everywhere = jnp.zeros((shape[0], counts.shape[1]), counter)
            counts = lax.dynamic_update_slice_in_dim(everywhere, counts, origin[0], 0)
        totals.append(counts)
    total = jnp.concatenate(totals)
    return lax.psum(total, tuple(sorted(used))) if used else total


def _place(mesh: Any, entry: Any, counter: jnp.dtype) -> jax.Array:
    """The number of this device's part along an axis."""
    place = jnp.zeros((), counter)
    for name in _names(entry):
        place = place * mesh.shape[name] + lax.axis_index(name).astype(counter)
    return place
