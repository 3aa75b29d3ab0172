"""Reads a traced model: one interpreter of its program, and what is found by it.

`param_uses` finds how a model uses each of its parameters, in one walk through its program. Each value that is made of
a parameter has a view, which says which axes of the parameter lie along which axes of the value (`views`).

>>> import jax, jax.numpy as jnp
>>> def apply(params, x):
...     kernels = params['w'].reshape(3, 2, 3, 4).transpose(0, 3, 2, 1)
...     return jax.lax.scan(lambda x, w: (x, jnp.tensordot(x, w, 1)), x, kernels)[1]
>>> (use,) = param_uses(apply, {'w': jnp.ones((3, 6, 4))}, jnp.ones((5, 4)))['w']
>>> print(use.site.view)
(2:4, 1:3, 1:2), a trip for each of 0:3
>>> use.op, use.contract, use.free, use.stack
('dot', (2,), (1,), (0,))

A trip is one iteration of a `scan` or a `while` loop: one run of its body. In trip i a scan takes element i of each
array that it scans over. Read the files in this order:

    program                     programs in equations, by version of JAX; going through them, and running them
    views → rules               what a view is, and what each primitive does to it
    walk → graph → input_axes   the walk that finds uses; the uses of each leaf; N:M along the axes that are summed
    taps → segments             runs that observe operations, and runs from cut to cut
    compiled_once               equal programs are compiled once
"""

from jaxpruner.trace.graph import UnsupportedPrimitive as UnsupportedPrimitive
from jaxpruner.trace.graph import Use as Use
from jaxpruner.trace.graph import UseGraph as UseGraph
from jaxpruner.trace.input_axes import with_input_axes as with_input_axes
from jaxpruner.trace.walk import param_uses as param_uses
