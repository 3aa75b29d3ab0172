"""Dataclasses that are read like named tuples, as the sparsity types of JaxPruner were."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self


class NamedFields:
    """Gives a frozen dataclass the methods of a named tuple.

    It is no tuple: JAX keeps it whole as a leaf of a pytree, and `NByM(1, 2)` is not equal to `Block((1, 2))`.
    `_fields` names what unpacking gives, in order. A field that is not named there has a default.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Point(NamedFields):
    ...     _fields = ('x', 'y')
    ...     x: int
    ...     y: int = 0
    >>> x, y = Point(3)
    >>> x, y, Point(3)._replace(y=1)
    (3, 0, Point(x=3, y=1))
    """

    _fields: ClassVar[tuple[str, ...]] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self, name) for name in self._fields])

    def __len__(self) -> int:
        return len(self._fields)

    def __bool__(self) -> bool:
        return True  # a type without fields is a type, too

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def _asdict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}

    def _replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    @classmethod
    def _make(cls, values: Iterable[Any]) -> Self:
        return cls(*values)
