"""`ChannelGraph`: the channels of a model that can be removed, and the methods that use them.

Take a model of two layers, `relu(x @ up + bias) @ down`, with 8 hidden units. Its graph has one group of 8 channels,
named `up[1]` after the first leaf that has them. A channel of the group is a column of `up`, an element of `bias` and a
row of `down`. `shrink` with `keep={'up[1]': [0, 3]}` leaves 2 columns, 2 elements and 2 rows. The axes of the model's
inputs and results are pinned.
"""

from jaxpruner.structure.graph.channel_graph import ChannelGraph as ChannelGraph
