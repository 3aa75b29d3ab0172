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

A trip is one iteration of a `scan`, one run of its body. A model that scans over its layers has a trip for each layer.

Each subpackage begins with a worked example. Read them in this order:

    analysis    what the trace says of channels
        axes → ties → positions  expressions over atoms, how two of them become one, and where atoms lie along an axis
        records, live_evaluator  what is known of an equation and of a trace; what goes through a program
        inference                states what each equation says of axes
        fills → zeros            what zeroing leaves at removed channels, and which groups are exact
        lists                    which groups may keep other channels in each trip of a scan, each expert, each head
        members                  the records of groups
        leaf_numbers             maps another tree's leaves to the model's
    rules       a row for each primitive: `primitives` is the table
    cutting     from what is kept to a smaller model
        keeping → cut → trees    what is kept is checked; what stays along each axis; trees are cut along
        replay, derivatives      the program at smaller shapes, and its rules of derivatives
        small_model, verifying   the smaller model for inputs of any shape; compared with the zeroed one
        additions → blocks → shallow_model
                                 residual blocks of unrolled models; the model without some of them
        plans                    what is kept, as a file
    choosing    which channels stay
        costs, latency           parameters, bytes, operations and seconds as functions of how many channels stay
        leaf_scores → channel_scores → ranking → budgets
                                 scores of weights, then of channels; in which order channels go, and how far
        choosing                 goes through all of these
    widths      a module that is built from source with the new widths
        width_sources, width_flow            numbers that may come from an old width
        program_sides → source_programs → source_models
                                             the module's program beside the smaller one
        scales → folding                     factors that parameters can take up; the equations between them solved
        argument_numbers, built_shapes, constructors
                                             which arguments build such a module
    graph       what users hold, `ChannelGraph`: a file for each purpose of its methods

A graph may have the traces of several programs of one model. Code about all of them reads `graph.traces`; `graph.trace`
is the first.

Beside the subpackages, `tracing` traces a model, `programs` says what a graph is made of, and `groups` gives names to
what the analysis found. `zero_channels`, `channel_tables`, `grouped_channels` and `group_lasso` are about training that
removes channels, and `refitting` fits kernels to calibration inputs.
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
