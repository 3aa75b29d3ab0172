"""`channel_groups`: traces a model once and finds which channels can be removed from it."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.analysis.axes import (
    Axes,
    Axis,
    Pin,
    Ties,
    atoms,
    new_axes,
    set_pin,
    sizes_of,
)
from jaxpruner.structure.analysis.inference import Inference
from jaxpruner.structure.analysis.records import Place, Trace
from jaxpruner.structure.graph import ChannelGraph
from jaxpruner.structure.groups import find_groups
from jaxpruner.structure.programs import Model, ModelProgram, returned_leaves, shape_of_leaf
from jaxpruner.uses import liveness
from jaxpruner.uses.bodies import Program
from jaxpruner.uses.moving_rules import shape_of
from jaxpruner.uses.tracing import leaf_shape


def channel_groups(
    apply_fn: Callable[..., Any],
    params: tree_lib.PyTree,
    *inputs: Any,
    state: tree_lib.PyTree | None = None,
) -> ChannelGraph:
    """Which channels of a model can be removed, and what has to be removed together.

    Each axis of each value in the traced program is an expression over atoms: a reshape makes products of them, a
    concatenation sums. What operations tie together is one atom. An atom that nothing pins, and that lies along axes of
    parameters, is a group: hidden units, channels, heads, features of heads, the width of a residual stream.

    The model is traced, not computed: shapes (`jax.ShapeDtypeStruct`) do for parameters and inputs.

    Args:
      apply_fn: `(params, *inputs) -> results`, any function that JAX can trace; `(params, state, *inputs) -> results`
        if there is a state.
      params: any pytree of arrays, or of their shapes.
      *inputs: what else it is called with, pytrees of arrays or of their shapes. Their axes, and those of the results,
        stay as they are.
      state: arrays, or their shapes, that belong to channels and are no parameters, such as the statistics of batch
        normalization or the keys and values of earlier tokens. They are cut along. The part of the results with the
        names and shapes of the state, or of a named entry of it, is the state that comes back, and is cut along, too.

    Returns:
      The groups by name. Each leaf is in a group, in `pinned`, or in `unused`.

    Raises:
      TypeError: a leaf of `params` is no array.
      ValueError: a leaf of the state has the path of a parameter, or several parts of the results could be the state.

    >>> import jax.numpy as jnp
    >>> params = {'up': jnp.ones((3, 8)), 'bias': jnp.ones(8), 'down': jnp.ones((8, 2))}
    >>> def apply(p, x):
    ...     return jnp.tanh(x @ p['up'] + p['bias']) @ p['down']
    >>> graph = channel_groups(apply, params, jnp.ones((5, 3)))
    >>> graph.groups['up[1]'].size
    8
    >>> [f'{member.name}[{member.axis}]' for member in graph.groups['up[1]'].members]
    ['bias[0]', 'down[0]', 'up[1]']

    With a state:

    >>> def normalized(p, state, x):
    ...     hidden = x @ p['up']
    ...     mean = 0.9 * state['mean'] + 0.1 * hidden.mean(0)
    ...     return (hidden - mean + p['bias']) @ p['down'], {'mean': mean}
    >>> state = {'mean': jnp.zeros(8)}
    >>> graph = channel_groups(normalized, params, jnp.ones((5, 3)), state=state)
    >>> graph.shrink(state, {'up[1]': [0, 1]})['mean'].shape
    (2,)
    """
    return analyse(params, [ModelProgram.of(apply_fn, state, inputs)])


def analyse(params: tree_lib.PyTree, programs: Sequence[ModelProgram]) -> ChannelGraph:
    """The graph of a model with these programs; the first one names the groups."""
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    shapes = list(map(leaf_shape, leaves, paths))  # raises where a leaf is no array
    axes_of_leaves = list(map(new_axes, shapes))
    states = _States(paths)
    traced = []
    for program in programs:
        owner = 'the model' if len(programs) == 1 else program.name
        traced.append(_trace(program, params, (paths, axes_of_leaves), states, owner))
    traces = [each.trace for each in traced]
    read = [axes for each in traced for axes in each.read]
    _pin_unread(axes_of_leaves, read)
    model = Model(
        params=jax.tree.map(shape_of_leaf, params),
        programs=tuple([each.program for each in traced]),
        analyse=analyse,
    )
    return dataclasses.replace(find_groups(traces), model=model)


class _Traced(NamedTuple):
    """A program, its trace, and what it reads of values."""

    program: ModelProgram
    trace: Trace
    read: Sequence[Axes]


def _trace(
    program: ModelProgram,
    params: tree_lib.PyTree,
    leaves: tuple[Sequence[tree_lib.Path], Sequence[Axes]],
    states: '_States',
    owner: str,
) -> _Traced:
    """Traces a program, and infers the axes of each of its values."""
    jaxpr, results = jax.make_jaxpr(program.apply_fn, return_shape=True)(params, *program.arguments)
    returned = returned_leaves(program.state, results)
    paths, axes_of_leaves = leaves
    state_paths, axes_of_states = states.axes_of(program.state)
    count = len(paths) + len(state_paths)
    inputs = [new_axes(shape_of(variable)) for variable in jaxpr.jaxpr.invars[count:]]
    for number, axes in enumerate(inputs):
        _pin_each(axes, f'input {number} of {owner}')

    inference = Inference(axes_of_leaves)
    needed = (True,) * len(jaxpr.jaxpr.outvars)
    arguments = [*axes_of_leaves, *axes_of_states, *inputs]
    axes_of_results = inference.visit_program(Program.of(jaxpr), arguments, Place(needed=needed))
    for number, axes in enumerate(axes_of_results):
        if number in returned:
            ties = Ties(_pins_of_result(number, owner))
            ties.unify_each(axes, axes_of_states[returned[number]])
        else:
            _pin_each(axes, f'result {number} of {owner}')
    last = len(inference.equations)
    trace = Trace(
        program=jaxpr,
        paths=paths,
        leaves=axes_of_leaves,
        state_paths=state_paths,
        states=axes_of_states,
        returned=returned,
        equations=inference.equations,
        constants=inference.constants,
        trips=inference.trips,
        contractions=inference.contractions,
        used=liveness.live(jaxpr.jaxpr, needed).inputs[: len(paths)],
        first_uses=[inference.first_uses.get(number, last) for number in range(len(paths))],
    )
    program = program._replace(results=jax.tree.structure(results))
    return _Traced(program, trace, [*inference.read, *axes_of_results])


class _States:
    """The axes of states. Leaves with one path in several programs are the same."""

    def __init__(self, param_paths: Sequence[tree_lib.Path]):
        self._param_paths = frozenset(param_paths)
        self._axes: dict[tree_lib.Path, Axes] = {}

    def axes_of(self, state: tree_lib.PyTree) -> tuple[list[tree_lib.Path], list[Axes]]:
        """The paths and axes of the leaves of a state.

        Raises:
          ValueError: a leaf has the path of a parameter, or another rank than in another program.
        """
        paths, leaves, _ = tree_lib.flatten_with_paths(state)
        axes_of_leaves = []
        for path, leaf in zip(paths, leaves, strict=True):
            if path in self._param_paths:
                raise ValueError(
                    f'{tree_lib.path_string(path)} is the path of a leaf of the state and of a parameter; give the '
                    'state a name, state={"state": state}'
                )
            axes_of_leaves.append(self._axes_of_leaf(path, leaf.shape))
        return paths, axes_of_leaves

    def _axes_of_leaf(self, path: tree_lib.Path, shape: tuple[int, ...]) -> Axes:
        own = new_axes(shape)
        others = self._axes.setdefault(path, own)
        name = tree_lib.path_string(path)
        if len(others) != len(own):
            raise ValueError(
                f'the leaf {name} of the state has shape {sizes_of(others)} in one program and {shape} in another; '
                'give states that are not the same other names'
            )
        shared = []
        for i, (axis, other) in enumerate(zip(own, others, strict=True)):
            if axis.size != other.size:  # such as the batch of a cache
                sizes = f'{other.size} and {axis.size}'
                pin = Pin(f'axis {i} of the state {name} has sizes {sizes}', '', _no_line, False)
                set_pin(axis, pin)
                set_pin(other, pin)
            shared.append(other if axis.size == other.size else axis)
        return tuple(shared)


def _no_line() -> str:
    return ''


def _pins_of_result(number: int, owner: str) -> Callable[[str], Pin]:
    return lambda reason: Pin(f'result {number} of {owner}, a state: {reason}', '', _no_line)


def _pin_each(axes: Axes, owner: str) -> None:
    for i, axis in enumerate(axes):
        set_pin(axis, Pin(f'axis {i} of {owner}', '', _no_line, mixes=False))


def _pin_unread(leaves: Iterable[Axes], read: Iterable[Axes]) -> None:
    """Pins what no program reads of the parameters, such as positions beyond the length of the inputs."""
    read_atoms: set[Axis] = set()
    for axes in read:
        for axis in axes:
            read_atoms.update(atoms(axis))
    reason = 'the model does not read this part for inputs of these shapes'
    pin = Pin(reason, '', _no_line, mixes=False)
    for axes in leaves:
        for axis in axes:
            for each in atoms(axis):
                if each not in read_atoms:
                    set_pin(each, pin)
