"""Checks of single settings: the type, then the range, with what is expected in the words of the error."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxpruner import tree as tree_lib

# (key, value) -> None, or an error that names both.
Check = Callable[[str, Any], Any]


def _accept(value: Any) -> bool:
    del value
    return True


@dataclasses.dataclass(frozen=True)
class Setting:
    """A check of a value by its type, and of a value of that type by its range."""

    expected: str
    has_type: Callable[[Any], bool]
    is_in_range: Callable[[Any], bool] = _accept

    def __call__(self, key: str, value: Any) -> None:
        """Raises a `TypeError` or a `ValueError` that names the key."""
        if not self.has_type(value):
            raise TypeError(f'{key} must be {self.expected}, got {value!r}')
        if not self.is_in_range(value):
            raise ValueError(f'{key} must be {self.expected}, got {value!r}')


def is_flag(value: Any) -> bool:
    """Whether it is true or false."""
    return isinstance(value, bool | np.bool_)


def is_word(value: Any) -> bool:
    """Whether it is a string."""
    return isinstance(value, str)


def is_integer(value: Any) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def are_names(value: Any) -> bool:
    """Whether it is a glob, or a list of globs and paths."""
    return is_word(value) or (_is_list(value) and all(map(_is_name, value)))


def are_stacks(value: Any) -> bool:
    """Whether it is what `are_names` accepts, or a mapping from names to axes."""
    if not isinstance(value, Mapping):
        return are_names(value)
    return all(map(_is_name, value)) and all(map(is_integer, value.values()))


def are_blocks(value: Any) -> bool:
    """Whether it is a list of what `are_names` accepts."""
    return _is_list(value) and all(map(are_names, value))


def _is_name(value: Any) -> bool:
    return is_word(value) or (_is_list(value) and all(map(is_word, value)))


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def number_in(
    low: float, high: float = math.inf, low_is_included: bool = True
) -> Callable[[Any], bool]:
    """Makes a check of a finite number; one that is being traced is not known, and passes."""

    def is_in_range(value: Any) -> bool:
        if tree_lib.is_traced(value):
            return True
        number = float(value)
        is_above = number >= low if low_is_included else number > low
        return is_above and number <= high and math.isfinite(number)

    return is_in_range


def choice(*words: str) -> Setting:
    """Makes a check of one of a few words."""
    return Setting(' or '.join(map(repr, words)), is_word, words.__contains__)


def by_value(check: Callable[[Any], Any]) -> Check:
    """Makes a check of a function whose errors name the key themselves."""
    return lambda key, value: check(value)


def check_scheduler(key: str, value: Any) -> None:
    """Refuses anything but an object with the methods of a schedule."""
    for method in ('is_mask_update_iter', 'get_sparsity_at_step'):
        if not callable(getattr(value, method, None)):
            raise TypeError(
                f'{key} must have the method {method}, as those in sparsity_schedules; got {value!r}'
            )
    if isinstance(value, type):
        raise TypeError(
            f'{key} must be a schedule, got the class {value!r}; write {value.__name__}(…)'
        )
