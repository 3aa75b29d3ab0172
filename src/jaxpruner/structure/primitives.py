"""The table of primitives. What is not in it pins every axis that it touches, and is never guessed."""

from jaxpruner.structure import contracting, elementwise, indexing, moving
from jaxpruner.structure.records import Row

ROWS: dict[str, Row] = {
    **elementwise.ROWS,
    **moving.ROWS,
    **contracting.ROWS,
    **indexing.ROWS,
}
