"""`channel_groups`: traces a model once and finds which channels can be removed from it."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.axes import Axes, Axis, Pin, atoms, new_axes, set_pin
from jaxpruner.structure.graph import ChannelGraph
from jaxpruner.structure.groups import find_groups
from jaxpruner.structure.inference import Inference
from jaxpruner.structure.records import Place, Trace
from jaxpruner.structure.small_model import Model, is_array, shape_of_leaf
from jaxpruner.uses import liveness
from jaxpruner.uses.bodies import Program
from jaxpruner.uses.moving_rules import shape_of
from jaxpruner.uses.tracing import leaf_shape


def channel_groups(
    apply_fn: Callable[..., Any], params: tree_lib.PyTree, *inputs: Any
) -> ChannelGraph:
    """Which channels of a model can be removed, and what has to be removed together.

    Each axis of each value in the traced program is an expression over atoms: a reshape makes products of them, a
    concatenation sums. What operations tie together is one atom. An atom that nothing pins, and that lies along axes of
    parameters, is a group: hidden units, channels, heads, features of heads, the width of a residual stream.

    The model is traced, not computed: shapes (`jax.ShapeDtypeStruct`) do for parameters and inputs.

    Args:
      apply_fn: `(params, *inputs) -> results`, any function that JAX can trace.
      params: any pytree of arrays, or of their shapes.
      *inputs: what else it is called with, pytrees of arrays or of their shapes. Their axes, and those of the results,
        stay as they are.

    Returns:
      The groups by name. Each leaf is in a group, in `pinned`, or in `unused`.

    Raises:
      TypeError: a leaf of `params` is no array.

    >>> import jax.numpy as jnp
    >>> params = {'up': jnp.ones((3, 8)), 'bias': jnp.ones(8), 'down': jnp.ones((8, 2))}
    >>> def apply(p, x):
    ...     return jnp.tanh(x @ p['up'] + p['bias']) @ p['down']
    >>> graph = channel_groups(apply, params, jnp.ones((5, 3)))
    >>> graph.groups['up[1]'].size
    8
    >>> [f'{member.name}[{member.axis}]' for member in graph.groups['up[1]'].members]
    ['bias[0]', 'down[0]', 'up[1]']
    """
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    for leaf, path in zip(leaves, paths, strict=True):
        leaf_shape(leaf, path)  # raises where it is no array
    program, results = jax.make_jaxpr(apply_fn, return_shape=True)(params, *inputs)
    trace = infer(program, paths)
    model = Model(
        apply_fn,
        params=jax.tree.map(shape_of_leaf, params),
        inputs=jax.tree.map(shape_of_leaf, inputs),
        examples=inputs if all(map(is_array, jax.tree.leaves(inputs))) else None,
        results=jax.tree.structure(results),
        analyse=functools.partial(channel_groups, apply_fn),
    )
    return dataclasses.replace(find_groups(trace), model=model)


def infer(program: Any, paths: list[tree_lib.Path]) -> Trace:
    """The axes of each value of a program, of which the first inputs are the leaves of the parameters."""
    jaxpr = program.jaxpr
    arguments = [new_axes(shape_of(variable)) for variable in jaxpr.invars]
    count = len(paths)
    for number, axes in enumerate(arguments[count:]):
        _pin_each(axes, f'input {number} of the model')
    needed = (True,) * len(jaxpr.outvars)
    inference = Inference(arguments[:count])
    results = inference.visit_program(Program.of(program), arguments, Place(needed=needed))
    for number, axes in enumerate(results):
        _pin_each(axes, f'result {number} of the model')
    _pin_unread(arguments[:count], [*inference.read, *results])
    used = liveness.live(jaxpr, needed).inputs[:count]
    last = len(inference.equations)
    return Trace(
        program=program,
        paths=paths,
        leaves=arguments[:count],
        equations=inference.equations,
        constants=inference.constants,
        trips=inference.trips,
        contractions=inference.contractions,
        used=used,
        first_uses=[inference.first_uses.get(number, last) for number in range(count)],
    )


def _pin_each(axes: Axes, owner: str) -> None:
    for i, axis in enumerate(axes):
        set_pin(axis, Pin(f'axis {i} of {owner}', '', lambda: '', mixes=False))


def _pin_unread(leaves: Iterable[Axes], read: Iterable[Axes]) -> None:
    """Pins what the model cuts off its parameters, such as positions beyond the length of the inputs."""
    read_atoms: set[Axis] = set()
    for axes in read:
        for axis in axes:
            read_atoms.update(atoms(axis))
    pin = Pin('the model does not read this part for inputs of these shapes', '', lambda: '', False)
    for axes in leaves:
        for axis in axes:
            for each in atoms(axis):
                if each not in read_atoms:
                    set_pin(each, pin)
