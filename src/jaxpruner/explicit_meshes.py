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
    function: Callable[..., Any], like: Any, *divided: bool
) -> Callable[..., Any]:
    """Lets a function do what explicit axes of a mesh leave open, such as a sum over an axis that is divided.

    Args:
      function: of arrays.
      like: one of them.
      divided: for each result (one, or those of a tuple) whether it is divided as `like` is; others are whole on each
        device.

    Returns:
      The function itself where `like` lies on no such mesh.

    >>> import jax.numpy as jnp
    >>> without_explicit_axes(jnp.sum, jnp.ones(3), False)(jnp.ones(3))
    Array(3., dtype=float32)
    """
    sharding = explicit_sharding(like)
    if sharding is None:
        return function
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    first, *others = (sharding if one else whole for one in divided)
    return jax.sharding.auto_axes(function, out_sharding=(first, *others) if others else first)


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
