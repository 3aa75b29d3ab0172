"""Finds the widths that a number may come from: it is such a width, its root, or the inverse of either.

Suppose that 16 of 64 channels stay. A number 0.125 in the program is `1 / sqrt(64)`. With the new width it is 0.25:

>>> (source,) = sources_of(0.125, frozenset([Width(64, 16, frozenset())]), jnp.float32)
>>> source.width.old, source.new
(64, 0.25)
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxpruner.structure.analysis.axes import Axis


class Width(NamedTuple):
    """A width that a cut changes.

    Attributes:
      old: before the cut.
      new: after it.
      atoms: the cut atoms that lie along it.
    """

    old: int
    new: int
    atoms: frozenset[Axis]


Widths = frozenset[Width]


class Source(NamedTuple):
    """A width that a number may come from, and the number for the new width."""

    width: Width
    new: float


def _fourth_root(width: float) -> float:
    return width**0.25


def _one_less(width: float) -> float:
    return width - 1.0


_FORMS: tuple[Callable[[float], float], ...] = (float, math.sqrt, _fourth_root, _one_less)


def sources_of(number: Any, widths: Widths, dtype: Any) -> list[Source]:
    """The widths that a number may come from, the largest first."""
    # The number was rounded to the dtype of the operation.
    tolerance = 0.0
    if jnp.issubdtype(dtype, jnp.inexact):
        tolerance = 4 * float(jnp.finfo(dtype).eps)
    largest_first = sorted(widths, key=lambda width: -width.old)
    sources = []
    for width in largest_first:
        for form in _FORMS:
            old = form(width.old)
            new = form(width.new)
            if min(old, new) <= 0:
                continue
            if math.isclose(number, old, rel_tol=tolerance):
                sources.append(Source(width, new))
            if math.isclose(number, 1 / old, rel_tol=tolerance):
                sources.append(Source(width, 1 / new))
    return sources
