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

A trip is one iteration of a `scan`: one run of its body. A model that scans over its layers has a trip for each layer.

Each subpackage begins with a worked example. Read them in this order:

    analysis    finds groups of channels in a trace
        axes → ties → positions  expressions over atoms, how two of them become one, and where atoms lie along an axis
        records, live_evaluator  records of an equation and of a trace; visits the equations of a program
        inference                unifies the axes that equations tie together
        signs → fills → zeros    signs of values, the scalars that zeroing leaves at removed channels, and which groups
                                 are exact
        lists                    which groups may keep other channels in each trip of a scan, each expert, each head
        members                  the records of groups
        leaf_numbers             matches the leaves of another tree with the model's
    rules       a row for each primitive: `primitives` is the table
    cutting     makes a smaller model
        keeping → cut → trees    checks what is kept; finds what stays along each axis; cuts trees
        replay, derivatives      the program at smaller shapes, and its derivative rules
        small_model, verifying   the smaller model for inputs of any shape; compares it with the zeroed one
        additions → blocks → shallow_model
                                 residual blocks of unrolled models; the model without some of them
        plans                    files of what is kept
    choosing    chooses the channels that stay
        costs, latency           parameters, bytes, operations and seconds as functions of how many channels stay
        leaf_scores → channel_scores → ranking → budgets
                                 scores of weights, then of channels; the order in which channels go, and how many go
        choosing                 goes through all of these
    widths      a module that is built from source with the new widths
        width_sources, width_flow            numbers that may come from an old width
        program_sides → source_programs → source_models
                                             compares the module's program with the smaller one
        scales → folding                     equations between factors of parameters; solves them
        argument_numbers, built_shapes, constructors
                                             finds the arguments that build such a module
    graph       the class `ChannelGraph`, with a file for each purpose of its methods

A graph may have the traces of several programs of one model. `graph.traces` has all of them, and `graph.trace` is the
first.

Beside the subpackages, `shrinking` goes from a model to a smaller one in one call. For it `modules` makes functions of
NNX and Equinox modules, `shrunk_modules` makes smaller modules, and `held_numbers` finds widths that they hold as
numbers. `tracing` traces a model, `programs` has the records of its programs, and `groups` makes and names the groups
that the analysis found. `zero_channels`, `channel_tables`, `grouped_channels` and `group_lasso` are about training that
removes channels. `refitting` fits kernels to calibration inputs.
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
from jaxpruner.structure.shrinking import ShrunkModel as ShrunkModel
from jaxpruner.structure.shrinking import shrink as shrink
from jaxpruner.structure.tracing import channel_groups as channel_groups
from jaxpruner.structure.widths.constructors import ConstructorArguments as ConstructorArguments
from jaxpruner.structure.widths.constructors import constructor_arguments as constructor_arguments
from jaxpruner.structure.widths.folding import Folded as Folded
from jaxpruner.structure.widths.old_numbers import OldNumber as OldNumber
from jaxpruner.structure.widths.old_numbers import OldNumbers as OldNumbers
from jaxpruner.structure.widths.source_models import SourceComparison as SourceComparison
