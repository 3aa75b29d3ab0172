"""Equality and hash of objects with many settings, so that they can be static arguments of `jax.jit`."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxpruner import tree as tree_lib


class EqualSettings:
    """Makes objects of one class equal if all of their attributes are; hashable, if these are.

    Functions are equal if they are the same function, `functools.partial` and trees by their parts, arrays by their
    values. What is being traced is equal to itself alone.

    The decorator `dataclasses.dataclass` makes an `__eq__` of all fields, and takes the hash away, for each class that
    has none in its own namespace. So each new subclass gets both there before the decorator sees it.

    >>> @dataclasses.dataclass
    ... class Pruner(EqualSettings):
    ...     filter_fn: object = None
    >>> Pruner(functools.partial(max, key=len)) == Pruner(functools.partial(max, key=len))
    True
    """

    def __init_subclass__(cls, **settings: Any):
        super().__init_subclass__(**settings)
        if '__eq__' in vars(cls) or '__hash__' in vars(cls):
            return
        for base in cls.__mro__:  # up to the first that somebody wrote, and not the decorator
            method = vars(base).get('__eq__')
            if method is not None and not is_generated(method):
                cls.__eq__ = method
                setattr(cls, '__hash__', base.__hash__)  # noqa: B010 - None, where it has no hash
                return

    def __eq__(self, other: object) -> Any:
        if self is other:
            return True
        if type(self) is not type(other):
            return NotImplemented
        return _settings(self) == _settings(other)

    def __hash__(self) -> int:
        hashes: list[Any] = [type(self)]
        for name, value in _settings(self).items():
            try:
                hashes.append(hash(value))
            except TypeError as error:
                raise TypeError(
                    f'{type(self).__name__} is not hashable, since {name}={vars(self).get(name)!r} is not ({error}); '
                    'if it is a dataclass of your own, make it frozen'
                ) from None
        return hash(tuple(hashes))


def is_generated(method: Any) -> bool:
    """Whether `dataclasses.dataclass` made a method; it wraps some of those that it makes."""
    inner = getattr(method, '__wrapped__', method)
    code = getattr(inner, '__code__', None)
    return code is not None and code.co_qualname.startswith('__create_fn__.')


def is_derived(value: Any) -> bool:
    """Whether a pruner made a value of its other settings, which are compared instead; its class says so."""
    return getattr(type(value), 'is_derived_setting', False)


def _settings(instance: Any) -> dict[str, Any]:
    """The attributes as they were given, in a form that can be compared and hashed."""
    values = dict(vars(instance))
    for field in dataclasses.fields(instance):
        if field.name not in values and hasattr(instance, field.name):  # it lies in a slot
            values[field.name] = getattr(instance, field.name)
    given = sorted(name for name, value in values.items() if not is_derived(value))
    return {name: _comparable(values[name]) for name in given}


def _comparable(value: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray):
        return _ByValue(value)
    if isinstance(value, functools.partial):
        keywords = sorted(value.keywords.items())
        return type(value), value.func, _comparable(value.args), _comparable(keywords)
    if type(value) is dict:  # as a tree it would lose its order
        return tuple([(key, _comparable(entry)) for key, entry in value.items()])
    leaves, treedef = jax.tree.flatten(value, is_leaf=lambda node: _is_compared_alone(node, value))
    if treedef.num_nodes == treedef.num_leaves == 1:
        return value
    return treedef, tuple(map(_comparable, leaves))


def _is_compared_alone(node: Any, tree: Any) -> bool:
    return node is not tree and (type(node) is dict or isinstance(node, functools.partial))


class _ByValue:
    """An array that is hashed by its dtype and shape, and compared by its values."""

    def __init__(self, array: Any):
        self.array = array

    def __hash__(self) -> int:
        return hash((str(self.array.dtype), self.array.shape))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ByValue):
            return False
        first, second = self.array, other.array
        if first is second:
            return True
        if tree_lib.is_traced(first) or tree_lib.is_traced(second):
            return False
        return hash(self) == hash(other) and bool(np.array_equal(_numbers(first), _numbers(second)))


def _numbers(array: Any) -> np.ndarray:
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)
