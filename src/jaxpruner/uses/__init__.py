"""Finds how a model uses each of its parameters, in one walk through the traced program.

Each value that is made of a parameter has a view. It says which axes of the parameter lie along which axes of the
value. `1:6` is an axis of the value with 6 elements along axis 1 of the parameter. Take a stack of 3 kernels with 4
inputs and 2 x 3 outputs, stored as (kernels, outputs, inputs). Its view changes like this:

>>> from jaxpruner.uses import control_flow, moves, reshaping, views
>>> view = views.whole(leaf=0, shape=(3, 6, 4))
>>> print(view)
(0:3, 1:6, 2:4)
>>> view = reshaping.reshape(view, (3, 2, 3, 4))
>>> print(view)  # one axis of the parameter lies along two axes of the value
(0:3, 1:2, 1:3, 2:4)
>>> view = moves.transpose(view, (0, 3, 2, 1))
>>> print(view)
(0:3, 2:4, 1:3, 1:2)
>>> view = control_flow.enter_loop(view, loop=(2,))
>>> print(view)  # what each trip of a scan gets; equation 2 of the program is the scan
(2:4, 1:3, 1:2), a trip for each of 0:3

A trip is one iteration of a `scan` or a `while` loop: one run of its body. In trip i a scan takes element i of each
array that it scans over.

A product of data with this value sums over the value's first axis. So it contracts axis 2 of the parameter, axis 1 is
free, and axis 0 is a stack. `param_uses` finds that in the model itself:

>>> import jax, jax.numpy as jnp
>>> def apply(params, x):
...     kernels = params['w'].reshape(3, 2, 3, 4).transpose(0, 3, 2, 1)
...     return jax.lax.scan(lambda x, w: (x, jnp.tensordot(x, w, 1)), x, kernels)[1]
>>> (use,) = param_uses(apply, {'w': jnp.ones((3, 6, 4))}, jnp.ones((5, 4)))['w']
>>> print(use.site.view)
(2:4, 1:3, 1:2), a trip for each of 0:3
>>> use.op, use.contract, use.free, use.stack
('dot', (2,), (1,), (0,))

Read the files in this order:

    tracing → records → walk                traces the model; records of its values; the walk
    bodies → visitors                       programs in equations, by version of JAX; ways through them
    rules → moving_rules                    what each primitive does to views
    views → moves → reshaping               what a view is, and how it changes
    control_flow                            scans, while loops and branches
    contractions                            which axes a product sums over
    graph                                   the uses of each leaf

Beside these, `liveness` finds which equations the results depend on. `indexing_rules` is for elements at unknown
indices. `constant_rules` keeps views exact if the other operands are constants, which `constants` and `known_integers`
follow. `taps`, `steps` and `segments` run the traced model again.
"""

from jaxpruner.uses.graph import UnsupportedPrimitive as UnsupportedPrimitive
from jaxpruner.uses.graph import Use as Use
from jaxpruner.uses.graph import UseGraph as UseGraph
from jaxpruner.uses.input_axes import with_input_axes as with_input_axes
from jaxpruner.uses.taps import run_with_taps as run_with_taps
from jaxpruner.uses.tracing import param_uses as param_uses
