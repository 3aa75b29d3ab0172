"""The table of primitives. A primitive without a row pins every axis that it touches; nothing is guessed."""

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
    """Whether a primitive makes new values, as `iota` does."""
    row = ROWS.get(name)
    return row is not None and row.resized is resizing.from_nothing


def fills_rule(name: str) -> Callable[..., list[Any]]:
    """The rule for the fills of a primitive's results."""
    if name not in ROWS:
        return moving_fills.nothing
    return ROWS[name].fills


def resized_rule(name: str) -> Callable[..., list[Any]]:
    """How a primitive runs on smaller operands. It has a row, since the axes of others are pinned."""
    return ROWS[name].resized or resizing.unchanged
