"""Sparsity types as they are written in configs."""

import re
from collections.abc import Callable
from typing import Any

from jaxpruner.sparsity_types.base import SparsityType, Unstructured
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


def is_n_by_m_without_axis(entry: Any) -> bool:
    """Whether a setting is N:M as a string that names no axis."""
    return isinstance(entry, str) and any(
        re.fullmatch(pattern, entry) for pattern in _N_BY_M_WITHOUT_AXIS
    )


def parse_sparsity_type(text: str) -> SparsityType:
    """Reads a sparsity type as it stands in configs.

    Args:
      text: `'unstructured'`, `'nm_2,4'`, `'nm_2,4,0'` (with the axis), `'2:4'`, `'block_4,4'` or `'channel_-1'`.

    Returns:
      The validated type.

    Raises:
      ValueError: the text is none of these.

    >>> parse_sparsity_type('2:4') == parse_sparsity_type('nm_2,4') == NByM(2, 4)
    True
    """
    for pattern, make in _PATTERNS:
        match = re.fullmatch(pattern, text)
        if match:
            return make(*map(int, match.groups()))
    raise ValueError(
        f"unknown sparsity type {text!r}; write 'unstructured', 'nm_2,4' or '2:4', 'block_4,4', or 'channel_-1'"
    )
