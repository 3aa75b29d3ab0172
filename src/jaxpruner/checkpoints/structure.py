"""Which structure the zeros of an array have: N:M, blocks, dead channels. Large arrays are looked at in parts."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpruner.checkpoints.parts import Part, parts_of

_GROUP_LENGTHS = (2, 4, 8, 16)
# Groups that have weights at all have this share of N of them, at least: N:M by chance leaves most groups far emptier.
_FULL = 0.75


class NOfM(NamedTuple):
    """Of each m weights along an axis at most n are not zero.

    >>> str(NOfM(2, 4, 1))
    '2:4 along axis 1'
    """

    n: int
    m: int
    axis: int

    def __str__(self) -> str:
        return f'{self.n}:{self.m} along axis {self.axis}'


class Structure(NamedTuple):
    """The zeros of an array.

    >>> Structure(size=4, nonzeros=1, n_of_m=None, block=None, dead=(1, 1)).sparsity
    0.75
    """

    size: int
    nonzeros: int
    n_of_m: NOfM | None  # that with the least n / m, then the least m, that holds
    block: (
        tuple[int, int] | None
    )  # height and width over the last two axes; each block is all zero or not zero at all
    dead: tuple[
        int, ...
    ]  # for each axis how many of its indices have no weight that is not zero; () of vectors

    @property
    def sparsity(self) -> float:
        """The share of zeros."""
        return 1 - self.nonzeros / self.size if self.size else 0.0


def structure_of(array: np.ndarray) -> Structure:
    """The structure of an array that is at hand.

    Args:
      array: numbers of any shape; NaN is not zero.

    >>> structure_of(np.tile([0.0, 1.0, 2.0, 0.0], (3, 2)))
    Structure(size=24, nonzeros=12, n_of_m=NOfM(n=1, m=2, axis=1), block=None, dead=(0, 4))
    """
    survey = Survey(array.shape)
    flat = array.reshape(-1)
    for part in parts_of(array.shape, multiple=_GROUP_LENGTHS[-1]):
        survey.add(part, flat[part.start : part.start + part.size].reshape(part.shape))
    return survey.structure()


class Survey:
    """Finds the structure of an array that comes in parts.

    Args:
      shape: the array's.

    >>> survey = Survey((2, 2))
    >>> for part in parts_of((2, 2), size=2):
    ...     survey.add(part, np.array([[0.0, 1.0]]))
    >>> survey.structure().dead
    (0, 1)
    """

    def __init__(self, shape: Sequence[int]):
        self._shape = tuple(shape)
        self._nonzeros = 0
        self._alive = [np.zeros(length, bool) for length in self._shape]
        self._groups = {
            axis: {m: _Groups() for m in _GROUP_LENGTHS if length and length % m == 0}
            for axis, length in enumerate(self._shape)
        }
        self._blocks = _Blocks(self._shape[-2:]) if len(self._shape) > 1 else None

    def add(self, part: Part, array: np.ndarray) -> None:
        """Looks at the next part.

        Args:
          part: which, in flat order.
          array: its weights.
        """
        mask = (array != np.zeros((), array.dtype)).astype(np.uint8)
        self._nonzeros += int(np.count_nonzero(mask))
        if not mask.ndim or not mask.size:
            return
        for axis, alive in enumerate(self._alive):
            others = tuple(other for other in range(mask.ndim) if other != axis)
            alive[part.offset[axis] : part.offset[axis] + part.shape[axis]] |= mask.any(others)
        for axis, groups in self._groups.items():
            self._count_groups(axis, groups, part, mask)
        if self._blocks is not None:
            self._blocks.add(part, mask)

    def _count_groups(
        self, axis: int, groups: dict[int, '_Groups'], part: Part, mask: np.ndarray
    ) -> None:
        sums = np.moveaxis(mask, axis, -1)
        for m in _GROUP_LENGTHS:
            if m not in groups:
                return
            if part.offset[axis] % m or part.shape[axis] % m:  # the part cuts groups
                groups.clear()
                return
            sums = sums[..., 0::2] + sums[..., 1::2]
            groups[m].most = max(groups[m].most, int(sums.max()))
            groups[m].filled += int(np.count_nonzero(sums))
        if groups and groups[max(groups)].most == max(
            groups
        ):  # a full group is full in all lengths
            groups.clear()

    def structure(self) -> Structure:
        """What has been found in the parts that were added."""
        size = math.prod(self._shape)
        some = 0 < self._nonzeros < size
        held = [
            NOfM(groups.most, m, axis)
            for axis, lengths in self._groups.items()
            for m, groups in lengths.items()
            if some and groups.most < m and self._nonzeros >= _FULL * groups.most * groups.filled
        ]
        n_of_m = min(held, key=lambda held: (held.n / held.m, held.m, -held.axis), default=None)
        block = self._blocks.block() if self._blocks is not None and some else None
        dead = (
            tuple(int(np.count_nonzero(~alive)) for alive in self._alive)
            if len(self._shape) > 1
            else ()
        )
        return Structure(size, self._nonzeros, n_of_m, block, dead)


class _Groups:
    """The groups of one length along one axis."""

    def __init__(self):
        self.most = 0  # weights not zero in the fullest one
        self.filled = 0  # groups with any


class _Blocks:
    """The largest blocks in which zeros stand together: what all places have in common at which the mask changes."""

    def __init__(self, shape: tuple[int, ...]):
        self._shape = shape
        self._steps = [
            0,
            0,
        ]  # greatest common divisors along the last two axes; 0 where nothing has changed
        self._last_row = np.zeros(shape[-1], np.uint8)

    def add(self, part: Part, mask: np.ndarray) -> None:
        if part.shape[-1] != self._shape[-1]:  # rows too long to look at two of them
            self._steps = [1, 1]
            return
        if self._steps[0] != 1:
            changed = (mask[..., 1:, :] != mask[..., :-1, :]).any(
                tuple(i for i in range(mask.ndim) if i != mask.ndim - 2)
            )
            places = part.offset[-2] + 1 + np.flatnonzero(changed)
            rows = mask.reshape(-1, mask.shape[-1])
            if part.offset[-2] and not np.array_equal(self._last_row, rows[0]):
                places = np.append(places, part.offset[-2])
            self._last_row = rows[-1]
            self._steps[0] = int(np.gcd.reduce(places, initial=self._steps[0]))
        if self._steps[1] != 1:
            changed = (mask[..., 1:] != mask[..., :-1]).any(tuple(range(mask.ndim - 1)))
            self._steps[1] = int(np.gcd.reduce(1 + np.flatnonzero(changed), initial=self._steps[1]))

    def block(self) -> tuple[int, int] | None:
        height, width = self._steps
        # Blocks as long as an axis are channels.
        return (height, width) if height and width and height * width > 1 else None
