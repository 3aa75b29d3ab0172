"""Where the indices of atoms stand along an axis, and which positions stay where some are removed."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxpruner.structure.analysis.axes import Axis

# Atom -> its kept indices, ascending; of other atoms all are kept.
Keep = Mapping[Axis, np.ndarray]


def kept_positions(axis: Axis, keep: Keep) -> np.ndarray:
    """The positions along an axis that stay, ascending.

    Args:
      axis: an expression.
      keep: atom -> its kept indices, ascending; of other atoms all are kept.

    >>> from jaxpruner.structure.analysis.axes import atom, product, total
    >>> heads, features = atom(2), atom(3)
    >>> kept_positions(total([product([heads, features]), atom(2)]), {features: np.array([0, 2])}).tolist()
    [0, 2, 3, 5, 6, 7]
    """
    axis = axis.resolved()
    if axis.form == 'atom':
        return np.asarray(keep.get(axis, np.arange(axis.size)))
    if axis.form == 'sum':
        before = 0
        positions = []
        for part in axis.parts:
            positions.append(before + kept_positions(part, keep))
            before += part.size
        return np.concatenate(positions)
    kept = np.zeros(1, int)
    for part in axis.parts:
        inside = kept_positions(part, keep)
        kept = (kept[:, None] * part.size + inside).ravel()
    return kept


class Occurrence(NamedTuple):
    """Where an atom stands in an axis.

    Index i of the atom is at `offset + i * stride + j` for all j below the stride, and again at distances of `repeats`,
    pairs of a count and a distance, outermost first.
    """

    atom: Axis
    offset: int
    stride: int
    repeats: tuple[tuple[int, int], ...]

    def positions(self) -> np.ndarray:
        """The positions of each index along the axis: an array of shape (atom.size, positions of one index)."""
        starts = self.offset + self.stride * np.arange(self.atom.size)[:, None]
        shifts = np.zeros(1, int)
        for count, distance in self.repeats:
            shifts = (shifts[:, None] + distance * np.arange(count)).ravel()
        shifts = (shifts[:, None] + np.arange(self.stride)).ravel()
        return starts + shifts


def occurrences(axis: Axis) -> list[Occurrence]:
    """Where the atoms of an expression stand.

    >>> from jaxpruner.structure.analysis.axes import atom, product
    >>> [(found.offset, found.stride, found.repeats) for found in occurrences(product([atom(2), atom(3)]))]
    [(0, 3, ()), (0, 1, ((2, 3),))]
    """
    axis = axis.resolved()
    if axis.form == 'atom':
        return [Occurrence(axis, 0, 1, ())]
    found = []
    if axis.form == 'sum':
        before = 0
        for part in axis.parts:
            for inside in occurrences(part):
                found.append(inside._replace(offset=before + inside.offset))
            before += part.size
        return found
    outer, inner = 1, axis.size
    for part in axis.parts:
        inner //= part.size
        repeats = ((outer, part.size * inner),) if outer > 1 else ()
        for inside in occurrences(part):
            scaled = tuple([(count, distance * inner) for count, distance in inside.repeats])
            found.append(
                Occurrence(
                    inside.atom, inside.offset * inner, inside.stride * inner, repeats + scaled
                )
            )
        outer *= part.size
    return found


def indices_of(atom: Axis, axis: Axis) -> np.ndarray:
    """The index of an atom for each position along an axis, -1 where it has none.

    >>> from jaxpruner.structure.analysis.axes import atom, total
    >>> heads = atom(2)
    >>> indices_of(heads, total([atom(1), heads, heads])).tolist()
    [-1, 0, 1, 0, 1]
    """
    indices = np.full(axis.size, -1)
    for found in occurrences(axis):
        if found.atom is atom:
            indices[found.positions()] = np.arange(atom.size)[:, None]
    return indices
