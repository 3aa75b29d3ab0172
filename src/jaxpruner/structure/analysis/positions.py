"""Where the indices of atoms lie along an axis, and which positions of the axis stay after a cut."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxpruner.structure.analysis.axes import Axis

# Atom -> its kept indices, ascending; other atoms keep all.
KeepByAtom = Mapping[Axis, np.ndarray]


def kept_positions(axis: Axis, keep: KeepByAtom) -> np.ndarray:
    """The positions along an axis that stay, ascending.

    Args:
      axis: an expression.
      keep: atom -> its kept indices, ascending; other atoms keep all.

    >>> from jaxpruner.structure.analysis.axes import atom, product, total
    >>> heads, features = atom(2), atom(3)
    >>> kept_positions(total([product([heads, features]), atom(2)]), {features: np.array([0, 2])}).tolist()
    [0, 2, 3, 5, 6, 7]
    """
    axis = axis.resolved()
    if axis.form == 'atom':
        all_indices = np.arange(axis.size)
        return np.asarray(keep.get(axis, all_indices))
    if axis.form == 'sum':
        start = 0
        segments = []
        for part in axis.parts:
            kept = kept_positions(part, keep)
            segments.append(start + kept)
            start += part.size
        return np.concatenate(segments)
    positions = np.zeros(1, int)
    for part in axis.parts:
        inner = kept_positions(part, keep)
        outer = positions[:, None] * part.size
        positions = (outer + inner).ravel()
    return positions


class Occurrence(NamedTuple):
    """Where an atom lies in an axis.

    Index i of the atom is at `offset + i * stride + j` for all j below the stride. It is there again at the distances
    that `repeats` lists, as in `Member`.
    """

    atom: Axis
    offset: int
    stride: int
    repeats: tuple[tuple[int, int], ...]

    def positions(self) -> np.ndarray:
        """The positions of each index along the axis, of shape `(atom.size, positions of one index)`."""
        shifts = np.zeros(1, int)
        for count, distance in (*self.repeats, (self.stride, 1)):
            distances = distance * np.arange(count)
            shifts = (shifts[:, None] + distances).ravel()
        indices = np.arange(self.atom.size)
        starts = self.offset + self.stride * indices
        return starts[:, None] + shifts


def occurrences(axis: Axis) -> list[Occurrence]:
    """Where the atoms of an expression lie.

    >>> from jaxpruner.structure.analysis.axes import atom, product
    >>> for _, offset, stride, repeats in occurrences(product([atom(2), atom(3)])):
    ...     print(offset, stride, repeats)
    0 3 ()
    0 1 ((2, 3),)
    """
    axis = axis.resolved()
    if axis.form == 'atom':
        return [Occurrence(axis, 0, 1, ())]
    if axis.form == 'sum':
        return _occurrences_in_sum(axis)
    return _occurrences_in_product(axis)


def _occurrences_in_sum(axis: Axis) -> list[Occurrence]:
    moved = []
    start = 0
    for part in axis.parts:
        for occurrence in occurrences(part):
            offset = start + occurrence.offset
            moved.append(occurrence._replace(offset=offset))
        start += part.size
    return moved


def _occurrences_in_product(axis: Axis) -> list[Occurrence]:
    scaled = []
    outer, inner = 1, axis.size  # products of the factors before and after the current one
    for part in axis.parts:
        inner //= part.size
        outer_repeats = ((outer, part.size * inner),) if outer > 1 else ()
        for atom, offset, stride, repeats in occurrences(part):
            inner_repeats = [(count, distance * inner) for count, distance in repeats]
            all_repeats = (*outer_repeats, *inner_repeats)
            scaled.append(Occurrence(atom, offset * inner, stride * inner, all_repeats))
        outer *= part.size
    return scaled


def indices_of(atom: Axis, axis: Axis) -> list[np.ndarray]:
    """The indices of an atom at each position along an axis, -1 where there is none.

    A position has an index for each factor that is the atom, so that there is an array for each of them.

    >>> from jaxpruner.structure.analysis.axes import atom, product, total
    >>> channels = atom(2)
    >>> for indices in indices_of(channels, total([atom(1), channels, product([channels, channels])])):
    ...     print(indices.tolist())
    [-1, 0, 1, 0, 0, 1, 1]
    [-1, -1, -1, 0, 1, 0, 1]
    """
    arrays: list[np.ndarray] = []
    for occurrence in occurrences(axis):
        if occurrence.atom is not atom:
            continue
        positions = occurrence.positions()
        free = [indices for indices in arrays if (indices[positions] < 0).all()]
        if not free:
            arrays.append(np.full(axis.size, -1))
            free = arrays[-1:]
        free[0][positions] = np.arange(atom.size)[:, None]
    return arrays
