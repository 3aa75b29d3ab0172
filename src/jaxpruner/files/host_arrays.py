"""Leaves of trees between files and devices, one at a time."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib


def named_arrays(tree: tree_lib.PyTree) -> dict[str, tuple[tree_lib.Path, Any]]:
    """Lists the leaves of a tree as arrays with their paths, under dotted names.

    Raises:
      TypeError: a leaf is no array whose values this process has.
      ValueError: two leaves have one name.
    """
    arrays: dict[str, tuple[tree_lib.Path, Any]] = {}
    for path, leaf in tree_lib.zip_with_paths(tree):
        name = '.'.join(path)
        if name in arrays:
            raise ValueError(
                f'the leaves {arrays[name][0]} and {path} are both called {name!r} in a file; rename one'
            )
        array = np.asarray(leaf) if isinstance(leaf, bool | int | float | complex) else leaf
        has_values = isinstance(array, jax.Array | np.ndarray | np.generic)
        if isinstance(array, jax.Array):
            is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
            has_values = not tree_lib.is_traced(array) and not is_key and array.is_fully_addressable
        if not has_values:
            raise TypeError(
                f'{name}: a leaf must be an array whose values this process has, got {type(leaf).__name__}; save '
                'outside jit, gather what other processes hold (multihost_utils.process_allgather), take '
                'jax.random.key_data of keys, and leave out what is no array (for Equinox: '
                'eqx.filter(model, eqx.is_array))'
            )
        if not array.dtype.isnative:  # files are read as the machine's own byte order
            array = array.astype(array.dtype.newbyteorder('='))
        arrays[name] = path, array
    return arrays


def on_host(array: Any) -> np.ndarray:
    """Returns the array's values; those that the caller is done with are freed by the next fetch at the latest."""
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    # An array keeps the copy that is fetched from it. So the copy is fetched from another array of the same buffers.
    # JAX 0.12 frees copies only when Python collects garbage, of any generation. So the copy before goes now.
    gc.collect(0)
    buffers = [shard.data for shard in array.addressable_shards]
    same = jax.make_array_from_single_device_arrays(array.shape, array.sharding, buffers)
    return np.asarray(same)


def on_device(where: str, array: np.ndarray, sharding: Any = None) -> jax.Array:
    """Puts an array on devices; a `ValueError` says where JAX would round its 64 bits."""
    placed = jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)
    if placed.dtype != array.dtype:
        raise ValueError(
            f'{where} is {array.dtype}, of which JAX would make {placed.dtype}; call '
            "jax.config.update('jax_enable_x64', True) first"
        )
    return placed
