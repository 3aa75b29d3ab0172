"""Pruners of equal settings are equal, and have a hash, so that they can be static arguments of `jax.jit`."""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import checks, mask_calculator
from jaxpruner import tree as tree_lib


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
        return self is other or _settings(self) == _settings(other)

    def __hash__(self) -> int:
        hashes: list[Any] = [type(self)]
        for name, value in _settings(self).items():
            try:
                hashes.append(hash(value))
            except TypeError as error:
                raise TypeError(
                    f'{type(self).__name__} is not hashable, since {name}={getattr(self, name, None)!r} is not '
                    f'({error}); if it is a dataclass of your own, make it frozen'
                ) from None
        return hash(tuple(hashes))


def _settings(pruner):
    """The settings as they were given, in a form that can be compared and hashed."""
    names = {*vars(pruner), *(field.name for field in dataclasses.fields(pruner))}
    values = {name: getattr(pruner, name, None) for name in sorted(names)}
    values['topk_fn'] = mask_calculator.own_topk_fn(pruner.topk_fn)
    return {
        name: _comparable(value)
        for name, value in values.items()
        if not getattr(value, 'is_derived_setting', False)  # by what the pruner has done
    }


def _comparable(value):
    if isinstance(value, jax.Array | np.ndarray):
        return _ByValue(value)
    if isinstance(value, functools.partial):
        keywords = sorted(value.keywords.items())
        return value.func, _comparable(value.args), _comparable(keywords)
    if type(value) is dict:  # as a tree it would lose its order
        return tuple((key, _comparable(entry)) for key, entry in value.items())
    is_alone = lambda node: node is not value and isinstance(node, dict | functools.partial)  # noqa: E731
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_alone)
    if treedef.num_nodes == treedef.num_leaves == 1:
        return value
    return treedef, tuple(map(_comparable, leaves))


class _ByValue:
    """An array that is hashed by its dtype and shape, and compared by its values; a traced one by identity."""

    def __init__(self, array: Any):
        self.array = array

    def __hash__(self) -> int:
        return hash((str(self.array.dtype), self.array.shape))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ByValue) or hash(self) != hash(other):
            return False
        arrays = [self.array, other.array]
        if tree_lib.has_traced(arrays):
            return arrays[0] is arrays[1]
        if jnp.issubdtype(self.array.dtype, jax.dtypes.prng_key):
            arrays = list(map(jax.random.key_data, arrays))
        return bool(np.array_equal(arrays[0], arrays[1]))
