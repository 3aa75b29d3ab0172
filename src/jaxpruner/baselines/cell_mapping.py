"""How one program trains many cells: one after another, all at once, or spread over devices.

The command line calls this `--over`.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

CellMapping = Literal['each', 'map', 'vmap', 'devices']
RequestedMapping = Literal[CellMapping, 'auto']  # auto: the one that is measured to be the fastest
CELL_MAPPINGS: tuple[CellMapping, ...] = get_args(CellMapping)
_AXIS = 'cells'


def available_mappings() -> tuple[CellMapping, ...]:
    """The mappings that work here: 'devices' needs more than one."""
    if jax.local_device_count() > 1:
        return CELL_MAPPINGS
    return ('each', 'map', 'vmap')


def check_mapping(name: str) -> None:
    """Raises a `ValueError` for a mapping that does not exist, or needs more devices."""
    if name not in CELL_MAPPINGS:
        raise ValueError(f'cells are trained over {", ".join(CELL_MAPPINGS)}, got {name!r}')
    if name not in available_mappings():
        raise ValueError(
            f'over {name!r} needs more than one device, here is {jax.local_device_count()}; '
            "a CPU's cores are devices with XLA_FLAGS=--xla_force_host_platform_device_count=2"
        )


def map_over_cells(mapping: CellMapping, function: Callable, *data: Any) -> Callable:
    """Makes a function of many cells out of a function of one; it is to be compiled.

    `function` takes the data, then the arrays of a cell and, by name, what all cells share. The
    result takes no data, and its arrays have a leading axis of cells. A sweep hands cells over
    singly with 'each'.

    >>> function = lambda data, x, scale: data + scale * x
    >>> map_over_cells('vmap', function, 1.0)(jax.numpy.arange(3.0), scale=2.0).tolist()
    [1.0, 3.0, 5.0]
    """
    if mapping == 'vmap':
        return _vmapped(function, *data)
    if mapping == 'devices':
        return _spread_over_devices(function, *data)
    return _one_after_another(function, *data)


def place_data(mapping: CellMapping, data: Any) -> Any:
    """Copies data to every device where cells are spread over devices."""
    if mapping != 'devices':
        return data
    replicated = NamedSharding(_mesh(), PartitionSpec())
    return jax.device_put(data, replicated)


def add_cell_axis(cell: Any) -> Any:
    """A pytree of one cell as one of many."""
    return jax.tree.map(lambda leaf: leaf[None], cell)


def drop_cell_axis(cells: Any) -> Any:
    """The first cell of a pytree of many."""
    return jax.tree.map(lambda leaf: leaf[0], cells)


def _one_after_another(function: Callable, *data: Any) -> Callable:
    def mapped(*arrays, **shared):
        call = functools.partial(function, *data, **shared)
        if _count_cells(arrays) == 1:  # a single cell needs no loop around it
            return add_cell_axis(call(*drop_cell_axis(arrays)))
        return jax.lax.map(lambda cell: call(*cell), arrays)

    return mapped


def _vmapped(function: Callable, *data: Any) -> Callable:
    def mapped(*arrays, **shared):
        return jax.vmap(lambda *cell: function(*data, *cell, **shared))(*arrays)

    return mapped


def _spread_over_devices(function: Callable, *data: Any) -> Callable:
    def train_share(data, shared, arrays):
        return _one_after_another(function, *data)(*arrays, **shared)

    def mapped(*arrays, **shared):
        mesh = _mesh()
        count = _count_cells(arrays)
        cells_per_device = -(-count // mesh.size)
        padded_count = cells_per_device * mesh.size
        # Each device gets as many: the last cell is trained again to fill up. Outside of the
        # program the count is that of the other mappings, so that checkpoints fit them all.
        if padded_count > count:
            repeated = np.minimum(np.arange(padded_count), count - 1)
            arrays = jax.tree.map(lambda leaf: leaf[repeated], arrays)
        everywhere = PartitionSpec()
        split = PartitionSpec(_AXIS)
        specs = (everywhere, everywhere, split)
        train = _shard_map(train_share, mesh=mesh, in_specs=specs, out_specs=split)
        results = train(data, shared, arrays)
        if padded_count == count:
            return results
        return jax.tree.map(lambda leaf: leaf[:count], results)

    return mapped


def _count_cells(arrays: Any) -> int:
    return jax.tree.leaves(arrays)[0].shape[0]


def _mesh() -> Mesh:
    return Mesh(np.array(jax.local_devices()), (_AXIS,))


def _shard_map(function: Callable, **specs: Any) -> Callable:
    """Maps without the check of what is the same on all devices: nothing is."""
    if hasattr(jax, 'shard_map'):
        return jax.shard_map(function, check_vma=False, **specs)
    from jax.experimental.shard_map import shard_map  # where JAX is older than 0.6.1

    return shard_map(function, check_rep=False, **specs)
