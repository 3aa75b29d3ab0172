"""The graph of a model's channels: one class, whose methods stand in a file for each purpose.

Each part is an abstract class that reads the fields of a `GraphRecord`:

    record          the fields, and what they say of themselves
    choosing        which channels stay
    cutting         the smaller arrays and the smaller program
    blocks          residual blocks that are left out as a whole
    zero_channels   channels that are zero already
    sources         a module that is built from source with the new widths
"""

from typing import final

from jaxpruner.structure.graph.blocks import BlockMethods
from jaxpruner.structure.graph.choosing import ChoosingMethods
from jaxpruner.structure.graph.cutting import CuttingMethods
from jaxpruner.structure.graph.sources import SourceMethods
from jaxpruner.structure.graph.zero_channels import ZeroChannelMethods


@final
class ChannelGraph(
    ChoosingMethods, CuttingMethods, BlockMethods, ZeroChannelMethods, SourceMethods
):
    """The channels of a model: what can be removed together, and what cannot be removed. Made by `channel_groups`.

    Each leaf has a part in a group, is in `pinned`, or is in `unused`.

    Attributes:
      groups: name -> group, in the order in which the model uses their first leaves.
      pinned: the axes of leaves that stay as they are.
      unused: paths of leaves that have no part in the results.
      trace: the traced program and the axes of its values.
      model: the programs that were traced, and the shapes with which they were.
      others: traces of the programs that were added with `also`.

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
