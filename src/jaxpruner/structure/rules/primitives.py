"""The table of primitives. What is not in it pins every axis that it touches, and is never guessed."""

from collections.abc import Callable
from typing import Any

from jaxpruner.structure.analysis.records import Row
from jaxpruner.structure.rules import (
    contracting,
    elementwise,
    indexing,
    moving,
    moving_fills,
    resizing,
)

ROWS: dict[str, Row] = {
    **elementwise.ROWS,
    **moving.ROWS,
    **contracting.ROWS,
    **indexing.ROWS,
}


def makes_from_nothing(name: str) -> bool:
    """Whether a primitive makes values without operands, such as `iota`."""
    row = ROWS.get(name)
    return row is not None and row.resized is resizing.from_nothing


def fills_rule(name: str) -> Callable[..., list[Any]]:
    """What a primitive makes of removed channels."""
    if name not in ROWS:
        return moving_fills.nothing
    return ROWS[name].fills


def resized_rule(name: str) -> Callable[..., list[Any]]:
    """How a primitive runs on smaller operands. Whatever is not in the table is never asked: its axes are pinned."""
    return ROWS[name].resized or resizing.unchanged
