"""The numbers in the arguments of a constructor, also inside mappings, sequences and dataclasses.

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
# The keys, indices and names of fields that lead to a number.
Location = tuple[Any, ...]


def numbers_in(value: Any, location: Location = ()) -> Iterator[tuple[Location, Value]]:
    """Yields the location and value of each number in some arguments."""
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
        entries = []
        for field in dataclasses.fields(value):
            if field.init:
                entries.append((field.name, getattr(value, field.name)))
        return entries
    return []


def changed(value: Any, changes: Mapping[Location, Value]) -> Any:
    """Returns arguments with some numbers changed."""
    if not changes:
        return value
    if () in changes:
        return changes[()]
    new_entries = {}
    for key, entry in _entries(value):
        changes_of_entry = {}
        for (first, *rest), number in changes.items():
            if first == key:
                changes_of_entry[tuple(rest)] = number
        new_entries[key] = changed(entry, changes_of_entry)
    return _rebuilt(value, new_entries)


def _rebuilt(value: Any, entries: Mapping[Any, Any]) -> Any:
    """A mapping, sequence or dataclass of the same type with other entries."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **entries)
    constructor: Any = type(value)
    if isinstance(value, Mapping):
        return constructor(entries)
    if hasattr(value, '_fields'):  # a named tuple
        return constructor(*entries.values())
    return constructor(entries.values())
