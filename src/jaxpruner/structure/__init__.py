"""Channels that can be removed from a model, found from its trace.

Zeros do not make a model faster, but smaller matrices do, on every device. A hidden unit is a column of one kernel, an
element of a bias and a row of the next kernel. It can only be removed from all three. `channel_groups` finds what
belongs together in any model that JAX can trace:

>>> import jax, jax.numpy as jnp
>>> def apply(p, x):
...     return jax.nn.relu(x @ p['up'] + p['bias']) @ p['down']
>>> params = {'up': jnp.ones((3, 8)), 'bias': jnp.ones(8), 'down': jnp.ones((8, 2))}
>>> graph = channel_groups(apply, params, jnp.ones((5, 3)))
>>> [(member.name, member.axis) for member in graph.groups['up[1]'].members]
[('bias', 0), ('down', 0), ('up', 1)]

Which channels belong together? Each axis of a value begins as an atom of its own. The first product makes the last axis
of `x @ up` the same as that of `up`. The sum makes it the same as that of `bias`, and the second product the same as
the first of `down`. So `up[1]`, `bias[0]` and `down[0]` become one atom of size 8, a group. The 3 inputs and the 2
results are pinned, since callers of the model rely on them.

Which can be removed? Let unit 5 be zero in all members of its group. Then the hidden values are zero there, and so is
their ReLU. The sum over units in the second product gets nothing from unit 5. So removing the unit is the same as
zeroing it: the group is exact. With a softmax over the hidden units it would not be exact. A zeroed unit still adds
`exp(0) = 1` to the sum by which the softmax divides.

Keep two of the units, `{'up[1]': [0, 3]}`. The cut leaves `up[:, [0, 3]]`, `bias[[0, 3]]` and `down[[0, 3], :]`, of
moments of Adam likewise, and of masks. Each equation of the trace runs on the smaller arrays: `bias` is repeated to
shape (5, 2) instead of (5, 8). The results equal those of the whole model with zeros for the other six units.

A trip is one iteration of a `scan`: one run of its body. A model that scans over its layers has a trip for each layer.
A graph may have the traces of several programs of one model. `graph.traces` has all of them, and `graph.trace` is the
first. Read the files in this order:

    axes                     expressions over atoms, and what an equation of a traced program says of them
    rules                    the table of primitives, a row for each
    programs                 the programs of a model or module; unifies the axes that their equations tie together
    zeros → groups           what is known of zeroed channels; which groups are exact, and which may keep other channels
                             in each layer, expert or head
    cut                      what is kept along each axis; cuts trees
    small_model              the program at smaller shapes, for inputs of any shape; compares it with the zeroed one
    blocks                   residual blocks of unrolled models, and the model without some of them
    channel_tables           values of weights as values of channels, and the other way round; channels that are zero
    choosing                 scores of weights, then of channels; the order in which channels go, and how many go
    costs                    parameters, bytes, operations and seconds as functions of how many channels stay
    graph                    the class `ChannelGraph`, whose methods are all of this
    shrinking                from a module to a smaller one in one call
    grouped_channels         training that removes channels

One group, from its parameters to the smaller arrays, goes through `axes` to `small_model` and through `graph`. Beside
these it needs the interpreter, `trace/program.py`, and the paths of leaves, `tree.py`.
"""

from jaxpruner.structure.blocks import Block as Block
from jaxpruner.structure.choosing import Choice as Choice
from jaxpruner.structure.costs import Cost as Cost
from jaxpruner.structure.graph import ChannelGraph as ChannelGraph
from jaxpruner.structure.graph import channel_groups as channel_groups
from jaxpruner.structure.grouped_channels import GroupedChannels as GroupedChannels
from jaxpruner.structure.grouped_channels import group_lasso as group_lasso
from jaxpruner.structure.groups import Group as Group
from jaxpruner.structure.groups import Member as Member
from jaxpruner.structure.shrinking import ShrunkModel as ShrunkModel
from jaxpruner.structure.shrinking import shrink as shrink
from jaxpruner.structure.small_model import Verification as Verification
