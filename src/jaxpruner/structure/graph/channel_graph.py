"""The class `ChannelGraph`. Its methods are spread over several files, one for each purpose.

Each file has a base class of `ChannelGraph`, which reads the fields of `GraphRecord`. Its methods hold the
documentation for users, and call the subpackage or module named last:

    file                   methods                                         done in
    record                 also, explain; the fields                       programs, graph/texts
    choosing_methods       choose, cost                                    choosing
    cutting_methods        shrink, zeroed, expand, small_apply, verify     cutting
                           refit                                           refitting
    block_methods          blocks, without_blocks, drop_blocks             cutting/blocks, cutting/shallow_model
    zero_channel_methods   zero_channels, nonzero_channels                 zero_channels
    source_methods         old_numbers, fold, compare                      widths
"""

from typing import final

from jaxpruner.structure.graph.block_methods import BlockMethods
from jaxpruner.structure.graph.choosing_methods import ChoosingMethods
from jaxpruner.structure.graph.cutting_methods import CuttingMethods
from jaxpruner.structure.graph.source_methods import SourceMethods
from jaxpruner.structure.graph.zero_channel_methods import ZeroChannelMethods


@final
class ChannelGraph(
    ChoosingMethods, CuttingMethods, BlockMethods, ZeroChannelMethods, SourceMethods
):
    """The channels of a model: which can be removed together, and which cannot be removed. Made by `channel_groups`.

    Each axis of a leaf is in a group or in `pinned`, unless the leaf is in `unused`.

    Attributes:
      groups: name -> group, in the order in which the model uses their first leaves.
      pinned: axes of leaves that stay as they are.
      unused: paths of leaves that have no part in the results.
      trace: the traced program and the axes of its values.
      model: the programs that were traced, and the shapes of their arguments.
      others: traces of the programs added with `also`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> def apply(p, x):
    ...     return jax.nn.relu(x @ p['up'] + p['bias']) @ p['down']
    >>> shapes = {'up': (3, 8), 'bias': (8,), 'down': (8, 2)}
    >>> graph = channel_groups(apply, {name: jnp.ones(shape) for name, shape in shapes.items()}, jnp.ones((5, 3)))
    >>> print(graph)
    group  channels  parameters  exact  members
    --------------------------------------------------
    up[1]         8          48  yes    bias, down, up
    2 axes stay as they are; graph.explain(leaf, axis) says why
    >>> print(graph.explain('down', 1))
    down[1], 2 channels, stays: axis 1 of result 0 of the model
    """
