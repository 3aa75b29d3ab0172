"""Which structure the zeros of an array have: N:M, blocks, dead channels. Large arrays are looked at in parts."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpruner.checkpoints.parts import Part, parts_of

_GROUP_LENGTHS = (2, 4, 8, 16)
# Parts that start at its multiples cut no group.
LONGEST_GROUP = _GROUP_LENGTHS[-1]
# Groups that have nonzeros at all have at least this share of N of them. N:M by chance leaves most groups far emptier.
_FULL = 0.75


class NOfM(NamedTuple):
    """At most n of each m weights along an axis are not zero."""

    n: int
    m: int
    axis: int

    def __str__(self) -> str:
        return f'{self.n}:{self.m} along axis {self.axis}'


class Structure(NamedTuple):
    """The zeros of an array."""

    size: int
    nonzeros: int
    # Of those that hold the one with the least n / m, then the least m, then the last axis.
    n_of_m: NOfM | None
    # Height and width over the last two axes; each block is all zero or all nonzero.
    block: tuple[int, int] | None
    # For each axis the number of its indices without any nonzero; () of vectors.
    dead: tuple[int, ...]

    @property
    def sparsity(self) -> float:
        """The share of zeros."""
        return 1 - self.nonzeros / self.size if self.size else 0.0


def structure_of(array: np.ndarray) -> Structure:
    """Finds the structure of an array that is at hand; NaN is not zero.

    >>> structure_of(np.tile([0.0, 1.0, 2.0, 0.0], (3, 2)))
    Structure(size=24, nonzeros=12, n_of_m=NOfM(n=1, m=2, axis=1), block=None, dead=(0, 4))
    """
    survey = Survey(array.shape)
    for part in parts_of(array.shape, multiple=LONGEST_GROUP):
        survey.add(part, part.of(array))
    return survey.structure()


class Survey:
    """Finds the structure of an array that comes in parts, in flat order."""

    def __init__(self, shape: Sequence[int]):
        self._shape = tuple(shape)
        self._nonzeros = 0
        self._alive = [np.zeros(length, bool) for length in self._shape]
        self._groups = [_Groups(axis, length) for axis, length in enumerate(self._shape)]
        self._blocks = _Blocks(self._shape[-2:]) if len(self._shape) > 1 else None

    def add(self, part: Part, array: np.ndarray) -> None:
        """Looks at the weights of the next part."""
        mask = (array != np.zeros((), array.dtype)).astype(np.uint8)
        self._nonzeros += int(np.count_nonzero(mask))
        if not mask.ndim or not mask.size:
            return
        for axis, alive in enumerate(self._alive):
            first = part.offset[axis]
            alive[first : first + part.shape[axis]] |= _any_except(mask, axis)
        for groups in self._groups:
            groups.add(part, mask)
        if self._blocks is not None:
            self._blocks.add(part, mask)

    @property
    def zeros(self) -> tuple[np.ndarray, ...]:
        """For each axis, whether all weights at an index are zero."""
        return tuple([~alive for alive in self._alive])

    def structure(self) -> Structure:
        """Returns the structure of the parts that were added."""
        size = math.prod(self._shape)
        is_partly_zero = 0 < self._nonzeros < size
        n_of_m = block = None
        if is_partly_zero:
            n_of_m = self._sparsest_n_of_m()
            block = None if self._blocks is None else self._blocks.block()
        dead = []
        if len(self._shape) > 1:
            dead = [int(np.count_nonzero(~alive)) for alive in self._alive]
        return Structure(size, self._nonzeros, n_of_m, block, tuple(dead))

    def _sparsest_n_of_m(self) -> NOfM | None:
        candidates: list[NOfM] = []
        for groups in self._groups:
            candidates += groups.n_of_m(self._nonzeros)
        return min(candidates, key=_preference, default=None)


def _preference(n_of_m: NOfM) -> tuple[float, int, int]:
    return (n_of_m.n / n_of_m.m, n_of_m.m, -n_of_m.axis)


class _Groups:
    """Groups of all lengths along one axis: the most nonzeros in a group, and the groups that have any."""

    def __init__(self, axis: int, axis_length: int):
        self._axis = axis
        self._most: dict[int, int] = {}  # by length of the groups
        self._nonempty: dict[int, int] = {}
        for m in _GROUP_LENGTHS:
            if axis_length and axis_length % m == 0:
                self._most[m] = self._nonempty[m] = 0

    def add(self, part: Part, mask: np.ndarray) -> None:
        counts = np.moveaxis(mask, self._axis, -1)
        for m in list(self._most):
            is_cut = part.offset[self._axis] % m or part.shape[self._axis] % m
            if is_cut:
                self._most.clear()
                return
            counts = counts[..., 0::2] + counts[..., 1::2]
            self._most[m] = max(self._most[m], int(counts.max()))
            self._nonempty[m] += int(np.count_nonzero(counts))
        longest = max(self._most, default=0)
        if longest and self._most[longest] == longest:  # a full group is full in all lengths
            self._most.clear()

    def n_of_m(self, nonzeros: int) -> list[NOfM]:
        """Lists what holds, the shortest groups first."""
        return [
            NOfM(n, m, self._axis)
            for m, n in self._most.items()
            if n < m and nonzeros >= _FULL * n * self._nonempty[m]
        ]


class _Blocks:
    """The largest blocks in which zeros stand together: what all indices have in common at which the mask changes."""

    def __init__(self, shape: tuple[int, ...]):
        self._width = shape[-1]
        # Greatest common divisors of these indices along the last two axes; 0 where the mask has not changed.
        self._row_step = 0
        self._column_step = 0
        self._last_row = np.zeros(shape[-1], np.uint8)

    def add(self, part: Part, mask: np.ndarray) -> None:
        if part.shape[-1] != self._width:  # rows too long to look at two of them
            self._row_step = self._column_step = 1
            return
        if self._row_step != 1:
            has_changed = _any_except(mask[..., 1:, :] != mask[..., :-1, :], mask.ndim - 2)
            indices = part.offset[-2] + 1 + np.flatnonzero(has_changed)
            rows = mask.reshape(-1, self._width)
            if part.offset[-2] and not np.array_equal(self._last_row, rows[0]):
                indices = np.append(indices, part.offset[-2])
            self._last_row = rows[-1]
            self._row_step = int(np.gcd.reduce(indices, initial=self._row_step))
        if self._column_step != 1:
            has_changed = _any_except(mask[..., 1:] != mask[..., :-1], mask.ndim - 1)
            indices = 1 + np.flatnonzero(has_changed)
            self._column_step = int(np.gcd.reduce(indices, initial=self._column_step))

    def block(self) -> tuple[int, int] | None:
        """Returns height and width; blocks as long as an axis are channels instead."""
        height, width = self._row_step, self._column_step
        return (height, width) if height and width and height * width > 1 else None


def _any_except(mask: np.ndarray, axis: int) -> np.ndarray:
    """Whether any weight is set behind each index of an axis."""
    other_axes = tuple(other for other in range(mask.ndim) if other != axis)
    return np.asarray(mask.any(other_axes))
