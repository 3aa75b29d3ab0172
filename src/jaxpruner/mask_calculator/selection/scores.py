"""Scores that are a function of what is known of each weight, and are computed wherever they are read.

Written down, the scores of a model take as much memory as its weights. A pass that reads the weights and computes the
scores as it goes takes none.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax


@functools.partial(jax.tree_util.register_dataclass, data_fields=['weights'], meta_fields=['of'])
@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The scores `of(weights)`, which are never written down; what moves weights, moves them, too (`jax.tree.map`).

    Attributes:
      weights: float array, or a tuple that begins with one, and has others of its shape, say of flags, which are moved
        to the devices where it lies; floats of 8 bits, which are ranked in wider ones, are scored before.
      of: gives the score of each weight by itself, from that array or tuple, in the weight's dtype; hashable.

    >>> import jax.numpy as jnp
    >>> scores = Scores(jnp.array([[-2.0, 1.0]]), jnp.abs)
    >>> scores.shape, jax.tree.map(jnp.ravel, scores).shape, read(scores).tolist()
    ((1, 2), (2,), [[2.0, 1.0]])
    """

    weights: jax.Array | tuple[Any, ...]
    of: Callable[[Any], jax.Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weights."""
        return self._array.shape

    @property
    def dtype(self) -> jax.numpy.dtype:
        """That of the weights."""
        return self._array.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of scores."""
        return math.prod(self.shape)

    @property
    def _array(self) -> jax.Array:
        return jax.tree.leaves(self.weights)[0]


def read(scores: jax.Array | Scores) -> jax.Array:
    """The scores as an array.

    Args:
      scores: an array, which is returned as it is, or `Scores`, which are computed.

    >>> import jax.numpy as jnp
    >>> read(jnp.array([1.0])).tolist(), read(Scores(jnp.array([-1.0]), jnp.abs)).tolist()
    ([1.0], [1.0])
    """
    return scores.of(scores.weights) if isinstance(scores, Scores) else scores
