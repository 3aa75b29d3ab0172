"""Lazy scores: a function of the weights, computed wherever they are read and never materialised.

The scores of a model as arrays take as much memory as its weights. A pass that computes them as it reads takes none.
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
    """The lazy scores `of(weights)`; what moves weights moves them, too (`jax.tree.map`).

    Attributes:
      weights: float array, or a tuple that begins with one. Its other arrays have the same shape, flags for instance,
        and are moved to the devices of the first. Floats of 8 bits are scored at once: they are ranked as float32.
      of: computes each weight's score from that array or tuple, elementwise, in the weight's dtype; hashable.

    >>> import jax.numpy as jnp
    >>> scores = Scores(jnp.array([[-2.0, 1.0]]), jnp.abs)
    >>> scores.shape, jax.tree.map(jnp.ravel, scores).shape, read(scores).tolist()
    ((1, 2), (2,), [[2.0, 1.0]])
    """

    weights: jax.Array | tuple[Any, ...]
    of: Callable[[Any], jax.Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights."""
        return self._array.shape

    @property
    def dtype(self) -> jax.numpy.dtype:
        """Dtype of the weights."""
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
    """Computes lazy scores; returns an array as it is.

    >>> import jax.numpy as jnp
    >>> read(jnp.array([1.0])).tolist(), read(Scores(jnp.array([-1.0]), jnp.abs)).tolist()
    ([1.0], [1.0])
    """
    return scores.of(scores.weights) if isinstance(scores, Scores) else scores
