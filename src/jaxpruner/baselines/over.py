"""The ways in which one program trains many cells: one after another, together, or spread over devices."""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Over = Literal['each', 'map', 'vmap', 'devices']
Wanted = Literal[Over, 'auto']  # or whichever is measured to be the fastest
OVERS: tuple[Over, ...] = get_args(Over)
_AXIS = 'cells'


def ways() -> tuple[Over, ...]:
    """The ways that there are here: cells can be spread where there is more than one device.

    >>> ways()[:3]
    ('each', 'map', 'vmap')
    """
    return (
        OVERS
        if jax.local_device_count() > 1
        else tuple(over for over in OVERS if over != 'devices')
    )


def check_over(over: str) -> None:
    """Refuses a way that there is not, or not here.

    Args:
      over: its name.

    Raises:
      ValueError: no such way, or 'devices' where there is one device.

    >>> check_over('map')
    """
    if over not in OVERS:
        raise ValueError(f'cells are trained over {", ".join(OVERS)}, got {over!r}')
    if over not in ways():
        raise ValueError(
            f"over {over!r} needs more than one device, here is {jax.local_device_count()}; a CPU's cores are devices "
            'with XLA_FLAGS=--xla_force_host_platform_device_count=2'
        )


def spread(over: Over, function: Callable, *data: Any) -> Callable:
    """A function of one cell becomes one of many, to be compiled.

    Args:
      over: 'each' and 'map' go through the cells one after another (with 'each' a sweep hands them over singly), 'vmap'
        takes all at once, 'devices' goes through a share of them on each device.
      function: takes the data, arrays of a cell and, by name, what is the same for all cells; returns arrays.
      *data: pytrees that all cells share.

    Returns:
      The function without the data; its arrays have a leading axis of cells.

    >>> spread('vmap', lambda data, x, scale: data + scale * x, 1.0)(jax.numpy.arange(3.0), scale=2.0).tolist()
    [1.0, 3.0, 5.0]
    """
    return {'each': _map, 'map': _map, 'vmap': _vmap, 'devices': _devices}[over](function, *data)


def shared(over: Over, data: Any) -> Any:
    """Data where the cells need them: on every device where cells are spread.

    Args:
      over: the way.
      data: a pytree of arrays.

    >>> shared('map', None) is None
    True
    """
    return (
        jax.device_put(data, NamedSharding(_mesh(), PartitionSpec())) if over == 'devices' else data
    )


def _map(function: Callable, *data: Any) -> Callable:
    def mapped(*arrays: Any, **same: Any) -> Any:
        call = functools.partial(function, *data, **same)
        if _cells(arrays) == 1:  # a cell alone needs no loop around it
            return jax.tree.map(
                lambda leaf: leaf[None], call(*jax.tree.map(lambda leaf: leaf[0], arrays))
            )
        return jax.lax.map(lambda one: call(*one), arrays)

    return mapped


def _vmap(function: Callable, *data: Any) -> Callable:
    return lambda *arrays, **same: jax.vmap(lambda *one: function(*data, *one, **same))(*arrays)


def _devices(function: Callable, *data: Any) -> Callable:
    def mapped(*arrays: Any, **same: Any) -> Any:
        mesh, cells = _mesh(), _cells(arrays)
        # Each device gets as many; the last cell is trained again where that needs more. Outside of the program there
        # are as many cells as with the other ways, so that a checkpoint does not depend on the way.
        chosen = np.minimum(np.arange(-(-cells // mesh.size) * mesh.size), cells - 1)
        padded = arrays if len(chosen) == cells else jax.tree.map(lambda leaf: leaf[chosen], arrays)

        def on_a_device(data: Any, same: Any, arrays: Any) -> Any:
            return _map(function, *data)(*arrays, **same)

        one, each = PartitionSpec(), PartitionSpec(_AXIS)
        results = _shard_map(on_a_device, mesh=mesh, in_specs=(one, one, each), out_specs=each)(
            data, same, padded
        )
        return results if len(chosen) == cells else jax.tree.map(lambda leaf: leaf[:cells], results)

    return mapped


def _cells(arrays: Any) -> int:
    return jax.tree.leaves(arrays)[0].shape[0]


def _mesh() -> Mesh:
    return Mesh(np.array(jax.local_devices()), (_AXIS,))


def _shard_map(function: Callable, **specs: Any) -> Callable:
    """Without the check of what is the same on all devices: nothing is."""
    if hasattr(jax, 'shard_map'):
        return jax.shard_map(function, check_vma=False, **specs)
    from jax.experimental.shard_map import shard_map  # where JAX is older than 0.6.1

    return shard_map(function, check_rep=False, **specs)
