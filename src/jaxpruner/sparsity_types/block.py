"""Block sparsity: blocks over the last two axes are kept or removed whole."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpruner.core.dtypes import at_least_float32
from jaxpruner.core.named_fields import NamedFields
from jaxpruner.sparsity_types.base import check_whole


@dataclasses.dataclass(frozen=True)
class Block(NamedFields):
    """Blocks over the last two axes are kept or removed whole. Config string: `'block_4,4'`.

    Attributes:
      block_shape: height and width of a block.
      use_avg_pooling: a block's score is the mean of its scores, else their maximum.

    Raises:
      ValueError: not two positive lengths.

    >>> Block((4, 4))
    Block(block_shape=(4, 4), use_avg_pooling=True)
    """

    _fields = ('block_shape', 'use_avg_pooling')

    block_shape: tuple[int, int]
    use_avg_pooling: bool = True

    def __post_init__(self):
        if (
            not isinstance(self.block_shape, Sequence)
            or isinstance(self.block_shape, str)
            or len(self.block_shape) != 2
        ):
            raise ValueError(f'block_shape must be (height, width), got {self.block_shape!r}')
        # A list from a config file becomes hashable.
        object.__setattr__(self, 'block_shape', tuple(self.block_shape))
        height, width = self.block_shape
        check_whole('block height', height, 1)
        check_whole('block width', width, 1)

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Accepts every shape: blocks at the edges may be partial, a 1-D array is one row.

        >>> Block((4, 4)).check_shape((3, 3), 'kernel')
        """

    def group_scores(self, scores: jax.Array) -> jax.Array:
        """Computes means or maxima of the blocks, in one array with the blocks' rows and columns as its last axes.

        >>> Block((1, 2)).group_scores(jnp.array([[1.0, 3.0, 5.0]]))
        Array([[2., 5.]], dtype=float32)
        """
        # Sums of 16-bit scores would lose what tells blocks apart, and some floats of 8 bits have no infinity.
        dtype = at_least_float32(scores.dtype)
        padding_value = 0 if self.use_avg_pooling else -jnp.inf
        pooled, sizes = scores.astype(dtype), jnp.ones((), dtype)
        for axis, length in self._axes(scores.ndim):
            size = scores.shape[axis]
            blocks = -(-size // length)
            padding = [(0, 0)] * scores.ndim
            padding[axis] = (0, blocks * length - size)
            padded = jnp.pad(pooled, padding, constant_values=padding_value)
            before = pooled.shape[:axis]
            after = pooled.shape[axis + 1 :]
            split = padded.reshape(*before, blocks, length, *after)
            if self.use_avg_pooling:
                pooled = split.sum(axis + 1)
            else:
                pooled = split.max(axis + 1)
            left = size - length * jnp.arange(blocks)
            lengths = jnp.minimum(length, left).astype(dtype)
            ones = (1,) * len(after)
            sizes = sizes * lengths.reshape(blocks, *ones)
        return pooled / sizes if self.use_avg_pooling else pooled

    def spread_groups(self, group_mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Gives each block's verdict to all of its weights.

        >>> Block((1, 2)).spread_groups(jnp.array([[1, 0]], jnp.uint8), (1, 3))
        Array([[1, 1, 0]], dtype=uint8)
        """
        for axis, length in self._axes(len(shape)):
            # Broadcast, not jnp.repeat, which looks the verdicts up and gathers those of all devices for it.
            before = group_mask.shape[:axis]
            blocks = group_mask.shape[axis]
            after = group_mask.shape[axis + 1 :]
            verdicts = jnp.expand_dims(group_mask, axis + 1)
            spread = jnp.broadcast_to(verdicts, (*before, blocks, length, *after))
            padded = spread.reshape(*before, blocks * length, *after)
            group_mask = jax.lax.slice_in_dim(padded, 0, shape[axis], axis=axis)
        return group_mask

    def _axes(self, rank: int) -> list[tuple[int, int]]:
        """Lists axis and block length for each blocked axis: none of a scalar, one of a vector."""
        if not rank:
            return []
        height, width = self.block_shape
        both = [(rank - 2, height), (rank - 1, width)]
        return both[-rank:]
