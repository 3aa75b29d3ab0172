"""Arrays whose types say how they are divided over devices: inside, that is left to the compiler."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def explicit_sharding(array: Any) -> NamedSharding | None:
    """Returns how an array is divided if its type says so; the oldest JAX has no such types.

    >>> explicit_sharding(jax.numpy.ones(3)) is None
    True
    """
    sharding = getattr(jax.typeof(array), 'sharding', None) if hasattr(jax, 'typeof') else None
    kinds = getattr(getattr(sharding, 'mesh', None), 'axis_types', None) or ()
    is_explicit = any(getattr(kind, 'name', None) == 'Explicit' for kind in kinds)
    return sharding if is_explicit else None


def without_explicit_axes(
    function: Callable[..., Any], inputs: Any, results: Any = None
) -> Callable[..., Any]:
    """Lets a function do what explicit axes of a mesh leave open, such as a sum over an axis that is divided.

    Args:
      function: of arrays.
      inputs: those of its arguments that may lie on such a mesh, a pytree.
      results: for each result an array that is divided alike; by default all are whole on each device.

    Returns:
      The function itself where no input lies on such a mesh.

    >>> import jax.numpy as jnp
    >>> without_explicit_axes(jnp.sum, jnp.ones(3))(jnp.ones(3))
    Array(3., dtype=float32)
    """
    explicit = next(filter(None, map(explicit_sharding, jax.tree.leaves(inputs))), None)
    if explicit is None:
        return function
    whole = NamedSharding(explicit.mesh, PartitionSpec())
    alike = jax.tree.map(lambda like: explicit_sharding(like) or whole, results)
    return jax.sharding.auto_axes(function, out_sharding=whole if results is None else alike)


def on_explicit_mesh(tree: Any, like: Any) -> Any:
    """Puts new arrays whole on all devices of the mesh on which the types of others say how they are divided.

    Args:
      tree: a pytree of arrays.
      like: another; if none of its arrays lies on such a mesh, nothing is done.

    >>> on_explicit_mesh({'a': 1.0}, [])
    {'a': 1.0}
    """
    for leaf in jax.tree.leaves(like):
        sharding = getattr(leaf, 'sharding', None)
        if isinstance(sharding, NamedSharding) and explicit_sharding(leaf) is not None:
            return jax.device_put(tree, NamedSharding(sharding.mesh, PartitionSpec()))
    return tree
