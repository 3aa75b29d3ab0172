"""Unstructured sparsity: every weight is ranked by its own score."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxpruner.core.named_fields import NamedFields


@dataclasses.dataclass(frozen=True)
class Unstructured(NamedFields):
    """Every weight stands alone. Config string: `'unstructured'`.

    >>> Unstructured()
    Unstructured()
    """

    _fields = ()

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Accepts every shape.

        >>> Unstructured().check_shape((3, 5), 'kernel')
        """

    def group_scores(self, scores: jax.Array) -> jax.Array:
        """The scores: each weight is a group."""
        return scores

    def spread_groups(self, group_mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The mask as it is."""
        del shape
        return group_mask


_GROUPING = ('check_shape', 'group_scores', 'spread_groups')


def is_unstructured(sparsity_type: Any) -> bool:
    """Whether each weight is ranked by its own score, so that scores need no pooling.

    True for `Unstructured` and for subclasses that leave its methods as they are. A subclass with a method of its own
    may pool scores in another way.

    Args:
      sparsity_type: a type; `None` is not unstructured.

    >>> from jaxpruner.sparsity_types import Channel
    >>> is_unstructured(Unstructured()), is_unstructured(Channel())
    (True, False)
    """
    if not isinstance(sparsity_type, Unstructured):
        return False
    own = type(sparsity_type)
    return all(getattr(own, name) is getattr(Unstructured, name) for name in _GROUPING)
