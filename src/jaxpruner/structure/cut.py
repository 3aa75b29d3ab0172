"""What a cut keeps: along any axis the positions that stay, and values with these alone."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.axes import Axes, Axis
from jaxpruner.structure.positions import Keep, kept_positions


class Cut:
    """The channels that stay.

    Attributes:
      kept: atom -> its kept indices, ascending; of other atoms all are kept.

    >>> from jaxpruner.structure.axes import atom, product
    >>> heads, features = atom(2), atom(3)
    >>> cut = Cut({features: np.array([0, 2])})
    >>> cut.take(jnp.arange(6), (product([heads, features]),)).tolist()
    [0, 2, 3, 5]
    """

    def __init__(self, kept: Keep):
        self.kept = kept
        self._positions: dict[int, tuple[Axis, np.ndarray]] = {}  # by `id`; the axis stays alive

    def positions(self, axis: Axis) -> np.ndarray:
        """The positions along an axis that stay, ascending."""
        axis = axis.resolved()
        if id(axis) not in self._positions:
            self._positions[id(axis)] = axis, kept_positions(axis, self.kept)
        return self._positions[id(axis)][1]

    def size(self, axis: Axis) -> int:
        """How many positions of an axis stay."""
        return len(self.positions(axis))

    def shape(self, axes: Axes) -> tuple[int, ...]:
        """The shape of a value of these axes after the cut."""
        return tuple(map(self.size, axes))

    def touches(self, values: Iterable[Axes]) -> bool:
        """Whether one of some values gets smaller."""
        return any(self.size(axis) != axis.size for axes in values for axis in axes)

    def take(self, value: Any, axes: Axes, first: int = 0) -> Any:
        """The part of a value that stays, along its axes from `first` on; the value itself if that is all of it."""
        for i, axis in enumerate(axes[first:], first):
            if self.size(axis) != axis.size:
                value = take_sorted(value, self.positions(axis), i)
        return value


def take_sorted(value: Any, positions: np.ndarray, axis: int) -> Any:
    """The elements at ascending positions, on the device where the value is."""
    return jnp.take(
        value, positions, axis, mode='clip', indices_are_sorted=True, unique_indices=True
    )
