"""The numbers in the arguments of a constructor, wherever they stand: in mappings, sequences and dataclasses.

>>> arguments = {'layers': [8, 4], 'rate': 0.5, 'bias': True}
>>> dict(numbers_in(arguments))
{('layers', 0): 8, ('layers', 1): 4, ('rate',): 0.5}
>>> changed(arguments, {('layers', 1): 2})
{'layers': [8, 2], 'rate': 0.5, 'bias': True}
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Value = int | float
# Keys, indices and names of fields that lead to a number.
Location = tuple[Any, ...]


def numbers_in(value: Any, location: Location = ()) -> Iterator[tuple[Location, Value]]:
    """The numbers in some arguments, and where they are."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield location, value
        return
    for key, inner in _entries(value):
        yield from numbers_in(inner, (*location, key))


def _entries(value: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return [(name, getattr(value, name)) for name in names]
    return []


def changed(value: Any, changes: Mapping[Location, Value]) -> Any:
    """Arguments with some numbers changed."""
    if not changes:
        return value
    if () in changes:
        return changes[()]
    inner = {}
    for key, entry in _entries(value):
        below = {}
        for location, number in changes.items():
            if location[0] == key:
                below[location[1:]] = number
        inner[key] = changed(entry, below)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **inner)
    kind: Any = type(value)
    if isinstance(value, Mapping):
        return kind(inner)
    return kind(*inner.values()) if hasattr(value, '_fields') else kind(inner.values())
