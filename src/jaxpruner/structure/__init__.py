"""Channels that can be removed from a model, found from its trace.

Zeros do not make a model faster; smaller matrices do, on every device. A hidden unit is a column of one kernel, an
element of a bias and a row of the next kernel, and can be removed only from all three. `channel_groups` finds what
belongs together in any model that JAX can trace:

>>> import jax, jax.numpy as jnp
>>> def apply(p, x):
...     return jax.nn.relu(x @ p['up'] + p['bias']) @ p['down']
>>> params = {'up': jnp.ones((3, 8)), 'bias': jnp.ones(8), 'down': jnp.ones((8, 2))}
>>> graph = channel_groups(apply, params, jnp.ones((5, 3)))
>>> [(member.name, member.axis) for member in graph.groups['up[1]'].members]
[('bias', 0), ('down', 0), ('up', 1)]

Read the files in this order:

    axes → positions       expressions over atoms, and how two of them become one; where atoms lie along an axis
    records                what is known of an equation and of a traced model
    live_evaluator         what goes through a program and leaves out what is not needed
    primitives             the table: a row for each primitive, from elementwise, moving, contracting and indexing
    inference → tracing    a program is gone through; a model is traced
    fills → zeros          what zeroing leaves at removed channels, and which groups are exact; `moving_fills` and
                           `contracting_fills` hold the second half of each row of the table
    lists                  which groups may keep other channels in each trip of a scan, each expert, each head
    members, groups, graph atoms become groups with names; what users see
    keeping → cut          what is kept is checked; what stays along each axis
    choosing               which channels stay, by scores and budgets; it names the files that it goes through
    costs                  parameters, bytes and operations as a function of how many channels stay
    latency                seconds as such a function, by timing candidates on the device at hand
    trees                  parameters, masks and states of optimizers are cut along
    resizing → replay      how primitives run on smaller operands, the third part of each row of the table; the program
                           at smaller shapes, with `derivatives` for rules of derivatives
    programs               what a graph is made of: functions, and the state that they take and return
    small_model, verifying the smaller model, for inputs of any shape; compared with the zeroed one
    leaf_numbers → channel_tables
                           which leaves those of another tree are; values of weights become values of channels
    zero_channels          which channels are zero already
    grouped_channels       the sparsity type that removes channels from all of their leaves, while a model trains
    group_lasso            the optax transformation that pulls whole channels to zero
    refitting              kernels are fitted to calibration inputs, so that they make up for removed channels
    blocks, shallow_model  residual blocks of unrolled models; the model without some of them
    plans                  what is kept, as a file
    old_numbers → width_flow → source_programs → source_models
                           numbers that a smaller program keeps from an old width: what is known of one, where it
                           meets the width, and the program of a module that is built with the new widths beside it
    scales → folding       factors that parameters can take up; the equations between them solved
    argument_numbers → constructors
                           numbers in arguments, and which of them build such a module
"""

from jaxpruner.structure.analysis.members import Group as Group
from jaxpruner.structure.analysis.members import Member as Member
from jaxpruner.structure.choosing.choices import Choice as Choice
from jaxpruner.structure.choosing.costs import Cost as Cost
from jaxpruner.structure.cutting.blocks import Block as Block
from jaxpruner.structure.cutting.plans import load_plan as load_plan
from jaxpruner.structure.cutting.plans import save_plan as save_plan
from jaxpruner.structure.cutting.verifying import Verification as Verification
from jaxpruner.structure.graph import ChannelGraph as ChannelGraph
from jaxpruner.structure.group_lasso import group_lasso as group_lasso
from jaxpruner.structure.grouped_channels import GroupedChannels as GroupedChannels
from jaxpruner.structure.tracing import channel_groups as channel_groups
from jaxpruner.structure.widths.constructors import ConstructorArguments as ConstructorArguments
from jaxpruner.structure.widths.constructors import constructor_arguments as constructor_arguments
from jaxpruner.structure.widths.folding import Folded as Folded
from jaxpruner.structure.widths.old_numbers import OldNumber as OldNumber
from jaxpruner.structure.widths.old_numbers import OldNumbers as OldNumbers
from jaxpruner.structure.widths.source_models import SourceComparison as SourceComparison
