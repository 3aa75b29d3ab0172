"""One short line for an object with many settings: those that differ from their defaults."""

import dataclasses
import functools
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.core import text_tables

# Longer texts of a setting lose their middle.
_LONGEST_SETTING = 60
# Of longer containers the first entries are shown.
_MOST_ENTRIES = 4
_ELLIPSIS = '…'


class ShortRepr:
    """Gives a dataclass and its subclasses a `repr` of one line; a class that defines its own keeps it.

    The decorator `dataclasses.dataclass` makes a `repr` of all fields for each class that has none in its own
    namespace. So each new subclass gets one there before the decorator sees it.

    >>> @dataclasses.dataclass
    ... class Pruner(ShortRepr):
    ...     rng_seed: int = 8
    ...     scores: object = None
    >>> Pruner(), Pruner(scores=np.abs)
    (Pruner(), Pruner(scores=absolute))
    """

    def __init_subclass__(cls, **settings: Any):
        super().__init_subclass__(**settings)
        if '__repr__' not in vars(cls):
            cls.__repr__ = _nearest_repr(cls)

    @reprlib.recursive_repr(_ELLIPSIS)
    def __repr__(self) -> str:
        return f'{type(self).__name__}({", ".join(_changed_settings(self))})'


def _nearest_repr(cls: type) -> Any:
    """Finds the `__repr__` that somebody wrote, and not the decorator, in the first base that has one."""
    for base in cls.__mro__:
        method = vars(base).get('__repr__')
        if method is not None and not is_generated(method):
            return method
    raise AssertionError(cls)  # `object` has one


def is_generated(method: Any) -> bool:
    """Whether `dataclasses.dataclass` made a method; it wraps some of those that it makes."""
    inner = getattr(method, '__wrapped__', method)
    code = getattr(inner, '__code__', None)
    return code is not None and code.co_qualname.startswith('__create_fn__.')


def _changed_settings(instance: Any) -> list[str]:
    """Lists the fields that differ from their defaults as `name=value`, the sparsity in front."""
    fields: dict[str, dataclasses.Field] = {}
    # A class that is no dataclass itself, below a mixin that is one, would show the mixin's fields alone.
    for base in reversed(type(instance).__mro__):
        if '__dataclass_fields__' in vars(base):
            fields |= {field.name: field for field in dataclasses.fields(base) if field.repr}
    values = vars(instance)  # as they were given: reading an attribute may make a key
    settings = []
    for name in dict.fromkeys(['sparsity', *fields]):
        if name not in fields or name not in values:
            continue
        value = values[name]
        if not _is_default(value, fields[name]) and not is_derived(value):
            text = text_tables.shorten(describe(value), _LONGEST_SETTING)
            settings.append(f'{name}={text}')
    return settings


def is_derived(value: Any) -> bool:
    """Whether a pruner made a value of its other settings, which are shown instead; its class says so."""
    return getattr(type(value), 'is_derived_setting', False)


def _is_default(value: Any, field: dataclasses.Field) -> bool:
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if value is default:
        return True
    if type(value) is not type(default) or isinstance(value, jax.Array | np.ndarray):
        return False
    try:
        return bool(value == default)
    except (ValueError, TypeError):  # containers of arrays
        return False


def describe(value: Any) -> str:
    """Describes a setting on one line: functions by name, scalars by value, other arrays by dtype and shape.

    >>> describe(functools.partial(max, key=len)), describe(np.zeros((2, 3))), describe([1, 2, 3, 4, 5, 6])
    ('max(key=len)', 'float64[2,3]', '[1, 2, 3, 4, …]')
    """
    if isinstance(value, jax.Array | np.ndarray):
        if _is_known_number(value):
            return str(np.asarray(value))
        return f'{value.dtype}[{",".join(map(str, value.shape))}]'
    if isinstance(value, functools.partial):
        arguments = list(map(describe, value.args))
        arguments += [f'{name}={describe(argument)}' for name, argument in value.keywords.items()]
        return f'{describe(value.func)}({", ".join(arguments)})'
    if isinstance(value, dict):
        entries = [f'{key!r}: {describe(entry)}' for key, entry in value.items()]
        return f'{{{_first_entries(entries)}}}'
    if type(value) is list:
        return f'[{_first_entries(list(map(describe, value)))}]'
    if type(value) is tuple:
        comma = ',' if len(value) == 1 else ''
        return f'({_first_entries(list(map(describe, value)))}{comma})'
    if _has_generated_repr(value):
        return f'{type(value).__name__}({", ".join(_arguments(value))})'
    name = getattr(value, '__name__', None)
    if isinstance(name, str):
        # The schedules of optax are functions inside the functions that users call.
        return value.__qualname__.partition('.')[0] if _is_of_optax(value) else name
    text = ' '.join(repr(value).split())
    # A default `repr` shows an address.
    return f'{type(value).__name__}()' if ' object at 0x' in text else text


def _is_known_number(array: Any) -> bool:
    """Whether an array is a scalar whose value is there to be read."""
    if array.ndim or not jnp.issubdtype(array.dtype, jnp.number):
        return False
    if not isinstance(array, jax.Array):
        return True
    return not tree_lib.is_traced(array) and not array.is_deleted() and array.is_fully_addressable


def _is_of_optax(function: Any) -> bool:
    module = getattr(function, '__module__', None) or ''
    return module.startswith('optax.') and hasattr(function, '__qualname__')


def _first_entries(texts: list[str]) -> str:
    if len(texts) > _MOST_ENTRIES:
        texts = [*texts[:_MOST_ENTRIES], _ELLIPSIS]
    return ', '.join(texts)


def _has_generated_repr(value: Any) -> bool:
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and is_generated(type(value).__repr__)
    )


def _arguments(value: Any) -> list[str]:
    """Lists a dataclass's arguments: by position as far as that is easily read, then by name; without defaults."""
    fields = [field for field in dataclasses.fields(value) if field.init and field.repr]
    changed = [field for field in fields if not _is_default(getattr(value, field.name), field)]
    by_position = _easily_read_positions(value, fields, changed)
    texts = [describe(getattr(value, field.name)) for field in by_position]
    for field in changed:
        if field not in by_position:
            texts.append(f'{field.name}={describe(getattr(value, field.name))}')
    return texts


def _easily_read_positions(
    value: Any, fields: list[dataclasses.Field], changed: list[dataclasses.Field]
) -> list[dataclasses.Field]:
    """Takes the first fields, up to a flag, to a second default, or to the last that is changed."""
    by_position: list[dataclasses.Field] = []
    defaults = 0
    for number, field in enumerate(fields):
        defaults += field not in changed
        is_flag = isinstance(getattr(value, field.name), bool)
        if field.kw_only or is_flag or defaults > 1:
            break
        if field in changed:
            by_position = fields[: number + 1]
    return by_position
