"""A model without its channels that are zero: the better way where whole channels are, since all its layers shrink."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.core import tree as tree_lib
from jaxpruner.sparse.execution.choosing import Matrices
from jaxpruner.structure import ChannelGraph, channel_groups


class SmallModel(NamedTuple):
    """A model from which channels were removed.

    Attributes:
      apply_fn: `(small params, *inputs) -> results`.
      graph: of the whole model.
      keep: the channels that stay.
    """

    apply_fn: Callable[..., Any]
    graph: ChannelGraph
    keep: Mapping[str, np.ndarray]

    def shrink(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """The parameters of the smaller model."""
        return self.graph.shrink(params, self.keep, verify=False)

    @property
    def removed(self) -> dict[str, int]:
        """Group -> how many channels were removed."""
        counts = {}
        for name, kept in self.keep.items():
            counts[name] = self.graph.groups[name].size - np.shape(kept)[-1]
        return counts


def without_zero_channels(
    apply_fn: Callable[..., Any],
    params: tree_lib.PyTree,
    sample: tuple[Any, ...],
    matrices: Mapping[str, Matrices],
) -> SmallModel | None:
    """The model without channels that are zero; `None` if there are none.

    The model is analysed only if a matrix has zero inputs or outputs.
    """
    if not any(map(_has_zero_lines, matrices.values())):
        return None
    graph = channel_groups(apply_fn, params, *sample)
    keep = graph.nonzero_channels(params)
    return SmallModel(graph.small_apply(keep), graph, keep) if keep else None


def _has_zero_lines(matrices: Matrices) -> bool:
    window = matrices.product.window
    used = matrices.pattern.used(1, window), matrices.pattern.used(2)
    return not all(lines.all() for lines in used)
