"""Checks whether parameters, compact weights and positions fit a model.

Shapes are always known, and values only outside of transformations: traced positions are not checked.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import explicit_meshes
from jaxpruner import tree as tree_lib

_AS_PACKED = 'use the topology that `pack` or `update` of a model with these settings returned'


def check_params(params: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuses dense leaves of other shapes than those of the model.

    Args:
      params: leaves by name.
      expected: their shapes by name.

    Raises:
      ValueError: a leaf has another shape.
    """
    for name, leaf in params.items():
        shape = jnp.shape(leaf)
        if shape != expected[name].shape:
            raise ValueError(
                f'params: {name!r} must have shape {expected[name].shape}, as when the model was made, got {shape}; '
                'make a model for these parameters'
            )


def check_not_divided(name: str, leaf: Any) -> None:
    """Refuses a dense leaf that is divided by an explicit axis of a mesh: JAX does not reshape such an array.

    Raises:
      ValueError: it is divided by one.
    """
    if not explicit_meshes.has_explicit_axes(leaf):
        return
    spec = jax.typeof(leaf).sharding.spec
    if any(axis is not None for axis in spec):
        raise ValueError(
            f'params: {name!r} is divided by axes of type Explicit, as {spec}, and cannot be cut so; gather it first: '
            'jax.device_put(leaf, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))'
        )


def check_shapes(
    argument: str, name: str, arrays: Any, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuses arrays of a leaf that are missing, or of other shapes than the model needs.

    Args:
      argument: the argument of the caller, for the message.
      name: the name of the leaf.
      arrays: the arrays by name.
      shapes: the shapes that they must have, by name.

    Raises:
      ValueError: an array does not fit.
    """
    for key, expected in shapes.items():
        is_there = isinstance(arrays, Mapping) and key in arrays
        shape = jnp.shape(arrays[key]) if is_there else None
        if shape != expected:
            raise ValueError(
                f'{argument}: {name!r} must have {key} of shape {expected}, got {shape}; use the {argument} of a '
                'model with the same settings, as its `pack` returned them or training changed them'
            )


def check_gradient(argument: str, name: str, gradient: Any, expected: tuple[int, ...]) -> None:
    """Refuses an array that is no gradient with respect to the probe of a leaf.

    Args:
      argument: the argument of the caller, for the message.
      name: the name of the leaf.
      gradient: an array, or `None` if it is missing.
      expected: its shape.

    Raises:
      ValueError: it is missing, or has another shape.
    """
    shape = None if gradient is None else jnp.shape(gradient)
    if shape != expected:
        raise ValueError(
            f'{argument}: {name!r} must have shape {expected}, got {shape}; take the gradient of the loss with respect '
            'to model.probe()'
        )


def check_positions(name: str, positions: Any, bound: int, must_ascend: bool) -> None:
    """Refuses positions that are out of range or repeated.

    Traced positions pass, and so do those that lie in other processes.

    Args:
      name: the name of the leaf.
      positions: along the last axis they must differ.
      bound: all are below it.
      must_ascend: along the last axis they must also ascend.

    Raises:
      ValueError: positions do not fit.
    """
    is_elsewhere = not getattr(positions, 'is_fully_addressable', True)
    if tree_lib.is_traced(positions) or is_elsewhere:
        return
    found = np.asarray(positions)
    start = f'topology: {name!r} must have'
    if found.dtype.kind not in 'iu':
        raise ValueError(f'{start} whole numbers for positions, got {found.dtype}; {_AS_PACKED}')
    if not found.size:
        return
    least = int(found.min())
    greatest = int(found.max())
    if least < 0 or greatest >= bound:
        wrong = least if least < 0 else greatest
        raise ValueError(f'{start} positions from 0 to {bound - 1}, got {wrong}; {_AS_PACKED}')
    in_order = found if must_ascend else np.sort(found, axis=-1)
    before = in_order[..., :-1]
    after = in_order[..., 1:]
    out_of_order = after[after <= before]
    if out_of_order.size:
        wrong = out_of_order[0]
        rule = 'ascending positions' if must_ascend else 'each position once in a group'
        raise ValueError(f'{start} {rule}, and {wrong} breaks that; {_AS_PACKED}')
