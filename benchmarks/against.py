"""A subject measured with the library of this checkout and with another's, in turn."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.elsewhere import printed_elsewhere
from benchmarks.report import Row
from benchmarks.timing import Ratio, Timing, ratio

PACKAGE = Path('src') / 'jaxpruner'
# Each measures with both libraries.
PARTS = 3
HERE = Path(__file__).parents[1]

# Columns by the name of the row.
_Printed = dict[str, dict[str, Any]]


def compare(name: str, columns: Sequence[str], size: str, rounds: int, other: Path) -> list[Row]:
    """Measures the subject in processes with either library, each first in turn.

    Args:
      name: the subject.
      columns: its columns.
      size: that of the subject.
      rounds: in all parts together.
      other: another checkout; the benchmarks are those of this one.

    Returns:
      For each row and column, how many times as much it is with this library, part by part.
    """
    rounds_of_a_part = max(2, -(-rounds // PARTS))
    ours: list[_Printed] = []
    theirs: list[_Printed] = []
    in_turn = [(HERE, ours), (other.resolve(), theirs)]
    for _ in range(PARTS):
        for tree, parts in in_turn:
            parts.append(_printed(name, size, rounds_of_a_part, tree))
        in_turn.reverse()
    rows = []
    for row in ours[0]:
        rows.append(Row(row, tuple(_ratio(row, column, ours, theirs) for column in columns)))
    return rows


def _printed(name: str, size: str, rounds: int, tree: Path) -> _Printed:
    source = str(tree / PACKAGE.parent)
    path = os.pathsep.join([source, *filter(None, [os.environ.get('PYTHONPATH')])])
    environment = {'PYTHONPATH': path}
    printed = json.loads(printed_elsewhere(name, size, rounds, True, environment))
    if not Path(printed['library']).is_relative_to(tree):
        raise RuntimeError(f'{printed["library"]} was measured rather than the library in {source}')
    return {row.pop('name'): row for row in printed['rows']}


def _ratio(row: str, column: str, ours: list[_Printed], theirs: list[_Printed]) -> Ratio | None:
    """Of the numbers or medians, where both have them and they are not 0."""
    mine, other = ([_number(part, row, column) for part in parts] for parts in (ours, theirs))
    if not (all(mine) and all(other)):
        return None
    return ratio(Timing(mine), Timing(other))


def _number(part: _Printed, row: str, column: str) -> float:
    """Not a number and nothing count as 0."""
    value = part.get(row, {}).get(column)
    if isinstance(value, dict):
        return value['median']
    return value if isinstance(value, int | float) else 0.0
