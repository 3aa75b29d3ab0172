"""Sparsity types as they are written in configs."""

import re
from collections.abc import Callable
from typing import Any

from jaxpruner.sparsity_types.base import SparsityType, Unstructured, is_sparsity_type
from jaxpruner.sparsity_types.block import Block
from jaxpruner.sparsity_types.channel import Channel
from jaxpruner.sparsity_types.n_by_m import NByM

_INTEGER = r'\s*([+-]?\d+)\s*'
_N_BY_M_WITHOUT_AXIS = (rf'{_INTEGER}:{_INTEGER}', rf'\s*nm_{_INTEGER},{_INTEGER}')
_PATTERNS: tuple[tuple[str, Callable[..., SparsityType]], ...] = (
    (r'\s*unstructured\s*', Unstructured),
    *[(pattern, NByM) for pattern in _N_BY_M_WITHOUT_AXIS],
    (rf'\s*nm_{_INTEGER},{_INTEGER},{_INTEGER}', NByM),
    (rf'\s*block_{_INTEGER},{_INTEGER}', lambda height, width: Block((height, width))),
    (rf'\s*channel_{_INTEGER}', Channel),
)
# What a name of one's own must not be.
_NAMES = ('unstructured', 'nm', 'block', 'channel', 'dense')

# Name -> function of a config string that begins with it.
OWN_TYPES: dict[str, Callable[[str], SparsityType]] = {}


def register_sparsity_type(name: str, parse: Callable[[str], SparsityType]) -> None:
    """Makes a sparsity type of your own known by name, so that configurations, recipes and the command can hold it.

    Args:
      name: with which its config strings begin: `'diagonal'` for `'diagonal'` and `'diagonal_4'`. Of several names that
        fit a string the longest counts.
      parse: makes the type of such a string, `'diagonal_4'`. The type is hashable (a frozen dataclass), and has the
        methods of `sparsity_types.GroupedType`.

    Raises:
      TypeError: the name is no string, or `parse` cannot be called.
      ValueError: the name has other characters than letters, digits and `_`, or is taken, by the library or by another
        function.

    >>> from jaxpruner.sparsity_types import Channel
    >>> register_sparsity_type('rows', lambda text: Channel(0))
    >>> parse_sparsity_type('rows')
    Channel(axis=0)
    """
    if not isinstance(name, str):
        raise TypeError(
            f"the name of a sparsity type must be a string, such as 'diagonal', got {name!r}"
        )
    if not name.isidentifier():
        raise ValueError(
            f'the name {name!r} of a sparsity type may have letters, digits and _ alone'
        )
    if name in _NAMES:
        raise ValueError(f'{name!r} is a config string of the library; choose another name')
    if not callable(parse):
        raise TypeError(
            f"{name!r}: give a function of the text, such as '{name}_4', that makes the type, got {parse!r}"
        )
    known = OWN_TYPES.get(name, parse)
    # A cell of a notebook that is run again defines its function anew.
    if _qualified_name(known) != _qualified_name(parse):
        raise ValueError(
            f'{name!r} is taken: it is read by {_qualified_name(known)}; choose another name'
        )
    OWN_TYPES[name] = parse


def _qualified_name(function: Callable[..., Any]) -> str:
    named = function if hasattr(function, '__qualname__') else type(function)
    return f'{named.__module__}.{named.__qualname__}'


def is_n_by_m_without_axis(entry: Any) -> bool:
    """Whether a setting is N:M as a string that names no axis."""
    return isinstance(entry, str) and any(
        re.fullmatch(pattern, entry) for pattern in _N_BY_M_WITHOUT_AXIS
    )


def parse_sparsity_type(text: str) -> SparsityType:
    """Reads a sparsity type as it stands in configs.

    Args:
      text: `'unstructured'`, `'nm_2,4'`, `'nm_2,4,0'` (with the axis), `'2:4'`, `'block_4,4'`, `'channel_-1'`, or one
        that begins with a name that was given to `register_sparsity_type`.

    Returns:
      The validated type.

    Raises:
      ValueError: the text is none of these.
      TypeError: a function that was registered makes something else.

    >>> parse_sparsity_type('2:4') == parse_sparsity_type('nm_2,4') == NByM(2, 4)
    True
    """
    for pattern, make in _PATTERNS:
        match = re.fullmatch(pattern, text)
        if match:
            return make(*map(int, match.groups()))
    fitting = [name for name in OWN_TYPES if f'{text}_'.startswith(f'{name}_')]
    if not fitting:
        own = ''.join(f', or {name!r}' for name in OWN_TYPES)
        raise ValueError(
            f"unknown sparsity type {text!r}; write 'unstructured', 'nm_2,4' or '2:4', 'block_4,4', or 'channel_-1'"
            f'{own}, or a name that you register with jaxpruner.register_sparsity_type'
        )
    name = max(fitting, key=len)
    made = OWN_TYPES[name](text)
    if not is_sparsity_type(made):
        raise TypeError(
            f'{text!r}: the function registered for {name!r} returned {made!r}, which is no sparsity type; it needs '
            'the methods of sparsity_types.GroupedType'
        )
    return made
