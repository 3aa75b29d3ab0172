"""A subject measured with the library of this checkout and with another's, in turn."""

import dataclasses
import json
import math
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


@dataclasses.dataclass(frozen=True)
class _Library:
    """The library of a checkout, and what was measured with it."""

    tree: Path
    parts: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def measure(self, subject: str, size: str, rounds: int) -> None:
        """Adds a part: the columns of each row by its name."""
        source = str(self.tree / PACKAGE.parent)
        paths = [source]
        if 'PYTHONPATH' in os.environ:
            paths.append(os.environ['PYTHONPATH'])
        environment = {'PYTHONPATH': os.pathsep.join(paths)}
        printed = json.loads(printed_elsewhere(subject, size, rounds, True, environment))
        library = printed['library']
        if not Path(library).is_relative_to(self.tree):
            raise RuntimeError(f'{library} was measured rather than the library in {source}')
        self.parts.append({row['name']: row for row in printed['rows']})

    def timing(self, row: str, column: str) -> Timing:
        """A number of each part; 0 where there is none."""
        numbers = []
        for part in self.parts:
            value = part.get(row, {}).get(column)
            if isinstance(value, dict):
                value = value['median']
            numbers.append(value if isinstance(value, int | float) else 0.0)
        return Timing(numbers)


def compare(subject: str, columns: Sequence[str], size: str, rounds: int, other: Path) -> list[Row]:
    """Measures the subject in processes with either library, each first in turn.

    Args:
      subject: its name.
      columns: its columns.
      size: how large its models are.
      rounds: in all parts together.
      other: another checkout; the benchmarks are those of this one.

    Returns:
      For each row and column, how many times as much it is with this library, part by part.
    """
    rounds_of_a_part = max(2, math.ceil(rounds / PARTS))
    ours, theirs = _Library(HERE), _Library(other.resolve())
    in_turn = [ours, theirs]
    for _ in range(PARTS):
        for library in in_turn:
            library.measure(subject, size, rounds_of_a_part)
        in_turn.reverse()
    rows = []
    for name in ours.parts[0]:
        ratios = []
        for column in columns:
            ratios.append(_ratio(ours.timing(name, column), theirs.timing(name, column)))
        rows.append(Row(name, tuple(ratios)))
    return rows


def _ratio(ours: Timing, theirs: Timing) -> Ratio | None:
    """Nothing where a number is missing or 0."""
    if not (all(ours.rounds) and all(theirs.rounds)):
        return None
    return ratio(ours, theirs)
