"""A model without its channels that are zero. This is better than sparse formats, since all layers shrink."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.sparse.execution.choosing import Matrices
from jaxpruner.structure import ChannelGraph, channel_groups, zero_channels


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

    def check_removed(self, params: tree_lib.PyTree) -> None:
        """Refuses parameters of the whole model in which a removed channel has a part in the results.

        The pattern of zeros covers only matrices. Whether a channel can be left out may also depend on its bias.

        Raises:
          ValueError: some removed channels are not zero.
        """
        nonzero = zero_channels.nonzero_weights(self.graph.trace, params)
        groups = [self.graph.groups[name] for name in self.keep]
        zero = zero_channels.find(self.graph.traces, groups, nonzero)
        for group in groups:
            name, size = group.name, group.size
            is_kept = _flags(self.keep[name], size)
            is_zero = zero.get(name, np.zeros(size, bool))
            is_zero = is_zero.reshape(-1, size)
            is_needed = ~is_zero & ~is_kept
            in_any_list = np.any(is_needed, axis=0)
            count = int(in_any_list.sum())
            if count:
                raise ValueError(
                    f'{count} of the channels {name} that were removed from the model are not zero in these '
                    'parameters: a bias, or another weight of theirs, has a part in the results; compile the model for '
                    'them'
                )

    @property
    def removed(self) -> dict[str, int]:
        """Group -> how many channels were removed."""
        counts = {}
        for name, channels in self.keep.items():
            *_, kept = np.shape(channels)
            group = self.graph.groups[name]
            counts[name] = group.size - kept
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
    if not keep:
        return None
    return SmallModel(graph.small_apply(keep), graph, keep)


def _flags(channels: Any, size: int) -> np.ndarray:
    """Lists of channels as bool[lists, size]."""
    *_, length = np.shape(channels)
    lists = np.reshape(channels, (-1, length))
    flags = np.zeros((len(lists), size), bool)
    np.put_along_axis(flags, lists, True, axis=1)
    return flags


def _has_zero_lines(matrices: Matrices) -> bool:
    """Whether some inputs or outputs of the matrices are zero."""
    window = matrices.matrix_leaf.window
    used_inputs = matrices.pattern.used_inputs(window)
    used_outputs = matrices.pattern.used_outputs()
    return not (used_inputs.all() and used_outputs.all())
