"""Pruners of equal settings are equal, and have a hash, so that they can be static arguments of `jax.jit`."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxpruner import checks, mask_calculator


class EqualSettings:
    """Makes pruners of one class equal if their settings are; hashable, if these are.

    Functions are equal if they are the same function, `functools.partial` and trees by their parts, arrays by their
    values. What is being traced is equal to itself alone.
    """

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        checks.check_constructor(cls, settings)
        return super().__new__(cls)

    def __init_subclass__(cls, **settings: Any):
        super().__init_subclass__(**settings)
        # The dataclass decorator would give the class an equality of all fields, and take its hash away.
        if '__eq__' not in vars(cls):
            cls.__eq__, cls.__hash__ = cls.__eq__, cls.__hash__

    def __eq__(self, other: object) -> Any:
        if type(self) is not type(other):
            return NotImplemented
        return self is other or _settings(self, True) == _settings(other, True)

    def __hash__(self) -> int:
        return hash((type(self), _settings(self, False)))


def _settings(pruner, reads_arrays):
    """The settings as they were given, in a form that can be compared; a hash reads no arrays."""
    names = {*vars(pruner), *(field.name for field in dataclasses.fields(pruner))}
    values = {name: getattr(pruner, name, None) for name in sorted(names)}
    values['topk_fn'] = mask_calculator.own_topk_fn(pruner.topk_fn)

    def comparable(value):
        match value:
            case jax.core.Tracer():
                return id(value)
            case jax.Array() | np.ndarray():
                return str(value.dtype), value.shape, _bytes(value) if reads_arrays else b''
            case functools.partial():
                return (
                    value.func,
                    comparable(value.args),
                    comparable(sorted(value.keywords.items())),
                )
            case Mapping():
                return tuple((key, comparable(entry)) for key, entry in value.items())
            case list() | tuple():
                return tuple(map(comparable, value))
        leaves, treedef = jax.tree.flatten(value)
        return value if treedef.num_nodes == 1 else (treedef, tuple(map(comparable, leaves)))

    return comparable(values)


def _bytes(array):
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():
            array = jax.random.key_data(array)
    return np.asarray(array).tobytes()
