"""Channel sparsity: all weights with the same index along an axis are kept or removed together."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpruner.core.dtypes import at_least_float32
from jaxpruner.core.named_fields import NamedFields
from jaxpruner.sparsity_types.base import axis_in, check_whole


@dataclasses.dataclass(frozen=True)
class Channel(NamedFields):
    """All weights with the same index along `axis` are kept or removed together. Config string: `'channel_-1'`.

    Attributes:
      axis: the channels' axis.

    Raises:
      TypeError: the axis is no whole number.

    >>> Channel()
    Channel(axis=-1)
    """

    _fields = ('axis',)

    axis: int = -1

    def __post_init__(self):
        check_whole('axis', self.axis)

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Refuses a shape without the axis.

        Raises:
          ValueError: there is no such axis.

        >>> Channel(1).check_shape((3, 8), 'dense/kernel')
        """
        axis_in(self.axis, shape, where)

    def group_scores(self, scores: jax.Array) -> jax.Array:
        """Sums over all other axes: one score for each channel.

        >>> Channel(-1).group_scores(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
        Array([4., 6.], dtype=float32)
        """
        # Sums of 16-bit scores would overflow.
        dtype = at_least_float32(scores.dtype)
        return jnp.sum(scores.astype(dtype), axis=self._others(scores.ndim))

    def spread_groups(self, group_mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Gives each channel's verdict to all of its weights.

        >>> Channel(-1).spread_groups(jnp.array([0, 1], jnp.uint8), (2, 2))
        Array([[0, 1],
               [0, 1]], dtype=uint8)
        """
        return jnp.broadcast_to(jnp.expand_dims(group_mask, self._others(len(shape))), shape)

    def _others(self, rank: int) -> tuple[int, ...]:
        return tuple(axis for axis in range(rank) if axis != self.axis % rank)
